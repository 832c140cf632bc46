"""The rule for `control`: which of its records are in force, and what they say by now. RecordsInForce asks it.

Most records of `control` are replaced by later ones: the trainer says after each checkpoint what all deletions amount
to, the feeder how far it has drawn. What is neither replaced nor withdrawn makes the summary of the topic. Its records
stand there unchanged, so that who begins with a summary sees what a reader from the beginning would know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rftstream.contracts import codec
from rftstream.contracts.control import Claim, Drawn, RunFinished, RunManifest, TasksEnded, Trimmed
from rftstream.contracts.messages import Message
from rftstream.contracts.records import Record
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.rules import show
from rftstream.contracts.summaries import ControlSummary, KeptRecord
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ContractError
from rftstream.service.records.versions_in_force import RecordedVersions
from rftstream.transport.base import Transport

MAX_SUMMARY_BYTES = 1 << 20
"""Most bytes of the records in a summary. If there are more, no summary is written."""

WITHDRAWN = (b"finished", b"end", b"state", b"request/")
"""Beginnings of the keys whose records a tombstone withdraws. It has no effect on others."""


@dataclass(frozen=True, slots=True)
class ControlStart:
    """The place at which a reader of `control` begins."""

    offset: int
    """Offset from which the topic is read on."""
    records: tuple[Record, ...] = ()
    """The records below it that still say something, in order."""


class ControlInForce:
    """The state of `control` up to the last record. RecordsInForce makes it, empty or from a summary, and calls one of
    `why_foreign`, `withdraw` and `pass_over` for each record, in order."""

    def __init__(self, transport: Transport, recorded: RecordedVersions, summary: ControlSummary | None = None) -> None:
        """`recorded` tells whether a version is on `steps`."""
        self.claims: dict[str, Claim] = {}
        """The claim in force of each role."""
        self.was_imported = summary is not None and summary.was_imported
        """Whether the tasks are copies of another run's tasks, so that the claims of their feeder are on the other
        run's log."""
        self.next_offset = 0
        """The offset below which all records were judged."""
        self._transport, self._recorded = transport, recorded
        self._trimmed: Trimmed | None = None
        self._has_manifest = False
        self._kept: dict[bytes, Record] = {}
        """The newest record in force of each key."""
        self._unread: list[Record] = []
        """Records that cannot be decoded. A later release may have written them."""
        self._ends: dict[str, list[int]] = {}
        """Topic -> ends of its partitions when they were last asked for."""
        self._is_compacted: bool | None = None
        for record in records_of(summary):
            try:
                self._apply(record, codec.from_record(record))
            except ContractError:
                self._unread.append(record)

    # ------------------------------------------------------------------------------------------ records in order

    def why_foreign(self, record: Record, message: Message, epoch: int) -> str | None:
        """Return why the next record is foreign. Otherwise apply it and return None."""
        why = self._why_foreign(message, epoch)
        if why is None:
            self._apply(record, message)
        self.next_offset = record.offset + 1
        return why

    def withdraw(self, record: Record) -> None:
        """Apply the next record, a tombstone."""
        if (key := record.key or b"").startswith(WITHDRAWN):
            self._kept.pop(key, None)
        self.next_offset = record.offset + 1

    def pass_over(self, record: Record) -> None:
        """Keep the next record, which cannot be decoded, for those who can."""
        self._unread.append(record)
        self.next_offset = record.offset + 1

    def _apply(self, record: Record, message: Message) -> None:
        match message:
            case Claim():
                self.claims[message.role] = message
            case RunManifest():
                self._has_manifest = True
            case Trimmed():
                self._trimmed = message
        self._kept[b"drawn" if isinstance(message, Drawn) else record.key or b""] = record

    def summary(self) -> ControlSummary | None:
        """Return the summary of the topic so far; None if it would be too large."""
        records = sorted((*self._kept.values(), *self._unread), key=lambda record: record.offset)
        if sum(map(_num_bytes, records)) > MAX_SUMMARY_BYTES:
            return None
        kept = tuple(
            KeptRecord(
                offset=record.offset,
                timestamp_s=record.timestamp_s,
                key=record.key,
                value=record.value,
                headers=record.headers,
            )
            for record in records
        )
        return ControlSummary(records=kept, was_imported=self.was_imported)

    # ------------------------------------------------------------------------------------------ who is in force

    def rules(self, role: str, epoch: int) -> bool:
        """Return whether the role is held under this epoch after the last record."""
        known = self.claims.get(role)
        return self.may_lack_claims() if known is None else epoch == known.epoch

    def may_lack_claims(self) -> bool:
        """Return whether claims may have been compacted away. Runs that are older than this rule have such a
        `control`."""
        if self._is_compacted is None:
            self._is_compacted = self._transport.admin.topics()["control"].compacted
        return self._is_compacted

    def _why_foreign(self, message: Message, epoch: int) -> str | None:
        match message:
            case Claim():
                return self._of_claim(message)
            case RunManifest():
                return "a second manifest; the first good one is the run's" if self._has_manifest else None
            case TasksEnded():
                was_imported = message.reason == "imported" and epoch == 0 and RoleName.feeder not in self.claims
                if not was_imported and not self.rules(RoleName.feeder, epoch):
                    return _not_in_force(RoleName.feeder, epoch, self.claims)
                self.was_imported = self.was_imported or was_imported
            case Drawn():
                if not self.rules(RoleName.feeder, epoch):
                    return _not_in_force(RoleName.feeder, epoch, self.claims)
            case RunFinished():
                if not self.rules(RoleName.trainer, epoch) or message.name.trainer_epoch != epoch:
                    return _not_in_force(RoleName.trainer, epoch, self.claims)
            case Trimmed():
                if not self.rules(RoleName.trainer, epoch):
                    return _not_in_force(RoleName.trainer, epoch, self.claims)
                return self._contradiction(message)
        return None

    def _of_claim(self, claim: Claim) -> str | None:
        known = self.claims.get(claim.role)
        follows = known.epoch + 1 if known is not None else 1
        if claim.epoch != follows and (known is not None or not self.may_lack_claims()):
            return f"a claim of epoch {claim.epoch} by {claim.process}, expected {follows}: claims follow one by one"
        return None

    def _contradiction(self, said: Trimmed) -> str | None:
        """Return how the record contradicts the log, or None. Everything that it deletes must have existed, and must
        stay deleted."""
        before = self._trimmed
        if before is not None and (said.version < before.version or said.sequence < before.sequence):
            return f"it takes back that what is below version {before.version} was deleted"
        if said.version > said.name.version:
            return (
                f"it deletes what is below version {said.version}, and its newest checkpoint is of {said.name.version}"
            )
        if said.name.version and said.name not in self._recorded:
            return f"its checkpoint is of version {said.name.version} of epoch {said.name.trainer_epoch}, not on steps"
        for topic, offsets in said.offsets.items():
            if topic not in TOPICS:
                return f"it deletes from {show(topic)}, which is no topic"
            if not self._are_there(topic, offsets):
                return f"it deletes {topic} up to {offsets}, but the log ends at {tuple(self._ends[topic])}"
            kept = before.offsets.get(topic) if before is not None else None
            if kept and any(offset < least for offset, least in zip(offsets, kept, strict=True)):
                return f"it takes back that {topic} was deleted up to {kept}"
        return None

    def _are_there(self, topic: str, offsets: tuple[int, ...]) -> bool:
        """Return whether the log goes up to these offsets. It is asked again only if it did not before."""
        for is_known in (True, False):
            if not is_known or topic not in self._ends:
                self._ends[topic] = [end for _, end in sorted(self._transport.admin.end_offsets(topic).items())]
            ends = self._ends[topic]
            if len(offsets) == len(ends) and all(offset <= end for offset, end in zip(offsets, ends, strict=True)):
                return True
        return False


def records_of(summary: ControlSummary | None) -> Iterator[Record]:
    """Yield the records in a summary, in order."""
    for one in () if summary is None else summary.records:
        yield Record(
            topic="control",
            partition=0,
            offset=one.offset,
            timestamp_s=one.timestamp_s,
            key=one.key,
            value=one.value,
            headers=one.headers,
        )


def _num_bytes(record: Record) -> int:
    """Return about how many bytes the record takes in a summary."""
    headers = sum(len(name) + len(value) + 4 for name, value in record.headers)
    return 32 + headers + len(record.key or b"") + len(record.value or b"")


def _not_in_force(role: str, epoch: int, claims: Mapping[str, Claim]) -> str:
    known = claims.get(role)
    return f"written under {role} epoch {epoch}, expected the one in force, {known.epoch if known else 'none yet'}"
