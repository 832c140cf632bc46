"""The real vLLM, built for a CPU, with a made model: one engine for all of it, since starting one takes a minute."""

from __future__ import annotations

import dataclasses
import importlib.util
import time

import numpy as np
import psutil
import pytest

from rftstream.clock import SystemClock
from rftstream.contracts.beside import join_columns
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.token_values import ALLOWED
from rftstream.errors import PolicyError, WeightsError
from rftstream.models.rendering import open_renderer
from rftstream.policies.base import Constraint
from rftstream.policies.vllm.policy import VllmPolicy
from tests.engines.replay import Replay
from tests.engines.test_in_flight import PROMPTS, check_stamps, check_under_updates, versions_of
from tests.unit import tiny
from tests.unit.policies.test_hf import keep_by_definition, logits_of, row, sample

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # vllm and what it imports warn in many ways, none of which is ours to mend.
    pytest.mark.filterwarnings("default"),
]

TOLERANCE = 2e-5
"""Between vLLM's logprobs and those computed anew, in float32."""

CONTEXT = 256


def test_vllm_is_installed_where_these_tests_run():
    assert importlib.util.find_spec("vllm"), "no vllm: run scripts/setup vllm, or leave these out: -m 'not vllm'"


MODEL = {"seed": 3, "width": 128, "context": CONTEXT}  # vLLM wants heads of 32


@pytest.fixture(scope="module")
def policy(spec):
    engine = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
    config = VllmPolicy.Config(batch_size=32, engine=engine, says_load=True)
    records = frozenset({ALLOWED})
    opened = VllmPolicy(config, model=spec, renderer=open_renderer(spec), clock=SystemClock(), records=records)
    yield opened
    opened.close()


@pytest.fixture
def backend(spec):
    return tiny.backend(spec)


def in_flight(policy, setting):
    policy._config = policy._engine._config = dataclasses.replace(policy._config, in_flight=setting)


def trained(backend, policy, version):
    """A policy that is not uniform, with the weights of the backend."""
    (*_, (_, tensors)) = versions_of(backend, 2)
    policy.load(tensors, tiny.name(version))


def test_it_says_how_busy_it_is(policy, backend):
    trained(backend, policy, 9)
    before = policy.engine_load()
    for number in range(64):
        policy.submit(tiny.request(number, max_tokens=100, min_tokens=100))
    waiting = memory = 0
    done = []
    while policy.num_active:
        done += policy.step()
        load = policy.engine_load()
        waiting, memory = max(waiting, load.num_waiting), max(memory, load.memory)
    assert waiting >= 32 and 0 < memory < 1
    deadline = time.monotonic() + 30
    while policy.engine_load().num_tokens - before.num_tokens < sum(len(one.token_ids) for one in done):
        assert time.monotonic() < deadline  # it says so after it has given the tokens
        time.sleep(0.01)
    assert policy.engine_load().busy_s > before.busy_s


def test_logprobs_are_those_of_the_trainer_however_it_is_sampled(policy, backend, subtests):
    trained(backend, policy, 10)
    for temperature in (1.0, 0.5, 1.7, 0.0):
        with subtests.test(temperature=temperature):
            for request, completion in sample(policy, temperature=temperature):
                assert completion.finish_reason in ("stop", "length") and completion.error is None
                assert {span.version for span in completion.versions} == {10}
                again = backend.logprobs([row(request, completion, temperature or 1.0)])[0][len(request.token_ids) :]
                np.testing.assert_allclose(completion.behavior_logprobs, again, atol=TOLERANCE)
    for truncation in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.4}, {"top_k": 6, "top_p": 0.7}):
        with subtests.test(**truncation):
            for request, completion in sample(policy, temperature=0.8, **truncation):
                logits_TV = logits_of(backend, request, completion) / 0.8
                for place, token in enumerate(completion.token_ids):
                    probs_V = logits_TV[place].softmax(-1).double().numpy()
                    kept = keep_by_definition(probs_V, **truncation)
                    assert len(kept) < len(probs_V) and int(token) in kept
                    expected = np.log(probs_V[token] / probs_V[kept].sum())
                    assert completion.behavior_logprobs[place] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("setting", ["keep", "recompute"])
def test_stamps_are_right_token_by_token(policy, backend, spec, setting):
    """New weights come while all are being sampled; nothing is dropped."""
    in_flight(policy, setting)
    replay, names, done = Replay(spec), [], {}
    requests = {f"r{n}": tiny.request(n, PROMPTS[n % 4], max_tokens=200, min_tokens=200) for n in range(16)}
    for version, (_, tensors) in enumerate(versions_of(backend, 4)):
        names.append(tiny.name(20 + version))
        replay.add(names[-1], tensors)
        policy.load(tensors, names[-1])
        assert policy.version == names[-1]
        if version == 0:
            for request in requests.values():
                policy.submit(request)
        while version < 3 and so_far(policy, requests) < 40 * (version + 1):
            done |= {one.request_id: one for one in policy.step()}
    done |= tiny.drain(policy)
    assert done.keys() == requests.keys()
    for request_id, request in requests.items():
        stamped = [span.version for span in done[request_id].versions]
        assert stamped == [20, 21, 22, 23][: len(stamped)] and len(done[request_id].token_ids) == 200
        check_stamps(replay, request, done[request_id], names, cache=setting)
    # the engine samples in its own time: on a busy machine a row may have ended before the last version is loaded
    assert max(len(completion.versions) for completion in done.values()) >= 3


@pytest.mark.parametrize("setting", ["keep", "recompute"])
def test_an_update_every_two_seconds(policy, backend, spec, setting):
    in_flight(policy, setting)
    check_under_updates(
        policy, backend, Replay(spec), every_s=2.0, updates=4, first=60, cache=setting, max_tokens=240, min_tokens=240
    )


def so_far(policy, requests):
    """Tokens of the request that has fewest."""
    unfinished = [policy.so_far(name) for name in requests]
    return min((len(one.token_ids) if one is not None else 0) for one in unfinished)


def test_finish_lets_what_runs_end_with_the_old_weights(policy, backend, spec):
    trained(backend, policy, 30)
    in_flight(policy, "finish")
    requests = {f"r{n}": tiny.request(n, PROMPTS[n % 4], max_tokens=100, min_tokens=100) for n in range(8)}
    for request in requests.values():
        policy.submit(request)
    while so_far(policy, requests) < 3:
        assert policy.step() == []
    policy.load(backend.served_tensors(), tiny.name(31))
    policy.load(backend.served_tensors(), tiny.name(32))  # before the other could be taken over
    assert policy.version == tiny.name(32)
    policy.submit(tiny.request(99, max_tokens=5, min_tokens=5))
    done = tiny.drain(policy)
    in_flight(policy, "keep")
    assert {done[name].versions[0].version for name in requests} == {30}
    assert all(len(done[name].versions) == 1 and len(done[name].token_ids) == 100 for name in requests)
    assert done["r99"].versions == (VersionSpan(start=0, count=5, trainer_epoch=1, version=32),)


def test_what_was_sampled_so_far_and_going_on_with_it(policy, backend, spec):
    trained(backend, policy, 40)
    replay = Replay(spec)
    replay.add(tiny.name(40), backend.served_tensors())
    request = tiny.request(0, max_tokens=240, min_tokens=240)
    policy.submit(request)
    while (part := policy.so_far("r0")) is None or len(part.token_ids) < 5:
        assert policy.step() == []
    assert part.finish_reason == "unfinished"
    policy.abort("r0")
    policy.abort("r0")
    assert policy.num_active == 0 and policy.so_far("r0") is None
    count = len(part.token_ids)
    check_stamps(replay, request, part, [])
    rest = dataclasses.replace(request, token_ids=(*request.token_ids, *part.token_ids.tolist()), num_sampled=count,
                               max_tokens=240 - count)  # fmt: skip
    policy.submit(rest)
    completion = tiny.drain(policy)["r0"]
    assert len(completion.token_ids) == 240 - count
    assert completion.token_ids.tolist()[:count] != part.token_ids.tolist()  # other random numbers
    with_stop = dataclasses.replace(rest, sampling=dataclasses.replace(rest.sampling, stop=("7",)))
    policy.submit(with_stop)
    assert "cannot go on" in tiny.drain(policy)["r0"].error


def test_seeds_limits_and_what_is_refused(policy, backend):
    trained(backend, policy, 50)
    alone = [tiny.drain_one(policy, tiny.request(7, max_tokens=20)) for _ in range(2)]
    together = sample(policy, count=24, max_tokens=20)
    other = tiny.drain_one(policy, dataclasses.replace(tiny.request(7, max_tokens=20, min_tokens=20), seed=1))
    assert alone[0].token_ids.tolist() == alone[1].token_ids.tolist() != other.token_ids.tolist()
    assert {len(completion.versions) for _, completion in together} == {1}

    stopping = tiny.drain_one(policy, tiny.request(0, max_tokens=200, stop=("1", "22"), min_tokens=2))
    text = policy._renderer.decode(stopping.token_ids.tolist())
    if stopping.finish_reason == "stop" and stopping.token_ids[-1] not in policy._renderer.stop_token_ids:
        assert text.endswith(("1", "22"))

    too_long = tiny.drain_one(policy, tiny.request(1, (5,) * CONTEXT))
    assert (too_long.finish_reason, len(too_long.token_ids)) == ("length", 0)
    nearly = tiny.drain_one(policy, tiny.request(1, (5,) * (CONTEXT - 3), max_tokens=8, min_tokens=8))
    assert (nearly.finish_reason, len(nearly.token_ids)) == ("length", 3)
    for prompt in ((), (5, 10_000)):
        assert tiny.drain_one(policy, tiny.request(1, prompt)).finish_reason == "error"

    tensors = dict(backend.served_tensors())
    del tensors["model.norm.weight"]
    with pytest.raises(WeightsError, match=r"'model\.norm\.weight' is missing"):
        policy.load(tensors, tiny.name(51))
    assert policy.version == tiny.name(50)
    assert tiny.drain_one(policy, tiny.request(7, max_tokens=20)).token_ids.tolist() == alone[0].token_ids.tolist()


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.6}, {"top_k": 3, "min_tokens": 5}, {"min_p": 0.3}, {"choice": ["12", "345"]}]
)
def test_over_the_recorded_sets_the_trainer_finds_vllms_logprobs(policy, backend, settings):
    trained(backend, policy, 70)
    sampling = {name: value for name, value in settings.items() if name != "choice"}
    form = Constraint(kind="choice", value=settings["choice"], setting="form") if "choice" in settings else None
    for number in range(6):
        request = dataclasses.replace(tiny.request(number, PROMPTS[number % 3], **sampling), constraint=form)
        completion = tiny.drain_one(policy, request)
        beside = join_columns([(len(request.token_ids), {}), (len(completion.token_ids), completion.beside)])
        [found] = backend.logprobs([dataclasses.replace(row(request, completion), beside=beside)])
        np.testing.assert_allclose(found[len(request.token_ids) :], completion.behavior_logprobs, atol=TOLERANCE)
        assert completion.beside


def test_constrained_tokens_keep_to_their_form_and_their_logprobs_are_of_what_is_left(policy, backend):
    trained(backend, policy, 60)
    constraint = Constraint(kind="choice", value=["12", "345"])
    asked = dataclasses.replace(tiny.request(7, max_tokens=20), constraint=constraint)
    drawn = [tiny.drain_one(policy, dataclasses.replace(asked, request_id=f"c{seed}", seed=seed)) for seed in range(12)]
    stops, decode = policy._renderer.stop_token_ids, policy._renderer.decode
    texts = {decode([token for token in found.token_ids.tolist() if token not in stops]) for found in drawn}
    assert texts == {"12", "345"} and {found.finish_reason for found in drawn} == {"stop"}
    left = [policy._renderer.encode(one)[0] for one in ("1", "3")]
    for found in drawn:
        probs_V = logits_of(backend, asked, found)[0].softmax(-1).double().numpy()
        expected = np.log(probs_V[found.token_ids[0]] / probs_V[left].sum())
        assert found.behavior_logprobs[0] == pytest.approx(expected, abs=TOLERANCE)
        assert found.behavior_logprobs[1] == pytest.approx(0.0, abs=TOLERANCE), "nothing else was left"
    nonsense = dataclasses.replace(tiny.request(8), constraint=Constraint(kind="regex", value="("))
    assert tiny.drain_one(policy, nonsense).finish_reason == "error"
    assert len(tiny.drain_one(policy, tiny.request(7, max_tokens=20)).token_ids), "it goes on"


def test_zz_an_engine_that_dies_is_a_policy_error(policy, backend):
    """The last one: it ends the engine."""
    trained(backend, policy, 60)
    policy.submit(tiny.request(0, max_tokens=240, min_tokens=240))
    children = psutil.Process().children(recursive=True)
    engine = next(one for one in children if any(child in children for child in one.children()))
    engine.kill()
    with pytest.raises(PolicyError, match="the engine died"):
        step_until_it_fails(policy)


def step_until_it_fails(policy):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        policy.step()
