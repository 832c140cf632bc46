"""An outcome says what became of a group and why. Topic `outcomes`: buffer -> feeder, audit."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rftstream.contracts.message_spec import Facts, MessageSpec
from rftstream.contracts.ranges import NonNegativeInt
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.rules import Violation, presence, rule
from rftstream.contracts.verdicts import UnscorableReason


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
    num_tokens: NonNegativeInt
    """Sampled tokens."""
    status: RolloutStatus
    """How it ended."""
    reward: float | None = None
    """None: not scored."""
    reason: UnscorableReason | None = None
    """Why it was not scored."""
    rejected: str | None = None
    """`operator: reason` where an operator left this sibling out of its group's batch."""


class OperatorAction(StrEnum):
    """What an operator of the experience side did."""

    reject = "reject"
    """Left out the group, or some of its siblings."""
    mask = "mask"
    """Kept tokens from being trained on."""
    shape = "shape"
    """Added a term to rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDecision:
    """What an operator of the experience side did to a group. Who keeps a group as it is has no such record."""

    operator: str
    """Name of the operator, as the run file has it."""
    action: OperatorAction
    """What it did."""
    reason: str = ""
    """Why, in the operator's words; of a term its name."""
    siblings: tuple[NonNegativeInt, ...] = ()
    """Whom it concerns, in order; none where a whole group is rejected."""
    num_tokens: NonNegativeInt = 0
    """Tokens that were masked."""
    terms: tuple[float, ...] = ()
    """What was added to the reward of each of the siblings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of a group, exactly one for each admitted group. `outcomes`: buffer -> feeder, explorer, audit.

    `late` records are for siblings that arrived after their group's outcome; they change no count of groups."""

    group_id: str
    """`taskset/pass/index/attempt`."""
    taskset: str
    """Name in the run file."""
    sequence: NonNegativeInt
    """The feeder's count of admitted groups."""
    result: GroupResult
    """What became of the group; a late record says what became of its siblings."""
    reason: str
    """complete, zero_variance, deadline, stale, unscorable, ..."""
    rollouts: tuple[RolloutSummary, ...]
    """The siblings that were there; a late record lists the late siblings."""
    batch_sequence: NonNegativeInt | None = None
    """Set exactly for batched groups."""
    late: bool = False
    """Whether the record is about siblings that arrived after the outcome."""
    decided_at: float = 0.0
    """When the buffer decided."""
    group_size: NonNegativeInt = 0
    """Siblings that the feeder admitted; 0 in records before version 2, which do not say it."""
    seen: NonNegativeInt | None = None
    """Operators decided by the facts in this many records of `outcomes`, the first ones; None: there were none."""
    decisions: tuple[OperatorDecision, ...] = ()
    """What operators did to a group that is batched or filtered, in order."""
    parts: dict[str, float] = field(default_factory=dict)
    """Mean of each named part over the scored siblings, in runs with operators."""
    version: NonNegativeInt | None = None
    """The trainer's version that operators were told, at which the group would be trained; of a batched group that is
    the batch's. None: no operator looks at it, or the versions of rollouts say nothing about this run."""


@rule(
    GroupOutcome,
    json_schema={
        "if": {"properties": {"result": {"const": "batched"}}},
        "then": {"required": ["batch_sequence"], "properties": {"batch_sequence": {"type": "integer"}}},
        "else": {"properties": {"batch_sequence": {"type": "null"}}},
    },
)
def _check_group_outcome(outcome: GroupOutcome) -> Violation | None:
    if (outcome.batch_sequence is not None) is not (outcome.result is GroupResult.batched):
        return ".batch_sequence", (
            f"got {presence(outcome.batch_sequence)} with result {outcome.result}, "
            "expected one exactly for batched groups"
        )
    if outcome.late and not outcome.rollouts:
        return ".rollouts", "got none, expected at least one in a late record"
    return None


def _outcome_id(outcome: GroupOutcome) -> str:
    late = ",".join(rollout.rollout_id for rollout in outcome.rollouts)
    return f"{outcome.group_id}#late/{late}" if outcome.late else outcome.group_id


def _outcome_headers(outcome: GroupOutcome) -> Facts:
    names = ("group_id", "taskset", "sequence", "result", "reason", "batch_sequence", "late")
    return {name: getattr(outcome, name) for name in names}


GROUP_OUTCOME = MessageSpec(
    type=GroupOutcome,
    contract="group_outcome",
    version=5,
    topic="outcomes",
    key=lambda outcome: outcome.group_id,
    id=_outcome_id,
    headers=_outcome_headers,
)
