"""A rollout that is being made: its segments, its turns, its conversation; and what of it is new since it was saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rftstream.contracts.arrays import Array
from rftstream.contracts.rollouts import Segment, Turn, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling
from rftstream.environments.base import Environment
from rftstream.models.rendering import Renderer
from rftstream.policies.base import Completion


@dataclass(slots=True)
class OpenSegment:
    """A segment that grows. Its rollout calls `prompt` and `sampled` in turns, and `close` when it has ended."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    @staticmethod
    def of(segment: Segment) -> OpenSegment:
        """Return an open segment that begins with what a closed one holds."""
        opened = OpenSegment()
        opened.extend(segment)
        return opened

    def prompt(self, token_ids: Sequence[int]) -> None:
        """Add tokens that were not sampled."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * len(token_ids))
        self.mask.extend([0] * len(token_ids))

    def sampled(self, completion: Completion) -> None:
        """Add tokens that the policy sampled."""
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids.tolist())
        self.logprobs.extend(completion.behavior_logprobs.tolist())
        self.mask.extend([1] * len(completion.token_ids))
        self._stamp(completion.versions, start)

    def extend(self, segment: Segment) -> None:
        """Add what was saved of the segment later."""
        start = len(self.token_ids)
        self.token_ids.extend(segment.token_ids.numpy().tolist())
        self.logprobs.extend(segment.behavior_logprobs.numpy().tolist())
        self.mask.extend(segment.loss_mask.numpy().tolist())
        self._stamp(segment.versions, start)

    def _stamp(self, spans: Sequence[VersionSpan], start: int) -> None:
        for span in spans:
            first, count = start + span.start, span.count
            last = self.versions[-1] if self.versions else None
            if (
                last is not None
                and last.start + last.count == first
                and (last.trainer_epoch, last.version) == (span.trainer_epoch, span.version)
            ):
                first, count = last.start, last.count + count
                self.versions.pop()
            self.versions.append(
                VersionSpan(start=first, count=count, trainer_epoch=span.trainer_epoch, version=span.version)
            )

    def from_token(self, start: int) -> OpenSegment:
        """Return what follows the first `start` tokens, as a segment of its own."""
        return OpenSegment(
            self.token_ids[start:],
            self.logprobs[start:],
            self.mask[start:],
            [
                VersionSpan(
                    start=max(span.start - start, 0),
                    count=min(span.count, span.start + span.count - start),
                    trainer_epoch=span.trainer_epoch,
                    version=span.version,
                )
                for span in self.versions
                if span.start + span.count > start
            ],
        )

    def close(self) -> Segment:
        """Return the segment as a rollout holds it."""
        return Segment(
            token_ids=Array.of(self.token_ids, "int32"),
            behavior_logprobs=Array.of(self.logprobs, "float32"),
            loss_mask=Array.of(self.mask, "uint8"),
            versions=tuple(self.versions),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """What of a rollout is new since it was saved last; the fields are those of PartialRollout."""

    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    continues: bool
    num_tokens: int
    kept_messages: int
    messages: tuple[ChatMessage, ...]
    metrics: dict[str, float]
    environment_state: bytes | None
    sampler_state: bytes | None
    started_at: float


@dataclass(slots=True)
class _Mark:
    """How much of a rollout is saved."""

    num_turns: int = 0
    segment: int = 0
    """Number of the last one of which there is something."""
    num_in_segment: int = 0
    messages: tuple[ChatMessage, ...] = ()
    environment_turn: int = -1
    """Before which turn the environment was saved last."""


@dataclass(slots=True)
class OpenRollout:
    """A rollout between its start and its end: what was said, and the tokens of it. TurnLoop makes it and alone calls
    it. For each turn that is `extend` for the prompt and `carry` for what was sampled; in between `increment` returns
    what is new since it was saved last."""

    key: str
    environment: Environment
    problem: Problem
    sampling: Sampling
    seed: int
    messages: list[ChatMessage]
    started_at: float
    truncate: bool
    renderer: Renderer
    name: str
    """What it is called in log lines."""
    environment_name: str
    turns: list[Turn] = field(default_factory=list)
    segments: list[OpenSegment] = field(default_factory=list)
    num_tokens: int = 0
    """Sampled tokens in the segments."""
    turn: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    carried: int = 0
    """How many of the last segment's tokens belong to the turn that is being sampled."""
    sampler_state: bytes | None = None
    """The state of the sampler that these tokens came with."""
    _mark: _Mark = field(default_factory=_Mark)

    def __post_init__(self) -> None:
        self._mark.messages = self.problem.messages

    def extend(self, prompt: Sequence[int]) -> None:
        """Take the tokens of the next prompt. They join the last segment if they begin with it; else they open a new
        one."""
        if self.segments:
            known = self.segments[-1].token_ids
            if list(prompt[: len(known)]) == known:
                self.segments[-1].prompt(prompt[len(known) :])
                return
        segment = OpenSegment()
        segment.prompt(prompt)
        self.segments.append(segment)

    def carry(self, so_far: Completion) -> None:
        """Take the tokens that were sampled so far. The policy forgets them; sampling goes on behind them."""
        self.segments[-1].sampled(so_far)
        self.num_tokens += len(so_far.token_ids)
        self.carried += len(so_far.token_ids)
        self.sampler_state = so_far.sampler_state

    def num_unsaved(self, so_far: Completion | None) -> int:
        """Return how many sampled tokens a successor would not find."""
        first = self._mark.segment
        rest = [
            segment.from_token(self._mark.num_in_segment if number == first else 0)
            for number, segment in enumerate(self._with(so_far))
            if number >= first
        ]
        return sum(sum(segment.mask) for segment in rest)

    def increment(self, so_far: Completion | None) -> Increment | None:
        """Return what is new; it counts as saved from now on. None if nothing is new, or if the state of the
        environment would be needed and cannot be saved."""
        mark, segments = self._mark, self._with(so_far)
        if self.num_unsaved(so_far) == 0:
            return None
        state = self.environment.save() if mark.environment_turn != self.turn else None
        if state is None and self.turn > 0 and mark.environment_turn != self.turn:
            return None
        new = [segments[mark.segment].from_token(mark.num_in_segment), *segments[mark.segment + 1 :]]
        continues = mark.num_in_segment > 0
        if not new[0].token_ids:
            new, continues = new[1:], False
        kept = 0
        while kept < min(len(mark.messages), len(self.messages)) and mark.messages[kept] == self.messages[kept]:
            kept += 1
        found = Increment(
            turns=tuple(self.turns[mark.num_turns :]),
            segments=tuple(segment.close() for segment in new),
            continues=continues,
            num_tokens=sum(sum(segment.mask) for segment in new),
            kept_messages=kept,
            messages=tuple(self.messages[kept:]),
            metrics=dict(self.metrics),
            environment_state=state,
            sampler_state=so_far.sampler_state if so_far is not None else self.sampler_state,
            started_at=self.started_at,
        )
        self.saved(len(segments[-1].token_ids), environment=state is not None or mark.environment_turn == self.turn)
        return found

    def saved(self, num_in_segment: int, *, environment: bool) -> None:
        """Note that all of it is saved, with so many tokens of the last segment."""
        self._mark = _Mark(
            len(self.turns),
            len(self.segments) - 1,
            num_in_segment,
            tuple(self.messages),
            self.turn if environment else -1,
        )

    def _with(self, so_far: Completion | None) -> list[OpenSegment]:
        if so_far is None:
            return self.segments
        last = self.segments[-1].from_token(0)
        last.sampled(so_far)
        return [*self.segments[:-1], last]
