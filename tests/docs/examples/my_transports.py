"""The embedded log, with commits that take their time: what would a slow network do to a run?"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rftstream.config.sections import TransportSection
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import ConfigError
from rftstream.transport.base import Admin, Jump, Member, Position, Producer, Reader, Snapshot
from rftstream.transport.embedded.transport import EmbeddedTransport


class SlowTransport:
    """Options: `folder` (the log of a run is made below it) and `commit_s`."""

    def __init__(self, run: str, section: TransportSection) -> None:
        folder = section.options.get("folder")
        if not isinstance(folder, str):
            raise ConfigError(f"transport.options.folder: got {folder!r}, expected the folder of the log")
        self._log = EmbeddedTransport(Path(folder) / run)
        self._commit_s = float(section.options.get("commit_s", 0.02))
        self.admin: Admin = self._log.admin

    def jumps(self) -> list[Jump]:
        return self._log.jumps()

    def reader(self, positions: Mapping[TopicPartition, int], *, bodies: bool = True) -> Reader:
        return self._log.reader(positions, bodies=bodies)

    def member(self, group: str, topics: Collection[str], *, name: str, session_timeout_s: float = 10.0) -> Member:
        return self._log.member(group, topics, name=name, session_timeout_s=session_timeout_s)

    def producer(self, transactional_id: str, *, timeout_s: float = 10.0) -> Producer:
        return _SlowProducer(self._log.producer(transactional_id, timeout_s=timeout_s), self._commit_s)

    def wait(self, sources: Collection[Reader | Member], timeout_s: float) -> None:
        self._log.wait(sources, timeout_s)

    def close(self) -> None:
        self._log.close()


class _SlowProducer:
    def __init__(self, producer: Producer, commit_s: float) -> None:
        self._producer, self._commit_s = producer, commit_s

    def start(self) -> None:
        self._producer.start()

    def commit(
        self,
        records: Sequence[NewRecord],
        *,
        positions: Mapping[TopicPartition, Position] | None = None,
        group: str | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        time.sleep(self._commit_s)
        self._producer.commit(records, positions=positions, group=group, snapshot=snapshot)

    def close(self) -> None:
        self._producer.close()
