"""Records in the form that their roles write: under a claimed epoch, so that they are in force."""

from __future__ import annotations

from collections.abc import Iterable

from rftstream.contracts import codec
from rftstream.contracts.control import Claim, Drawn, RunFinished, TasksEnded, Trimmed
from rftstream.contracts.messages import Message
from rftstream.contracts.records import NewRecord
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.summaries import Summary, summariser
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.versions import StepRecord, WeightsAnnounced
from rftstream.service.control_view import read_control
from rftstream.service.records.in_force import RULED
from rftstream.transport.base import Transport


def played_records(transport: Transport, run: str, entries: Iterable[tuple[str, int, Message]]) -> list[NewRecord]:
    """Return the records for entries of topic, partition and message. If a record needs a claim, the claim of its
    writer comes before it."""
    entries = list(entries)
    if not any(topic in RULED for topic, _, _ in entries):
        return [codec.to_record(message, topic, partition, run=run) for topic, partition, message in entries]
    claimed = {role: claim.epoch for role, claim in read_control(transport).claims.items()}
    records: list[NewRecord] = []
    for topic, partition, message in entries:
        role, epoch = _writer(topic, message, claimed)
        last = epoch - 1 if isinstance(message, Claim) else epoch
        for number in range(claimed.get(role, 0) + 1, last + 1):
            claim = Claim(role=role, epoch=number, host="", pid=0, process=f"played-{role}", claimed_at=0.0)
            records.append(codec.to_record(claim, "control", 0, run=run, writer_epoch=number))
        claimed[role] = max(claimed.get(role, 0), epoch)
        records.append(codec.to_record(message, topic, partition, run=run, writer_epoch=epoch))
    return records


def _writer(topic: str, message: Message, claimed: dict[str, int]) -> tuple[str, int]:
    """Return the role that writes the message, and its epoch."""
    match message:
        case Claim():
            return message.role, message.epoch
        case WeightsAnnounced() | StepRecord() | RunFinished():
            return RoleName.trainer, message.name.trainer_epoch
        case Trimmed():
            return RoleName.trainer, max(1, claimed.get(RoleName.trainer, 0))
        case Summary():
            return summariser(message.topic), max(1, claimed.get(summariser(message.topic), 0))
        case Drawn():
            return RoleName.feeder, max(1, claimed.get(RoleName.feeder, 0))
        case TasksEnded() if message.reason != "imported":
            return RoleName.feeder, max(1, claimed.get(RoleName.feeder, 0))
    role = TOPICS[topic].writer or ""
    return role, max(1, claimed.get(role, 0)) if role else 0
