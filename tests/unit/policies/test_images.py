"""Images in prompts: what is sampled after them has the probability that trainer and transformers give it."""

import dataclasses
import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.clock import SystemClock
from rftstream.config.sections import LoraSection
from rftstream.contracts.tasks import ChatMessage
from rftstream.data.tasksets.images import image_in
from rftstream.errors import ConfigError, ImageError
from rftstream.models.rendering import image_spans, open_renderer
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.models.vision.images import decode_data_url
from rftstream.policies.hf.policy import HfPolicy
from rftstream.weights.snapshot import RawTensor
from tests.unit import tiny

COLORS = ("red", "green", "blue", "white")


def picture(color, size=(40, 30)):
    file = io.BytesIO()
    image = Image.new("RGB", size, "black")
    image.paste(color, (5, 5, 20, 25))
    image.save(file, "PNG")
    return image_in(file.getvalue())


PICTURES = [picture(color) for color in COLORS]


MODEL = {"seed": 3, "vision": True, "context": 128}


@pytest.fixture(scope="module")
def trained(spec):
    """Trained a little, so that neither tower nor policy are as they were made."""
    opened = tiny.backend(spec)
    rows = [row_of(request, [3, 4, 5, 0]) for request in (prompted(spec, n) for n in range(4))]
    for step in range(6):
        signed = [dataclasses.replace(row, advantages=row.loss_mask * (-1) ** (n + step)) for n, row in enumerate(rows)]
        opened.update(signed, Grpo(Grpo.Config(correction="none")), tiny.plan(lr=2e-2))
    return opened


def prompted(spec, number, *, images=None, text="12+3", **sampling):
    renderer = open_renderer(spec)
    shown = [PICTURES[number % len(PICTURES)]] if images is None else images
    message = ChatMessage(role="user", content=text, media=tuple(shown))
    token_ids = renderer.render([message])
    request = tiny.request(number, token_ids, **sampling)
    return dataclasses.replace(request, images=image_spans(renderer, token_ids, [message]))


def row_of(request, sampled, temperature=1.0):
    ids = np.asarray([*request.token_ids, *sampled], np.int32)
    mask = np.zeros(len(ids), np.float32)
    mask[len(request.token_ids) :] = 1
    return TrainingRow(
        token_ids=ids, loss_mask=mask, behavior_logprobs=-2 * mask, advantages=mask.copy(), temperature=temperature,
        images=request.images,
    )  # fmt: skip


def plain_model(spec, opened):
    """transformers' own model with the backend's weights, and its own processor."""
    model = AutoModelForImageTextToText.from_pretrained(spec.folder, dtype=torch.float32).eval()
    model.load_state_dict({name: one.detach().clone() for name, one in opened._masters.masters.items()}, strict=False)
    return model, AutoProcessor.from_pretrained(spec.folder)


def plain_logits(spec, model, processor, row):
    """Logits [T, V] by transformers' own forward pass, of ids and pixels that its processor makes."""
    files = [Image.open(io.BytesIO(decode_data_url(span.image.url))) for span in row.images]
    pixels = processor(images=files, text=["<image>" * len(files)], return_tensors="pt")["pixel_values"]
    logits = model(input_ids=torch.from_numpy(row.token_ids).long()[None], pixel_values=pixels).logits[0]
    return logits.index_fill(-1, torch.tensor([open_renderer(spec).images.token_id]), -torch.inf)


def plain_logprobs(spec, model, processor, row):
    logits = plain_logits(spec, model, processor, row) / row.temperature
    ids = torch.from_numpy(row.token_ids).long()
    return torch.cat([torch.zeros(1), logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]])


def test_ids_are_those_of_transformers_own_processor(spec):
    processor = AutoProcessor.from_pretrained(spec.folder)
    for images, text in (([PICTURES[0]], "<image>1+2"), (PICTURES[:2], "<image>1<image>+2")):
        files = [Image.open(io.BytesIO(decode_data_url(one.url))) for one in images]
        expected = processor(images=files, text=[text])["input_ids"][0]
        assert list(prompted(spec, 0, images=images, text=text).token_ids) == list(expected)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_trainer_and_transformers(spec, trained, temperature):
    policy = tiny.policy(spec, trained.served_tensors(), batch_size=8)
    model, processor = plain_model(spec, trained)
    requests = [prompted(spec, n, temperature=temperature) for n in range(12)]
    requests += [prompted(spec, n, images=PICTURES[n - 12 : n - 10], temperature=temperature) for n in (12, 13)]
    requests += [prompted(spec, 14, images=[], temperature=temperature)]
    for request in requests:
        policy.submit(request)
    done = tiny.drain(policy)
    for request in requests:
        completion = done[request.request_id]
        row = row_of(request, completion.token_ids, temperature)
        (ours,) = trained.logprobs([row])
        start = len(request.token_ids)
        np.testing.assert_allclose(completion.behavior_logprobs, ours[start:], atol=2e-5)
        if request.images:
            with torch.no_grad():
                theirs = plain_logprobs(spec, model, processor, row).numpy()[start:]
            np.testing.assert_allclose(completion.behavior_logprobs, theirs, atol=2e-5)


@pytest.mark.slow
def test_sampled_logprobs_are_those_of_the_trainer_with_adapters(spec):
    pytest.importorskip("peft")
    adapted = dataclasses.replace(spec, lora=LoraSection(rank=4, alpha=8.0))
    opened = tiny.backend(adapted)
    rows = [row_of(prompted(spec, n), [3, 4, 5, 0]) for n in range(4)]
    for step in range(4):
        signed = [dataclasses.replace(row, advantages=row.loss_mask * (-1) ** (n + step)) for n, row in enumerate(rows)]
        opened.update(signed, Grpo(Grpo.Config(correction="none")), tiny.plan(lr=5e-2))
    tensors = {name: RawTensor(one.dtype, one.shape, bytearray(one.data))
               for name, one in opened.served_tensors().items()}  # fmt: skip
    assert any("vision_tower" in name and ".lora_B." in name and any(one.data) for name, one in tensors.items())
    policy = tiny.policy(adapted, tensors)
    for n in range(6):
        request = prompted(spec, n)
        completion = tiny.drain_one(policy, request)
        (ours,) = opened.logprobs([row_of(request, completion.token_ids)])
        np.testing.assert_allclose(completion.behavior_logprobs, ours[len(request.token_ids) :], atol=2e-5)


def test_equal_tokens_of_other_images_share_nothing(spec, trained):
    policy = tiny.policy(spec, trained.served_tensors(), batch_size=16)
    same = [dataclasses.replace(prompted(spec, n % 4), request_id=f"r{n}", seed=7) for n in range(8)]
    assert len({request.token_ids for request in same}) == 1
    for request in same:
        policy.submit(request)
    done = tiny.drain(policy)
    firsts = [float(done[f"r{n}"].behavior_logprobs[0]) for n in range(8)]
    assert len(set(firsts)) == 4
    assert firsts[:4] == firsts[4:]


@pytest.mark.slow
def test_what_images_are_leaves_the_device_and_comes_back(spec, trained):
    """As `trainer.colocate` has it while the trainer trains."""
    found = []
    for moved in (False, True):
        policy = tiny.policy(spec, trained.served_tensors())
        requests = [prompted(spec, number, max_tokens=6) for number in range(4)]
        policy.submit(requests[0])
        done = {}
        while len(done) < len(requests):
            done.update((one.request_id, one) for one in policy.step())
            if moved:
                policy._state.leave()
                assert [one.untyped_storage().nbytes() for one in policy._images.tensors()], "there are some"
                assert not any(one.untyped_storage().nbytes() for one in policy._images.tensors())
                policy._state.come()
            if requests[1:] and len(done) == 1 and not policy.num_active:
                for request in requests[1:]:  # the first one's image is known by now
                    policy.submit(dataclasses.replace(request, images=requests[0].images))
        found.append({name: one.behavior_logprobs.tobytes() for name, one in done.items()})
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["keep", "recompute", "finish"])
def test_new_weights_see_the_same_images(spec, trained, in_flight):
    fresh = tiny.backend(spec)
    policy = tiny.policy(spec, fresh.served_tensors(), in_flight=in_flight)
    requests = [prompted(spec, n, max_tokens=12) for n in range(20)]
    request = next(one for one in requests if len(tiny.drain_one(policy, one).token_ids) == 12)
    policy.submit(request)
    for _ in range(5):
        assert not policy.step()
    policy.load(trained.served_tensors(), tiny.name(1))
    done = tiny.drain(policy)[request.request_id]
    later = [span for span in done.versions if span.version == 1]
    if in_flight == "finish":
        assert not later
    if in_flight == "recompute":  # as if the new weights had seen it all
        row = row_of(request, done.token_ids)
        start = len(request.token_ids) + later[0].start
        expected = trained.logprobs([row])[0][start : start + later[0].count]
        np.testing.assert_allclose(done.behavior_logprobs[later[0].start :], expected, atol=2e-5)
    policy.submit(dataclasses.replace(request, request_id="again"))
    again = tiny.drain(policy)["again"]
    (expected,) = trained.logprobs([row_of(request, again.token_ids)])
    np.testing.assert_allclose(again.behavior_logprobs, expected[len(request.token_ids) :], atol=2e-5)


def test_a_further_turn_may_show_another_image(spec, trained):
    renderer = open_renderer(spec)
    policy = tiny.policy(spec, trained.served_tensors())
    first = dataclasses.replace(prompted(spec, 0, max_tokens=3), may_go_on=True)
    said = tiny.drain_one(policy, first)
    more = ChatMessage(role="user", content="+1", media=(PICTURES[2],))
    new = renderer.render([more])
    before = (*first.token_ids, *said.token_ids.tolist())
    spans = (*first.images, *renderer.images.spans(new, [PICTURES[2]], start=len(before)))
    second = dataclasses.replace(tiny.request(9, (*before, *new)), images=spans)
    assert policy._turns.find(policy._images.admit(second)) is not None
    done = tiny.drain_one(policy, second)
    (expected,) = trained.logprobs([row_of(second, done.token_ids)])
    np.testing.assert_allclose(done.behavior_logprobs, expected[len(second.token_ids) :], atol=2e-5)


def test_others_are_sampled_while_an_image_is_fetched(spec, trained):
    """Each image once, however many wait for it; a request may be aborted meanwhile."""
    arrives, asked = threading.Event(), []

    def fetch(media):
        asked.append(media.digest)
        assert arrives.wait(60)
        return decode_data_url(media.url)

    policy = HfPolicy(
        HfPolicy.Config(), model=spec, renderer=open_renderer(spec), clock=SystemClock(),
        images=ImageCache(fetch, spec.folder),
    )  # fmt: skip
    policy.load(trained.served_tensors(), tiny.name(0))
    slow = [dataclasses.replace(prompted(spec, 0, max_tokens=4), request_id=f"slow{n}") for n in range(3)]
    for request in slow:
        policy.submit(request)
    policy.submit(tiny.request(7, max_tokens=4))
    done = {}
    while "r7" not in done:
        done |= {one.request_id: one for one in policy.step()}
    assert set(done) == {"r7"}
    assert policy.num_active == 3
    assert policy.idle_s() == 0
    policy.abort("slow1")
    arrives.set()
    assert tiny.drain(policy).keys() == {"slow0", "slow2"}
    assert len(asked) == 1
    policy.close()


@pytest.mark.slow
def test_placeholders_are_never_sampled(spec, trained):
    token = open_renderer(spec).images.token_id
    policy = tiny.policy(spec, trained.served_tensors(), batch_size=64)
    for n in range(64):  # so hot that every other token comes
        policy.submit(prompted(spec, n, temperature=50.0, max_tokens=24, min_tokens=24))
    said = np.concatenate([one.token_ids for one in tiny.drain(policy).values()])
    assert token not in said
    assert len(set(said.tolist())) == tiny.VOCABULARY - 1  # all characters, and no end before 24 tokens


@pytest.mark.slow
def test_bad_images_end_their_request_alone(spec, trained):
    policy = tiny.policy(spec, trained.served_tensors())
    good = prompted(spec, 0)
    cut = image_in(decode_data_url(PICTURES[1].url)[:60])
    bad = {
        "cut": dataclasses.replace(PICTURES[1], url=cut.url),
        "text": image_in(b"no image"),
        "huge": dataclasses.replace(PICTURES[1], width=100_000, height=100_000),
        "gone": dataclasses.replace(PICTURES[1], url="data:,"),
        "unread": dataclasses.replace(PICTURES[1], digest="", kind=""),
    }
    policy.submit(good)
    for name, media in bad.items():
        span = dataclasses.replace(good.images[0], image=media)
        policy.submit(dataclasses.replace(good, request_id=name, images=(span,)))
    done = tiny.drain(policy)
    assert done["r0"].finish_reason != "error"
    for name, media in bad.items():
        assert done[name].finish_reason == "error"
        assert (media.digest or "could not be read") in done[name].error


def test_a_model_of_text_refuses_images(tmp_path):
    text = tiny.make(tmp_path)
    message = ChatMessage(role="user", content="1+2", media=(PICTURES[0],))
    with pytest.raises(ConfigError, match="got 1 images, which it is not shown: it reads text alone"):
        open_renderer(text).render([message])
    assert tiny.images(text) is None


def test_a_placeholder_in_a_text_is_no_image(spec):
    renderer = open_renderer(spec)
    with pytest.raises(ConfigError, match="found 1 placeholders of images in the prompt, expected 0"):
        renderer.render([ChatMessage(role="user", content="<image>1")])
    with pytest.raises(ConfigError, match="2 marks <image> in a message with 1 images"):
        renderer.render([ChatMessage(role="user", content="<image>1<image>", media=(PICTURES[0],))])


def test_pixels_are_held_within_bounds(spec):
    fetched = []

    def fetch(media):
        fetched.append(media.digest)
        return decode_data_url(media.url)

    cache = ImageCache(fetch, spec.folder, max_bytes=2 * 3 * 32 * 32 * 4)
    for place in (0, 1, 0, 2, 0, 1):
        cache.inputs(PICTURES[place])
    assert [PICTURES.index(next(one for one in PICTURES if one.digest == digest)) for digest in fetched] == [0, 1, 2, 1]
    with pytest.raises(ImageError):
        cache.inputs(image_in(b"no image"))
