"""A summary says what the records of a topic below an offset amount to. Topic `summaries`.

The single role that writes a topic summarises it; the trainer does it for `control`, on which many write. Who starts
reads the newest summary, and then only what came after it. A summary is true for ever, however old it is, since the
records below its offset do not change."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.message_spec import Message, message
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.ranges import NonNegativeInt
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.rules import Violation, rule
from rftstream.contracts.structs import message_part
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.versions import VersionName

_Count = Annotated[int, Meta(ge=0)]


@message_part(frozen=True, slots=True, kw_only=True)
class MissingSiblings:
    """Siblings of a decided group that had not come yet."""

    sequence: NonNegativeInt
    """The feeder's count of admitted groups."""
    siblings: tuple[NonNegativeInt, ...]
    """Numbers of these siblings in the group, in order."""


@message_part(frozen=True, slots=True, kw_only=True)
class OutcomesSummary:
    """Results of the groups that the summarised records of `outcomes` are about."""

    below: NonNegativeInt
    """All groups below this sequence have an outcome."""
    above: tuple[NonNegativeInt, ...] = ()
    """Further groups that have one, in order."""
    groups: dict[str, _Count] = field(default_factory=dict)
    """GroupResult -> groups."""
    missing: tuple[MissingSiblings, ...] = ()
    """Groups that were decided before all their siblings came, in order."""
    next_batch: NonNegativeInt = 0
    """The batch behind the newest one in which a group is."""
    next_reuse: NonNegativeInt = 0
    """The batch behind the newest one that has groups once more."""


@message_part(frozen=True, slots=True, kw_only=True)
class KeptVersion:
    """A version that was announced and whose object was not given up."""

    version: NonNegativeInt
    """Number of the version."""
    parent: VersionName | None = None
    """The version that its object is a delta to; None for a full snapshot."""


@message_part(frozen=True, slots=True, kw_only=True)
class VersionRun:
    """The versions that one trainer has written about one model."""

    trainer_epoch: NonNegativeInt
    """Whose they are."""
    first: NonNegativeInt
    """The version with which the trainer began."""
    last: NonNegativeInt
    """The newest one."""
    resumed: bool = False
    """The first one is the state that the trainer started from."""
    model: str = ""
    """Name of the model; empty for steps."""
    kept: tuple[KeptVersion, ...] | None = None
    """Those of `weights` that are kept, in order; None for steps, and where a release that did not say it has written
    the summary before."""


@message_part(frozen=True, slots=True, kw_only=True)
class StepsSummary:
    """Which versions were trained, and where training stands."""

    versions: tuple[VersionRun, ...]
    """Versions of each trainer, in order of the trainers."""
    name: VersionName
    """The version in force."""
    trained_groups: NonNegativeInt
    """Number in all batches up to it."""
    trained_rollouts: NonNegativeInt
    """Number in all batches up to it."""
    last: bool = False
    """It is the run's last step."""


@message_part(frozen=True, slots=True, kw_only=True)
class WeightsSummary:
    """Which versions were announced before a full snapshot, which is the first record above the summary."""

    versions: tuple[VersionRun, ...]
    """Versions of each trainer, in order of the trainers."""


@message_part(frozen=True, slots=True, kw_only=True)
class KeptRecord:
    """A record of `control` that still says something, as it was."""

    offset: NonNegativeInt
    """Its offset."""
    timestamp_s: float
    """Its time on the log."""
    key: bytes | None
    """Its key."""
    value: bytes | None
    """Its value."""
    headers: tuple[tuple[str, bytes], ...]
    """Its headers, as names and values."""


@message_part(frozen=True, slots=True, kw_only=True)
class ControlSummary:
    """The records of `control` that later ones have neither replaced nor withdrawn."""

    records: tuple[KeptRecord, ...]
    """The newest record of each key, and those that the writer of the summary could not read, by offset."""
    was_imported: bool = False
    """The run's tasks are copies of another run's, whose log has the claims of their feeder."""


@message(
    "summary",
    version=3,
    readable_since=1,
    topic="summaries",
    key=lambda summary: summary.topic,
    headers=lambda summary: {"topic": summary.topic, "through": summary.through},
)
class Summary(Message):
    """A summary of all records of a topic below an offset. `summaries`: buffer, trainer -> starting processes.

    Exactly the field that is named like the topic is set."""

    topic: str
    """control, outcomes, steps or weights."""
    through: NonNegativeInt
    """The summary covers all records below this offset."""
    outcomes: OutcomesSummary | None = None
    """Summary of `outcomes`."""
    steps: StepsSummary | None = None
    """Summary of `steps`."""
    weights: WeightsSummary | None = None
    """Summary of `weights`."""
    control: ControlSummary | None = None
    """Summary of `control`."""


SUMMARISED = ("control", "outcomes", "steps", "weights")
"""The topics that are summarised."""


def summariser(topic: str) -> str:
    """Return the role that summarises a topic; an empty name for a topic that nobody summarises."""
    return RoleName.trainer if topic == "control" else TOPICS[topic].writer or ""


@rule(Summary)
def _check_summary(summary: Summary) -> Violation | None:
    named = tuple(name for name in SUMMARISED if getattr(summary, name) is not None)
    if named != (summary.topic,):
        return ".topic", f"got {summary.topic!r} with {', '.join(named) or 'nothing'}, expected the field of that name"
    if summary.outcomes is not None and (unknown := set(summary.outcomes.groups) - set(GroupResult)):
        return ".outcomes.groups", f"got {sorted(unknown)[0]!r}, expected one of {', '.join(GroupResult)}"
    return None
