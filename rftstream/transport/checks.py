"""Checks of arguments and state that all transports share, so that their errors have the same words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import AssignmentLost, ConfigError, PositionMissing, ProducerLost, RecordTooLarge
from rftstream.transport.base import MAX_METADATA_BYTES, Position, Snapshot, TopicSettings

S = TypeVar("S")


PUT_OUT = (
    "%s was put out of the group %s: it gave no sign for longer than transport.session_timeout_s = %g s; its work "
    "begins anew (was the process stopped, or the machine too busy? give it more seconds)"
)
"""The message about a member that the others have removed, with its name, its group, and the setting."""


def own_sources(sources: Collection[object], *kinds: type[S]) -> list[S]:
    """Return the sources passed to `Transport.wait`, as the transport's own types. ConfigError if a source is of
    another type."""
    own = [source for source in sources if isinstance(source, kinds)]
    if len(own) < len(sources):
        kind = next(type(source).__name__ for source in sources if not isinstance(source, kinds))
        raise ConfigError(f"wait: got a {kind} of another transport; wait where it was made")
    return own


def check_owned(
    partition: TopicPartition, assignment: Mapping[TopicPartition, int], *, group: str, member: str
) -> None:
    """Raise AssignmentLost unless the member's assignment has the partition."""
    if partition not in assignment:
        raise AssignmentLost(
            f"group {group}, {partition}: not owned by {member}, only owned partitions can be"
            f" positioned; look at assignment() again"
        )


def choose_positions(
    found: Mapping[TopicPartition, Position], partitions: Collection[TopicPartition], *, group: str, hint: str = ""
) -> dict[TopicPartition, Position]:
    """Return the group's positions of these partitions. PositionMissing, with the hint, if one is missing."""
    missing = [place for place in partitions if place not in found]
    if missing:
        raise PositionMissing(
            f"group {group}: no position for {', '.join(map(str, missing))}, one was expected since the run was made;"
            f" admin.commit_initial makes those of a new run{hint}"
        )
    return {place: found[place] for place in partitions}


def check_commit(
    producer: str,
    positions: Mapping[TopicPartition, Position] | None,
    group: str | None,
    snapshot: Snapshot | None,
    *,
    has_begun: bool,
) -> str | None:
    """Return the group whose positions a commit moves; None if it moves none. ProducerLost if the producer was not
    started or is lost, ConfigError for positions without a group."""
    if not has_begun:
        raise ProducerLost(
            f"producer {producer}: not started, or lost; call start, then read the committed records and positions"
        )
    owner = snapshot.group if snapshot is not None else group
    if positions and owner is None:
        raise ConfigError(f"producer {producer}: positions without a group; give `group` or `snapshot`")
    return owner


def too_large(record: NewRecord, most: int) -> RecordTooLarge:
    """Return the error for a record that is too large for its topic."""
    return RecordTooLarge(
        f"{record.topic}[{record.partition}]: a record of {record.num_bytes} bytes, the topic takes {most}; make it"
        f" smaller or carry its large parts by reference"
    )


def check_metadata(place: TopicPartition, position: Position) -> None:
    """Raise RecordTooLarge if the metadata of a position exceeds its limit."""
    num_bytes = len(position.metadata.encode())
    if num_bytes > MAX_METADATA_BYTES:
        raise RecordTooLarge(
            f"{place}: got {num_bytes} bytes of metadata beside the position, expected at most {MAX_METADATA_BYTES}"
        )


def check_same_settings(
    existing: Mapping[str, TopicSettings], wanted: Mapping[str, TopicSettings], *, prefix: str = "", otherwise: str
) -> None:
    """Raise ConfigError if a topic exists with settings other than the wanted ones.

    `prefix` precedes topic names on the log. `otherwise` names the thing to choose anew, such as "run folder"."""
    for name, settings in wanted.items():
        if name in existing and existing[name] != settings:
            raise ConfigError(
                f"topic {prefix}{name}: exists with {existing[name]}, {settings} was asked for; use the settings"
                f" it was made with, or another {otherwise}"
            )
