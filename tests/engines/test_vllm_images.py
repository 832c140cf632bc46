"""Images in the prompts of the real vLLM, built for a CPU, with a made model that sees: one engine for all of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rftstream.algorithms.grpo import Grpo
from rftstream.clock import SystemClock
from rftstream.models.rendering import open_renderer
from rftstream.policies.vllm.policy import VllmPolicy
from rftstream.weights.snapshot import RawTensor
from tests.engines.test_vllm import TOLERANCE, in_flight, pytestmark  # noqa: F401
from tests.unit import tiny
from tests.unit.policies.test_images import PICTURES, image_in, plain_model, prompted, row_of

MODEL = {"seed": 3, "width": 128, "vision": True, "context": 256}


@pytest.fixture(scope="module")
def versions(spec):
    """Weights of two versions that differ in the tower, too, each with a backend that has them."""
    made = [tiny.backend(spec), tiny.backend(spec)]
    answers = ([3, 4, 5, 0], [6, 7, 8, 0], [9, 3, 10, 0], [5, 5, 4, 0])
    rows = [row_of(prompted(spec, number), answer) for number, answer in enumerate(answers)]
    for _ in range(2):
        made[1].update(rows, Grpo(Grpo.Config(correction="none")), tiny.plan(lr=3e-3))
    tensors = [
        {name: RawTensor(one.dtype, one.shape, bytearray(one.data)) for name, one in opened.served_tensors().items()}
        for opened in made
    ]
    return list(zip(made, tensors, strict=True))


@pytest.fixture(scope="module")
def policy(spec):
    opened = VllmPolicy(
        VllmPolicy.Config(batch_size=16, engine={"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}),
        model=spec, renderer=open_renderer(spec), clock=SystemClock(), images=tiny.images(spec),
    )  # fmt: skip
    yield opened
    opened.close()


def check(backend, request, completion, temperature=1.0):
    assert completion.error is None
    (expected,) = backend.logprobs([row_of(request, completion.token_ids, temperature)])
    np.testing.assert_allclose(completion.behavior_logprobs, expected[len(request.token_ids) :], atol=TOLERANCE)


@torch.no_grad()
def without_end(spec, backend, request, sampled):
    """Logprobs of tokens after a prompt with one image, where the end is not sampled, by transformers' own model."""
    model, _ = plain_model(spec, backend)
    ids = torch.tensor([[*request.token_ids, *sampled.tolist()]])
    pixels = tiny.images(spec).inputs(request.images[0].image)["pixel_values"]
    renderer = open_renderer(spec)
    never = torch.tensor([*renderer.images.never_sampled, *renderer.stop_token_ids])
    logits_TV = model(input_ids=ids, pixel_values=torch.from_numpy(pixels)).logits[0].index_fill(-1, never, -torch.inf)
    later = torch.from_numpy(sampled).long()[:, None]
    return logits_TV[len(request.token_ids) - 1 : -1].log_softmax(-1).gather(1, later)[:, 0].numpy()


def sampled(policy, requests):
    for request in requests:
        policy.submit(request)
    done = tiny.drain(policy)
    return [done[request.request_id] for request in requests]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_the_trainer(policy, spec, versions, temperature):
    """With no, one and two images, for siblings, and with each version in turn, whatever the engine has kept."""
    requests = [prompted(spec, n, temperature=temperature) for n in range(8)]
    requests += [prompted(spec, n, images=PICTURES[n - 8 : n - 6], temperature=temperature) for n in (8, 9, 10)]
    requests += [prompted(spec, 11, images=[], temperature=temperature)]
    for number, (backend, tensors) in enumerate([*versions, versions[0]]):
        policy.load(tensors, tiny.name(10 + number))
        for request, completion in zip(requests, sampled(policy, requests), strict=True):
            check(backend, request, completion, temperature)
            assert {span.version for span in completion.versions} == {10 + number}


def test_each_image_and_the_tower_count(policy, spec, versions):
    (_, old), (_, new) = versions
    policy.load(new, tiny.name(20))
    same = [dataclasses.replace(prompted(spec, n % 4), request_id=f"r{n}", seed=7) for n in range(8)]
    assert len({request.token_ids for request in same}) == 1
    firsts = [float(one.behavior_logprobs[0]) for one in sampled(policy, same)]
    np.testing.assert_allclose(firsts[:4], firsts[4:], atol=TOLERANCE)
    assert min(abs(a - b) for n, a in enumerate(firsts[:4]) for b in firsts[:n]) > 10 * TOLERANCE
    policy.load({name: (old if "vision_tower" in name else new)[name] for name in new}, tiny.name(21))
    blind = [float(one.behavior_logprobs[0]) for one in sampled(policy, same[:4])]
    assert min(abs(a - b) for a, b in zip(firsts, blind, strict=False)) > 10 * TOLERANCE


@pytest.mark.parametrize("setting", ["keep", "recompute"])
def test_new_weights_reach_the_tower_while_it_samples(policy, spec, versions, setting):
    in_flight(policy, setting)
    policy.load(versions[0][1], tiny.name(30))
    request = prompted(spec, 1, max_tokens=200, min_tokens=200)
    policy.submit(request)
    while (part := policy.so_far(request.request_id)) is None or len(part.token_ids) < 10:
        assert policy.step() == []
    policy.load(versions[1][1], tiny.name(31))
    again = dataclasses.replace(prompted(spec, 1), request_id="again")
    policy.submit(again)
    done = tiny.drain(policy)
    in_flight(policy, "keep")
    check(versions[1][0], again, done["again"])
    completion = done[request.request_id]
    assert [span.version for span in completion.versions] == [30, 31]
    if setting == "recompute":  # as if the new weights had seen it all
        start = completion.versions[1].start
        expected = without_end(spec, versions[1][0], request, completion.token_ids)[start:]
        np.testing.assert_allclose(completion.behavior_logprobs[start:], expected, atol=TOLERANCE)


def test_placeholders_are_never_sampled(policy, spec, versions):
    policy.load(versions[0][1], tiny.name(40))
    hot = [prompted(spec, n, temperature=2.0, max_tokens=64, min_tokens=64) for n in range(64)]
    said = np.concatenate([one.token_ids for n in range(0, 64, 16) for one in sampled(policy, hot[n : n + 16])])
    assert open_renderer(spec).images.token_id not in said
    assert len(set(said.tolist())) == tiny.VOCABULARY - 1


def test_bad_images_end_their_request_alone(policy, spec, versions):
    policy.load(versions[0][1], tiny.name(50))
    good = prompted(spec, 0)
    (span,) = good.images
    bad = {
        "text": dataclasses.replace(span, image=image_in(b"no image")),
        "gone": dataclasses.replace(span, image=dataclasses.replace(PICTURES[2], digest="sha256:0", url="data:,")),
        "short": dataclasses.replace(span, count=span.count - 1),
        "elsewhere": dataclasses.replace(span, start=span.start + 1),
    }
    requests = [dataclasses.replace(good, request_id=name, images=(one,)) for name, one in bad.items()]
    first, *others = sampled(policy, [good, *requests])
    check(versions[0][0], good, first)
    for completion, one in zip(others, bad.values(), strict=True):
        assert completion.finish_reason == "error" and one.image.digest in completion.error
    assert "has 15 tokens in the prompt, expected the 16 that vllm makes of it" in others[2].error
