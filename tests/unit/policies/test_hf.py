import dataclasses

import numpy as np
import pytest
import torch

from rftstream.algorithms.base import TrainingRow
from rftstream.contracts.beside import fill_columns
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.token_values import ALLOWED
from rftstream.errors import WeightsError
from rftstream.policies.sampling import _invert, uniforms
from tests.suite.each import each
from tests.unit import tiny

PROMPTS = [(4, 11, 5, 15), (3, 4), (5, 5, 5, 5, 5, 5, 5), (9,)]


MODEL = {"seed": 3}


@pytest.fixture(scope="module")
def backend(spec):
    """Trained a little, so that the policy is not uniform."""
    from rftstream.algorithms.grpo import Grpo

    opened = tiny.backend(spec)
    for seed in range(8):
        opened.update(tiny.rows(24, seed=seed), Grpo(Grpo.Config(correction="none")), tiny.plan(lr=3e-2))
    return opened


@pytest.fixture
def policy(spec, backend):
    return tiny.policy(spec, backend.served_tensors(), batch_size=16)


def sample(policy, count=12, **sampling):
    requests = {f"r{n}": tiny.request(n, PROMPTS[n % len(PROMPTS)], **sampling) for n in range(count)}
    for one in requests.values():
        policy.submit(one)
    done = tiny.drain(policy)
    assert done.keys() == requests.keys()
    return [(requests[name], done[name]) for name in requests]


def row(request, completion, temperature=1.0):
    ids = np.asarray([*request.token_ids, *completion.token_ids], np.int32)
    mask = np.zeros(len(ids), np.float32)
    mask[len(request.token_ids) :] = 1
    return TrainingRow(
        token_ids=ids, loss_mask=mask, advantages=mask, temperature=temperature,
        behavior_logprobs=np.concatenate([0 * mask[: len(request.token_ids)], completion.behavior_logprobs]),
        beside=fill_columns({}, len(ids), completion.beside),
    )  # fmt: skip


def logits_of(backend, request, completion):
    """Float32 logits [T, V] that each sampled token was drawn from."""
    ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
    with torch.no_grad():
        return backend._network.model(input_ids=ids.long()).logits[0, len(request.token_ids) - 1 : -1]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_logprobs_are_those_that_the_trainer_computes(policy, backend, temperature):
    for request, completion in sample(policy, temperature=temperature):
        again = backend.logprobs([row(request, completion, temperature)])[0][len(request.token_ids) :]
        np.testing.assert_allclose(completion.behavior_logprobs, again, atol=2e-5)


@pytest.mark.parametrize("truncation", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.4}, {"top_k": 6, "top_p": 0.7}])
def test_truncated_logprobs_are_renormalised(policy, backend, truncation):
    kept_any_less = False
    for request, completion in sample(policy, temperature=0.8, **truncation):
        logits_TV = logits_of(backend, request, completion) / 0.8
        for place, token in enumerate(completion.token_ids):
            probs_V = logits_TV[place].softmax(-1).double().numpy()
            kept = keep_by_definition(probs_V, **truncation)
            kept_any_less |= len(kept) < len(probs_V)
            assert int(token) in kept
            expected = np.log(probs_V[token] / probs_V[kept].sum())
            assert completion.behavior_logprobs[place] == pytest.approx(expected, abs=2e-5)
    assert kept_any_less


def keep_by_definition(probs_V, top_p=1.0, top_k=0, min_p=0.0):
    order = [token for token in np.argsort(-probs_V, kind="stable") if probs_V[token] >= min_p * probs_V.max() - 1e-9]
    order = order[: top_k or None]
    share = probs_V[order] / probs_V[order].sum()
    return order[: int(np.searchsorted(np.cumsum(share), top_p - 1e-7)) + 1]


def test_it_says_how_busy_it_is(policy):
    for number in range(20):
        policy.submit(tiny.request(number, PROMPTS[number % len(PROMPTS)], min_tokens=4))
    policy.step()
    begun = policy.engine_load()
    assert (begun.num_tokens, begun.num_waiting) == (16, 4) and begun.busy_s > 0 and 0 < begun.memory < 0.5
    done = tiny.drain(policy)
    ended = policy.engine_load()
    assert ended.num_tokens == sum(len(one.token_ids) for one in done.values()) and ended.num_waiting == 0
    assert ended.busy_s > begun.busy_s


def test_penalties_by_definition(policy, backend):
    settings = {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.4}
    for request, completion in sample(policy, **settings):
        logits_TV = logits_of(backend, request, completion)
        for place, token in enumerate(completion.token_ids):
            logits_V = logits_TV[place].clone()
            sampled = completion.token_ids[:place].tolist()
            for seen in {*request.token_ids, *sampled}:
                logits_V[seen] = logits_V[seen] / 1.5 if logits_V[seen] > 0 else logits_V[seen] * 1.5
            for seen in set(sampled):
                logits_V[seen] -= 0.3 * sampled.count(seen) + 0.4
            expected = float(logits_V.log_softmax(-1)[token])
            assert completion.behavior_logprobs[place] == pytest.approx(expected, abs=2e-5)


def test_greedy_takes_the_likeliest_with_logprobs_of_temperature_one(policy, backend):
    for request, completion in sample(policy, count=4, temperature=0.0, top_p=0.1):
        logits_TV = logits_of(backend, request, completion)
        assert completion.token_ids.tolist() == logits_TV.argmax(-1).tolist()
        again = backend.logprobs([row(request, completion)])[0][len(request.token_ids) :]
        np.testing.assert_allclose(completion.behavior_logprobs, again, atol=2e-5)


@pytest.mark.slow
@pytest.mark.law("derived")
def test_tokens_do_not_depend_on_who_else_is_in_the_batch(spec, backend, policy):
    together = {request.request_id: completion for request, completion in sample(policy, count=40)}
    for number in (0, 1, 2, 3, 17, 39):
        alone = tiny.policy(spec, backend.served_tensors())
        alone.submit(tiny.request(number, PROMPTS[number % len(PROMPTS)]))
        completion = tiny.drain(alone)[f"r{number}"]
        assert completion.token_ids.tolist() == together[f"r{number}"].token_ids.tolist()
        np.testing.assert_allclose(completion.behavior_logprobs, together[f"r{number}"].behavior_logprobs, atol=2e-5)


GOING_ON = {
    "plain": {},
    "min_tokens": {"min_tokens": 8},
    "truncated distribution": {"temperature": 0.8, "top_k": 9, "top_p": 0.9},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "stop strings": {"stop": ("12", "3"), "min_tokens": 3},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.slow
@pytest.mark.law("lost")
@pytest.mark.parametrize("name", GOING_ON)
def test_a_rollout_that_goes_on_elsewhere_is_what_it_would_have_been(spec, backend, policy, name):
    """Token for token; its logprobs within rounding, for what it brings is computed in one pass."""
    first, second = (tiny.policy(spec, backend.served_tensors()) for _ in range(2))
    for request, whole in sample(policy, count=4, **GOING_ON[name]):
        for cut in range(1, len(whole.token_ids)):
            first.submit(request)
            for _ in range(cut):
                first.step()
            half = first.so_far(request.request_id)
            assert half.finish_reason == "unfinished"
            assert half.token_ids.tolist() == whole.token_ids[:cut].tolist()
            first.abort(request.request_id)
            second.submit(dataclasses.replace(
                request, token_ids=(*request.token_ids, *half.token_ids.tolist()), num_sampled=cut,
                max_tokens=request.max_tokens - cut,
            ))  # fmt: skip
            rest = tiny.drain(second)[request.request_id]
            assert rest.token_ids.tolist() == whole.token_ids[cut:].tolist()
            assert rest.finish_reason == whole.finish_reason
            assert [(one.start, one.count) for one in rest.versions] == [(0, len(rest.token_ids))]
            np.testing.assert_allclose(rest.behavior_logprobs, whole.behavior_logprobs[cut:], atol=2e-5)


def test_only_what_is_being_sampled_can_be_asked_for(policy):
    assert policy.so_far("r0") is None
    policy.submit(tiny.request(0, max_tokens=3, min_tokens=3))
    assert policy.so_far("r0") is None
    policy.step()
    assert len(policy.so_far("r0").token_ids) == 1
    policy.abort("r0")
    assert policy.so_far("r0") is None


@pytest.mark.slow
def test_frequencies_are_those_of_the_distribution(policy, backend):
    request = tiny.request(0, max_tokens=1)
    first = []
    for number in range(4000):
        policy.submit(dataclasses.replace(request, request_id=f"{number}", seed=number * 7919))
    first = (
        np.bincount([int(one.token_ids[0]) for one in tiny.drain(policy).values()], minlength=tiny.VOCABULARY) / 4000
    )
    with torch.no_grad():
        expected = backend._network.model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).numpy()
    np.testing.assert_allclose(first, expected, atol=4 * np.sqrt(0.25 / 4000))


@pytest.mark.law("lineage", "staleness")
def test_new_weights_in_the_middle_are_stamped(policy, backend):
    policy.submit(tiny.request(0, max_tokens=6, min_tokens=6))
    policy.submit(tiny.request(1, max_tokens=2, min_tokens=2))
    done = [policy.step(), policy.step()]
    policy.load(backend.served_tensors(), tiny.name(1))
    policy.submit(tiny.request(2, max_tokens=3, min_tokens=3))
    done += [policy.step()]
    policy.load(backend.served_tensors(), tiny.name(3, epoch=2))
    assert policy.version == tiny.name(3, epoch=2)
    while policy.num_active:
        done.append(policy.step())
    spans = {one.request_id: one.versions for ones in done for one in ones}
    span = VersionSpan
    assert spans["r1"] == (span(start=0, count=2, trainer_epoch=1, version=0),)
    assert spans["r0"] == (
        span(start=0, count=2, trainer_epoch=1, version=0), span(start=2, count=1, trainer_epoch=1, version=1),
        span(start=3, count=3, trainer_epoch=2, version=3),
    )  # fmt: skip
    assert spans["r2"] == (
        span(start=0, count=1, trainer_epoch=1, version=1), span(start=1, count=2, trainer_epoch=2, version=3)
    )  # fmt: skip


def test_new_weights_are_used(spec, backend, policy):
    before = [one.behavior_logprobs.tolist() for _, one in sample(policy)]
    other = tiny.backend(tiny.make(spec.folder.parent / "other", seed=99))
    policy.load(other.served_tensors(), tiny.name(1))
    request, completion = sample(policy)[0]
    assert completion.behavior_logprobs.tolist() not in before
    again = other.logprobs([row(request, completion)])[0][len(request.token_ids) :]
    np.testing.assert_allclose(completion.behavior_logprobs, again, atol=2e-5)


def test_nothing_is_sampled_before_the_first_weights(spec):
    policy = tiny.policy(spec)
    policy.submit(tiny.request(0))
    assert policy.version is None
    assert policy.step() == []
    assert policy.num_active == 1


@pytest.mark.law("lineage")
def test_foreign_weights_are_refused_whole(policy, backend):
    tensors = dict(backend.served_tensors())
    name = sorted(tensors)[0]
    with pytest.raises(WeightsError, match="is missing"):
        policy.load({key: value for key, value in tensors.items() if key != name}, tiny.name(1))
    with pytest.raises(WeightsError, match="not of this model"):
        policy.load({**tensors, "extra": tensors[name]}, tiny.name(1))
    with pytest.raises(WeightsError, match="expected"):
        policy.load({**tensors, name: dataclasses.replace(tensors[name], shape=(1, 2))}, tiny.name(1))
    assert policy.version == tiny.name(0)


def test_lengths_and_stop_tokens(policy):
    for _, completion in sample(policy, count=40, max_tokens=5, min_tokens=2):
        ids = completion.token_ids.tolist()
        assert 2 < len(ids) <= 5 or (len(ids) > 2 and ids[-1] == 0)
        assert completion.finish_reason == ("stop" if ids[-1] == 0 else "length")
        assert 0 not in ids[:-1]
        assert len(completion.behavior_logprobs) == len(ids)


def test_a_model_gone_wrong_gives_errors_not_tokens(policy, backend):
    tensors = dict(backend.served_tensors())
    name = "model.norm.weight"
    policy.submit(tiny.request(0, min_tokens=4))
    policy.step()
    policy.load({**tensors, name: dataclasses.replace(tensors[name], data=b"\xff" * 32 * 4)}, tiny.name(1))
    policy.submit(tiny.request(1))
    done = tiny.drain(policy)
    assert [done[one].finish_reason for one in ("r0", "r1")] == ["error", "error"]
    assert [len(done[one].token_ids) for one in ("r0", "r1")] == [1, 0]
    assert "not finite" in done["r1"].error
    assert done["r1"].versions == ()


def test_stop_strings_end_a_completion(spec, policy):
    from rftstream.models.rendering import open_renderer

    renderer = open_renderer(spec)
    reasons = set()
    for _, completion in sample(policy, count=40, max_tokens=12, stop=("7", "12")):
        text = renderer.decode(completion.token_ids.tolist())
        assert not any(stop in text[:-1] for stop in ("7", "12"))
        if any(stop in text for stop in ("7", "12")):
            assert completion.finish_reason == "stop"
            reasons.add("string")
        reasons.add(completion.finish_reason)
    assert reasons >= {"string", "stop"}


def test_requests_beyond_the_batch_wait_their_turn(policy):
    for number in range(50):
        policy.submit(tiny.request(number))
    assert policy.num_active == 50
    done = {one.request_id for one in policy.step()}
    assert policy._batch.num_rows <= policy.slots == 16
    assert len(done | tiny.drain(policy).keys()) == 50


def test_abort_forgets(policy):
    for number in range(20):
        policy.submit(tiny.request(number, max_tokens=6, min_tokens=6))
    policy.step()
    policy.abort("r0")
    policy.abort("r19")
    policy.abort("unknown")
    assert policy.num_active == 18
    assert sorted(tiny.drain(policy)) == sorted(f"r{number}" for number in range(1, 19))
    policy.submit(tiny.request(0))
    policy.step()
    policy.abort("r0")
    assert policy.step() == []
    assert policy.num_active == 0


def test_it_may_be_closed_in_the_middle(policy):
    for number in range(3):
        policy.submit(tiny.request(number, PROMPTS[0]))
    for _ in range(2):
        policy.step()
    policy.close()
    assert policy.num_active == 0


def test_what_cannot_be_sampled_is_said(policy):
    policy.submit(tiny.request(0, ()))
    policy.submit(tiny.request(1, (99,)))
    policy.submit(tiny.request(2, (5,) * 64))
    policy.submit(tiny.request(3, (5,) * 62, min_tokens=8))
    done = tiny.drain(policy)
    assert [done[f"r{n}"].finish_reason for n in range(4)] == ["error", "error", "length", "length"]
    assert "empty" in done["r0"].error
    assert [len(done[f"r{n}"].token_ids) for n in range(4)] == [0, 0, 0, 2]  # the context is 64


def test_noise_is_uniform_and_its_own_for_each_place():
    grid = np.asarray([uniforms(np.full(64, seed, np.uint64), np.arange(64)) for seed in range(64)])
    assert 0 < grid.min() < grid.max() < 1
    assert grid.mean() == pytest.approx(0.5, abs=0.02)
    assert len(np.unique(grid)) == grid.size


@each("vocabulary", [3, 256, 257, 5000])
def test_inversion_finds_the_first_token_over_the_number(vocabulary):
    generator = torch.Generator().manual_seed(0)
    probs_BV = torch.randn(200, vocabulary, generator=generator).masked_fill_(
        torch.rand(200, vocabulary, generator=generator) < 0.3, -torch.inf
    )
    probs_BV[:, 1] = 0.0
    probs_BV = probs_BV.softmax(-1)
    uniforms_B1 = torch.rand(200, 1, generator=generator, dtype=torch.float64)
    uniforms_B1[:2] = torch.tensor([[2.0**-33], [1 - 2.0**-33]], dtype=torch.float64)
    tokens_B = _invert(probs_BV, uniforms_B1)[:, 0].numpy()
    exact_BV = np.cumsum(probs_BV.double().numpy(), axis=1)
    exact_BV /= exact_BV[:, -1:]
    rows_B = np.arange(200)
    assert (probs_BV.numpy()[rows_B, tokens_B] > 0).all()
    assert (exact_BV[rows_B, tokens_B] > uniforms_B1[:, 0].numpy() - 1e-6).all()
    before_B = np.where(tokens_B > 0, exact_BV[rows_B, tokens_B - 1], 0.0)
    assert (before_B <= uniforms_B1[:, 0].numpy() + 1e-6).all()


@pytest.mark.parametrize("truncation", [{"top_p": 0.5}, {"min_p": 0.4}, {"top_k": 6, "top_p": 0.7, "min_tokens": 4}])
def test_over_the_recorded_sets_the_trainer_finds_the_samplers_logprobs(spec, backend, truncation):
    recording = tiny.policy(spec, backend.served_tensors(), batch_size=16, records=[ALLOWED])
    done = sample(recording, count=40, temperature=0.8, max_tokens=12, **truncation)
    rows = [row(request, completion, 0.8) for request, completion in done]
    for one, found in zip(rows, backend.logprobs(rows), strict=True):
        np.testing.assert_allclose(found, one.behavior_logprobs, atol=1e-5)
    own = backend.logprobs([dataclasses.replace(one, beside={}) for one in rows])
    assert max(np.abs(found - one.behavior_logprobs).max() for one, found in zip(rows, own, strict=True)) > 0.1
