"""The turn loop under a template that keeps what was there: turns join one segment, and only sampled tokens count."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rftstream import metrics
from rftstream.contracts.rollouts import RolloutStatus, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling
from rftstream.contracts.versions import VersionName
from rftstream.environments.base import AssistantMessage, Environment, Reply
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.splice import BreakReason, Continuation, Conversation
from rftstream.policies.base import Completion, SampleRequest
from rftstream.roles.explorer.attempt import Attempt
from rftstream.roles.explorer.turn_loop import TurnLoop
from tests.e2e import scripted
from tests.flow.environments import Config, Offering, Rewriter
from tests.flow.environments import Conversation as Sums
from tests.suite.each import each

END = 0
SAID = "yes"


class ChatRenderer:
    """Letters as bytes; what the assistant said ends with END, as with a chat template and its stop token."""

    images = None
    stop_token_ids = frozenset({END})
    vocabulary_size = 256
    control_texts: frozenset[str] = frozenset()
    digest = ""

    def __init__(self, context: int | None = None) -> None:
        self.context = context

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return tuple(token for one in messages for token in
                     (*one.content.encode(), *([END] if one.role == "assistant" else [])))  # fmt: skip

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token != END).decode()

    def parse(
        self, prompt: Sequence[int], completion: Sequence[int], *, tools: Any, finish_reason: str, turn: int
    ) -> Any:
        text = self.decode(completion)
        return AssistantMessage(content=text, text=text, finish_reason=finish_reason)

    def as_chat_message(self, said: AssistantMessage, completion: Sequence[int]) -> ChatMessage:
        return ChatMessage(role="assistant", content=said.text)

    def continue_prompt(
        self, known: Sequence[int], num_said: int, before: Conversation, now: Conversation
    ) -> Continuation:
        whole = self.render(now.messages)
        if list(whole[: len(known)]) != list(known):
            return Continuation(break_reason=BreakReason.rewritten)
        return Continuation(token_ids=whole[len(known) :])


class Parrot(scripted.Scripted):
    """Says SAID and stops, or as much of it as it may; its n-th answer comes from version n."""

    slots = 4

    def __init__(self) -> None:
        self.version = VersionName(trainer_epoch=1, version=0)
        self.requests: list[SampleRequest] = []
        self._waiting = {}

    def submit(self, request: SampleRequest) -> None:
        self.requests.append(request)
        super().submit(request)

    def _complete(self, request: SampleRequest, name: VersionName) -> Completion:
        ids = [*SAID.encode(), END][: request.max_tokens]
        version = len(self.requests) - 1
        return Completion(
            request_id=request.request_id, token_ids=np.asarray(ids, np.int32),
            behavior_logprobs=np.full(len(ids), -1.0 - version, np.float32),
            versions=(VersionSpan(start=0, count=len(ids), trainer_epoch=1, version=version),),
            finish_reason="stop" if ids[-1] == END else "length",
        )  # fmt: skip


def attempt_of(
    *, turns: int, context: int | None = None, max_tokens: int = 100, policy: Parrot | None = None
) -> tuple[Attempt, Parrot]:
    def make(where: str, name: str, problem: Problem, seed: int) -> Environment:
        return Sums(Config(turns=turns), problem=problem, seed=seed)

    parrot = policy or Parrot()
    loop = TurnLoop(policy=parrot, renderer=ChatRenderer(context), make_environment=make, context=context,
                    now=lambda: 0.0)  # fmt: skip
    loop.start("a", problem=Problem(messages=(ChatMessage(role="user", content="1+2="),)),
               sampling=Sampling(max_tokens=max_tokens), seed=100, environment="any", where="any", name="g/0",
               group="g")  # fmt: skip
    for _ in range(20):
        if finished := loop.step():
            assert loop.num_open == 0
            return finished[0], parrot
    raise AssertionError("it does not end")


def test_turns_join_one_segment() -> None:
    attempt, _ = attempt_of(turns=3)
    assert attempt.status is RolloutStatus.completed
    (segment,) = attempt.segments
    tokens, mask = segment.token_ids.numpy(), segment.loss_mask.numpy()
    assert bytes(tokens.tolist()) == b"1+2=yes\x001+1=yes\x002+2=yes\x00"
    assert mask.tolist() == ([0] * 4 + [1] * 4) * 3
    assert segment.behavior_logprobs.numpy().tolist() == [0] * 4 + [-1] * 4 + [0] * 4 + [-2] * 4 + [0] * 4 + [-3] * 4
    assert [(span.start, span.count, span.version) for span in segment.versions] == [(4, 4, 0), (12, 4, 1), (20, 4, 2)]
    assert attempt.num_tokens == mask.sum() == 12
    assert [(turn.role, turn.content, turn.num_tokens) for turn in attempt.turns] == [
        ("assistant", "yes", 4), ("user", "1+1=", 0), ("assistant", "yes", 4), ("user", "2+2=", 0),
        ("assistant", "yes", 4)]  # fmt: skip


def test_the_reward_says_which_environment_gave_it() -> None:
    class Rewarding(Sums):
        def reply(self, said: AssistantMessage) -> Reply:
            return Reply(done=True, reward=1.0)

    def make(where: str, name: str, problem: Problem, seed: int) -> Environment:
        return Rewarding(Config(turns=1), problem=problem, seed=seed)

    loop = TurnLoop(policy=Parrot(), renderer=ChatRenderer(), make_environment=make, context=None, now=lambda: 0.0,
                    version_of=lambda where, name: f"{name} at {where}")  # fmt: skip
    loop.start("a", problem=Problem(messages=(ChatMessage(role="user", content="1+2="),)),
               sampling=Sampling(max_tokens=9), seed=1, environment="sums", where="there")  # fmt: skip
    (attempt,) = [one for _ in range(20) for one in loop.step()]
    assert attempt.posted is not None and attempt.posted.version == "sums at there"


def test_each_turn_has_a_seed_of_its_own_and_what_is_left_of_the_tokens() -> None:
    _, parrot = attempt_of(turns=3, max_tokens=10)
    assert [request.seed for request in parrot.requests] == [100, 101, 102]
    assert [request.max_tokens for request in parrot.requests] == [10, 6, 2]


def test_all_turns_name_their_rollout_and_its_group() -> None:
    """A policy with several servers has one of them sample all of them."""
    _, parrot = attempt_of(turns=3)
    assert [(request.rollout_id, request.group_id) for request in parrot.requests] == [("g/0", "g")] * 3


def test_the_last_turn_may_be_cut_short() -> None:
    attempt, _ = attempt_of(turns=3, max_tokens=10)
    assert attempt.status is RolloutStatus.truncated
    assert attempt.num_tokens == 10
    assert attempt.turns[-1].finish_reason == "length"


@each(("context", "tokens", "turns"), [(12, 4, 1), (13, 5, 2), (17, 8, 2), (20, 8, 2), (21, 9, 3)])
def test_the_context_bounds_prompt_and_completion_together(context: int, tokens: int, turns: int) -> None:
    attempt, parrot = attempt_of(turns=5, context=context)
    assert attempt.status is RolloutStatus.truncated
    assert attempt.error is None
    assert attempt.num_tokens == tokens
    assert len(parrot.requests) == turns
    assert all(len(request.token_ids) + request.max_tokens <= context for request in parrot.requests)
    assert len(attempt.segments[-1].token_ids.numpy()) <= context


class Odd(Parrot):
    """Somebody's policy with a mistake."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self._changes = changes

    def _complete(self, request: SampleRequest, name: VersionName) -> Completion:
        return dataclasses.replace(super()._complete(request, name), **self._changes)


def span(start: int, count: int) -> VersionSpan:
    return VersionSpan(start=start, count=count, trainer_epoch=1, version=0)


@each(
    ("changes", "error"),
    [
        ({"behavior_logprobs": np.asarray([-1, -np.inf, -1, -1], np.float32)}, "a logprob that is not finite"),
        ({"behavior_logprobs": np.asarray([-1, np.nan, -1, -1], np.float32)}, "a logprob that is not finite"),
        ({"behavior_logprobs": np.zeros(3, np.float32)}, "3 logprobs for 4 tokens"),
        ({"versions": ()}, "versions for 0 of 4 tokens"),
        ({"versions": (span(0, 3),)}, "versions for 3 of 4 tokens"),
        ({"versions": (span(0, 5),)}, "versions for 5 of 4 tokens"),
        ({"versions": (span(0, 1), span(2, 2))}, "a version for 2 tokens from 2 on, expected some from 1 on"),
    ],
)
def test_what_nobody_could_learn_from_is_a_failed_rollout(changes: dict[str, Any], error: str) -> None:
    attempt, _ = attempt_of(turns=1, policy=Odd(**changes))
    assert (attempt.status, attempt.error) == (RolloutStatus.failed, f"the policy gave {error}")
    assert attempt.num_tokens == 0


# --------------------------------------------------------------------------------------------- tools


class Scripted(Parrot):
    """Says one text after the other, and stops."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self._texts = list(texts)

    def _complete(self, request: SampleRequest, name: VersionName) -> Completion:
        ids = [*self._texts.pop(0).encode(), END]
        return Completion(
            request_id=request.request_id, token_ids=np.asarray(ids, np.int32),
            behavior_logprobs=np.zeros(len(ids), np.float32), versions=(span(0, len(ids)),), finish_reason="stop",
        )  # fmt: skip


def test_tool_calls_reach_the_environment_and_the_record() -> None:
    """One that can be read, one that no record can hold, one that is no JSON."""

    def make(where: str, name: str, problem: Problem, seed: int) -> Environment:
        return Offering(Config(), problem=problem, seed=seed)

    calls = ['{"a": 1}', '{"a": 1e400, "b": 123456789012345678901234567890}', "{"]
    text = "".join(
        f'<tool_call>{{"name": "add", "arguments": {one}}}</tool_call>' if one != "{" else "<tool_call>{</tool_call>"
        for one in calls
    )
    loop = TurnLoop(policy=Scripted(text, "done"), renderer=FakeRenderer(), make_environment=make, context=None,
                    now=lambda: 0.0)  # fmt: skip
    tool = {"type": "function", "function": {"name": "subtract"}}
    problem = Problem(messages=(ChatMessage(role="user", content="1+2="),), tools=(tool,))
    loop.start("a", problem=problem, sampling=Sampling(max_tokens=1000), seed=1, environment="any", where="any")
    finished: list[Attempt] = []
    while not finished:
        finished = loop.step()
    (attempt,) = finished
    assert attempt.status is RolloutStatus.completed, attempt.error
    said = attempt.turns[0]
    assert said.content == text
    assert [(call.id, call.arguments) for call in said.tool_calls] == [
        ("call_0_0", {"a": 1}), ("call_0_1", None), ("call_0_2", None)]  # fmt: skip
    assert said.tool_calls[1].error is not None
    assert said.tool_calls[2].error
    assert [turn.role for turn in attempt.turns] == ["assistant", "tool", "tool", "tool", "assistant"]
    assert len(attempt.segments) == 1


def test_a_rewritten_context_begins_a_segment_and_is_counted() -> None:
    def make(where: str, name: str, problem: Problem, seed: int) -> Environment:
        return Rewriter(Config(), problem=problem, seed=seed)

    counter = metrics.SEGMENT_BREAKS.labels(BreakReason.rewritten.value)
    before = counter._value.get()
    loop = TurnLoop(policy=Parrot(), renderer=FakeRenderer(), make_environment=make, context=None, now=lambda: 0.0)
    loop.start("a", problem=Problem(messages=(ChatMessage(role="user", content="1+2="),)),
               sampling=Sampling(max_tokens=100), seed=1, environment="any", where="any")  # fmt: skip
    finished: list[Attempt] = []
    while not finished:
        finished = loop.step()
    texts = [bytes(segment.token_ids.numpy().tolist()) for segment in finished[0].segments]
    assert texts == [b"1+2=yes\0", b"it was yes; 5+5=yes\0"]
    assert counter._value.get() == before + 1
