"""The messages of all topics. The contract of each is `schemas/<name>.json`; this file follows it.

Rules (docs/contracts.md): one type per stage, frozen; a new field gets a default; a type, default or meaning
never changes and a name is never used again; readers skip fields they do not know.

Shapes: T tokens of a segment, G siblings of a group. Times are seconds since the Unix epoch, as the writer's
clock had it. Ids are derived, never drawn (PROTOCOL "Names and numbers").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An n-dimensional array, little-endian, C order."""

    dtype: str
    """One of int8, uint8, int32, int64, float16, bfloat16, float32, float64, bool."""
    shape: tuple[int, ...]
    """Length of each dimension; at most 4 of them, () for a scalar."""
    data: bytes
    """The elements, little-endian, C order: product(shape) times the size of one element."""

    @staticmethod
    def of(values: Any, dtype: str) -> Array:
        import numpy as np

        array = np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
        return Array(dtype=dtype, shape=tuple(array.shape), data=array.tobytes())

    def numpy(self) -> np.ndarray:
        """A read-only view of the bytes. bfloat16 comes as its uint16 bit patterns."""
        import numpy as np

        name = "uint16" if self.dtype == "bfloat16" else self.dtype
        return np.frombuffer(self.data, dtype=np.dtype(name).newbyteorder("<")).reshape(self.shape)


# --------------------------------------------------------------------------------------------- shared parts


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutIds:
    """Where a rollout belongs. Set by the feeder, carried unchanged to the end of the flow."""

    rollout_id: str
    """`group_id/sibling`."""
    group_id: str
    """`taskset/pass/index/attempt`."""
    taskset: str
    """Name in the run file, `[a-z0-9_-]+`."""
    sibling: int
    """Index in the group, dense from 0."""
    group_size: int
    """Siblings that the feeder admitted."""
    sequence: int
    """The feeder's dense count of admitted groups; `sequence mod partitions` is the partition everywhere."""
    min_version: int
    """No token of the rollout may be sampled by an older version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """An image or other payload, by reference."""

    url: str
    """Where the bytes are; any URL that fsspec opens."""
    digest: str
    """`sha256:<hex>` of the bytes behind the url."""
    kind: str
    """Media type, e.g. image/png."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation, as chat templates take it."""

    role: str
    """system, user, assistant or tool."""
    content: str
    """The text; empty where a message is tool calls only."""
    media: tuple[Media, ...] = ()
    """Shown with the text, in order."""
    name: str | None = None
    """Of the speaker or of the tool, where the template uses it."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """As the model family writes them, one plain map each."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The full set. docs/algorithms.md says with which of them the recorded logprobs are exact."""

    temperature: float = 1.0
    """0 is greedy; the recorded logprobs are then those of temperature 1."""
    top_p: float = 1.0
    """1: off."""
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    """0: off."""
    presence_penalty: float = 0.0
    """0: off."""
    frequency_penalty: float = 0.0
    """0: off."""
    repetition_penalty: float = 1.0
    """1: off."""
    min_tokens: int = 0
    """No end of sequence before this many completion tokens."""
    max_tokens: int = 256
    """Completion tokens of the whole rollout, all turns together."""
    stop: tuple[str, ...] = ()
    """A completion ends after any of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be solved, as the taskset gave it."""

    messages: tuple[ChatMessage, ...]
    """The prompt."""
    answer: str | None = None
    """The reference answer, where the taskset has one."""
    tools: tuple[dict[str, Any], ...] = ()
    """Definitions of the tools offered, one plain map each."""
    info: dict[str, Any] = field(default_factory=dict)
    """Everything else that the taskset had, for environment and reward; plain values only."""
    data_source: str = ""
    """Which part of a mixed taskset it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`count` consecutive sampled tokens from position `start` on came from one policy version."""

    start: int
    """Position in the segment, from 0."""
    count: int
    """At least 1."""
    trainer_epoch: int
    """Of the version."""
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
    """In order, not overlapping; together they cover the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of the conversation as a person reads it."""

    role: str
    """As in ChatMessage."""
    content: str
    """The text."""
    num_tokens: int = 0
    """Sampled tokens of an assistant turn, 0 for the others."""
    finish_reason: str | None = None
    """stop, length or repetition, for assistant turns."""


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


# --------------------------------------------------------------------------------------------- the flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One rollout to do. `tasks`: feeder -> explorer."""

    ids: RolloutIds
    """The rollout to be made."""
    problem: Problem
    """What to solve."""
    sampling: Sampling
    """How to sample it; set per taskset."""
    seed: int
    """Derived from the run's seed and the rollout_id; non-negative, below 2**63."""
    environment: str = "single_turn"
    """Name in the table of environments."""
    stored_rollout: str | None = None
    """`topic[partition]@offset` of a rollout to score again instead of sampling."""
    created_at: float = 0.0
    """When the feeder admitted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled attempt, without a reward. `rollouts`: explorer -> verifier."""

    ids: RolloutIds
    """As the task had them."""
    status: RolloutStatus
    """How it ended."""
    problem: Problem | None
    """None exactly when the task was undecodable."""
    turns: tuple[Turn, ...]
    """The completion: what came after the problem's messages."""
    segments: tuple[Segment, ...]
    """What to train on; most rollouts have one, an agent that rewrites its context several."""
    num_tokens: int
    """Sampled tokens over all segments."""
    sampling: Sampling
    """As the task had it."""
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
    """As the task had them."""
    piece: int
    """Dense from 0."""
    turns: tuple[Turn, ...]
    """Of this piece only."""
    segments: tuple[Segment, ...]
    """Of this piece only."""
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
    """So many messages of the conversation as the piece before left it stand in front; before the first piece it is
    the problem's messages."""
    messages: tuple[ChatMessage, ...] = ()
    """What follows them: together they are what the policy is shown now."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the environment measured so far, in all."""
    started_at: float = 0.0
    """When sampling of the rollout began."""
    explorer: str = ""
    """Name of the process that sampled this piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward and how it came about."""

    reward: float
    """Finite."""
    scorer: str
    """Name of the reward."""
    scorer_version: str
    """Changes whenever the same rollout could get another reward."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts; `reward` is their weighted sum unless the scorer says otherwise."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the reward measured; goes to the trackers."""
    additions: dict[str, Array] = field(default_factory=dict)
    """Arrays that the algorithm may need, e.g. teacher_logprobs [T]."""


class UnscorableReason(StrEnum):
    """Why a rollout has no reward."""

    undecodable = "undecodable"
    """Its record could not be decoded; only the headers are known."""
    failed = "failed"
    """The rollout failed, so there is nothing to score."""
    skipped = "skipped"
    """Its group was decided before it was sampled."""
    timeout = "timeout"
    """The scorer did not end within its time limit."""
    error = "error"
    """The scorer failed."""
    missing_checker = "missing_checker"
    """The scorer needs something that is not installed."""
    oversized = "oversized"
    """It outgrew the record limit; its segments are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRollout:
    """A rollout with its verdict, or with the reason why it has none. `verified`: verifier -> buffer."""

    ids: RolloutIds
    """As the task had them."""
    rollout: Rollout | None
    """None exactly when `reason` is undecodable."""
    verdict: Verdict | None
    """None: it could not be scored, which is not a reward of 0."""
    reason: UnscorableReason | None = None
    """Set exactly when `verdict` is None."""
    detail: str | None = None
    """More about the reason, for people."""
    verified_at: float = 0.0
    """When the verifier was done with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to the same messages."""

    prompt: tuple[ChatMessage, ...]
    """What both answer."""
    chosen: tuple[ChatMessage, ...]
    """The better answer."""
    rejected: tuple[ChatMessage, ...]
    """The worse one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Expert experience. `experts`: `rftstream experts load`, gateway -> buffer. Chat or preference, never both."""

    demonstration_id: str
    """Derived from source and content."""
    source: str
    """File or service that it came from."""
    messages: tuple[ChatMessage, ...] = ()
    """A chat; the assistant messages are trained on."""
    preference: Preference | None = None
    """A preference pair."""
    weight: float = 1.0
    """Factor of its loss."""
    info: dict[str, Any] = field(default_factory=dict)
    """Everything else that the source had; plain values only."""
    number: int = 0
    """Dense from 0, in the order in which they were loaded; `number mod partitions` is the partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """A late judgement of a rollout by a person or an environment. `feedback`: gateway -> buffer."""

    feedback_id: str
    """Derived from its source and rollout."""
    rollout_id: str
    """The rollout that is judged."""
    source: str
    """Who judges."""
    reward: float | None = None
    """The judgement as a number, if it is one."""
    comment: str | None = None
    """The judgement in words."""
    given_at: float = 0.0
    """When it was given."""


class LossKind(StrEnum):
    """Which loss an experience goes into."""

    rl = "rl"
    """Policy gradient; needs a reward."""
    sft = "sft"
    """Cross entropy on expert data."""
    dpo = "dpo"
    """Preference pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A rollout's segments with reward and group, ready to train on. `batches`: buffer -> trainer.

    Advantages are not in it: the algorithm computes them in the trainer from the whole group, which stays
    inside one share of one batch."""

    ids: RolloutIds
    """As the task had them; for expert data of the same form, made by the buffer."""
    batch_sequence: int
    """The batch k, trained at version k."""
    share: int
    """Which of the shares; equal to the partition."""
    position: int
    """Place inside the share, dense from 0."""
    loss_kind: LossKind
    """Which loss it goes into."""
    segments: tuple[Segment, ...]
    """What to train on."""
    reward: float | None
    """None for expert data."""
    sampling: Sampling
    """How it was sampled."""
    truncated: bool = False
    """A token limit ended the rollout."""
    expert: bool = False
    """From `experts`, not from the policy."""
    pair: str | None = None
    """For preferences: `chosen` or `rejected`; the two share a group."""
    parts: dict[str, float] = field(default_factory=dict)
    """Of the verdict."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of rollout and verdict; under a name that both have, the verdict's."""
    additions: dict[str, Array] = field(default_factory=dict)
    """Of the verdict, e.g. teacher_logprobs [T]."""
    attachments: dict[str, Media] = field(default_factory=dict)
    """Of the rollout."""
    weight: float = 1.0
    """Factor of its loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchManifest:
    """Closes a batch: the last record of the batch in every share. `batches`: buffer -> trainer."""

    batch_sequence: int
    """The batch k, trained at version k."""
    share: int
    """Which of the shares; equal to the partition."""
    num_shares: int
    """Of the run."""
    count: int
    """Experiences of this batch in this share."""
    digest: str
    """`sha256:<hex>` over the encoded experiences of this share, in order."""
    groups: tuple[str, ...]
    """Groups of this share, in order."""
    num_groups: int
    """Of the batch, all shares."""
    total_groups: int
    """Batched by all batches up to and including this one."""
    last: bool = False
    """The run's last batch; it may be short or empty."""
    admitted: int | None = None
    """Groups that the feeder had admitted in all, where `last`: a run that was given more to do has more later."""
    max_staleness: int = 0
    """batch_sequence minus the oldest version that sampled a token of the batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the buffer saw since the batch before: reward over all decided rollouts, filtered share, ..."""
    total_experts: int = 0
    """Demonstrations in all batches up to and including this one; one that came in two passes counts twice."""


class GroupResult(StrEnum):
    """What became of a group."""

    batched = "batched"
    """In a batch."""
    filtered = "filtered"
    """Left out on purpose, e.g. for rewards that are all the same."""
    expired = "expired"
    """Too late or too old."""
    dead = "dead"
    """Too few of its rollouts could be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """A rollout as an outcome tells of it."""

    rollout_id: str
    """`group_id/sibling`."""
    num_tokens: int
    """Sampled tokens."""
    status: RolloutStatus
    """How it ended."""
    reward: float | None = None
    """None: not scored."""
    reason: UnscorableReason | None = None
    """Why it was not scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of a group, exactly one for each admitted group. `outcomes`: buffer -> feeder, explorer, audit.

    `late` records are for siblings that arrived after their group's outcome; they change no count of groups."""

    group_id: str
    """`taskset/pass/index/attempt`."""
    taskset: str
    """Name in the run file."""
    sequence: int
    """The feeder's count of admitted groups."""
    result: GroupResult
    """What became of the group; of a late record, what became of its siblings."""
    reason: str
    """complete, zero_variance, deadline, stale, unscorable, ..."""
    rollouts: tuple[RolloutSummary, ...]
    """The siblings that were there; of a late record, the late ones."""
    batch_sequence: int | None = None
    """Set exactly for batched groups."""
    late: bool = False
    """For siblings that arrived after the outcome."""
    decided_at: float = 0.0
    """When the buffer decided."""
    group_size: int = 0
    """Siblings that the feeder admitted; 0: not told, before version 2."""


class WeightsKind(StrEnum):
    """What an object of the store holds."""

    full = "full"
    """A snapshot that needs nothing else (an anchor)."""
    delta = "delta"
    """What changed since the parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionName:
    """A version's full name."""

    trainer_epoch: int
    """How often a trainer had taken the run."""
    version: int
    """Weights after batches 0 ... version-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaObject:
    """What changed since another version, as an object of the store."""

    parent: VersionName
    """The version that it applies to."""
    object: str
    """Name inside the object store."""
    num_bytes: int
    """Of the object."""
    digest: str
    """`sha256:<hex>` of the object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAnnounced:
    """New weights are in the object store. `weights`: trainer -> explorer, evaluator. The object is durable by then."""

    model: str
    """Name of the model; weights of another one are refused."""
    name: VersionName
    """The version that is announced."""
    kind: WeightsKind
    """Snapshot or delta."""
    parent: VersionName | None
    """The version a delta applies to; None for full snapshots."""
    object: str
    """Name inside the object store."""
    num_bytes: int
    """Of the object."""
    digest: str
    """`sha256:<hex>` of the object."""
    weights_digest: str
    """`sha256:<hex>` of the state: over each tensor's name and digest, sorted by name."""
    dtype: str
    """Served dtype, e.g. bfloat16."""
    resumed: bool = False
    """True for the anchor that a trainer publishes when it starts."""
    announced_at: float = 0.0
    """When the object was durable."""
    gone: tuple[VersionName, ...] = ()
    """Older versions whose objects are deleted once this record stands here, by whomever and whenever."""
    delta: DeltaObject | None = None
    """Of full snapshots: the same version once more as a delta, for those who have its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One trained batch, or (`resumed`) the start of a trainer. `steps`: trainer -> feeder, gateway."""

    name: VersionName
    """The version that resulted."""
    batch_sequence: int | None
    """None on resumed records."""
    positions: tuple[int, ...]
    """Next offset to read on `batches`, per share."""
    trained_groups: int
    """By all batches up to this version."""
    trained_rollouts: int
    """By all batches up to this version."""
    weights_digest: str | None
    """None when this version was not published."""
    metrics: dict[str, float]
    """Loss, gradient norm, reward, lengths, times, ...; may hold a NaN."""
    resumed: bool = False
    """Written by a trainer that starts, with the anchor."""
    skipped: bool = False
    """The batch gave a NaN or infinite loss or gradient; the version equals its parent."""
    announced: bool = True
    """The version was published on `weights`."""
    last: bool = False
    """The run's last step."""
    recorded_at: float = 0.0
    """When the step was done."""
    config: str = ""
    """Of resumed records: the resolved config that this trainer works by, as TOML, secrets left out."""
    computed_with: dict[str, str] = field(default_factory=dict)
    """Of resumed records: what the bits of the weights depend on: versions of libraries, threads, device, cpu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation of one version. `evals`: evaluator -> trainer, gateway."""

    evaluation: str
    """Name in the run file."""
    name: VersionName
    """The version that was evaluated."""
    num_tasks: int
    """Tasks of the evaluation."""
    num_samples: int
    """Per task (n)."""
    num_unscored: int
    """Samples without a reward; not in the means."""
    metrics: dict[str, float]
    """mean, std; pass@k, best@k and worst@k for each k; length_mean, truncated_share, and what rewards measured."""
    generations: str | None
    """Object of the store with every completion and its reward, one JSON object a line."""
    request_id: str | None = None
    """The request that asked for it; None when it was due by itself."""
    best: bool = False
    """Best mean of this evaluation so far."""
    evaluated_at: float = 0.0
    """When it was done."""


# --------------------------------------------------------------------------------------------- control and dead


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """What the run is; the feeder's first record. `control`, key `manifest`."""

    run: str
    """Name of the run."""
    created_at: float
    """When the feeder first started."""
    config: str
    """The resolved config as TOML, secrets left out."""
    digests: dict[str, str]
    """model, tokenizer, chat_template, config, and `taskset.<name>` for each."""
    partitions: int
    """Of tasks, rollouts, partials and verified; fixed for the run."""
    shares: int
    """Of batches; fixed for the run."""
    seed: int
    """The run's seed; all others derive from it."""
    rftstream_version: str
    """That created the run."""
    changed: tuple[str, ...] = ()
    """Of a run made of another one's records: `key before -> after` for each setting in which it differs from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who holds a single role. `control`, key `claim/<role>`. The one with the highest epoch is in force."""

    role: str
    """feeder, buffer, trainer or evaluator."""
    epoch: int
    """Dense from 1, per role."""
    host: str
    """Where it runs."""
    pid: int
    """Process id there."""
    process: str
    """Name of the process in the logs."""
    claimed_at: float
    """When it took the role."""


class DesiredState(StrEnum):
    """What a run should do."""

    running = "running"
    """Work goes on."""
    paused = "paused"
    """No admission, no steps; work in flight finishes."""
    draining = "draining"
    """No admission; what is admitted is finished, then the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What the run should do. `control`, key `state`."""

    state: DesiredState
    """The desired state."""
    by: str
    """Who asked for it."""
    reason: str = ""
    """Why, for people."""
    since: float = 0.0
    """When it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksEnded:
    """The feeder admits no more. `control`, key `end`."""

    admitted: int
    """Groups admitted in all."""
    reason: str
    """taskset, steps, draining, experts."""
    experts: int = 0
    """Of a run without tasks: demonstrations that there are, of which each pass takes those that are trained on."""
    batches: int | None = None
    """Of a run without tasks: how many batches all passes make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The run is over. `control`, key `finished`; a tombstone takes it back."""

    reason: str
    """steps, hours, reward, taskset, drained, no_signal, ..."""
    name: VersionName
    """The last version."""
    finished_at: float
    """When the last step was done."""
    exit_code: int = 0
    """What the workers exit with."""


class RequestKind(StrEnum):
    """What can be asked for."""

    evaluate = "evaluate"
    """Evaluate a version now."""
    retry_dead = "retry_dead"
    """Put a dead group back as a new attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Something to be done once. `control`, key `request/<id>`."""

    request_id: str
    """A request with the same id is the same request."""
    kind: RequestKind
    """What to do."""
    arguments: dict[str, Any]
    """As the kind asks; plain values only."""
    expires_at: float
    """Not done after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that could not be dealt with, as it was. `dead`: any -> any."""

    topic: str
    """Where the record stands."""
    partition: int
    """Where the record stands."""
    offset: int
    """Where the record stands."""
    key: bytes | None
    """Of the record."""
    value: bytes | None
    """Of the record, unchanged."""
    headers: tuple[tuple[str, bytes], ...]
    """Of the record: names and values."""
    role: str
    """Who gave up."""
    reason: str
    """In a word."""
    detail: str
    """The error, for people."""
    tries: int
    """How often it was tried."""
    dead_at: float = 0.0
    """When it was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadDropped:
    """Dead letters and dead groups that somebody has done with: they stay where they stand, and are listed no more.
    `control`, key `dropped/<digest of what is in it>`."""

    letters: tuple[str, ...]
    """Ids of dead letters, `role/topic/partition/offset`."""
    groups: tuple[str, ...]
    """Groups whose outcome is dead, `taskset/pass/index/attempt`."""
    by: str
    """Who asked for it."""
    reason: str = ""
    """Why, for people."""
    dropped_at: float = 0.0
    """When it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmed:
    """What was deleted of the run so far, said before it goes. `control`, key `trimmed`; the newest says all of it.

    What it names counts as gone from here on, whether it is still there or not: a process that was away may delete it
    at any time."""

    name: VersionName
    """Of the newest checkpoint when this was written."""
    checkpoints: tuple[VersionName, ...]
    """Those that are kept; any other that is older than `name` is gone."""
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Topic -> the first offset that is kept, per partition. Topics that are not named are whole."""
    version: int = 0
    """Batches below are gone: the earliest version that can be trained on from."""
    sequence: int = 0
    """All groups below are through: each has its outcome, its siblings have been seen, its batch was trained. Records
    of `tasks`, `rollouts` and `verified` that are gone belong to these."""
    groups: dict[str, int] = field(default_factory=dict)
    """What became of the groups below `sequence`: trained, expired, filtered, dead -> how many."""
    rollouts: dict[str, int] = field(default_factory=dict)
    """What became of their rollouts, likewise."""
    trimmed_at: float = 0.0
    """When this was written."""


MESSAGES: dict[str, type] = {
    "task": Task,
    "rollout": Rollout,
    "partial_rollout": PartialRollout,
    "verified_rollout": VerifiedRollout,
    "demonstration": Demonstration,
    "feedback": Feedback,
    "experience": Experience,
    "batch_manifest": BatchManifest,
    "group_outcome": GroupOutcome,
    "weights_announced": WeightsAnnounced,
    "step_record": StepRecord,
    "eval_result": EvalResult,
    "run_manifest": RunManifest,
    "claim": Claim,
    "run_state": RunState,
    "tasks_ended": TasksEnded,
    "run_finished": RunFinished,
    "request": Request,
    "dead_letter": DeadLetter,
    "dead_dropped": DeadDropped,
    "trimmed": Trimmed,
}
"""Contract name -> type. The name travels in the header `contract`; `schemas/<name>.json` is the contract."""

Message = (
    Task
    | Rollout
    | PartialRollout
    | VerifiedRollout
    | Demonstration
    | Feedback
    | Experience
    | BatchManifest
    | GroupOutcome
    | WeightsAnnounced
    | StepRecord
    | EvalResult
    | RunManifest
    | Claim
    | RunState
    | TasksEnded
    | RunFinished
    | Request
    | DeadLetter
    | DeadDropped
    | Trimmed
)
