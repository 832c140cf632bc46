"""Weights that change while a policy samples: every token's logprob is that of the version it is stamped with."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rftstream.contracts.rollouts import VersionSpan
from rftstream.weights.snapshot import RawTensor
from tests.engines.replay import Replay
from tests.unit import tiny

PROMPTS = [(4, 11, 5, 15), (3, 4), (5, 5, 5, 5, 5, 5, 5), (9,)]


def versions_of(backend, count):
    """`count` versions that differ in what they find likely."""
    from rftstream.algorithms.grpo import Grpo

    for version in range(count):
        for seed in range(3):
            rows = tiny.rows(24, seed=100 * version + seed)
            backend.update(rows, Grpo(Grpo.Config(correction="none")), tiny.plan(lr=1e-2))
        yield tiny.name(version), backend.served_tensors()


def check_stamps(replay, request, completion, names, *, cache="keep", atol=3e-4):
    """Under its own version each token's logprob is what was recorded; under others it is not.

    `atol`: 500 places in float32 under trained weights are up to 1.1e-4 off what float64 gives."""
    assert completion.error is None
    assert sum(span.count for span in completion.versions) == len(completion.token_ids)
    expected = replay.logprobs(request, completion, cache=cache)
    np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=atol)
    for name in names:
        other = replay.logprobs(request, completion, only=name)
        for span in completion.versions:
            if (span.trainer_epoch, span.version) != (name.trainer_epoch, name.version) and span.count > 3:
                places = slice(span.start, span.start + span.count)
                assert np.abs(other - completion.behavior_logprobs)[places].max() > 20 * atol


def check_under_updates(policy, backend, replay, *, every_s, updates, first, cache="keep", num_checked=24, **request):
    """New weights every so many seconds, of versions from `first` on, while requests follow one another in all places:
    each is answered, and those that saw most versions are stamped rightly."""
    names, requests, done, places = [], {}, {}, 16
    for version, (_, tensors) in enumerate(versions_of(backend, updates + 1)):
        names.append(tiny.name(first + version))
        replay.add(names[-1], tensors)
        policy.load(tensors, names[-1])
        until, before = time.monotonic() + every_s, len(done)
        while time.monotonic() < until or len(done) == before:  # a slow machine has more time
            while len(requests) - len(done) < places:
                number = len(requests)
                requests[f"r{number}"] = tiny.request(number, PROMPTS[number % 4], **request)
                policy.submit(requests[f"r{number}"])
            done |= {one.request_id: one for one in policy.step()}
    done |= tiny.drain(policy)
    assert done.keys() == requests.keys()
    by_versions = sorted(done.values(), key=lambda one: len(one.versions), reverse=True)
    seen = {span.version for one in done.values() for span in one.versions}
    assert len(by_versions[0].versions) > 1 and seen == {name.version for name in names}
    for completion in by_versions[:num_checked]:
        check_stamps(replay, requests[completion.request_id], completion, names, cache=cache)


@pytest.mark.long
@pytest.mark.parametrize("setting", ["keep", "recompute"])
def test_hf_under_an_update_every_two_seconds(tmp_path, setting):
    spec = tiny.make(tmp_path, seed=3, width=128, context=512)
    policy = tiny.policy(spec, in_flight=setting)
    check_under_updates(
        policy, tiny.backend(spec), Replay(spec), every_s=2.0, updates=4, first=0, cache=setting, max_tokens=500,
        min_tokens=500,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "setting"), [(1, "keep"), (4, "keep"), (4, "recompute")])
def test_stamps_of_hf_are_right_token_by_token(tmp_path, updates, setting):
    spec = tiny.make(tmp_path, seed=3, context=128)
    backend, replay = tiny.backend(spec), Replay(spec)
    policy, names, done = tiny.policy(spec, in_flight=setting, prefill_tokens=200), [], {}
    requests = {f"r{n}": tiny.request(n, PROMPTS[n % 4], max_tokens=60, min_tokens=60) for n in range(12)}
    for name, tensors in versions_of(backend, updates + 1):
        replay.add(name, tensors)
        policy.load(tensors, name)
        names.append(name)
        for request in requests.values():
            if len(names) == 1:
                policy.submit(request)
        for _ in range(60 // (updates + 1)):
            done |= {one.request_id: one for one in policy.step()}
    done |= tiny.drain(policy)
    assert done.keys() == requests.keys()
    for request_id, request in requests.items():
        assert len(done[request_id].versions) == updates + 1
        check_stamps(replay, request, done[request_id], names, cache=setting)


@pytest.mark.slow
def test_hf_finishes_what_runs_with_the_old_weights(tmp_path):
    spec = tiny.make(tmp_path, seed=3)
    policy, (first, second, third) = tiny.policy(spec, in_flight="finish"), versions_of(tiny.backend(spec), 3)
    policy.load(first[1], first[0])
    for number in range(4):
        policy.submit(tiny.request(number, max_tokens=10, min_tokens=10))
    done = [policy.step(), policy.step()]
    policy.load(second[1], second[0])
    policy.load(third[1], third[0])  # before the other could be taken over
    assert policy.version == third[0]
    policy.submit(tiny.request(9, max_tokens=5, min_tokens=5))
    while policy.num_active:
        done.append(policy.step())
    spans = {one.request_id: one.versions for ones in done for one in ones}
    assert spans["r9"] == (VersionSpan(start=0, count=5, trainer_epoch=1, version=2),)
    assert {spans[f"r{number}"] for number in range(4)} == {
        (VersionSpan(start=0, count=10, trainer_epoch=1, version=0),)
    }


@pytest.mark.slow
def test_hf_keeps_what_it_will_load_later(tmp_path):
    """A follower changes its bytes in place, while the policy finishes with the old weights."""
    spec = tiny.make(tmp_path, seed=3)
    policy, (first, second) = tiny.policy(spec, in_flight="finish"), versions_of(tiny.backend(spec), 2)
    policy.load(first[1], first[0])
    policy.submit(tiny.request(0, max_tokens=10, min_tokens=10))
    policy.step()
    state = {key: RawTensor(one.dtype, one.shape, bytearray(one.data)) for key, one in second[1].items()}
    policy.load(state, second[0])
    for one in state.values():
        one.data[:] = bytes(len(one.data))
    policy.submit(tiny.request(9, max_tokens=5))
    done = tiny.drain(policy)
    undisturbed = tiny.policy(spec)
    undisturbed.load(second[1], second[0])
    undisturbed.submit(tiny.request(9, max_tokens=5))
    expected = tiny.drain(undisturbed)["r9"]
    np.testing.assert_array_equal(done["r9"].token_ids, expected.token_ids)
    np.testing.assert_array_equal(done["r9"].behavior_logprobs, expected.behavior_logprobs)
