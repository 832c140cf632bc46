"""A rollout is one sampled attempt, without a reward. Topics `rollouts` and `partials`.

Shapes: T tokens of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rftstream.contracts.arrays import Array
from rftstream.contracts.tasks import ChatMessage, Media, Problem, RolloutIds, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`count` consecutive sampled tokens from position `start` on came from one policy version."""

    start: int
    """Position in the segment, from 0."""
    count: int
    """Number of tokens, at least 1."""
    trainer_epoch: int
    """Trainer epoch of the version."""
    version: int
    """The trainer step of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of turns flattened to tokens."""

    token_ids: Array
    """int32 [T]."""
    behavior_logprobs: Array
    """float32 [T]: log-probability of the token under the distribution it was sampled from; 0 where not sampled."""
    loss_mask: Array
    """uint8 [T]: 1 where the token was sampled by the policy and may be trained on."""
    versions: tuple[VersionSpan, ...]
    """Spans in order, not overlapping; together they cover the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of the conversation as a person reads it."""

    role: str
    """Role of the speaker, as in ChatMessage."""
    content: str
    """The text."""
    num_tokens: int = 0
    """Sampled tokens of an assistant turn, 0 for the others."""
    finish_reason: str | None = None
    """Why an assistant turn ended: stop, length or repetition."""


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    completed = "completed"
    """It ended by itself."""
    truncated = "truncated"
    """A token limit ended it, or the rule against repeated text."""
    failed = "failed"
    """The environment or the policy failed; `error` says how."""
    skipped = "skipped"
    """Its group was decided before it was sampled."""
    oversized = "oversized"
    """It outgrew the record limit; its segments were left out."""
    undecodable = "undecodable"
    """Its task could not be decoded; only the headers are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled attempt, without a reward. `rollouts`: explorer -> verifier."""

    ids: RolloutIds
    """The ids that the task had."""
    status: RolloutStatus
    """How it ended."""
    problem: Problem | None
    """The problem; None exactly when the task was undecodable."""
    turns: tuple[Turn, ...]
    """The completion: what came after the problem's messages."""
    segments: tuple[Segment, ...]
    """What to train on; most rollouts have one, an agent that rewrites its context several."""
    num_tokens: int
    """Sampled tokens over all segments."""
    sampling: Sampling
    """The sampling settings of the task."""
    error: str | None = None
    """Why it failed, for people."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the environment measured."""
    attachments: dict[str, Media] = field(default_factory=dict)
    """What a model family needs beside tokens (MoE routing, for one), by reference."""
    started_at: float = 0.0
    """When sampling began."""
    finished_at: float = 0.0
    """When the last token was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRollout:
    """One piece of an unfinished rollout. `partials`: explorer -> explorer, keyed `rollout_id#piece`."""

    ids: RolloutIds
    """The ids that the task had."""
    piece: int
    """Dense from 0."""
    turns: tuple[Turn, ...]
    """What this piece adds."""
    segments: tuple[Segment, ...]
    """What this piece adds."""
    num_tokens: int
    """Sampled tokens of this piece."""
    environment_state: bytes | None = None
    """What the environment saved of itself, its own encoding."""
    sampler_state: bytes | None = None
    """State of the sampler's random generator."""
    saved_at: float = 0.0
    """When the explorer saved it."""
    continues: bool = False
    """The first segment goes on where the last one of the piece before ended."""
    kept_messages: int = 0
    """How many messages stay of the conversation as the piece before left it; for the first piece that is the problem's
    messages."""
    messages: tuple[ChatMessage, ...] = ()
    """Messages after the kept ones. Together they are what the policy is shown now."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the environment measured so far, in all."""
    started_at: float = 0.0
    """When sampling of the rollout began."""
    explorer: str = ""
    """Name of the process that sampled this piece."""
