"""The embedded log passes the suite; its peers are processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import TransportError
from rftstream.testing.conformance import ConformanceHarness, TransportConformance, run_peer
from rftstream.testing.conformance_tests.bench import read_all
from rftstream.transport.base import TopicSettings, Transport
from rftstream.transport.embedded.transport import EmbeddedTransport

pytestmark = pytest.mark.law("lost", "twice", "fencing")


class EmbeddedHarness(ConformanceHarness):
    session_timeout_s = 0.6
    wake_up_s = 0.2  # Without pipes no call would take less than 0.5; measured 0.001 where nothing else runs.

    def __init__(self, folder: Path, pool: ProcessPoolExecutor) -> None:
        self._folder = folder
        self._pool = pool

    def connect(self) -> Transport:
        return EmbeddedTransport(self._folder)

    def peers(self, peers: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
        connect = partial(EmbeddedTransport, self._folder)
        running = [self._pool.submit(run_peer, connect, peer, arguments) for peer, arguments in peers]
        return [future.result() for future in running]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(5, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


class TestEmbedded(TransportConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path, pool: ProcessPoolExecutor) -> ConformanceHarness:
        return EmbeddedHarness(tmp_path / "log", pool)


def test_pages_of_deleted_records_are_used_again_and_a_vacuum_gives_them_back(tmp_path: Path) -> None:
    """20 rounds of 1 MB, of which two are kept."""
    log = EmbeddedTransport(tmp_path)
    log.admin.ensure_topics({"rounds": TopicSettings(partitions=2)})
    producer = log.producer("writer")
    producer.start()
    pages: list[int] = []
    for number in range(20):
        producer.commit([NewRecord("rounds", i % 2, b"%d" % number, bytes(10_000)) for i in range(100)])
        log.admin.delete_before({place: max(0, end - 100) for place, end in log.admin.end_offsets("rounds").items()})
        with contextlib.closing(sqlite3.connect(tmp_path / "log.sqlite")) as database:
            pages.append(database.execute("PRAGMA page_count").fetchone()[0])
    assert max(pages) == max(pages[:4]), pages
    log.admin.delete_before({place: end - 5 for place, end in log.admin.end_offsets("rounds").items()})
    before = read_all(log, ["rounds"])
    log.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "log.sqlite")) as database:
        database.execute("VACUUM")
    assert (tmp_path / "log.sqlite").stat().st_size < 300_000
    log = EmbeddedTransport(tmp_path)
    assert read_all(log, ["rounds"]) == before
    assert len(before) == 10
    log.close()


def test_a_log_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    EmbeddedTransport(tmp_path / "log").close()
    (tmp_path / "log" / "log.writer").unlink()
    (tmp_path / "log" / "log.writer").mkdir()  # root may write where others may not, but nobody to a folder
    with pytest.raises(TransportError, match=r"log\.writer: Is a directory, expected a folder with rights to write"):
        EmbeddedTransport(tmp_path / "log", create=False)


def test_a_reader_sees_what_its_own_process_commits_beside_other_topics(tmp_path: Path) -> None:
    transport = EmbeddedTransport(tmp_path)
    transport.admin.ensure_topics({name: TopicSettings(partitions=1) for name in ("read", "other")})
    reader = transport.reader({TopicPartition("read", 0): 0})
    producer = transport.producer("p")
    producer.start()
    for number in range(3):
        assert not reader.poll() and not reader.has_data()
        producer.commit([NewRecord("other", 0, b"key", b"other")])
        assert not reader.has_data()
        producer.commit([NewRecord(topic, 0, b"key", b"%d" % number) for topic in ("other", "read")])
        assert reader.has_data()
        assert [record.value for record in reader.poll()] == [b"%d" % number]
    transport.close()
