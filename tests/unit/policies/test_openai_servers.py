"""Several served models: who is asked what, while servers fail in all ways that there are."""

import contextlib
import math
import time
from dataclasses import replace

import pytest

from rftstream import metrics
from rftstream.clock import SystemClock
from rftstream.config.parts import registry
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling
from rftstream.errors import ConfigError, PolicyError
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.policies.openai import routing
from rftstream.policies.openai.policy import OpenAiPolicy
from rftstream.policies.openai.routing import ranked
from rftstream.policies.served import served_parameters
from rftstream.roles.explorer.turn_loop import TurnLoop
from rftstream.weights.snapshot import RawTensor
from tests.flow.environments import Config
from tests.flow.environments import Conversation as Sums
from tests.flow.test_turns import ChatRenderer
from tests.unit import tiny
from tests.unit.served import Server, echo


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(routing, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(routing, "LONGEST_PAUSE_S", 0.02)
    opened = [Server() for _ in range(3)]
    yield opened
    for server in opened:
        server.close()


@pytest.fixture
def open_policy(servers):
    with contextlib.ExitStack() as stack:

        def make(num=2, *, model=None, renderer=None, **settings):
            urls = [server.url for server in servers[:num]]
            config = registry.build_config(OpenAiPolicy, {"url": urls, "model": "it", **settings}, where="x")
            policy = OpenAiPolicy(config, model=model, renderer=renderer or FakeRenderer(1024), clock=SystemClock())
            stack.callback(policy.close)
            if model is None:
                policy.load({}, tiny.name(0))
            return policy

        yield make


def submit(policy, *numbers, **changes):
    for number in numbers:
        policy.submit(request(number, **changes))


def request(number, prompt=(5, 6, 7), *, group="g", rollout=None, **sampling):
    asked = tiny.request(number, prompt, **{"max_tokens": 2, **sampling})
    return replace(asked, group_id=group, rollout_id=rollout or f"{group}/{number}")


def first_of(servers, group="g"):
    """The servers in the order in which the group prefers them."""
    by_url = {server.url: server for server in servers}
    return [by_url[url] for url in ranked(group, by_url)]


def count(url, result):
    return metrics.SERVER_REQUESTS.labels(url, result)._value.get()


def until(policy, condition):
    deadline = time.monotonic() + 120
    done = {}
    while not condition():
        assert time.monotonic() < deadline
        done |= {one.request_id: one for one in policy.step()}
    return done


def prompts(server):
    return [body["prompt"] for _, body in server.requests if "prompt" in body and body["prompt"] != [0]]


def test_siblings_and_turns_go_to_one_server_and_other_groups_to_others(servers, open_policy):
    policy = open_policy()
    assert policy.slots == 2 * 64
    for turn in range(3):
        for sibling in range(4):
            policy.submit(request(sibling, (5,) * (turn + 1)))
        tiny.drain(policy)
    first, second = first_of(servers[:2])
    assert len(prompts(first)) == 12 and not prompts(second)
    for number in range(20):
        tiny.drain_one(policy, request(number, group=f"g{number}"))
    assert len(prompts(second)) >= 3 and len(prompts(first)) >= 15
    assert count(first.url, "answered") == len(prompts(first))


def test_a_server_that_is_too_full_gets_no_further_rollout(servers, open_policy):
    policy = open_policy()
    first, second = first_of(servers[:2])
    first.hold.clear()
    submit(policy, *range(8))
    done = until(policy, lambda: len(second.requests) == 3 and len(first.requests) == 5)
    first.hold.set()
    done |= tiny.drain(policy)
    assert len(done) == 8
    submit(policy, *range(8), prompt=(9,))
    tiny.drain(policy)
    assert prompts(first).count([9]) == 5 and prompts(second).count([9]) == 3, "all stay where they began"


@pytest.mark.slow
@pytest.mark.parametrize("bad", [
    (None, None), (503, {"error": "full"}), (429, {}), (500, {}), (404, {}), (401, {"error": "who are you"}),
    (200, {"choices": []}), (200, b"{"), (200, {"choices": [{"text": "hi", "finish_reason": "stop"}]}),
], ids=["gone", "503", "429", "500", "404", "401", "no choices", "no JSON", "no ids"])  # fmt: skip
def test_a_server_that_fails_is_left_for_the_next_and_probed(servers, open_policy, bad):
    policy = open_policy()
    first, second = first_of(servers[:2])
    first.answers += [bad] * 100
    submit(policy, *range(12))
    done = tiny.drain(policy)
    assert [one.token_ids.tolist() for one in done.values()] == [[5, 6]] * 12
    assert len(prompts(second)) == 12
    if metrics.SERVER_UP.labels(first.url)._value.get():  # the three failures that it takes
        pytest.fail("the first server is still asked")
    asked = len(prompts(first))
    tiny.drain_one(policy, request(20, (8,)))
    assert len(prompts(first)) == asked and count(first.url, "failed") >= asked
    first.answers.clear()
    policy.submit(request(21, (3,)))
    until(policy, lambda: metrics.SERVER_UP.labels(first.url)._value.get() == 1.0)
    tiny.drain(policy)
    assert {"prompt": [0], "max_tokens": 1}.items() <= first.requests[-1][1].items(), "by a probe of one token"
    tiny.drain_one(policy, request(22, (4,)))
    assert [4] in prompts(first)


@pytest.mark.slow
def test_a_server_that_hangs_is_left_when_time_is_up(servers, open_policy):
    policy = open_policy(timeout_s=0.3)
    first, second = first_of(servers[:2])
    first.hold.clear()
    done = tiny.drain_one(policy, request(0))
    assert done.token_ids.tolist() == [5, 6] and prompts(second) == [[5, 6, 7]]
    assert metrics.SERVER_UP.labels(first.url)._value.get() == 0.0, "one answer that does not come is enough"
    first.hold.set()
    policy.submit(request(1))
    until(policy, lambda: metrics.SERVER_UP.labels(first.url)._value.get() == 1.0)


def test_a_server_that_wants_to_be_left_alone_is(servers, open_policy):
    policy = open_policy()
    first, second = first_of(servers[:2])
    first.answers.append((429, {}, {"Retry-After": "120"}))
    assert tiny.drain_one(policy, request(0)).error is None
    assert metrics.SERVER_UP.labels(first.url)._value.get() == 0.0 and len(prompts(second)) == 1


def test_a_request_that_is_refused_fails_alone_at_the_first_server(servers, open_policy):
    policy = open_policy()
    first, second = first_of(servers[:2])
    first.answers.append((400, {"error": {"message": "the prompt is too long"}}))
    assert "too long" in tiny.drain_one(policy, request(0)).error
    assert not second.requests and count(first.url, "refused") == 1


def test_a_request_that_no_server_can_answer_fails_alone(servers, open_policy):
    """It is the request, not the servers: both give a bad answer to it, and good ones to others."""
    policy = open_policy()
    for server in servers[:2]:
        server.usual = lambda body: {} if body["prompt"] == [9] else echo(body)
    done = tiny.drain_one(policy, request(0, (9,)))
    assert done.finish_reason == "error" and "http://" in done.error and "no token ids" in done.error
    assert tiny.drain_one(policy, request(1)).error is None


def test_no_server_at_all_is_an_error_that_names_them(servers, open_policy):
    policy = open_policy(tries=3)
    for server in servers[:2]:
        server.usual = lambda body: b"<html>"
        server.answers += [(503, {"error": "starting"})] * 1000
    submit(policy, *range(4))
    with pytest.raises(PolicyError) as wrong:
        tiny.drain(policy)
    assert "503: starting" in str(wrong.value)
    assert any(server.url in str(wrong.value) for server in servers[:2])


def test_servers_that_were_away_before_are_tried_before_a_request_fails(servers, open_policy):
    policy = open_policy(tries=2)
    for server in servers[:2]:
        server.answers += [(503, {})] * 1000
    policy.submit(request(0))
    with pytest.raises(PolicyError):
        tiny.drain(policy)
    policy.abort("r0")
    until(policy, lambda: all(engine.is_away(2, 0.0) for engine in policy._engines.values()))
    for server in servers[:2]:
        server.answers.clear()
    assert tiny.drain_one(policy, request(1)).error is None


@pytest.mark.slow
def test_all_servers_are_away_for_a_while(servers, open_policy):
    policy = open_policy(tries=50)
    for server in servers[:2]:
        server.answers += [(503, {})] * 6
    submit(policy, *range(8))
    assert all(one.error is None for one in tiny.drain(policy).values())


@pytest.mark.parametrize("busy", [(429, {}), (503, {}), (None, None)], ids=["429", "503", "lost"])
def test_a_request_that_meets_full_servers_only_waits_while_others_are_answered(servers, open_policy, busy):
    policy = open_policy(tries=2)
    first, second = servers[:2]
    num_busy = [0]

    def usual(body):
        if body["prompt"] != [9] or num_busy[0] == 12:
            return echo(body)
        num_busy[0] += 1
        return None

    for server in (first, second):
        server.usual = usual
        server.instead = busy
    policy.submit(request(0, (9,)))
    others, done = 1, {}
    deadline = time.monotonic() + 120
    while policy.num_active:
        assert time.monotonic() < deadline
        if policy.num_active == 1:
            others += 1
            policy.submit(request(others))
        done |= {one.request_id: one for one in policy.step()}
        if "r0" in done:
            break
    assert done["r0"].error is None and num_busy == [12]


def test_a_request_that_breaks_every_server_fails_alone(servers, open_policy):
    policy = open_policy(tries=2)
    for server in servers[:2]:
        server.usual = lambda body: None if body["prompt"] == [9] else echo(body)
        server.instead = (500, {"error": "a bug"})
    policy.submit(request(0, (9,)))
    number, done = 0, {}
    deadline = time.monotonic() + 120
    while "r0" not in done:
        assert time.monotonic() < deadline
        if policy.num_active == 1:
            number += 1
            policy.submit(request(number))
        done |= {one.request_id: one for one in policy.step()}
    assert "a bug" in done["r0"].error and "4 tries" in done["r0"].error
    tiny.drain(policy)


def test_aborted_requests_are_forgotten_wherever_they_are(servers, open_policy):
    policy = open_policy(batch_size=1, tries=1000)
    for server in servers[:2]:
        server.answers += [(503, {})] * 1000
    submit(policy, *range(6))
    until(policy, lambda: all(len(server.requests) > 3 for server in servers[:2]))
    for number in range(6):
        policy.abort(f"r{number}")
    assert policy.num_active == 0 and policy.step() == [] and policy.idle_s() > 1e9


@pytest.mark.parametrize("urls", [[], ["http://me:secret@127.0.0.1:1/v1"] * 2])
def test_servers_that_are_none(urls):
    with pytest.raises(ConfigError, match=r"policies\.openai\.url: .*expected one server or more, each once") as wrong:
        registry.build_config(OpenAiPolicy, {"url": urls, "model": "it"}, where="policies.openai")
    assert "secret" not in str(wrong.value)


# ------------------------------------------------------------------------------------------ with weights


class Updated:
    """A server with weights: it answers with the version that it has loaded, and forgets it when it begins anew."""

    def __init__(self, server):
        self.server, self.version = server, 0
        server.usual = self.answer

    def answer(self, body, said=()):
        if "version" in body:
            self.version = int(body["version"])
            return {"success": True}
        tokens = [*said] or [self.version] * body["max_tokens"]
        logprobs = {"token_logprobs": [-1.0 - self.version] * len(tokens)}
        reason = "stop" if said else "length"
        return {"choices": [{"finish_reason": reason, "token_ids": tokens, "logprobs": logprobs}]}


@pytest.fixture
def updated(servers, open_policy, tmp_path):
    spec = tiny.make(tmp_path / "model", seed=3)
    (tmp_path / "served").mkdir()
    update = ({"path": "/load", "body": {"folder": "{folder}", "version": "{version}"}},)
    parameters, _ = served_parameters(spec)
    tensors = {
        name: RawTensor(dtype, shape, bytes(4 * math.prod(shape))) for name, (dtype, shape) in parameters.items()
    }
    states = [Updated(server) for server in servers[:2]]

    def make(**settings):
        return open_policy(model=spec, update=update, update_folder=str(tmp_path / "served"), **settings)

    return make, tensors, states


def stamped(done):
    """The version in the tokens of each completion, which its server had, and the one that it is stamped with."""
    return {key: ({*one.token_ids.tolist()}, {span.version for span in one.versions}) for key, one in done.items()}


def test_each_server_gets_each_version_when_its_own_requests_have_ended(servers, updated):
    make, tensors, _ = updated
    policy = make()
    first, second = first_of(servers[:2])
    policy.load(tensors, tiny.name(1))
    tiny.drain_one(policy, request(0))
    first.hold.clear()
    policy.submit(request(1))
    until(policy, lambda: len(prompts(first)) == 2)
    policy.load(tensors, tiny.name(2))
    other = next(f"h{n}" for n in range(99) if ranked(f"h{n}", [first.url, second.url])[0] == second.url)
    policy.submit(request(2, group=other))
    done = until(policy, lambda: len(prompts(second)) == 1 and policy.num_active == 1)
    assert stamped(done) == {"r2": ({2}, {2})}, "the second server does not wait for the first"
    policy.submit(request(3))
    first.hold.set()
    assert stamped(tiny.drain(policy)) == {"r1": ({1}, {1}), "r3": ({2}, {2})}


def test_a_server_that_comes_back_with_older_weights_is_given_them_before_it_is_asked(servers, updated):
    make, tensors, states = updated
    policy = make()
    first, _ = first_of(servers[:2])
    state = next(one for one in states if one.server is first)
    policy.load(tensors, tiny.name(4))
    tiny.drain_one(policy, request(0))
    first.hold.clear()
    for number in range(1, 5):
        policy.submit(request(number))
    until(policy, lambda: len(prompts(first)) == 5)
    state.version = 0  # it is restarted
    first.cut()
    first.hold.set()
    done = tiny.drain(policy)
    assert all(pair == ({4}, {4}) for pair in stamped(done).values()) and len(done) == 4
    policy.submit(request(5))
    until(policy, lambda: state.version == 4 and not policy.num_active)
    asked = len(prompts(first))
    done = {group: tiny.drain_one(policy, request(6, group=group)) for group in map(str, range(9))}
    assert all(pair == ({4}, {4}) for pair in stamped(done).values())
    assert len(prompts(first)) > asked


def test_a_rollout_begins_at_a_server_that_has_the_version(servers, updated):
    make, tensors, _ = updated
    policy = make()
    first, second = first_of(servers[:2])
    policy.load(tensors, tiny.name(1))
    tiny.drain_one(policy, request(0))
    first.hold.clear()
    policy.submit(request(1))
    until(policy, lambda: len(prompts(first)) == 2)
    policy.load(tensors, tiny.name(2))
    until(policy, lambda: policy._engines[second.url].version == tiny.name(2))
    policy.submit(request(2))
    assert stamped(until(policy, lambda: policy.num_active == 1))["r2"] == ({2}, {2}), "it waits for no other"
    first.hold.set()
    tiny.drain(policy)


@pytest.mark.parametrize("num", [1, 2])
def test_a_server_that_begins_anew_while_nothing_is_asked_is_given_its_version_first(servers, updated, num):
    make, tensors, states = updated
    policy = make(num=num)
    policy.load(tensors, tiny.name(1))
    until(policy, lambda: all(engine.version == tiny.name(1) for engine in policy._engines.values()))
    first = first_of(servers[:num])[0]
    tiny.drain_one(policy, request(0))
    assert [path for path, _ in first.requests].count("/load") == 1, "once, while it stays"
    until(policy, lambda: len(first.connections) == 3)  # the watch, and one for each request
    next(one for one in states if one.server is first).version = 0  # it is restarted
    first.cut()
    assert stamped({"x": tiny.drain_one(policy, request(1))})["x"] == ({1}, {1})
    assert prompts(first)[1:] == [[5, 6, 7]] and [path for path, _ in first.requests].count("/load") == 2


def test_a_server_that_cannot_be_given_a_version_is_left_until_it_can(servers, updated):
    make, tensors, states = updated
    policy = make()
    first, second = first_of(servers[:2])
    policy.load(tensors, tiny.name(1))
    tiny.drain_one(policy, request(0))
    first.answers += [(503, {})] * 3
    policy.load(tensors, tiny.name(2))
    moved = tiny.drain_one(policy, request(0, (7,)))
    assert stamped({"x": moved})["x"] == ({2}, {2}) and prompts(second) == [[7]], (
        "a rollout of two versions, both right"
    )
    policy.load(tensors, tiny.name(3))
    policy.submit(request(1))
    until(policy, lambda: all(one.version == 3 for one in states) and not policy.num_active)
    assert stamped({"x": tiny.drain_one(policy, request(2))})["x"] == ({3}, {3})


def test_servers_that_all_refuse_a_version_are_an_error(servers, updated):
    make, tensors, _ = updated
    policy = make()
    for server in servers[:2]:
        server.answers += [(400, {"error": {"message": "no such file"}})] * 100
    policy.load(tensors, tiny.name(1))
    policy.submit(request(0))
    with pytest.raises(PolicyError, match=r"none of 2 servers answers: .*no such file.*; .*no such file"):
        tiny.drain(policy)


def test_a_rollout_that_moves_records_which_version_sampled_which_token(servers, updated):
    """Each turn is of one version, at whatever server: what the servers had stands in the logprobs."""
    make, tensors, states = updated
    policy = make(renderer=ChatRenderer())
    for state in states:
        state.server.usual = lambda body, state=state: state.answer(body, b"yes\0")
    loop = TurnLoop(
        policy=policy, renderer=ChatRenderer(), context=None, now=lambda: 0.0,
        make_environment=lambda where, name, problem, seed: Sums(Config(turns=3), problem=problem, seed=seed),
    )  # fmt: skip
    policy.load(tensors, tiny.name(1))
    first, second = first_of(servers[:2])
    until(policy, lambda: all(engine.version == tiny.name(1) for engine in policy._engines.values()))
    first.hold.clear()
    loop.start(
        "a", problem=Problem(messages=(ChatMessage(role="user", content="1+2="),)), seed=1, environment="any",
        sampling=Sampling(max_tokens=100), where="any", name="g/0", group="g",
    )  # fmt: skip
    deadline, finished = time.monotonic() + 120, []
    while not finished:
        assert time.monotonic() < deadline
        finished = loop.step()
        if prompts(first) and not first.hold.is_set():
            first.answers += [(200, first.usual({"max_tokens": 4})), *[(503, {})] * 3]
            policy.load(tensors, tiny.name(2))  # when the first turn has ended; the server cannot be given it
            first.hold.set()
    ((attempt,), (segment,)) = finished, finished[0].segments
    assert attempt.error is None and [body["prompt"] for _, body in second.requests if "prompt" in body]
    assert [(span.start, span.count, span.version) for span in segment.versions] == [(4, 4, 1), (12, 4, 2), (20, 4, 2)]
    logprobs = segment.behavior_logprobs.numpy().tolist()
    assert logprobs == [0] * 4 + [-2] * 4 + [0] * 4 + [-3] * 4 + [0] * 4 + [-3] * 4
