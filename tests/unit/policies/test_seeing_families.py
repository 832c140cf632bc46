"""Families that see in different ways: what is sampled after images has the probability that the trainer and
transformers' own forward pass give it, and gradients are those of transformers."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rftstream.algorithms.grpo import Grpo
from rftstream.contracts.tasks import ChatMessage
from rftstream.data.tasksets.images import image_in
from rftstream.errors import ConfigError
from rftstream.models.rendering import image_spans, open_renderer
from rftstream.models.splice import Conversation
from rftstream.models.vision.image_inputs import OwnProcessor
from rftstream.models.vision.images import decode_data_url
from tests.unit import tiny
from tests.unit.policies.test_images import row_of
from tests.unit.seeing_families import FAMILIES, made

pytestmark = pytest.mark.sampled(2)

SIZES = ((40, 30), (16, 60), (33, 33), (90, 20))


def picture(number):
    width, height = SIZES[number % len(SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return image_in(file.getvalue())


PICTURES = [picture(number) for number in range(4)]


@pytest.fixture(scope="module", params=FAMILIES)
def spec(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def opened(spec):
    return tiny.backend(spec)


def prompted(spec, number, images, text, **sampling):
    renderer = open_renderer(spec)
    message = ChatMessage(role="user", content=text, media=tuple(images))
    token_ids = renderer.render([message])
    request = tiny.request(number, token_ids, **sampling)
    return dataclasses.replace(request, images=image_spans(renderer, token_ids, [message]))


def some_requests(spec, **sampling):
    """Of one image, of several of different sizes, of the same twice, and of none."""
    shown = [PICTURES[:1], PICTURES[1:2], PICTURES[1:4], [PICTURES[2]] * 2, [], PICTURES[3:]]
    texts = ["12+3", "a<image>b", "<image>\n<image>or<image>", "<image><image>=", "7*8", "\n\nwhat is it"]
    return [
        prompted(spec, n, images, text, **sampling) for n, (images, text) in enumerate(zip(shown, texts, strict=True))
    ]


def plainly(spec, opened):
    """transformers' own model with the backend's weights, and its own processor."""
    model = AutoModelForImageTextToText.from_pretrained(spec.folder, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict({name: one.detach().clone() for name, one in opened._masters.masters.items()}, strict=False)
    return model.eval(), OwnProcessor(spec.folder)


def plain_logits(spec, model, processor, row):
    """Logits [T, V] by transformers' own forward pass, of ids and pixels that its processor makes of the images."""
    ids = torch.from_numpy(row.token_ids).long()[None]
    tokens = open_renderer(spec).images
    given = {"input_ids": ids}
    if row.images:
        files = [Image.open(io.BytesIO(decode_data_url(span.image.url))) for span in row.images]
        found = processor.example(files)
        kinds = (ids == tokens.token_id).long()
        given |= {name: one for name, one in found.items() if name not in ("input_ids", "attention_mask")}
        given |= {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in found}
        given = {name: one for name, one in given.items() if spec.name != "idefics3" or name != "mm_token_type_ids"}
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None
    logits = model(**given).logits[0]
    return logits.index_fill(-1, torch.tensor(tokens.never_sampled), -torch.inf)


def plain_logprobs(spec, model, processor, row):
    logits = plain_logits(spec, model, processor, row) / row.temperature
    ids = torch.from_numpy(row.token_ids).long()
    return torch.cat([torch.zeros(1), logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]])


@pytest.mark.slow
def test_ids_are_those_of_transformers_own_processor(spec):
    processor = OwnProcessor(spec.folder)._processor
    renderer = open_renderer(spec)
    before, after = ("<|vision_start|>", "<|vision_end|>") if "qwen" in spec.name else ("", "")
    mark = f"{before}{processor.image_token}{after}"
    for images, text in (([PICTURES[0]], "\n<image>1+2"), (PICTURES[1:4], "<image>\n<image>\n\n+2<image>")):
        if spec.name == "qwen3_5":  # the class of its own tokenizer does not know this one's character
            text = text.replace("\n", "")
        files = [Image.open(io.BytesIO(decode_data_url(one.url))) for one in images]
        expected = processor(images=files, text=[f"H{text.replace('<image>', mark)}I"])["input_ids"][0]
        message = ChatMessage(role="user", content=text, media=tuple(images))
        ids = renderer.render([message])
        assert list(ids) == list(expected)
        spans = image_spans(renderer, ids, [message])
        assert [span.image for span in spans] == list(images)
        inside = {place for span in spans for place in range(span.start, span.start + span.count)}
        assert {place for place, one in enumerate(ids) if one == renderer.images.token_id} <= inside


@pytest.mark.slow
def test_sampled_logprobs_are_those_of_trainer_and_transformers(spec, opened):
    policy = tiny.policy(spec, opened.served_tensors(), batch_size=4, prefill_tokens=300)
    model, processor = plainly(spec, opened)
    requests = some_requests(spec, temperature=0.8, max_tokens=12)
    for request in requests:
        policy.submit(request)
    done = tiny.drain(policy)
    rows = [row_of(one, done[one.request_id].token_ids, 0.8) for one in requests]
    for request, row, ours in zip(requests, rows, opened.logprobs(rows, 500), strict=True):
        completion, start = done[request.request_id], len(request.token_ids)
        assert completion.error is None
        with torch.no_grad():
            theirs = plain_logprobs(spec, model, processor, row).numpy()
        np.testing.assert_allclose(ours[start:], theirs[start:], atol=2e-5)
        np.testing.assert_allclose(completion.behavior_logprobs, ours[start:], atol=2e-5)
    never = open_renderer(spec).images.never_sampled
    assert not {int(one) for completion in done.values() for one in completion.token_ids} & set(never)


@pytest.mark.slow
def test_images_matter(spec, opened):
    """The same text after other images has another probability."""
    rows = [row_of(prompted(spec, 0, [one], "="), [50, 51, 52]) for one in PICTURES]
    said = [tuple(np.round(one[-3:], 4)) for one in opened.logprobs(rows)]
    assert len(set(said)) == len(PICTURES)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradients_are_those_of_transformers(spec, packing, monkeypatch):
    backend = tiny.backend(spec, packing=packing)
    said = [(50, 51, 52, 0), (53, 53), (54, 0), (55, 56, 57), (58, 0), (59, 60)]
    rows = [row_of(one, ids) for one, ids in zip(some_requests(spec), said, strict=True)]
    rows = [dataclasses.replace(row, advantages=row.loss_mask * (n - 2.3), group=n // 2) for n, row in enumerate(rows)]
    model, processor = plainly(spec, backend)
    total = sum(row.loss_mask.sum() for row in rows)
    for row in rows:
        logprobs = plain_logprobs(spec, model, processor, row)[torch.from_numpy(row.loss_mask) == 1]
        weight = torch.from_numpy(row.advantages)[torch.from_numpy(row.loss_mask) == 1]
        (-((logprobs - logprobs.detach()).exp() * weight).sum() / float(total)).backward()
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    found = {}

    def step(lr, *, scale=1.0):
        found.update((name, one.grad.clone()) for name, one in backend._parameters.items() if one.grad is not None)
        backend._masters.drop_gradients()

    monkeypatch.setattr(backend._masters, "step", step)
    backend.update(rows, Grpo(Grpo.Config(correction="none")), tiny.plan(tokens_per_microbatch=200))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: name + text)


@pytest.mark.slow
def test_a_further_turn_may_show_another_image(spec, opened):
    renderer = open_renderer(spec)
    policy = tiny.policy(spec, opened.served_tensors())
    asked = ChatMessage(role="user", content="12", media=(PICTURES[0],))
    first = dataclasses.replace(prompted(spec, 0, [PICTURES[0]], "12", max_tokens=3), may_go_on=True)
    said = tiny.drain_one(policy, first)
    known = (*first.token_ids, *said.token_ids.tolist())
    answer = ChatMessage(role="assistant", content=renderer.decode(said.token_ids))
    more = ChatMessage(role="user", content="+1", media=(PICTURES[1],))
    found = renderer.continue_prompt(
        known, len(said.token_ids), Conversation(messages=(asked,)), Conversation(messages=(asked, answer, more))
    )
    assert found.break_reason is None
    spans = (*first.images, *renderer.images.spans(found.token_ids, [PICTURES[1]], start=len(known)))
    second = dataclasses.replace(tiny.request(9, (*known, *found.token_ids)), images=spans)
    done = tiny.drain_one(policy, second)
    (expected,) = opened.logprobs([row_of(second, done.token_ids)])
    np.testing.assert_allclose(done.behavior_logprobs, expected[len(second.token_ids) :], atol=2e-5)
    third = dataclasses.replace(second, token_ids=(*second.token_ids, 50, 51), request_id="r10")  # words alone
    done = tiny.drain_one(policy, third)
    (expected,) = opened.logprobs([row_of(third, done.token_ids)])
    np.testing.assert_allclose(done.behavior_logprobs, expected[len(third.token_ids) :], atol=2e-5)


@pytest.mark.slow
def test_further_turns_go_on_beside_others(spec, opened):
    """Three turns of rollouts that are decoded together: an image, then words alone or another image, then words. What
    goes on from a turn is computed at the positions behind its images, whether its slot was needed meanwhile or not."""
    renderer = open_renderer(spec)
    policy = tiny.policy(spec, opened.served_tensors(), batch_size=3)
    gone_on, go_on = [], policy._batch.go_on
    policy._batch.go_on = lambda request, *more: (gone_on.append(request.request_id), go_on(request, *more))[1]
    asked = {}
    for number in range(5):
        images = [PICTURES[number % 4], PICTURES[(number + 1) % 4]][: number % 3]
        one = dataclasses.replace(prompted(spec, number, images, "12", max_tokens=4), may_go_on=True)
        asked[one.request_id] = one
    compared = 0
    for turn in range(3):
        for one in asked.values():
            policy.submit(one)
        done = tiny.drain(policy)
        rows = [row_of(one, done[name].token_ids) for name, one in asked.items()]
        for (name, one), expected in zip(asked.items(), opened.logprobs(rows, 500), strict=True):
            assert done[name].error is None
            np.testing.assert_allclose(done[name].behavior_logprobs, expected[len(one.token_ids) :], atol=2e-5)
            compared += 1
            known, spans = (*one.token_ids, *done[name].token_ids.tolist()), one.images
            more = renderer.render([ChatMessage(role="user", content="+1")])
            if turn == 0 and name in ("r1", "r3"):
                more = renderer.render([ChatMessage(role="user", content="+", media=(PICTURES[2],))])
                spans = (*spans, *renderer.images.spans(more, [PICTURES[2]], start=len(known)))
            asked[name] = dataclasses.replace(one, token_ids=(*known, *more), images=spans)
    assert compared == 15
    looks_ahead = policy._model.seeing.looks_ahead
    assert len(gone_on) == 10 - 2 * looks_ahead, "all further turns, but those whose new image looks ahead"


@pytest.mark.slow
def test_new_weights_compute_running_requests_anew(spec, opened):
    later = tiny.backend(dataclasses.replace(spec))
    rows = [row_of(one, [50, 51, 0]) for one in some_requests(spec)]
    later.update(rows, Grpo(Grpo.Config(correction="none")), tiny.plan(lr=1e-2))
    policy = tiny.policy(spec, opened.served_tensors(), in_flight="recompute")
    requests = [prompted(spec, n, PICTURES[:2], "1", max_tokens=12) for n in range(20)]
    request = next(one for one in requests if len(tiny.drain_one(policy, one).token_ids) == 12)
    policy.submit(request)
    for _ in range(4):
        assert not policy.step()
    policy.load(later.served_tensors(), tiny.name(1))
    done = tiny.drain(policy)[request.request_id]
    (span,) = [one for one in done.versions if one.version == 1]
    (expected,) = later.logprobs([row_of(request, done.token_ids)])
    start = len(request.token_ids) + span.start
    np.testing.assert_allclose(done.behavior_logprobs[span.start :], expected[start : start + span.count], atol=2e-5)


def test_a_text_that_writes_a_placeholder_itself_is_refused(spec):
    renderer = open_renderer(spec)
    tokens = renderer.images
    for mark in {renderer._tokenizer.full_text([tokens.token_id]), tokens.texts.processor.mark}:
        with pytest.raises(ConfigError, match=r"a text itself has the name of the placeholder|2 marks <image>"):
            renderer.render([ChatMessage(role="user", content=f"1{mark}{mark}", media=(PICTURES[0],))])


@pytest.mark.slow
def test_an_update_is_the_same_to_the_bit(spec):
    states = []
    for _ in range(2):
        backend = tiny.backend(spec)
        rows = [row_of(one, [50, 51, 0]) for one in some_requests(spec)]
        backend.update(rows, Grpo(Grpo.Config(correction="none")), tiny.plan())
        states.append(tiny.state(backend))
    assert states[0] == states[1]
