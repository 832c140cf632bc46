"""What of a run the trainer keeps: its checkpoints, and with [retention] the records that somebody may still need.

Nothing is deleted before the log says so, durably. A `Trimmed` record names what goes; it is committed like a step,
which a trainer that was replaced cannot do; and whoever chooses what to begin with looks at the newest one first. So a
process that was away deletes, whenever it comes back, only what was given up while it was in force: it can be late, not
wrong. What was said and cannot be deleted yet is owed: the trainer tries again while it works, before it leaves a run
that is finished, and whoever comes next does it otherwise (weights/trimming.py).
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import Trimmed
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError, ContractError, RftError, TransportError, WeightsError
from rftstream.roles.buffer import BUFFER
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.feeder import FEEDER
from rftstream.roles.trainer.completed_groups import CompletedGroups
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.verifier import VERIFIER
from rftstream.service.role import FOREVER, Log
from rftstream.weights.checkpoints import CheckpointStore, is_gone
from rftstream.weights.publisher import object_names
from rftstream.weights.store import ObjectStore
from rftstream.weights.trimming import delete_trimmed

log = logging.getLogger(__name__)

InForce = Callable[[VersionName], bool]

READERS = {topic: spec.name for spec in (EXPLORER, VERIFIER, BUFFER) for topic in spec.consumes}
"""Topics of the flow and the groups that read them."""

STEPS = TopicPartition("steps", 0)

KEY = b"trimmed"
"""Of `Trimmed` on `control`."""

FIRST_PAUSE_S = 1.0
"""Seconds before what could not be deleted is tried again; then twice as long each time."""
LONGEST_PAUSE_S = 30.0
OWED_S = 90.0
"""Seconds that a trainer stays at most, when the run is finished, for what it has said and cannot delete yet. Longer
than a transaction of somebody who died stays open (PRODUCER_TIMEOUT_S, and a broker looks every ten seconds)."""


class Keeping:
    """Of one trainer epoch. `names`: the checkpoints that are kept, oldest first."""

    def __init__(self, config: RunConfig, store: ObjectStore, clock: Clock) -> None:
        self._retention = config.retention
        self._keep = config.trainer.keep_checkpoints
        self._store = store
        self._checkpoints = CheckpointStore(store)
        self._clock = clock
        self._said: Trimmed | None = None
        self.names: list[VersionName] = []
        self._log: Log | None = None
        self._settled = CompletedGroups()
        self._read_outcomes: dict[TopicPartition, int] = {}
        self._marks: deque[tuple[int, dict[str, tuple[int, ...]]]] = deque()
        """How many groups were admitted when the topics of the flow ended at these offsets, oldest first."""
        self._through: Mapping[str, tuple[int, ...]] = {}
        """Where the topics of the flow ended when no group was admitted that is not through by now."""
        self._again_at: float | None = None
        """When what was said and is still there is tried again; None if nothing is owed."""
        self._pause_s = FIRST_PAUSE_S
        self._may_pass = False
        """Whether it may soon be possible, as when somebody's transaction is open; not where rights are missing."""
        self._ended_at: float | None = None
        """When `may_leave` was asked first."""

    def absorb(self, trimmed: Trimmed) -> None:
        self._said = trimmed

    def begin(self, log_: Log) -> None:
        """After `control` was read; does again what a predecessor may have left undone."""
        self._log = log_
        if self._said is not None:
            self._settled = CompletedGroups(self._said.sequence, self._said.groups, self._said.rollouts)
            self.carry_out()
        self.names = self._there()

    def _there(self) -> list[VersionName]:
        """Complete checkpoints that nobody was told to delete."""
        return [name for name in self._checkpoints.names() if not is_gone(name, self._said)]

    # ------------------------------------------------------------------------------------------ checkpoints

    def newest(
        self, in_force: InForce, begins: tuple[int, ...], ends: tuple[int, ...]
    ) -> tuple[VersionName, TrainerProgress] | None:
        """The newest good checkpoint in force that the log has all batches after, `begins` to `ends` of each share.
        None if there is no such; ConfigError if training cannot begin without one, either."""
        begins = _larger(self._offsets("batches"), begins)
        refused: set[VersionName] = set()

        def usable(name: VersionName) -> bool:
            return in_force(name) and name not in refused and not is_gone(name, self._said)

        while (found := self._checkpoints.newest(usable)) is not None:
            name, progress = found[0], TrainerProgress.from_state(found[1])
            if all(
                begin <= position <= end for begin, position, end in zip(begins, progress.positions, ends, strict=True)
            ):
                return name, progress
            log.warning(
                "checkpoint %d/%d: positions %s lie outside the log (%s to %s); the one before is taken",
                name.trainer_epoch,
                name.version,
                progress.positions,
                begins,
                ends,
            )
            refused.add(name)
        if any(begins):
            since = f" of version {self._said.version} or above" if self._said is not None else ""
            raise ConfigError(
                f"trainer: no usable checkpoint, and the batches before {begins} are deleted, expected a checkpoint"
                f"{since} to begin with; put a copy of one back, or begin a new run with model.init_from"
            )
        return None

    def read(self, name: VersionName, folder: Path) -> None:
        self._checkpoints.read(name, folder)

    def write(self, name: VersionName, save: Callable[[Path], None], state: dict[str, Any]) -> None:
        """The log is durable up to its positions before it counts."""
        assert self._log is not None
        self._log.transport.admin.make_durable()
        self._checkpoints.write(name, save, state)
        self.names.append(name)

    # ------------------------------------------------------------------------------------------ what may go

    def plan(self, also: Collection[VersionName], in_force: InForce) -> Trimmed | None:
        """What to say after a checkpoint; None if there is nothing to be deleted. `also`: beside the newest ones."""
        there = self._there()
        wanted = [name for name in there if in_force(name)][-self._keep :]
        if not wanted:
            return None
        kept = tuple(name for name in there if name in {*wanted, *also})
        now = self._said or Trimmed(name=wanted[-1], checkpoints=())
        planned = replace(now, name=wanted[-1], checkpoints=kept, trimmed_at=self._clock.now())
        if self._retention is not None:
            self._mark()
            if len(wanted) >= self._retention.checkpoints:
                planned = self._plan_log(planned, wanted[-self._retention.checkpoints])
        leftovers = self._checkpoints.older_than(planned.name) - set(kept)
        return planned if leftovers or planned.offsets != now.offsets else None

    def _plan_log(self, now: Trimmed, oldest: VersionName) -> Trimmed:
        """Batches before the oldest of these checkpoints, and the flow of all groups that were through before."""
        try:
            positions = TrainerProgress.from_state(self._checkpoints.state(oldest)).positions
        except WeightsError as error:
            log.warning("%s; nothing is deleted from the log for now", error)
            return now
        version = max(now.version, oldest.version)
        self._settle(version)
        offsets = {"batches": _larger(self._offsets("batches"), positions)}
        while self._marks and self._marks[0][0] <= self._settled.sequence:
            self._through = self._marks.popleft()[1]
        for topic, found in self._through.items():
            offsets[topic] = _larger(self._offsets(topic), self._done(topic, found))
        settled = self._settled
        return replace(
            now,
            offsets={**now.offsets, **offsets},
            version=version,
            sequence=settled.sequence,
            groups=dict(settled.groups),
            rollouts=dict(settled.rollouts),
        )

    def _mark(self) -> None:
        """Ends first: all that stands below them belongs to groups which the feeder's count, read later, includes."""
        assert self._log is not None
        ends = {topic: _in_order(self._log.ends(topic)) for topic in READERS}
        cursor = self._log.committed(FEEDER.name).get(STEPS)
        admitted = json.loads(cursor.metadata)["admitted"] if cursor is not None and cursor.metadata else 0
        self._marks.append((admitted, ends))

    def _settle(self, version: int) -> None:
        assert self._log is not None
        for received in self._log.messages("outcomes", start=self._read_outcomes):
            if isinstance(received.message, GroupOutcome):
                self._settled.add(received.message)
            self._read_outcomes[received.record.place] = received.record.offset + 1
            self._settled.advance(version)
        self._settled.advance(version)

    def _done(self, topic: str, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """No further than its readers have committed."""
        assert self._log is not None
        committed = self._log.committed(READERS[topic])
        low_water = _in_order({place: one.offset for place, one in committed.items() if place.topic == topic})
        return tuple(min(pair) for pair in zip(offsets, low_water, strict=True))

    def _offsets(self, topic: str) -> tuple[int, ...]:
        """The first ones that are kept, as was said."""
        return self._said.offsets.get(topic, ()) if self._said is not None else ()

    # ------------------------------------------------------------------------------------------ deleting

    @property
    def owes(self) -> bool:
        """Whether something that was said may still be there."""
        return self._again_at is not None

    def again_in_s(self) -> float:
        """Return the seconds until what is owed is tried again; FOREVER if nothing is owed."""
        return FOREVER if self._again_at is None else max(0.0, self._again_at - self._clock.now())

    def delete_owed(self) -> None:
        """Try again to delete what was said, if it is time."""
        if self.again_in_s() <= 0:
            self.carry_out()

    def carry_out(self) -> None:
        """Delete what was said. What cannot be deleted now stays said, and is owed."""
        assert self._log is not None and self._said is not None
        said = self._said
        self._owe(delete_trimmed(said, self._log.transport, self._checkpoints, compacts=self._retention is not None))
        self.names = [name for name in self.names if not is_gone(name, said)]

    def _owe(self, errors: Sequence[RftError]) -> None:
        """What these errors left is tried again after a pause; without errors nothing is owed."""
        if not errors:
            self._again_at, self._pause_s = None, FIRST_PAUSE_S
            return
        level = logging.WARNING if self._pause_s == FIRST_PAUSE_S else logging.DEBUG
        for error in errors:
            log.log(level, "%s; what was given up is deleted later, next try in %g s", error, self._pause_s)
        self._again_at = self._clock.now() + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._may_pass = any(isinstance(error, TransportError) and error.retriable for error in errors)

    # ------------------------------------------------------------------------------------------ when the run is over

    def may_leave(self) -> bool:
        """Return whether a finished run leaves nothing to be deleted, or nothing that can be deleted soon."""
        now = self._clock.now()
        self._ended_at = now if self._ended_at is None else self._ended_at
        if not self.owes:
            return True
        if self._may_pass and now - self._ended_at < OWED_S:
            return False
        log.warning("what was given up may still be there; `rftstream resume` deletes it, also of a run that has ended")
        return True

    def after_the_end(self, log_: Log) -> bool:
        """Delete what the trainer of a finished run has left; return False to be asked again a moment later.

        A process that starts when the run is finished calls this. It has not taken the role, and needs not: what was
        said may be deleted by anybody."""
        if self._log is None or self.again_in_s() <= 0:
            self._log = log_
            try:
                self._said = _newest_said(log_)
            except TransportError as error:
                self._owe([error])
            else:
                self._owe([])
                if self._said is not None:
                    self.carry_out()
        return self.may_leave()

    # ------------------------------------------------------------------------------------------ weights

    def delete_weights(self, names: Collection[VersionName]) -> None:
        """Of versions that an announcement said are gone. What cannot be deleted now is said again by the next one."""
        if not names:
            return
        assert self._log is not None
        try:
            self._log.transport.admin.make_durable()
            for name in names:
                for one in object_names(name):
                    self._store.delete(one)
        except (WeightsError, TransportError) as error:
            log.warning("%s; old weights are deleted after the next version", error)


def _newest_said(log_: Log) -> Trimmed | None:
    """TransportError while somebody's open transaction may hide it."""
    found = None
    for record in log_.read("control", settled=True):
        if record.key == KEY and record.value is not None:
            with suppress(ContractError):
                message = codec.from_record(record)
                found = message if isinstance(message, Trimmed) else found
    return found


def _in_order(offsets: Mapping[TopicPartition, int]) -> tuple[int, ...]:
    return tuple(offset for _, offset in sorted(offsets.items()))


def _larger(before: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(pair) for pair in zip(before, offsets, strict=True)) if before else offsets
