"""The policy for served models, against a small server of our own that speaks as much of the API as it uses."""

from dataclasses import replace

import pytest

from rftstream.clock import SystemClock
from rftstream.contracts.rollouts import VersionSpan
from rftstream.errors import ConfigError, PolicyError
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.policies.base import Constraint
from rftstream.policies.openai.policy import OpenAiPolicy
from tests.unit import tiny
from tests.unit.served import echo


@pytest.fixture
def open_policy(server):
    opened = []

    def make(**settings):
        config = OpenAiPolicy.Config(**{"url": server.url, "model": "it", **settings})
        opened.append(OpenAiPolicy(config, model=None, renderer=FakeRenderer(64), clock=SystemClock()))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_completions_with_ids_logprobs_and_the_version_in_force(server, open_policy):
    policy = open_policy()
    policy.submit(tiny.request(0, (5, 6, 7), max_tokens=2))
    assert policy.step() == [] and policy.num_active == 1 and not server.requests  # nothing to stamp with
    policy.load({}, tiny.name(4))
    policy.submit(tiny.request(1, (8, 9), max_tokens=5))
    done = tiny.drain(policy)
    assert done["r0"].token_ids.tolist() == [5, 6] and done["r0"].finish_reason == "length"
    assert done["r1"].behavior_logprobs.tolist() == pytest.approx([-0.8, -0.9]) and done["r1"].finish_reason == "stop"
    assert done["r1"].versions == (VersionSpan(start=0, count=2, trainer_epoch=1, version=4),)
    assert [path for path, _ in server.requests] == ["/v1/completions"] * 2


def test_what_is_asked_for(server, open_policy):
    policy = open_policy(extra={"priority": 1})
    policy.load({}, tiny.name(0))
    tiny.drain_one(policy, tiny.request(0, temperature=0.5, top_p=0.9))
    tiny.drain_one(policy, tiny.request(0, top_k=5, stop=("x",), min_tokens=3))
    for kind, value in (("json", {"type": "object"}), ("choice", ["a", "b"])):
        tiny.drain_one(policy, replace(tiny.request(0), constraint=Constraint(kind=kind, value=value)))
        assert server.requests.pop()[1]["structured_outputs"] == {kind: value}
    (_, plain), (_, more) = server.requests
    assert (plain["temperature"], plain["top_p"], plain["priority"]) == (0.5, 0.9, 1)
    assert not {"structured_outputs", "top_k", "min_p", "stop", "min_tokens", "presence_penalty"} & plain.keys()
    assert (more["top_k"], more["stop"], more["min_tokens"]) == (5, ["x"], 3)
    assert plain["seed"] == more["seed"] >= 0


def test_token_ids_may_stand_in_the_tokens(server, open_policy):
    policy = open_policy()
    policy.load({}, tiny.name(0))
    server.answers.append((200, echo({"prompt": [5, 6], "max_tokens": 9}, ids=False)))
    assert tiny.drain_one(policy, tiny.request(0)).token_ids.tolist() == [5, 6]


@pytest.mark.parametrize(("answer", "says"), [
    ((200, {"choices": [{"text": "hi", "finish_reason": "stop"}]}), "no token ids with logprobs"),
    ((200, {}), "no token ids with logprobs"),
    ((400, {"error": {"message": "the prompt is too long"}}), "400: the prompt is too long"),
    ((200, {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": {"token_logprobs": []}}]}),
     "0 logprobs for 1 tokens"),
    ((200, {"choices": [{"token_ids": [1 << 40], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0]}}]}),
     "OverflowError"),
    ((200, {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": {"token_logprobs": [10**400]}}]}),
     "OverflowError"),
    ((200, b"[" * 20_000), "no token ids with logprobs"),
    ((200, {"choices": ["x" * (1 << 16)]}), "longer than 32,768 bytes"),
])  # fmt: skip
def test_a_request_that_cannot_be_answered_fails_alone(server, open_policy, answer, says, monkeypatch):
    monkeypatch.setattr("rftstream.http.client.MAX_ANSWER_BYTES", 1 << 15)
    policy = open_policy()
    policy.load({}, tiny.name(0))
    server.answers.append(answer)
    done = tiny.drain_one(policy, tiny.request(0))
    assert done.finish_reason == "error" and says in done.error
    assert tiny.drain_one(policy, tiny.request(1)).error is None


def test_a_busy_server_is_asked_again(server, open_policy):
    policy = open_policy(tries=3)
    policy.load({}, tiny.name(0))
    server.answers += [(503, {}), (429, {})]
    done = tiny.drain_one(policy, tiny.request(0))
    assert done.error is None
    load = policy.engine_load()
    assert (load.num_tokens, load.num_refused, load.num_waiting) == (len(done.token_ids), 1, 0)
    assert load.busy_s == pytest.approx(10 * load.lag_s) and load.lag_s > 0
    server.answers += [(503, {"error": "full"})] * 3
    with pytest.raises(PolicyError, match=r"503: full, after 3 tries; is the server up\?"):
        tiny.drain_one(policy, tiny.request(1))


def test_no_server_and_a_wrong_key_are_errors_without_the_key(server, open_policy):
    policy = open_policy(api_key="sk-secret")
    policy.load({}, tiny.name(0))
    server.answers.append((401, {"error": {"message": "who are you"}}))
    with pytest.raises(PolicyError, match="401: who are you; mend url, model or api_key") as wrong:
        tiny.drain_one(policy, tiny.request(0))
    assert server.keys == ["Bearer sk-secret"] and "sk-secret" not in str(wrong.value)
    nowhere = open_policy(url="http://127.0.0.1:9/v1", tries=2)
    nowhere.load({}, tiny.name(0))
    with pytest.raises(PolicyError, match=r"ConnectionRefusedError: .*, after 2 tries"):
        tiny.drain_one(nowhere, tiny.request(0))
    with pytest.raises(ConfigError, match="without keys in it"):
        open_policy(url="http://me:secret@127.0.0.1/v1")


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-sec ret", "sk-secret\u2026", ""])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(open_policy, key):
    with pytest.raises(ConfigError, match=r"policies\.openai\.api_key: found a space") as wrong:
        open_policy(api_key=key)
    assert "sk-" not in str(wrong.value)


def test_aborted_requests_are_forgotten_and_do_not_hold_up_the_end(server, open_policy):
    policy = open_policy()
    policy.load({}, tiny.name(0))
    server.hold.clear()
    policy.submit(tiny.request(0))
    while not server.requests:
        assert policy.step() == []
    policy.abort("r0")
    policy.submit(tiny.request(0, (5, 6)))
    server.hold.set()
    assert tiny.drain(policy)["r0"].token_ids.tolist() == [5, 6]
    too_long = tiny.drain_one(policy, tiny.request(1, (5,) * 64))
    assert too_long.finish_reason == "length"
    assert tiny.drain_one(policy, tiny.request(2, ())).finish_reason == "error"
