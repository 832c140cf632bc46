"""The rule for topics that a single role writes: which of their records are in force. All readers use it.

A record is in force if the epoch under which it was written was claimed for the role that writes the topic, and if it
follows from what stands before it. Anything else is foreign: somebody else wrote it, or it is damaged. It changes
nothing for anybody, and is passed over.

- On `control`, claims of a role follow one another by one. The first good manifest is the manifest. What the trainer
  and the feeder say there (`finished`, `trimmed`, `end`) counts under the epoch that is in force at this place, and
  `trimmed` may contradict neither the log's ends nor what was said before, and its checkpoint's version is on `steps`.
- On `weights` and `steps` each record names a version of its writer's epoch, newer than the one before.
- On `batches` a record belongs to the chain of batches, which roles/trainer/assembly.py puts together.

A claim is on the log before anything else of its epoch, but a reader may see another topic first. So on an epoch that
it does not know, it reads `control` to its end, and only then decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rftstream.contracts import codec
from rftstream.contracts.control import Claim, Drawn, RunFinished, RunManifest, TasksEnded, Trimmed
from rftstream.contracts.messages import Message
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.rules import show
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.contracts.versions import WeightsAnnounced as Announced
from rftstream.errors import ContractError, ForeignRecord
from rftstream.service.reading import read_to_ends
from rftstream.transport.base import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTROL = TopicPartition("control", 0)
STEPS = TopicPartition("steps", 0)
RULED = frozenset(("control", *(name for name, topic in TOPICS.items() if topic.writer is not None)))
"""Topics that the rule is about."""
PASSED_OVER = frozenset(("control", "weights", "steps"))
"""Topics on which a record that cannot be decoded is passed over, too: the next record says all that it said."""


class RecordsInForce:
    """Judges records as a reader meets them.

    Each reader of a log has one of its own, and hands it the records of a topic in order, from the beginning of the
    topic. Handed the same record again, it gives the same answer again."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._claims: dict[str, Claim] = {}
        self._has_manifest = False
        self._trimmed: Trimmed | None = None
        self._next_offset = 0
        """The offset on `control` below which everything was judged."""
        self._newest: dict[tuple[str, str], tuple[VersionName, int]] = {}
        """The newest version, and the offset of the last record that is not foreign, by topic and model."""
        self._names: defaultdict[str, set[VersionName]] = defaultdict(set)
        """The versions that stand on each topic."""
        self._made: set[tuple[bytes | None, bytes | None]] = set()
        """Trainer epochs and versions that the headers of `steps` name."""
        self._steps_end = 0
        """The offset on `steps` below which they were read."""
        self._foreign: dict[tuple[str, int], str] = {}
        """Why a record is foreign, by topic and offset. These topics have one partition."""
        self._is_compacted: bool | None = None

    def check(self, record: Record, message: Message) -> None:
        """Raise ForeignRecord unless the record is in force. TransportError if the log does not answer; the caller then
        asks again."""
        if record.topic in RULED and (why := self._why_foreign(record, message)) is not None:
            raise ForeignRecord(f"foreign: {why}", where=str(record))

    def decode(self, record: Record) -> Message | None:
        """Return the message of a record, None for a tombstone. ContractError if it cannot be decoded. ForeignRecord if
        it is not in force, or if it cannot be decoded on a topic of PASSED_OVER."""
        if record.value is None:
            return None
        try:
            message = codec.from_record(record)
        except ContractError as error:
            if record.topic in PASSED_OVER:
                raise ForeignRecord(error.text, path=error.path, where=error.where) from None
            raise
        self.check(record, message)
        return message

    def messages(self, records: Iterable[Record]) -> Iterator[tuple[Record, Message | None]]:
        """Yield records with their messages, None for tombstones. Records that are foreign or cannot be decoded are
        left out: for somebody who only looks, they must not end a run, and the roles report them."""
        for record in records:
            try:
                yield record, self.decode(record)
            except ContractError:
                continue

    # ------------------------------------------------------------------------------------------ epochs

    def _is_claimed(self, role: str, epoch: int) -> bool:
        """Return whether the role was ever claimed under this epoch. It reads `control` to its end before it says
        no."""
        known = self._claims.get(role)
        for settled in (False, True):  # an open transaction may hide a claim
            if known is None or epoch > known.epoch:
                self._read_on(settled=settled)
                known = self._claims.get(role)
        if known is None:
            return self._may_lack_claims()
        return 1 <= epoch <= known.epoch

    def _rules(self, role: str, epoch: int) -> bool:
        """Return whether the role is held under this epoch at the place of `control` that is judged."""
        known = self._claims.get(role)
        return self._may_lack_claims() if known is None else epoch == known.epoch

    def _read_on(self, *, settled: bool) -> None:
        """Judge `control` up to its end; `settled` as for `Admin.end_offsets`."""
        end = self._transport.admin.end_offsets("control", settled=settled)[CONTROL]
        if end <= self._next_offset:
            return
        begin = self._transport.admin.begin_offsets("control")[CONTROL]
        reader = self._transport.reader({CONTROL: max(begin, self._next_offset)})
        try:
            for records in read_to_ends(self._transport, reader, {CONTROL: end}):
                for _ in self.messages(records):
                    pass  # the records only have to be judged
            self._next_offset = max(self._next_offset, end)
        finally:
            reader.close()

    def _may_lack_claims(self) -> bool:
        """Return whether claims may have been compacted away. Runs from before the rule have such a `control`."""
        if self._is_compacted is None:
            self._is_compacted = self._transport.admin.topics()["control"].compacted
        return self._is_compacted

    # ------------------------------------------------------------------------------------------ records

    def _why_foreign(self, record: Record, message: Message) -> str | None:
        match message:
            case Announced() | StepRecord():
                return self._of_version(record, message)
        if record.topic != "control":
            role, epoch = TOPICS[record.topic].writer or "", writer_epoch(record)
            return None if self._is_claimed(role, epoch) or self._may_lack_claims() else _unclaimed(role, epoch)
        place = (record.topic, record.offset)
        if record.offset >= self._next_offset:
            if (why := self._of_control(record, message)) is not None:
                self._foreign[place] = why
            self._next_offset = record.offset + 1
        return self._foreign.get(place)

    def _of_version(self, record: Record, message: Announced | StepRecord) -> str | None:
        key = (record.topic, message.model if isinstance(message, Announced) else "")
        newest, offset = self._newest.get(key, (None, -1))
        place = (record.topic, record.offset)
        if record.offset <= offset or place in self._foreign:
            return self._foreign.get(place)
        name, epoch = message.name, writer_epoch(record)
        why = None
        if epoch != name.trainer_epoch:
            why = f"a version of trainer epoch {name.trainer_epoch}, written under epoch {epoch}"
        elif not self._is_claimed(RoleName.trainer, epoch):
            why = _unclaimed(RoleName.trainer, epoch)
        elif name in self._names[record.topic]:
            why = f"version {name.version} of epoch {epoch} stands there already"
        elif newest is not None and epoch == newest.trainer_epoch and name.version <= newest.version:
            why = f"version {name.version} does not follow version {newest.version} of the same trainer"
        if why is not None:
            self._foreign[place] = why
        else:
            self._names[record.topic].add(name)
            # A replaced trainer may still write versions; by the rule of weights/lineage.py they are out of force.
            self._newest[key] = (name if newest is None else max(newest, name, key=_in_order)), record.offset
        return why

    def _of_control(self, record: Record, message: Message) -> str | None:
        epoch = writer_epoch(record)
        match message:
            case Claim():
                return self._of_claim(message)
            case RunManifest():
                if self._has_manifest:
                    return "a second manifest; the first good one is the run's"
                self._has_manifest = True
            case TasksEnded():
                was_imported = message.reason == "imported" and epoch == 0 and RoleName.feeder not in self._claims
                if not was_imported and not self._rules(RoleName.feeder, epoch):
                    return _not_in_force(RoleName.feeder, epoch, self._claims)
            case Drawn():
                if not self._rules(RoleName.feeder, epoch):
                    return _not_in_force(RoleName.feeder, epoch, self._claims)
            case RunFinished():
                if not self._rules(RoleName.trainer, epoch) or message.name.trainer_epoch != epoch:
                    return _not_in_force(RoleName.trainer, epoch, self._claims)
            case Trimmed():
                if not self._rules(RoleName.trainer, epoch):
                    return _not_in_force(RoleName.trainer, epoch, self._claims)
                if (why := self._contradiction(message)) is not None:
                    return why
                self._trimmed = message
        return None

    def _of_claim(self, claim: Claim) -> str | None:
        known = self._claims.get(claim.role)
        follows = known.epoch + 1 if known is not None else 1
        if claim.epoch != follows and (known is not None or not self._may_lack_claims()):
            return f"a claim of epoch {claim.epoch} by {claim.process}, expected {follows}: claims follow one by one"
        self._claims[claim.role] = claim
        return None

    def _contradiction(self, said: Trimmed) -> str | None:
        """Return why the record contradicts the log, or None. What it deletes must have been there, and must stay
        deleted."""
        before = self._trimmed
        if before is not None and (said.version < before.version or said.sequence < before.sequence):
            return f"it takes back that what is below version {before.version} was deleted"
        if said.version > said.name.version:
            return (
                f"it deletes what is below version {said.version}, and its newest checkpoint is of {said.name.version}"
            )
        if said.name.version and not self._was_made(said.name):
            return f"its checkpoint is of version {said.name.version} of epoch {said.name.trainer_epoch}, not on steps"
        for topic, offsets in said.offsets.items():
            if topic not in TOPICS:
                return f"it deletes from {show(topic)}, which is no topic"
            ends = [end for _, end in sorted(self._transport.admin.end_offsets(topic).items())]
            kept = (before.offsets.get(topic) if before is not None else None) or (0,) * len(ends)
            if len(offsets) != len(ends) or any(offset > end for offset, end in zip(offsets, ends, strict=True)):
                return f"it deletes {topic} up to {offsets}, but the log ends at {tuple(ends)}"
            if any(offset < least for offset, least in zip(offsets, kept, strict=True)):
                return f"it takes back that {topic} was deleted up to {kept}"
        return None

    def _was_made(self, name: VersionName) -> bool:
        """Return whether the version stands on `steps`, read to its end before the answer is no: a step is there before
        a checkpoint of it is spoken of."""
        wanted = (b"%d" % name.trainer_epoch, b"%d" % name.version)
        for settled in (False, True):  # an open transaction may hide it
            if wanted not in self._made:
                self._read_steps(settled=settled)
        return wanted in self._made

    def _read_steps(self, *, settled: bool) -> None:
        """Read on where the last look at `steps` ended: a run deletes something after each checkpoint, and each time it
        is judged by the steps."""
        end = self._transport.admin.end_offsets("steps", settled=settled)[STEPS]
        start = max(self._steps_end, self._transport.admin.begin_offsets("steps")[STEPS])
        if start >= end:
            return
        reader = self._transport.reader({STEPS: start}, bodies=False)
        try:
            for records in read_to_ends(self._transport, reader, {STEPS: end}):
                self._made.update((one.header("trainer_epoch"), one.header("version")) for one in records)
        finally:
            reader.close()
        self._steps_end = end


def writer_epoch(record: Record) -> int:
    """Return the epoch under which a record says it was written; -1 if it says none."""
    text = record.header("writer_epoch") or b""
    return int(text) if text.isdigit() and len(text) < 20 else -1


def _in_order(name: VersionName) -> tuple[int, int]:
    return name.trainer_epoch, name.version


def _unclaimed(role: str, epoch: int) -> str:
    return f"written under {role} epoch {epoch}, which nobody claimed"


def _not_in_force(role: str, epoch: int, claims: Mapping[str, Claim]) -> str:
    known = claims.get(role)
    return f"written under {role} epoch {epoch}, expected the one in force, {known.epoch if known else 'none yet'}"
