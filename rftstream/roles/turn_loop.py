"""The turn loop: asks the environment, samples from the policy, tells the environment, until it is done.

Explorer and evaluator drive many of these at once over one policy. A rollout is kept as segments: while a prompt
begins with the tokens that are there already, the new tokens join the segment (only the environment's part is
masked); where it does not (an agent rewrote its context, a template changes earlier turns) a new segment begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rftstream.environments.base import Environment
from rftstream.messages import Array, ChatMessage, Problem, RolloutStatus, Sampling, Segment, Turn, VersionSpan
from rftstream.policies.base import Completion, Policy, SampleRequest
from rftstream.rendering import Renderer

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


@dataclass(slots=True)
class _OpenSegment:
    token_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    versions: list[VersionSpan] = field(default_factory=list)

    def prompt(self, token_ids: Sequence[int]) -> None:
        """Tokens that were not sampled."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * len(token_ids))
        self.mask.extend([0] * len(token_ids))

    def sampled(self, completion: Completion) -> None:
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids.tolist())
        self.logprobs.extend(completion.behavior_logprobs.tolist())
        self.mask.extend([1] * len(completion.token_ids))
        for span in completion.versions:
            self.versions.append(
                VersionSpan(
                    start=start + span.start, count=span.count, trainer_epoch=span.trainer_epoch, version=span.version
                )
            )

    def close(self) -> Segment:
        return Segment(
            token_ids=Array.of(self.token_ids, "int32"),
            behavior_logprobs=Array.of(self.logprobs, "float32"),
            loss_mask=Array.of(self.mask, "uint8"),
            versions=tuple(self.versions),
        )


@dataclass(slots=True)
class _Open:
    key: str
    environment: Environment
    problem: Problem
    sampling: Sampling
    seed: int
    messages: list[ChatMessage]
    started_at: float
    truncate: bool
    renderer: Renderer
    turns: list[Turn] = field(default_factory=list)
    segments: list[_OpenSegment] = field(default_factory=list)
    num_tokens: int = 0
    turn: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class TurnLoop:
    """Many rollouts over one policy."""

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
        self._renderer = renderer
        self._make_environment = make_environment
        self._context = context if context is not None else math.inf
        self._now = now
        self._open: dict[str, _Open] = {}
        self._finished: list[Attempt] = []

    @property
    def num_open(self) -> int:
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
    ) -> None:
        """`truncate`: a prompt longer than the context is cut from the left, else the attempt fails. `renderer`: with
        another chat template than the loop's."""
        try:
            opened = self._make_environment(environment, problem, seed)
            messages = list(opened.start())
        except Exception as error:  # an environment is the user's code: whatever it raises is a failed rollout
            self._finished.append(_failed(key, f"environment {environment}: {error!r}", self._now()))
            return
        self._open[key] = state = _Open(
            key=key,
            environment=opened,
            problem=problem,
            sampling=sampling,
            seed=seed,
            messages=messages,
            started_at=self._now(),
            truncate=truncate,
            renderer=renderer or self._renderer,
        )
        self._ask(state)

    def abort(self, key: str) -> None:
        state = self._open.pop(key, None)
        if state is not None:
            self.policy.abort(key)
            state.environment.close()

    def step(self) -> list[Attempt]:
        """One slice of the policy's work; the rollouts that ended."""
        if self._open:
            for completion in self.policy.step():
                state = self._open.get(completion.request_id)
                if state is not None:
                    self._told(state, completion)
        finished, self._finished = self._finished, []
        return finished

    # ------------------------------------------------------------------------------------------ turns

    def _ask(self, state: _Open) -> None:
        try:
            prompt = state.renderer.render(state.messages, state.problem.tools)
        except Exception as error:  # what the environment said: a template or a tokenizer may refuse it
            self._end(state, RolloutStatus.failed, f"the messages cannot be rendered: {error!r}")
            return
        room = self._context - len(prompt)
        if room < 1:
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
            room = self._context - len(prompt)
        self._extend(state, prompt)
        limit = int(min(room, state.sampling.max_tokens - state.num_tokens))
        self.policy.submit(
            SampleRequest(
                request_id=state.key,
                token_ids=tuple(prompt),
                sampling=state.sampling,
                seed=state.seed + state.turn,
                max_tokens=limit,
            )
        )

    def _extend(self, state: _Open, prompt: Sequence[int]) -> None:
        """The prompt joins the last segment if that is a prefix of it; else it opens a new one."""
        if state.segments:
            known = state.segments[-1].token_ids
            if list(prompt[: len(known)]) == known:
                state.segments[-1].prompt(prompt[len(known) :])
                return
        segment = _OpenSegment([], [], [])
        segment.prompt(prompt)
        state.segments.append(segment)

    def _told(self, state: _Open, completion: Completion) -> None:
        if completion.finish_reason == "error":
            self._end(state, RolloutStatus.failed, completion.error or "the policy failed")
            return
        state.segments[-1].sampled(completion)
        text = state.renderer.decode(completion.token_ids.tolist())
        count = len(completion.token_ids)
        state.num_tokens += count
        state.turns.append(
            Turn(role="assistant", content=text, num_tokens=count, finish_reason=completion.finish_reason)
        )
        try:
            reply = state.environment.reply(text, completion.finish_reason)
            state.metrics.update({name: float(value) for name, value in reply.metrics.items()})
        except Exception as error:  # the user's code, as above
            self._end(state, RolloutStatus.failed, f"environment: {error!r}")
            return
        if reply.done or completion.finish_reason == "length":
            truncated = completion.finish_reason == "length"
            self._end(state, RolloutStatus.truncated if truncated else RolloutStatus.completed, None)
            return
        state.messages.append(ChatMessage(role="assistant", content=text))
        state.messages.extend(reply.messages)
        if reply.rewrite is not None:
            state.messages = list(reply.rewrite)
        state.turns.extend(Turn(role=message.role, content=message.content) for message in reply.messages)
        state.turn += 1
        if state.num_tokens >= state.sampling.max_tokens:
            self._end(state, RolloutStatus.truncated, None)
            return
        self._ask(state)

    def _end(self, state: _Open, status: RolloutStatus, error: str | None) -> None:
        self._open.pop(state.key, None)
        try:
            state.environment.close()
        except Exception as closing:  # the user's code, as above
            error = error or f"environment.close: {closing!r}"
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
    """The oldest version that sampled a token; None if nothing was sampled."""
    versions = [span.version for segment in segments for span in segment.versions]
    return min(versions) if versions else None
