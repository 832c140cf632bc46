"""An outcome says what became of a group and why; a reuse says which groups a batch has once more. Topic `outcomes`:
buffer -> feeder, audit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from enum import StrEnum

from rftstream.contracts.message_spec import Facts, Message, message
from rftstream.contracts.ranges import NonNegativeFloat, NonNegativeInt
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.rules import Violation, presence, rule
from rftstream.contracts.structs import message_part
from rftstream.contracts.verdicts import UnscorableReason


class GroupResult(StrEnum):
    """The results that a decided group can have."""

    batched = "batched"
    """The group is in a batch."""
    filtered = "filtered"
    """Left out on purpose, e.g. for rewards that are all the same."""
    expired = "expired"
    """Too late or too old."""
    dead = "dead"
    """Too few of its rollouts could be scored."""


@message_part(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """A rollout as an outcome tells of it."""

    rollout_id: str
    """`group_id/sibling`."""
    num_tokens: NonNegativeInt
    """Sampled tokens."""
    status: RolloutStatus
    """How it ended."""
    reward: float | None = None
    """Reward of the rollout; None: not scored."""
    reason: UnscorableReason | None = None
    """Why it was not scored."""
    rejected: str | None = None
    """`operator: reason` where an operator left this sibling out of its group's batch."""
    roles: dict[str, float | None] = field(default_factory=dict)
    """Reward of each role, in an episode of several agents, as the verdict has it."""


class OperatorAction(StrEnum):
    """The actions of operators on the experience side."""

    reject = "reject"
    """Left out the group, or some of its siblings."""
    mask = "mask"
    """Kept tokens from being trained on."""
    shape = "shape"
    """Added a term to rewards."""
    prioritise = "prioritise"
    """Said how much the group matters."""
    offer = "offer"
    """Let later batches have the group, or some of its siblings, once more."""


@message_part(frozen=True, slots=True, kw_only=True)
class OperatorDecision:
    """An action of an operator of the experience side on a group. An operator that keeps a group as it is leaves no
    such record."""

    operator: str
    """Name of the operator, as the run file has it."""
    action: OperatorAction
    """Kind of action."""
    reason: str = ""
    """Reason in the operator's words; for a term, the term's name."""
    siblings: tuple[NonNegativeInt, ...] = ()
    """Numbers in the group of the rollouts concerned, in order; empty where the whole group is rejected."""
    num_tokens: NonNegativeInt = 0
    """Tokens that were masked."""
    terms: tuple[float, ...] = ()
    """Amount added to the reward of each sibling. For a group that was prioritised, the factor of its priority."""


class ReuseKind(StrEnum):
    """How a batch uses a group that was decided before."""

    replay = "replay"
    """The group is trained on once more, with its rewards."""
    hindsight = "hindsight"
    """The group's attempts become demonstrations of problems that they do solve."""


@message_part(frozen=True, slots=True, kw_only=True)
class ReuseOffer:
    """Permission for later batches to use a group once more."""

    kind: ReuseKind
    """How the batches use the group."""
    operator: NonNegativeInt
    """Place, among all operators of the run, of the one that offers it."""
    since: NonNegativeInt
    """The version from which its age counts: the oldest that sampled one of its tokens. Where the versions of rollouts
    say nothing about this run, the batch that was next when the group was decided."""
    until: NonNegativeInt
    """The last batch that may use the group."""
    siblings: tuple[NonNegativeInt, ...] = ()
    """Numbers in the group of the rollouts offered, in order; empty where the whole group is offered."""


@message_part(frozen=True, slots=True, kw_only=True)
class MaskedSpan:
    """Tokens that an operator kept from being trained on."""

    sibling: NonNegativeInt
    """Number of the rollout in its group."""
    segment: NonNegativeInt
    """Index of the segment."""
    start: NonNegativeInt
    """Position of the first masked token in the segment."""
    stop: NonNegativeInt
    """Position behind the last one."""


def _outcome_id(outcome: GroupOutcome) -> str:
    late = ",".join(rollout.rollout_id for rollout in outcome.rollouts)
    return f"{outcome.group_id}#late/{late}" if outcome.late else outcome.group_id


def _outcome_headers(outcome: GroupOutcome) -> Facts:
    names = ("group_id", "taskset", "sequence", "result", "reason", "batch_sequence", "late")
    return {name: getattr(outcome, name) for name in names}


@message(
    "group_outcome",
    version=7,
    readable_since=6,
    skippable=lambda outcome: not any(rollout.roles for rollout in outcome.rollouts),
    topic="outcomes",
    key=lambda outcome: outcome.group_id,
    id=_outcome_id,
    headers=_outcome_headers,
)
class GroupOutcome(Message):
    """The result of a group; each admitted group gets exactly one. `outcomes`: buffer -> feeder, explorer, audit.

    `late` records are for siblings that arrived after their group's outcome; they change no count of groups."""

    group_id: str
    """`taskset/pass/index/attempt`."""
    taskset: str
    """Name in the run file."""
    sequence: NonNegativeInt
    """The feeder's count of admitted groups."""
    result: GroupResult
    """Result of the group; in a late record, the result of its late siblings."""
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
    """Actions of operators on a group that is batched or filtered, in order."""
    parts: dict[str, float] = field(default_factory=dict)
    """Mean of each named part over the scored siblings, in runs with operators."""
    version: NonNegativeInt | None = None
    """The trainer's version that operators were told, at which the group would be trained; of a batched group that is
    the batch's. None: no operator looks at it, or the versions of rollouts say nothing about this run."""
    priority: NonNegativeFloat = 1.0
    """Priority of the group, the product of the operators' factors."""
    offers: tuple[ReuseOffer, ...] = ()
    """Offers to later batches to use the group once more, in order of the operators."""
    offsets: tuple[NonNegativeInt, ...] = ()
    """Offset on `verified` of each of `rollouts`, where there are offers."""
    masks: tuple[MaskedSpan, ...] = ()
    """Tokens that operators masked; recorded only where there are offers."""

    def siblings(self) -> set[int]:
        """Return the numbers in the group of `rollouts`."""
        numbers = (rollout.rollout_id.rpartition("/")[2] for rollout in self.rollouts)
        return {int(number) for number in numbers if number.isdecimal()}


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
    if outcome.offers and len(outcome.offsets) != len(outcome.rollouts):
        return ".offsets", f"got {len(outcome.offsets)}, expected {len(outcome.rollouts)}, one for each rollout"
    if outcome.late and not outcome.rollouts:
        return ".rollouts", "got none, expected at least one in a late record"
    return None


@message_part(frozen=True, slots=True, kw_only=True)
class GroupUse:
    """A group that was decided before and is in a batch once more."""

    group_id: str
    """`taskset/pass/index/attempt`."""
    taskset: str
    """Name in the run file."""
    sequence: NonNegativeInt
    """The feeder's count of admitted groups."""
    kind: ReuseKind
    """How the batch uses the group."""
    operator: NonNegativeInt
    """Place, among all operators of the run, of the one that offered it."""
    use: NonNegativeInt
    """Number of the use, from 1; the group's own batch is not counted."""
    weight: NonNegativeFloat
    """Factor of its loss."""
    staleness: NonNegativeInt
    """The batch minus `since` of the offer."""
    rollouts: tuple[str, ...]
    """Ids of the rollouts that the batch has, in order."""


@message(
    "batch_reuse",
    topic="outcomes",
    key=lambda reuse: f"reuse/{reuse.batch_sequence}",
    headers=lambda reuse: {"batch_sequence": reuse.batch_sequence, "num_uses": len(reuse.uses)},
)
class BatchReuse(Message):
    """Which groups a batch has once more. Written with each batch of rollouts, in runs with operators that offer groups
    for reuse. `outcomes`: buffer -> audit.

    It changes no outcome: a group has exactly one, and each further use of it is counted here."""

    batch_sequence: NonNegativeInt
    """The batch k, trained at version k."""
    seen: NonNegativeInt
    """The groups were chosen by this many outcomes, the first ones on `outcomes`."""
    uses: tuple[GroupUse, ...]
    """Uses in the order in which they were chosen."""


@rule(BatchReuse)
def _check_batch_reuse(reuse: BatchReuse) -> Violation | None:
    seen: set[str] = set()
    for i, use in enumerate(reuse.uses):
        if use.group_id in seen:
            return f".uses[{i}].group_id", f"got {use.group_id} twice, expected each group once"
        if use.use < 1:
            return f".uses[{i}].use", "got 0, expected at least 1"
        seen.add(use.group_id)
    return None


class DecidedSequences:
    """Records which groups have an outcome: all below a number, and some above. A reader of `outcomes` calls `add` for
    each outcome."""

    def __init__(self, below: int = 0, above: Iterable[int] = ()) -> None:
        self.below = below
        self._above = set(above)

    def add(self, sequence: int) -> None:
        """Add a group that has an outcome."""
        if sequence < self.below:
            return
        self._above.add(sequence)
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1

    def __contains__(self, sequence: int) -> bool:
        return sequence < self.below or sequence in self._above

    def __len__(self) -> int:
        return self.below + len(self._above)

    def above(self) -> tuple[int, ...]:
        """Return the groups above `below` that have an outcome, in order."""
        return tuple(sorted(self._above))
