"""What a simulated run deletes: said before, needed by nobody, and never by a trainer that was replaced."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rftstream.contracts.control import Trimmed
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.versions import StepRecord, VersionName, WeightsAnnounced
from rftstream.weights.checkpoints import CheckpointStore, is_gone
from rftstream.weights.lineage import Lineage
from rftstream.weights.version_parts import objects_of, parse_object_name

if TYPE_CHECKING:
    from tests.simulation.laws import Laws

READERS = {"tasks": "explorer", "rollouts": "verifier", "verified": "buffer"}


class Deletions:
    def __init__(self, laws: Laws) -> None:
        self._laws = laws
        self._lineage = Lineage()
        self._recorded: set[VersionName] = set()
        self._sequences: dict[TopicPartition, dict[int, int]] = defaultdict(dict)
        """Offset -> sequence of the group, on the topics of the flow."""
        self._begins: Counter[TopicPartition] = Counter()
        self._newest: WeightsAnnounced | None = None
        self._parents: dict[VersionName, VersionName | None] = {}
        """Of announced versions that were not given up; None: an anchor."""
        self._objects: dict[VersionName, list[str]] = {}
        """Of the same versions: all from which they are made, beside their parents."""
        self._there: set[VersionName] = set()
        """Versions that had objects when the newest one was announced."""
        self.num_deltas = 0
        self.said: Trimmed | None = None
        self.num_deleted = 0
        """Records of the flow."""

    def begin_at(self, begins: Mapping[TopicPartition, int]) -> None:
        """So much is deleted already."""
        self._begins = Counter(begins)

    def look(self, record: Record) -> None:
        sequence = record.header("sequence")
        if record.topic in READERS and sequence is not None and not self.is_deleted(record):
            self._sequences[record.place][record.offset] = int(sequence)

    def is_deleted(self, record: Record) -> bool:
        return record.offset < self._begins[record.place]

    def step(self, step: StepRecord) -> None:
        if step.resumed:
            self._lineage.start(step.name)
        self._recorded.add(step.name)

    def announced(self, message: WeightsAnnounced, *, again: bool) -> None:
        """What stays can still be made: nothing that it is made from goes. What was stored when the version before was
        announced, and is no version, goes: parts of one that was never completed, or that came too late. `again`: read
        once more, with what is stored now."""
        assert all(name != message.name for name in message.gone)
        there = set() if again else {parse_object_name(one) for one in self._laws.simulation.store.objects}
        is_next = self._newest is not None and self._newest.name.trainer_epoch == message.name.trainer_epoch
        for name in sorted(self._there & there) if is_next else ():
            is_known = name in self._parents or name in message.gone or name > message.name
            assert is_known, f"objects of {name}, which is no version, were there at the one before and stay"
        self._there = {name for name in there if name is not None}
        self._newest = message
        self._parents[message.name] = message.parent
        self._objects[message.name] = [one.object for one in objects_of(message)]
        self.num_deltas += message.parent is not None
        for name in message.gone:
            self._parents.pop(name, None)
            self._objects.pop(name, None)
        for name, parent in self._parents.items():
            assert parent is None or parent in self._parents, f"{name} stays, its parent {parent} goes"

    def say(self, trimmed: Trimmed) -> None:
        """It only grows, and it is true."""
        before, laws = self.said, self._laws
        self.said = trimmed
        if before is not None:
            assert trimmed.sequence >= before.sequence
            assert trimmed.version >= before.version
            for topic, offsets in before.offsets.items():
                assert all(map(int.__ge__, trimmed.offsets[topic], offsets))
            assert not [name for name in trimmed.checkpoints if is_gone(name, before)], "what is gone comes not back"
        assert bool(trimmed.offsets) <= (laws.config.retention is not None)
        groups = [one for one in laws.outcomes.values() if one.sequence < trimmed.sequence]
        fates = Counter("trained" if one.result is GroupResult.batched else str(one.result) for one in groups)
        assert dict(fates) == trimmed.groups
        assert sum(fates.values()) == trimmed.sequence
        sizes = sum(len(laws.admitted[one.group_id]) for one in groups)
        assert sum(trimmed.rollouts.values()) == sizes
        assert all(one.batch_sequence is None or one.batch_sequence < trimmed.version for one in groups)
        assert all(offer.until < trimmed.version for one in groups for offer in one.offers), "a batch may use it"
        assert trimmed.version <= laws.version

    def check(self) -> None:
        """After every change of the log."""
        laws, said = self._laws, self.said
        if self._newest is not None:
            name: VersionName | None = self._newest.name
            while name is not None:
                gone = [one for one in self._objects[name] if one not in laws.simulation.store.objects]
                assert not gone, f"{gone} of {name}, which the newest weights are made from, are gone"
                name = self._parents[name]
        if said is not None:
            for name in said.checkpoints:
                where = f"checkpoints/{name.trainer_epoch:06d}-{name.version:08d}/manifest.json"
                assert where in laws.simulation.store.objects, f"{name} was to be kept"
        partitions = laws.simulation.log.partitions
        moved = [place for place, one in partitions.items() if one.begin > self._begins[place]]
        for place in moved:
            self._deleted(place, partitions[place].begin)
        if any(place.topic == "batches" for place in moved):
            self._checkpoints()

    def _deleted(self, place: TopicPartition, begin: int) -> None:
        assert self.said is not None
        assert begin <= self.said.offsets[place.topic][place.partition], "deleted before it was said"
        if place.topic in READERS:
            group = self._laws.simulation.log.groups[READERS[place.topic]]
            assert begin <= group.positions[place].offset, f"{place}: its readers are not there yet"
            for offset in range(self._begins[place], begin):
                sequence = self._sequences[place].pop(offset, None)
                if sequence is None:  # a mark, or what was never committed
                    continue
                assert sequence < self.said.sequence, f"{place}@{offset}: of a group that is not through"
                self.num_deleted += 1
        self._begins[place] = begin

    def _checkpoints(self) -> None:
        """The newest ones in force can be begun with. There may be none of a short run that was killed when it had
        ended: it would begin with its first batch, if that is still there."""
        retention = self._laws.config.retention
        assert retention is not None
        store = CheckpointStore(self._laws.simulation.store)
        names = [one for one in store.names() if one in self._recorded and self._lineage.in_force(one)]
        names = [one for one in names if not is_gone(one, self.said)][-retention.checkpoints :]
        assert names or not any(self._begins.values()), "deleted, and there is no checkpoint to begin with"
        for name in names:
            positions = store.state(name)["positions"]
            for share, position in enumerate(positions):
                assert position >= self._begins[TopicPartition("batches", share)], f"batches after {name} are gone"

    def check_end(self) -> None:
        if self._laws.config.retention is None:
            assert not any(self._begins.values()), "deleted without being asked to"
        elif self._begins:
            self._checkpoints()
        if self.said is not None:
            self._carried_out(self.said)

    def _carried_out(self, said: Trimmed) -> None:
        """What the log says is deleted is not there, whoever said it and died."""
        for topic, offsets in said.offsets.items():
            for partition, offset in enumerate(offsets):
                place = TopicPartition(topic, partition)
                assert self._begins[place] >= offset, f"{place}: said to be deleted to {offset}, and still there"
        given_up = CheckpointStore(self._laws.simulation.store).older_than(said.name) - set(said.checkpoints)
        newest = self._laws.claims["trainer"]  # one that was replaced may complete a checkpoint when it is too late
        left = [name for name in given_up if name.trainer_epoch == newest]
        assert not left, f"checkpoints {left} were given up and are still there"
