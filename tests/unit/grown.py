"""A run that grows, with its summaries, and how many of its records somebody reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.summaries import Summary
from rftstream.contracts.versions import VersionName, WeightsAnnounced, WeightsKind
from rftstream.service.records.summaries import SummaryWriter
from rftstream.transport.memory.clients import MemoryReader
from tests.unit.synthetic import SyntheticLog, outcome

EVERY = 4
"""Records after which a topic is summarised."""


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many records of each topic are read from now on."""
    read: Counter[str] = Counter()
    poll = MemoryReader.poll

    def counted(self: MemoryReader, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[object]:
        found = poll(self, max_records, max_bytes)
        read.update(record.topic for record in found)
        return found  # type: ignore[return-value]

    monkeypatch.setattr(MemoryReader, "poll", counted)
    return read


def decided(
    log: SyntheticLog, sequence: int, result: GroupResult, batch: int | None = None, come: int = 2
) -> GroupOutcome:
    found = outcome(log.siblings(sequence)[:come], result, batch=batch)
    return replace(found, group_size=log.group_size)


def announced(version: int, epoch: int = 1) -> WeightsAnnounced:
    name, is_full = VersionName(trainer_epoch=epoch, version=version), version % 3 == 0
    return WeightsAnnounced(
        model="m", name=name, kind=WeightsKind.full if is_full else WeightsKind.delta, object=f"o{version}",
        parent=None if is_full else replace(name, version=version - 1), num_bytes=1, digest="d", weights_digest="w",
        dtype="float32", resumed=version == 0,
    )  # fmt: skip


def play(log: SyntheticLog, rounds: int, *, first: int = 0, rejected: GroupResult = GroupResult.dead) -> None:
    """In each round a rejected group, one that is decided too early, and a batch; groups are decided out of order."""
    for batch in range(first, first + rounds):
        begin = 4 * batch
        log.put("outcomes", decided(log, begin + 1, rejected))
        log.put("outcomes", decided(log, begin + 3, GroupResult.expired, come=1))
        if batch % 2:
            late = outcome(log.siblings(begin + 3)[1:], GroupResult.expired, late=True)
            log.put("outcomes", replace(late, group_size=log.group_size))
        log.put("outcomes", *(decided(log, begin + one, GroupResult.batched, batch) for one in (0, 2)))
        log.trained[batch + 1] = 2 * (batch + 1)
        if batch == 0:
            log.step(0, resumed=True)
            log.put("weights", announced(0))
        log.step(batch + 1, metrics={"reward": batch / 100, "spent/requests": 2.0}, staleness=((3, batch), (1,)))
        log.put("weights", announced(batch + 1))


def summarise(log: SyntheticLog, *topics: str, every: int = EVERY) -> list[Summary]:
    """Write the summaries of what stands there, as the role would that has just started."""
    writer = SummaryWriter(log.transport, topics or ("outcomes", "steps", "weights", "control"), every)
    found: list[Summary] = []
    while True:
        writer.look()
        made = [output.message for output in writer.take() if isinstance(output.message, Summary)]
        if not made:
            return found
        log.put("summaries", *made)
        found += made


def grow(log: SyntheticLog, rounds: int, *, first: int = 0, rejected: GroupResult = GroupResult.dead) -> None:
    """Play rounds, with a summary as soon as there is something for one."""
    for begin in range(first, first + rounds, EVERY):
        play(log, EVERY, first=begin, rejected=rejected)
        summarise(log)
