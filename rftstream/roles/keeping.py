"""What of a run the trainer keeps: its checkpoints, and with [retention] the records that somebody may still need.

Nothing is deleted before the log says so, durably. A `Trimmed` record names what goes; it is committed like a step,
which a trainer that was replaced cannot do; and whoever chooses what to begin with looks at the newest one first. So a
process that was away deletes, whenever it comes back, only what was given up while it was in force: it can be late, not
wrong.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rftstream import faults
from rftstream.clock import Clock
from rftstream.errors import ConfigError, TransportError, WeightsError
from rftstream.messages import GroupOutcome, Trimmed, VersionName
from rftstream.roles.progress import Progress
from rftstream.roles.settled import SettledGroups
from rftstream.runtime.role import Log
from rftstream.sections import RunConfig
from rftstream.transport.base import TopicPartition
from rftstream.weights.checkpoints import CheckpointStore, is_gone
from rftstream.weights.publisher import object_names
from rftstream.weights.store import ObjectStore

log = logging.getLogger(__name__)

InForce = Callable[[VersionName], bool]

READERS = {"tasks": "explorer", "rollouts": "verifier", "verified": "buffer"}
"""Topics of the flow and the groups that read them."""

STEPS = TopicPartition("steps", 0)


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
        self._settled = SettledGroups()
        self._read_outcomes: dict[TopicPartition, int] = {}
        self._marks: deque[tuple[int, dict[str, tuple[int, ...]]]] = deque()
        """How many groups were admitted when the topics of the flow ended at these offsets, oldest first."""
        self._through: Mapping[str, tuple[int, ...]] = {}
        """Where the topics of the flow ended when no group was admitted that is not through by now."""

    def absorb(self, trimmed: Trimmed) -> None:
        self._said = trimmed

    def begin(self, log_: Log) -> None:
        """After `control` was read; does again what a predecessor may have left undone."""
        self._log = log_
        if self._said is not None:
            self._settled = SettledGroups(self._said.sequence, self._said.groups, self._said.rollouts)
            self.carry_out()
        self.names = self._there()

    def _there(self) -> list[VersionName]:
        """Complete checkpoints that nobody was told to delete."""
        return [name for name in self._checkpoints.names() if not is_gone(name, self._said)]

    # ------------------------------------------------------------------------------------------ checkpoints

    def newest(
        self, in_force: InForce, begins: tuple[int, ...], ends: tuple[int, ...]
    ) -> tuple[VersionName, Progress] | None:
        """The newest good checkpoint in force that the log has all batches after, `begins` to `ends` of each share.
        None if there is no such; ConfigError if training cannot begin without one, either."""
        begins = _larger(self._offsets("batches"), begins)
        refused: set[VersionName] = set()

        def usable(name: VersionName) -> bool:
            return in_force(name) and name not in refused and not is_gone(name, self._said)

        while (found := self._checkpoints.newest(usable)) is not None:
            name, progress = found[0], Progress.from_state(found[1])
            if all(begin <= position <= end for begin, position, end in
                   zip(begins, progress.positions, ends, strict=True)):  # fmt: skip
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
            positions = Progress.from_state(self._checkpoints.state(oldest)).positions
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
        cursor = self._log.committed("feeder").get(STEPS)
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

    def carry_out(self) -> None:
        """Deletes what was said. What cannot be deleted now stays said, and goes after the next checkpoint."""
        assert self._log is not None and self._said is not None
        said = self._said
        try:
            # An open transaction may hide it from everybody who would miss what was deleted.
            self._log.transport.admin.end_offsets("control", settled=True)
            self._log.transport.admin.make_durable()
        except TransportError as error:
            log.warning("%s; what was given up is deleted after the next checkpoint", error)
            return
        faults.at("trim_said")
        for topic, offsets in said.offsets.items():
            places = {TopicPartition(topic, partition): offset for partition, offset in enumerate(offsets)}
            try:
                self._log.transport.admin.delete_before(places)
            except TransportError as error:
                log.warning("%s; records of %s are deleted after the next checkpoint", error, topic)
        if self._retention is not None:
            try:
                self._log.transport.admin.compact("partials")
            except TransportError as error:
                log.warning("%s; partials is compacted after the next checkpoint", error)
        faults.at("trim_log_done")
        try:
            for name in self._checkpoints.older_than(said.name) - set(said.checkpoints):
                self._checkpoints.delete(name)
        except WeightsError as error:
            log.warning("%s; old checkpoints are deleted after the next one", error)
        self.names = [name for name in self.names if not is_gone(name, said)]

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


def _in_order(offsets: Mapping[TopicPartition, int]) -> tuple[int, ...]:
    return tuple(offset for _, offset in sorted(offsets.items()))


def _larger(before: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(pair) for pair in zip(before, offsets, strict=True)) if before else offsets
