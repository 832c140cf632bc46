"""The turn loop: it asks the environment, samples from the policy, and tells the environment, until that is done.

Explorer and evaluator drive many of these at once over one policy. A rollout is kept as segments: while a prompt
begins with the tokens that are there already, the new tokens join the segment (only the environment's part is
masked); where it does not (an agent rewrote its context, a template changes earlier turns) a new segment begins.

A rollout can be paused, and saved piece by piece; whoever is given the pieces goes on from them.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rftstream.contracts.rollouts import RolloutStatus, Segment, Turn
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling
from rftstream.environments.base import Environment
from rftstream.error_kinds import Kinds
from rftstream.models.rendering import Renderer
from rftstream.policies.base import Completion, Policy, SampleRequest
from rftstream.roles.explorer.open_rollout import Increment, OpenRollout, OpenSegment
from rftstream.roles.explorer.pieces import SavedRollout, num_finished

log = logging.getLogger(__name__)

CUT_SHORT = ("length", "repetition")
"""Reasons why a completion finished with which its rollout ends as truncated, whatever the environment says."""

MakeEnvironment = Callable[[str, Problem, int], Environment]
"""Name, problem, seed -> environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a finished turn loop has to show."""

    key: str
    status: RolloutStatus
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    num_tokens: int
    error: str | None
    metrics: dict[str, float]
    started_at: float


class TurnLoop:
    """Many rollouts over one policy. `workers/` makes one for an explorer's or an evaluator's step, which calls `start`
    for each rollout, and `step` again and again for those that have ended. In between a rollout may be saved, paused
    (until `go_on`), cut short or aborted.

    One rollout goes through these: `_ask` renders the conversation, `_submit` hands it to the policy, `_on_completion`
    tells the environment what was said, and so on, until `_end`."""

    def __init__(
        self,
        *,
        policy: Policy,
        renderer: Renderer,
        make_environment: MakeEnvironment,
        context: int | None,
        now: Callable[[], float],
    ) -> None:
        self.policy = policy
        self.renderer = renderer
        self._make_environment = make_environment
        self._context = context if context is not None else math.inf
        self._now = now
        self._open: dict[str, OpenRollout] = {}
        self._finished: list[Attempt] = []
        self._kinds = Kinds()

    @property
    def num_open(self) -> int:
        """How many rollouts have not ended, paused ones included."""
        return len(self._open)

    def start(
        self,
        key: str,
        *,
        problem: Problem,
        sampling: Sampling,
        seed: int,
        environment: str,
        truncate: bool = False,
        renderer: Renderer | None = None,
        saved: SavedRollout | None = None,
        name: str = "",
    ) -> bool:
        """Begin a rollout. Return False if it was to go on from `saved` and began anew, since its environment could
        not go on.

        `truncate`: a prompt longer than the context is cut from the left, else the attempt fails. `renderer`: with
        another chat template than the loop's. `name`: what the rollout is called in log lines; default: its key."""

        def opened(made: Environment, messages: Sequence[ChatMessage]) -> OpenRollout:
            self._open[key] = state = OpenRollout(
                key=key,
                environment=made,
                problem=problem,
                sampling=sampling,
                seed=seed,
                messages=list(messages),
                started_at=self._now(),
                truncate=truncate,
                renderer=renderer or self.renderer,
                name=name or key,
                environment_name=environment,
            )
            return state

        def make() -> Environment:
            return self._make_environment(environment, problem, seed)

        if saved is not None:
            restored = _restored(key, make, saved)
            if restored is not None:
                self._resume(opened(restored, saved.messages), saved)
                return True
        try:
            fresh = make()
            messages = _messages(_plain(fresh.start(), "start"))
        except Exception as error:  # an environment is the user's code: whatever it raises is a failed rollout
            text = self._say(name or key, f"environment {environment}: start: {error!r}", error)
            self._finished.append(_failed(key, text, self._now()))
            return saved is None
        self._ask(opened(fresh, messages))
        return saved is None

    def abort(self, key: str) -> None:
        """Give a rollout up; nothing is handed out for it."""
        state = self._open.pop(key, None)
        if state is not None:
            self.policy.abort(key)
            with suppress(Exception):  # the user's code, as above; nobody asks what became of it
                state.environment.close()

    # ------------------------------------------------------------------------------------------ unfinished ones

    def num_sampled(self, key: str) -> int:
        """Return how many tokens were sampled so far; 0 if the rollout has ended."""
        state, so_far = self._open.get(key), self.policy.so_far(key)
        if state is None:
            return 0
        return state.num_tokens + (0 if so_far is None else len(so_far.token_ids))

    def num_unsaved(self, key: str) -> int:
        """Return how many tokens are lost if the rollout is aborted."""
        return self._open[key].num_unsaved(self.policy.so_far(key))

    def newest_tokens(self, key: str, count: int) -> np.ndarray:
        """Return the newest tokens of the turn that is being sampled, int32 [at most count]."""
        state, so_far = self._open[key], self.policy.so_far(key)
        tokens = np.zeros(0, np.int32) if so_far is None else so_far.token_ids[-count:]
        if (before := min(state.carried, count - len(tokens))) > 0:
            carried = np.asarray(state.segments[-1].token_ids[-before:], dtype=np.int32)
            tokens = np.concatenate([carried, tokens])
        return tokens

    def save(self, key: str) -> Increment | None:
        """Return what is new of the rollout since it was saved last; None if nothing is, or if it cannot be saved."""
        try:
            return self._open[key].increment(self.policy.so_far(key))
        except Exception as error:  # the user's code, as above
            log.warning("%s: its environment cannot be saved: %r", key, error)
            return None

    def pause(self, key: str) -> bool:
        """Let the policy forget the rollout until `go_on`. Return False if it is about to finish, and goes on."""
        so_far = self.policy.so_far(key)
        if so_far is None:
            return False
        self.policy.abort(key)
        self._open[key].carry(so_far)
        return True

    def go_on(self, key: str) -> None:
        """Have a paused rollout sampled again."""
        self._submit(self._open[key])

    def cut(self, key: str, reason: str) -> None:
        """End the rollout with what it has, as `truncated`."""
        so_far = self.policy.so_far(key)
        if so_far is not None:
            self.policy.abort(key)
            self._on_completion(self._open[key], replace(so_far, finish_reason=reason))

    def _resume(self, state: OpenRollout, saved: SavedRollout) -> None:
        state.started_at, state.metrics = saved.started_at, dict(saved.metrics)
        state.turns, state.segments = list(saved.turns), [OpenSegment.of(segment) for segment in saved.segments]
        state.num_tokens, state.carried, state.sampler_state = saved.num_tokens, saved.carried, saved.sampler_state
        state.turn = num_finished(saved.turns)
        state.saved(len(state.segments[-1].token_ids), environment=saved.environment_state is not None)
        last = state.segments[-1].token_ids[-1] if state.carried else None
        if last in state.renderer.stop_token_ids:
            self._on_completion(state, _nothing_more(state.key, "stop"))
        elif state.carried and self._room(state) < 1:
            self._on_completion(state, _nothing_more(state.key, "length"))
        else:
            self._submit(state)

    def step(self) -> list[Attempt]:
        """Do one slice of the policy's work; return the rollouts that ended."""
        if self._open:
            for completion in self.policy.step():
                state = self._open.get(completion.request_id)
                if state is not None:
                    self._on_completion(state, completion)
        finished, self._finished = self._finished, []
        return finished

    # ------------------------------------------------------------------------------------------ turns

    def _ask(self, state: OpenRollout) -> None:
        try:
            prompt = state.renderer.render(state.messages, state.problem.tools)
        except Exception as error:  # what the environment said: a template or a tokenizer may refuse it
            self._fail(state, f"the messages cannot be rendered: {error!r}", error)
            return
        if self._context - len(prompt) < 1:
            if not state.truncate or state.turns:
                self._end(
                    state,
                    RolloutStatus.truncated if state.turns else RolloutStatus.failed,
                    None
                    if state.turns
                    else f"a prompt of {len(prompt)} tokens leaves no room in the context of {self._context}",
                )
                return
            keep = max(1, int(self._context) - state.sampling.max_tokens)
            prompt = prompt[-min(keep, int(self._context) - 1) :]
        state.extend(prompt)
        self._submit(state)

    def _submit(self, state: OpenRollout) -> None:
        """Have a turn sampled. The last segment is the prompt, with what was sampled of this turn before."""
        self.policy.submit(
            SampleRequest(
                request_id=state.key,
                token_ids=tuple(state.segments[-1].token_ids),
                sampling=state.sampling,
                seed=state.seed + state.turn,
                max_tokens=self._room(state),
                num_sampled=state.carried,
                sampler_state=state.sampler_state,
            )
        )

    def _room(self, state: OpenRollout) -> int:
        """Return how many tokens more may be sampled of this turn."""
        context = self._context - len(state.segments[-1].token_ids)
        return int(min(context, state.sampling.max_tokens - state.num_tokens))

    def _on_completion(self, state: OpenRollout, completion: Completion) -> None:
        if completion.finish_reason == "error":
            self._fail(state, completion.error or "the policy failed")
            return
        if odd := _oddity(completion):
            self._fail(state, f"the policy gave {odd}")
            return
        state.carry(completion)
        count = state.carried
        text = state.renderer.decode(state.segments[-1].token_ids[-count:] if count else [])
        state.carried, state.sampler_state = 0, None
        state.turns.append(
            Turn(role="assistant", content=text, num_tokens=count, finish_reason=completion.finish_reason)
        )
        try:
            reply = _plain(state.environment.reply(text, completion.finish_reason), "reply")
            state.metrics.update({name: float(value) for name, value in reply.metrics.items()})
            is_done, messages = bool(reply.done), _messages(reply.messages)
            rewrite = None if reply.rewrite is None else _messages(reply.rewrite)
        except Exception as error:  # the user's code, as above
            self._fail(state, f"environment {state.environment_name}: reply: {error!r}", error)
            return
        truncated = completion.finish_reason in CUT_SHORT
        if is_done or truncated:
            self._end(state, RolloutStatus.truncated if truncated else RolloutStatus.completed, None)
            return
        state.messages.append(ChatMessage(role="assistant", content=text))
        state.messages.extend(messages)
        if rewrite is not None:
            state.messages = rewrite
        state.turns.extend(Turn(role=message.role, content=message.content) for message in messages)
        state.turn += 1
        if state.num_tokens >= state.sampling.max_tokens:
            self._end(state, RolloutStatus.truncated, None)
            return
        self._ask(state)

    def _end(self, state: OpenRollout, status: RolloutStatus, error: str | None) -> None:
        self._open.pop(state.key, None)
        try:
            _plain(state.environment.close(), "close")  # type: ignore[func-returns-value]  # it may be anybody's
        except Exception as closing:  # the user's code, as above
            said = self._say(state.name, f"environment {state.environment_name}: close: {closing!r}", closing)
            error = error or said
        self._finished.append(
            Attempt(
                key=state.key,
                status=status,
                turns=tuple(state.turns),
                segments=tuple(segment.close() for segment in state.segments),
                num_tokens=state.num_tokens,
                error=error,
                metrics=state.metrics,
                started_at=state.started_at,
            )
        )

    def _fail(self, state: OpenRollout, text: str, error: Exception | None = None) -> None:
        self._end(state, RolloutStatus.failed, self._say(state.name, text, error))

    def _say(self, rollout: str, text: str, error: Exception | None) -> str:
        """Log the first text of its kind with its traceback; return the text."""
        if self._kinds.is_new(text):
            log.warning("%s: %s (the first of its kind in this process)", rollout, text, exc_info=error)
        return text


def _plain(value: Any, method: str) -> Any:
    """Return what a method of an environment returned. TypeError if it was a coroutine: nobody awaits it here."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError(f"it returned something to await, expected a plain `def {method}`, not `async def`")
    return value


def _messages(found: Iterable[Any]) -> list[ChatMessage]:
    messages = list(found)
    if odd := [type(message).__name__ for message in messages if not isinstance(message, ChatMessage)]:
        raise TypeError(f"got a message of type {odd[0]}, expected ChatMessage")
    return messages


def _restored(key: str, make: Callable[[], Environment], saved: SavedRollout) -> Environment | None:
    """Return the environment as it was when the rollout was saved; None if that cannot be had."""
    environment: Environment | None = None
    try:
        environment = make()
        if saved.environment_state is not None:
            _plain(environment.load(saved.environment_state), "load")  # type: ignore[func-returns-value]
            return environment
        if tuple(environment.start()) == saved.messages:
            return environment
        log.warning("%s: its environment begins otherwise now; it is begun anew", key)
    except Exception as error:  # the user's code
        log.warning("%s: its environment cannot go on: %r; it is begun anew", key, error)
    if environment is not None:
        with suppress(Exception):
            environment.close()
    return None


def _oddity(completion: Completion) -> str:
    """Return what is wrong with a completion, since a policy may be anybody's; empty if a trainer can learn from it."""
    logprobs, count = completion.behavior_logprobs, len(completion.token_ids)
    if len(logprobs) != count:
        return f"{len(logprobs)} logprobs for {count} tokens"
    if not np.isfinite(logprobs).all():
        return "a logprob that is not finite"
    end = 0
    for span in completion.versions:
        if span.start != end or span.count < 1:
            return f"a version for {span.count} tokens from {span.start} on, expected some from {end} on"
        end += span.count
    return "" if end == count else f"versions for {end} of {count} tokens"


def _nothing_more(key: str, reason: str) -> Completion:
    """Return a completion without tokens, for a turn that was complete when it was saved."""
    return Completion(
        request_id=key,
        token_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        versions=(),
        finish_reason=reason,
    )


def _failed(key: str, error: str, now: float) -> Attempt:
    return Attempt(
        key=key,
        status=RolloutStatus.failed,
        turns=(),
        segments=(),
        num_tokens=0,
        error=error,
        metrics={},
        started_at=now,
    )


def oldest_version(segments: Sequence[Segment]) -> int | None:
    """Return the oldest version that sampled a token; None if nothing was sampled."""
    versions = [span.version for segment in segments for span in segment.versions]
    return min(versions) if versions else None
