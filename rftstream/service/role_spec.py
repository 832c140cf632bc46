"""The declaration of a role: its name, its topics, its number of workers, and how to start one.

The declaration of each role is in `rftstream/roles/<role>/__init__.py`. All code that must know the roles (commands,
supervisor, simulation, metrics, estimates, docs) reads them from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rftstream.config.sections import RunConfig


EVERY_ROLE_READS = ("control", "steps", "summaries")
"""Topics that a worker of every role reads: the state that the run should have, the records in force, and their
summaries."""

SINGLE_ROLES_WRITE = ("control", "dead")
"""Topics that every single role writes beside its own: claims and dead letters."""


class RoleKind(StrEnum):
    """How the workers of a role share its work. This determines the loop that drives it."""

    concurrent = "concurrent"
    """Any number of workers share the partitions of its topics; each works on many records at once."""
    single = "single"
    """One worker is in force per run; it reads by position, and its outputs are whole transactions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """The declaration of a role. `rftstream/roles/__init__.py` lists all of them. It is cheap to import: `build` only
    names the function that builds the role."""

    name: str
    """Its name in `--role`, logs, claims and metrics; also the name of its consumer group."""
    kind: RoleKind
    """Which loop drives it."""
    build: str
    """`module:function`, called with a RoleContext; returns the role's step."""
    summary: str
    """One line about the role's work, for help and docs."""
    consumes: tuple[str, ...] = ()
    """Topics whose positions the role commits, or keeps in its checkpoint."""
    follows: tuple[str, ...] = ()
    """Topics of which the role sees every record, from the beginning or from the position that `recover` returns."""
    summarised: tuple[str, ...] = ()
    """Concurrent roles: topics of `follows` that are delivered as their newest summary and the records after it."""
    produces: tuple[str, ...] = ()
    """Topics that it writes."""
    looks_up: tuple[str, ...] = ()
    """Further topics in which the role reads single records or counts records."""
    deletes: tuple[str, ...] = ()
    """Topics from which the role deletes records that are no longer needed."""
    sees_positions: bool = False
    """Whether the role reads the positions of other roles' consumer groups."""
    keeps: str | None = None
    """Concurrent roles: the topic on which unfinished work is saved. It has the same partitions as the consumed
    topic."""
    positions: tuple[str, ...] = ()
    """Topics whose positions the role's consumer group commits. Position 0 of each is committed when a run is made."""
    chosen: Callable[[RunConfig], tuple[str, ...]] = lambda config: ()
    """Further topics that the role consumes according to the run file. Their positions are committed like
    `positions`."""
    count: Callable[[RunConfig], int] = lambda config: 1
    """How many workers `rftstream run` starts."""
    devices: Callable[[RunConfig], tuple[str, ...]] = lambda config: ()
    """Devices of the workers: worker i gets devices[i mod n]; () for none."""
    parts: Callable[[RunConfig], tuple[tuple[str, str], ...]] = lambda config: ()
    """(kind, name) of the parts that are slow to import. A warm interpreter imports them before it forks."""
    begin_metrics: Callable[[], None] = lambda: None
    """Sets the role's own metrics to 0 at the start."""
    makes_the_run: bool = False
    """Whether the role writes the run's manifest. The workers of all other roles wait for the manifest."""
    outlives_the_run: bool = False
    """Whether the role may have work left when the run is finished."""
    digests: tuple[str, ...] = ()
    """Digests that a worker compares with the manifest before it works: `model` (without weights), `weights`,
    `templates`."""

    def reads(self, config: RunConfig) -> tuple[str, ...]:
        """Return all topics that the role's workers read in this run, each once. Rights on the log may hide all other
        topics.

        A role also reads the topics that it writes, to find out what became of a commit without an answer."""
        named = (*self.consumes, *self.chosen(config), *self.follows, *self.positions, *self.looks_up)
        return tuple(dict.fromkeys((*named, *self.writes(), *EVERY_ROLE_READS)))

    def writes(self) -> tuple[str, ...]:
        """Return all topics that the role's workers write, each once. The loop refuses to write to other topics."""
        kept = () if self.keeps is None else (self.keeps,)
        own = SINGLE_ROLES_WRITE if self.kind is RoleKind.single else ()
        return tuple(dict.fromkeys((*self.produces, *kept, *own)))

    def group(self) -> str | None:
        """Return the consumer group for which its workers commit positions; None if they commit none."""
        commits = self.kind is RoleKind.concurrent or bool(self.positions)
        return self.name if commits else None
