"""The declaration of a role: its name, its topics, how many workers it has, and what it takes to start one.

The declaration of each role stands in `rftstream/roles/<role>/__init__.py`; everything that must know which roles
there are (the commands, the supervisor, the simulation, metrics, estimates, docs) reads it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rftstream.config.sections import RunConfig


EVERY_ROLE_READS = ("control", "steps", "summaries")
"""Topics that a worker of every role reads: they say what the run should do, which records are in force, and what the
records so far amount to."""

SINGLE_ROLES_WRITE = ("control", "dead")
"""Topics that every single role writes beside its own: claims, and records that it cannot deal with."""


class RoleKind(StrEnum):
    """How the workers of a role share its work, and so which loop drives it."""

    concurrent = "concurrent"
    """Any number of workers share the partitions of its topics; each works on many records at once."""
    single = "single"
    """One worker is in force per run; it reads by position, and its outputs are whole transactions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """The declaration of a role. `rftstream/roles/__init__.py` lists them all. It is cheap to import: `build` only
    names what it takes to build the role."""

    name: str
    """Its name in `--role`, logs, claims and metrics; also the name of its consumer group."""
    kind: RoleKind
    """Which loop drives it."""
    build: str
    """`module:function`, called with a RoleContext; returns the role's step."""
    summary: str
    """One line about the role's work, for help and docs."""
    consumes: tuple[str, ...] = ()
    """Topics whose positions it commits (or keeps in its checkpoint)."""
    follows: tuple[str, ...] = ()
    """Topics of which it sees everything from the start, or from where `recover` says."""
    summarised: tuple[str, ...] = ()
    """Concurrent roles: topics of `follows` that it sees from their newest summary on, and that first."""
    produces: tuple[str, ...] = ()
    """Topics that it writes."""
    looks_up: tuple[str, ...] = ()
    """Topics beside these in which it reads single records, or counts what is there."""
    deletes: tuple[str, ...] = ()
    """Topics from which it deletes records that nobody needs any more."""
    sees_positions: bool = False
    """It asks for the positions of the other roles' consumer groups."""
    keeps: str | None = None
    """Concurrent roles: the topic, partitioned like what it consumes, on which it saves what is not finished."""
    positions: tuple[str, ...] = ()
    """Topics whose positions its consumer group commits; position 0 of each is committed when a run is made."""
    chosen: Callable[[RunConfig], tuple[str, ...]] = lambda config: ()
    """Topics that the run file has it consume, beside `consumes`. Their positions are committed like `positions`."""
    count: Callable[[RunConfig], int] = lambda config: 1
    """How many workers `rftstream run` starts."""
    devices: Callable[[RunConfig], tuple[str, ...]] = lambda config: ()
    """Devices of its workers: worker i gets devices[i mod n]; () for none."""
    parts: Callable[[RunConfig], tuple[tuple[str, str], ...]] = lambda config: ()
    """(kind, name) of the parts that are slow to import; a warm interpreter imports them before it forks."""
    begin_metrics: Callable[[], None] = lambda: None
    """Makes the role's own metrics start with 0."""
    makes_the_run: bool = False
    """It writes the run's manifest; the workers of all other roles wait for that."""
    outlives_the_run: bool = False
    """It may have something left to do when the run is finished."""
    digests: tuple[str, ...] = ()
    """Digests that a worker compares with the manifest before it works: `model` (without weights), `weights`,
    `templates`."""

    def reads(self, config: RunConfig) -> tuple[str, ...]:
        """Return all topics that its workers read in this run, each once. The log may hide all others from them.

        A role reads what it writes, too: to find out what became of a commit that got no answer."""
        named = (*self.consumes, *self.chosen(config), *self.follows, *self.positions, *self.looks_up)
        return tuple(dict.fromkeys((*named, *self.writes(), *EVERY_ROLE_READS)))

    def writes(self) -> tuple[str, ...]:
        """Return all topics that its workers write, each once. The loop refuses to write others."""
        kept = () if self.keeps is None else (self.keeps,)
        own = SINGLE_ROLES_WRITE if self.kind is RoleKind.single else ()
        return tuple(dict.fromkeys((*self.produces, *kept, *own)))

    def group(self) -> str | None:
        """Return the consumer group for which its workers commit positions; None if they commit none."""
        commits = self.kind is RoleKind.concurrent or bool(self.positions)
        return self.name if commits else None
