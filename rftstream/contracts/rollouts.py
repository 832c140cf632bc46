"""A rollout is one sampled attempt, without a reward. Topics `rollouts` and `partials`.

Shapes: T tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from rftstream.contracts.arrays import Array
from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.message_spec import Message, message
from rftstream.contracts.ranges import NonNegativeInt, PositiveInt
from rftstream.contracts.rules import Violation, presence, rule, show
from rftstream.contracts.structs import message_part
from rftstream.contracts.tasks import ChatMessage, Media, Problem, RolloutIds, Sampling, headers_of_ids
from rftstream.contracts.token_values import TokenValues

MAX_ROLE_CHARACTERS = 64


@message_part(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`count` consecutive sampled tokens from position `start` on came from one policy version."""

    start: NonNegativeInt
    """Position in the segment, from 0."""
    count: PositiveInt
    """Number of tokens, at least 1."""
    trainer_epoch: NonNegativeInt
    """Trainer epoch of the version."""
    version: NonNegativeInt
    """The trainer step of the weights."""


@message_part(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """`count` consecutive tokens from position `start` on stand for an image. None of them was sampled."""

    start: NonNegativeInt
    """Position in the segment, from 0."""
    count: PositiveInt
    """Number of tokens, at least 1; the model family says how many an image has."""
    image: Media
    """The image that the policy saw there."""


@message_part(frozen=True, slots=True, kw_only=True)
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
    images: tuple[ImageSpan, ...] = ()
    """Where images stand, in order, not overlapping; empty for a segment of text alone."""
    beside: dict[str, TokenValues] = field(default_factory=dict)
    """Kind -> values that the sampler recorded beside the tokens: `allowed`, `experts`, or those of your own policy."""
    role: Annotated[str, Meta(max_length=MAX_ROLE_CHARACTERS)] = ""
    """Role that the policy played in an episode of several agents, as the agent named it; empty: none."""


def roles_of(segments: Iterable[Segment]) -> tuple[str, ...]:
    """Return the roles of an episode, in the order in which they spoke first; empty if no segment has one."""
    return tuple(dict.fromkeys(segment.role for segment in segments if segment.role))


_SEGMENT_ARRAYS = ("token_ids", "behavior_logprobs", "loss_mask")
_SEGMENT_DTYPES = ("int32", "float32", "uint8")


@rule(Segment)
def _check_segment(segment: Segment) -> Violation | None:
    tokens, logprobs, mask = segment.token_ids, segment.behavior_logprobs, segment.loss_mask
    shape = tokens.shape
    dtypes = tokens.dtype, logprobs.dtype, mask.dtype
    if dtypes != _SEGMENT_DTYPES or len(shape) != 1 or logprobs.shape != shape or mask.shape != shape:
        for name, dtype, array in zip(_SEGMENT_ARRAYS, _SEGMENT_DTYPES, (tokens, logprobs, mask), strict=True):
            if array.dtype != dtype:
                return f".{name}.dtype", f"got {show(array.dtype)}, expected {dtype}"
            if len(array.shape) != 1 or array.shape != shape:
                return f".{name}.shape", f"got {list(array.shape)}, expected one dimension, as long as token_ids"
    if not mask.is_mask:
        return ".loss_mask.data", "got other values, expected only 0 and 1"
    end = 0
    for i, span in enumerate(segment.versions):
        if span.start < end:
            return f".versions[{i}].start", f"got {span.start}, expected at least {end}, the end of the span before"
        end = span.start + span.count
    if shape and end > shape[0]:
        return ".versions", f"got spans up to position {end}, expected at most {shape[0]}, the tokens of the segment"
    for name, given in segment.beside.items():
        if (num := given.num_tokens) != shape[0]:
            return f".beside.{name}.runs", f"got runs of {num} tokens, expected the {shape[0]} of the segment"
    return _check_images(segment)


def _check_images(segment: Segment) -> Violation | None:
    end, num_tokens = 0, len(segment.loss_mask.data)
    for i, span in enumerate(segment.images):
        if span.start < end:
            return f".images[{i}].start", f"got {span.start}, expected at least {end}, the end of the image before"
        end = span.start + span.count
        if end > num_tokens:
            return f".images[{i}]", f"got a span up to position {end}, expected at most {num_tokens}"
        if 1 in bytes(segment.loss_mask.data[span.start : end]):
            return f".images[{i}]", "got a sampled token in it, expected tokens of an image alone"
    return None


@message_part(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of the conversation as a person reads it."""

    role: str
    """Role of the speaker, as in ChatMessage."""
    content: str
    """The text."""
    num_tokens: NonNegativeInt = 0
    """Sampled tokens of an assistant turn, 0 for the others."""
    finish_reason: str | None = None
    """Why an assistant turn ended: stop, length or repetition."""
    reasoning: str = ""
    """The thinking that the model wrote in an assistant turn, without the marks around it. `content` has it, too."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls of an assistant turn, as they were read. `content` has their text, too."""
    reward: float | None = None
    """Reward that the environment gave for an assistant turn, if it gave one."""


@message_part(frozen=True, slots=True, kw_only=True)
class Posted:
    """The reward that environment or agent gave for the whole rollout."""

    reward: float | None
    """Sum of the rewards of all turns, a finite number. None: no reward was given, which is not a reward of 0."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, summed over turns."""
    source: str = "environment"
    """Giver of the reward: environment or agent."""
    error: str | None = None
    """Fault of the given reward, e.g. that it is not finite; the rollout then has no reward."""
    reached: tuple[ChatMessage, ...] = ()
    """The first messages of a problem that this attempt solves, in the place of its own; empty: the environment says of
    none. Text alone."""
    roles: dict[str, float | None] = field(default_factory=dict)
    """Reward of each role, in an episode of several agents. None: the role is not trained. Empty: all have `reward`."""
    version: str = ""
    """Digest of the giver: of the environment's settings and of the user's code behind it, as the explorer had them.
    Empty: not known."""


@message_part(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """One model call of an agent. Its id is `rollout_id/call/number`."""

    number: NonNegativeInt
    """Dense from 0, in the order in which the calls were answered."""
    dialect: str
    """The HTTP API that the agent spoke: chat, responses or anthropic."""
    request_digest: str
    """`sha256:<hex>` of the request, without what only concerns the form of the answer."""
    tools_digest: str
    """`sha256:<hex>` of the tools that the model was shown."""
    segment: NonNegativeInt
    """Index of the segment that the sampled tokens are in."""
    start: NonNegativeInt
    """Position of the first sampled token in the segment."""
    count: NonNegativeInt
    """Number of sampled tokens."""
    finish_reason: str
    """Why sampling ended: stop, length or repetition."""
    opened: str = ""
    """Why the call began a new segment; empty if it went on in one."""
    idempotency_digest: str = ""
    """`sha256:<hex>` of the name that the client gave the request for all its tries; empty if it gave none."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Settings that the agent asked for. Sampling is the task's."""
    started_at: float = 0.0
    """When the request came."""
    finished_at: float = 0.0
    """When its last token was sampled."""


@message_part(frozen=True, slots=True, kw_only=True)
class SavedCall:
    """The data of a call that only a successor needs: its conversation, and the answer as it was sent."""

    answer: bytes
    """Body of the answer, JSON."""
    parent: NonNegativeInt | None
    """Number of the call whose conversation and answer this one's begins with; None if there is none."""
    messages: tuple[ChatMessage, ...]
    """The conversation after the parent's answer; without a parent the whole."""
    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the model was shown, without a parent; with one they are the parent's."""


def is_without_roles(segments: Iterable[Segment], posted: Posted | None) -> bool:
    """Return whether a reader that knows of no roles reads all that there is."""
    return not any(segment.role for segment in segments) and (posted is None or not posted.roles)


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


@message(
    "rollout",
    version=8,
    readable_since=6,
    skippable=lambda rollout: is_without_roles(rollout.segments, rollout.posted),
    topic="rollouts",
    key=lambda rollout: rollout.ids.rollout_id,
    headers=lambda rollout: {
        **headers_of_ids(rollout.ids),
        "status": rollout.status,
        "num_tokens": rollout.num_tokens,
    },
)
class Rollout(Message):
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
    """Segments of tokens to train on. Most rollouts have one; an agent that rewrites its context has several."""
    num_tokens: NonNegativeInt
    """Sampled tokens over all segments."""
    sampling: Sampling
    """The sampling settings of the task."""
    error: str | None = None
    """Why it failed, for people."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the environment measured."""
    attachments: dict[str, Media] = field(default_factory=dict)
    """Further data of the rollout, by reference. Values that belong to tokens are in their segment, in `beside`."""
    started_at: float = 0.0
    """When sampling began."""
    finished_at: float = 0.0
    """When the last token was sampled."""
    posted: Posted | None = None
    """Reward that the environment or agent gave; None if they gave nothing."""
    calls: tuple[AgentCall, ...] = ()
    """Model calls of an agent in order; empty for an environment's rollout."""


@rule(
    Rollout,
    json_schema={
        "if": {"properties": {"status": {"const": "undecodable"}}},
        "then": {"properties": {"problem": {"type": "null"}}},
        "else": {"properties": {"problem": {"type": "object"}}},
    },
)
def _check_rollout(rollout: Rollout) -> Violation | None:
    undecodable = rollout.status is RolloutStatus.undecodable
    if (rollout.problem is None) is not undecodable:
        return ".problem", (
            f"got {presence(rollout.problem)} with status {rollout.status}, "
            "expected none exactly for an undecodable task"
        )
    return None


@message_part(frozen=True, slots=True, kw_only=True)
class StoredState:
    """Reference to the saved state of an environment, as an object of the run's store."""

    object: str
    """Name inside the object store."""
    num_bytes: NonNegativeInt
    """Size of the object."""
    digest: str
    """`sha256:<hex>` of the object."""


@message(
    "partial_rollout",
    version=10,
    readable_since=7,
    skippable=lambda partial: is_without_roles(partial.segments, partial.posted),
    topic="partials",
    key=lambda partial: f"{partial.ids.rollout_id}#{partial.piece}",
    id=lambda partial: partial.ids.rollout_id,
    headers=lambda partial: {
        **headers_of_ids(partial.ids),
        "piece": partial.piece,
        "num_tokens": partial.num_tokens,
        "explorer": partial.explorer or None,
        "session": partial.session or None,
    },
)
class PartialRollout(Message):
    """One piece of an unfinished rollout. `partials`: explorer -> explorer, keyed `rollout_id#piece`."""

    ids: RolloutIds
    """The ids that the task had."""
    piece: NonNegativeInt
    """Dense from 0."""
    turns: tuple[Turn, ...]
    """Turns that this piece adds."""
    segments: tuple[Segment, ...]
    """Segments that this piece adds."""
    num_tokens: NonNegativeInt
    """Sampled tokens of this piece."""
    environment_state: bytes | None = None
    """Saved state of the environment, in its own encoding; None if nothing is new, or if the state is in
    `stored_state`."""
    sampler_state: bytes | None = None
    """State of the sampler's random generator."""
    saved_at: float = 0.0
    """When the explorer saved it."""
    continues: bool = False
    """The first segment goes on where the last one of the piece before ended."""
    kept_messages: NonNegativeInt = 0
    """Number of messages that stay of the conversation as the piece before left it; for the first piece, of the
    problem's messages."""
    messages: tuple[ChatMessage, ...] = ()
    """Messages after the kept ones. Together they are what the policy is shown now."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the environment measured so far, in all."""
    started_at: float = 0.0
    """When sampling of the rollout began."""
    explorer: str = ""
    """Name of the process that sampled this piece."""
    posted: Posted | None = None
    """Reward that the environment gave so far, in all; None if it gave nothing."""
    session: str | None = None
    """Set in the piece that gives the rollout to an agent elsewhere: a digest of the name of the agent's request."""
    calls: tuple[AgentCall, ...] = ()
    """Model calls that this piece adds; the n-th one's new tokens are the n-th segment of the piece."""
    saved_calls: tuple[SavedCall, ...] = ()
    """More of these calls, one for each."""
    stored_state: StoredState | None = None
    """Reference to a large saved state of the environment, as an object that is stored before this record."""
    beside_before: dict[str, TokenValues] = field(default_factory=dict)
    """Kind -> values beside the last tokens before this piece, where they became known after these were saved."""


@rule(
    PartialRollout,
    json_schema={
        "if": {"properties": {"stored_state": {"type": "object"}}, "required": ["stored_state"]},
        "then": {"properties": {"environment_state": {"type": "null"}}},
    },
)
def _check_partial_rollout(partial: PartialRollout) -> Violation | None:
    if partial.stored_state is not None and partial.environment_state is not None:
        return ".environment_state", "got one beside a stored_state, expected one of them"
    return None
