"""Lists the versions of a run's weights and their state: `rftstream weights list` and `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rftstream.contracts.versions import WeightsAnnounced, WeightsKind
from rftstream.queries.formatting import moment, size
from rftstream.runs.published import Published

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLine:
    """A version in force and the state of its weights. `list_versions` makes it."""

    version: int
    trainer_epoch: int
    kind: str
    """"anchor" or "delta"."""
    state: str
    """"kept", "deleted" (the run gave it up), or "missing": the object, or one that it depends on, is not there though
    it should be."""
    num_bytes: int
    """Bytes of the snapshot, or of the delta."""
    delta_bytes: int | None
    """Bytes of the delta from the version's parent; None if there is no delta."""
    parent: int | None
    announced_at: float
    object: str


def list_versions(published: Published) -> list[VersionLine]:
    """Return the versions in force, oldest first."""
    available = {one.name for one in published.follower.available()}
    return [
        _line(one, "kept" if one.name in available else "deleted" if one.name in published.gone else "missing")
        for one in published.follower.in_force()
    ]


def lines_to_table(lines: Sequence[VersionLine], title: str) -> Table:
    """Return the lines as a table for a terminal."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("version", "epoch", "kind", "size", "as delta", "parent", "announced", "state"):
        table.add_column(heading, justify="right" if heading in ("version", "epoch", "size", "as delta") else "left")
    styles = {"kept": "", "deleted": "dim", "missing": "bold red"}
    for line in lines:
        delta = "-" if line.delta_bytes is None else size(line.delta_bytes)
        parent = "-" if line.parent is None else str(line.parent)
        table.add_row(
            str(line.version),
            str(line.trainer_epoch),
            line.kind,
            size(line.num_bytes),
            delta,
            parent,
            moment(line.announced_at),
            line.state,
            style=styles[line.state],
        )
    return table


def _line(one: WeightsAnnounced, state: str) -> VersionLine:
    anchor = one.kind is WeightsKind.full
    parent = one.delta.parent if one.delta is not None else one.parent
    delta_bytes = one.delta.num_bytes if one.delta is not None else None if anchor else one.num_bytes
    return VersionLine(
        version=one.name.version,
        trainer_epoch=one.name.trainer_epoch,
        kind="anchor" if anchor else "delta",
        state=state,
        num_bytes=one.num_bytes,
        delta_bytes=delta_bytes,
        parent=None if parent is None else parent.version,
        announced_at=one.announced_at,
        object=one.object,
    )
