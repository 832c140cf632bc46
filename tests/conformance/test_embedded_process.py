"""The embedded log when processes are killed, stopped, refused room, or gone without a word."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import ConfigError, LogFull, TransactionAborted
from rftstream.testing.conformance_tests.bench import await_true
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.embedded.member import EmbeddedMember
from rftstream.transport.embedded.transport import EmbeddedTransport

A0 = TopicPartition("a", 0)
Start = Callable[..., tuple[SpawnProcess, Connection]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transport = EmbeddedTransport(tmp_path / "log")
    transport.admin.ensure_topics({"a": TopicSettings(partitions=2), "b": TopicSettings(partitions=2)})
    transport.admin.commit_initial("g", ["a"])
    transport.close()
    return tmp_path / "log"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a function as a process with a pipe to it; none is left behind."""
    context = multiprocessing.get_context("spawn")
    started: list[SpawnProcess] = []

    def run(function: Callable[..., None], *arguments: Any) -> tuple[SpawnProcess, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        process.start()
        started.append(process)
        theirs.close()
        return process, ours

    yield run
    for process in started:
        process.kill()
        process.join()


def told(pipe: Connection, patience_s: float = 120.0) -> Any:
    assert pipe.poll(patience_s), "the other process said nothing"
    return pipe.recv()


def commit_text(transport: EmbeddedTransport, text: str) -> None:
    producer = transport.producer(f"text-{os.getpid()}")
    producer.start()
    producer.commit([NewRecord("a", 0, text.encode(), text.encode())])


# -- what the other processes do


def write_for_ever(pipe: Connection, folder: Path) -> None:
    transport = EmbeddedTransport(folder)
    producer = transport.producer(f"writer-{os.getpid()}")
    producer.start()
    value = b"x" * 65_536
    for number in range(1_000_000):
        key = b"%d/%d" % (os.getpid(), number)
        producer.commit(
            [NewRecord(topic, index % 2, key, value) for topic in ("a", "b") for index in range(16)],
            positions={A0: Position(number)},
            group="g",
        )
        pipe.send(number)


def hold_write_lock(pipe: Connection, folder: Path) -> None:
    with EmbeddedTransport(folder)._store.write() as db:
        db.execute("INSERT INTO positions VALUES ('half', 1, 0, '')")
        pipe.send("holding")
        pipe.recv()


def write_until_full(pipe: Connection, folder: Path, max_bytes: int) -> None:
    transport = EmbeddedTransport(folder)
    producer = transport.producer("writer")
    producer.start()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    num_committed = 0
    refused = ""
    while not refused:
        try:
            producer.commit(
                [NewRecord("a", index % 2, b"%d" % num_committed, b"x" * 65_536) for index in range(10)],
                positions={A0: Position(num_committed + 1)},
                group="g",
            )
            num_committed += 1
        except LogFull as error:
            refused = str(error)
    ends = sum(transport.admin.end_offsets("a").values())
    position = transport.admin.committed("g")[A0].offset
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    producer.commit([NewRecord("a", 0, b"again", b"x" * 65_536)])
    pipe.send((refused, num_committed, ends, position))
    transport.close()


def wait_for_ever(pipe: Connection, folder: Path) -> None:
    transport = EmbeddedTransport(folder)
    transport.wait([transport.reader({A0: 0})], 0.0)
    pipe.send("waiting")
    transport.wait([transport.reader({A0: 0})], 1000.0)


def be_member(pipe: Connection, folder: Path) -> None:
    transport = EmbeddedTransport(folder)
    member = transport.member("g", ["a"], name="other", session_timeout_s=1000.0)
    pipe.send(len(member.assignment()))
    pipe.recv()


# -- what is expected of it


@pytest.mark.slow
@pytest.mark.law("lost", "twice")
def test_a_writer_killed_in_the_middle_leaves_nothing_half_done(folder: Path, start: Start) -> None:
    watcher = EmbeddedTransport(folder)
    for _ in range(4):
        writer, pipe = start(write_for_ever, folder)
        told(pipe)

        def is_writing(pid: int | None = writer.pid) -> bool:
            holder = watcher.lock_holder()
            return holder is not None and holder.pid == pid

        until = time.monotonic() + 120.0
        while not is_writing():
            assert time.monotonic() < until
        writer.kill()
        writer.join()
        assert watcher.lock_holder() is None
        commit_text(watcher, "written after it")
    places = [TopicPartition(topic, number) for topic in ("a", "b") for number in (0, 1)]
    reader = watcher.reader(dict.fromkeys(places, 0), bodies=False)
    counts: Counter[bytes | None] = Counter()
    while batch := reader.poll():
        counts.update(record.key for record in batch)
    assert counts.pop(b"written after it") == 4
    assert set(counts.values()) == {32}
    watcher.close()
    with sqlite3.connect(folder / "log.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()


@pytest.mark.slow
def test_a_stopped_holder_of_the_write_lock_is_named(folder: Path, start: Start) -> None:
    begun = time.time()
    transport = EmbeddedTransport(folder, busy_timeout_s=0.2)
    producer = transport.producer("p")
    producer.start()
    holder, pipe = start(hold_write_lock, folder)
    assert told(pipe) == "holding"
    assert holder.pid is not None
    with pytest.raises(TransactionAborted, match=rf"process {holder.pid} .* is running"):
        producer.commit([NewRecord("a", 0, b"k", b"v")])
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(TransactionAborted, match=rf"process {holder.pid} .* stopped .*kill -KILL {holder.pid}"):
        producer.commit([NewRecord("a", 0, b"k", b"v")])
    seen = transport.lock_holder()
    assert seen is not None
    assert seen.pid == holder.pid
    assert begun <= seen.since_s <= time.time()
    # Reading goes on, and a member is not put out for it.
    assert transport.reader({A0: 0}).poll() == []
    os.kill(holder.pid, signal.SIGKILL)
    await_true("the lock is free", lambda: transport.lock_holder() is None, 120.0)
    producer.commit([NewRecord("a", 0, b"k", b"v")])
    assert transport.admin.committed("half") == {}
    transport.close()


def test_a_thread_that_holds_the_lock_is_seen_too(folder: Path) -> None:
    first, second = EmbeddedTransport(folder), EmbeddedTransport(folder, busy_timeout_s=0.05)
    with first._store.write():
        holder = second.lock_holder()
        assert holder is not None
        assert holder.pid == os.getpid()
        with pytest.raises(TransactionAborted, match=f"process {os.getpid()} "):
            commit_text(second, "a")
    assert second.lock_holder() is None
    first.close()
    commit_text(second, "a")
    second.close()


@pytest.mark.slow
@pytest.mark.law("lost")
@pytest.mark.parametrize("max_bytes", [3_000_000, 50_000_000])
def test_without_room_a_transaction_is_refused_whole(folder: Path, start: Start, max_bytes: int) -> None:
    """The smaller limit hits while the newest records are still in the WAL, the larger one when it was copied."""
    _, pipe = start(write_until_full, folder, max_bytes)
    refused, num_committed, ends, position = told(pipe)
    assert "no room" in refused
    assert num_committed > 0
    assert ends == 10 * num_committed
    assert position == num_committed
    transport = EmbeddedTransport(folder)
    reader = transport.reader({A0: 0, TopicPartition("a", 1): 0}, bodies=False)
    counts: Counter[bytes | None] = Counter()
    while batch := reader.poll():
        counts.update(record.key for record in batch)
    assert counts.pop(b"again") == 1
    assert counts == {b"%d" % number: 10 for number in range(num_committed)}
    transport.close()


@pytest.mark.slow
def test_the_pipe_of_a_killed_reader_is_taken_away(folder: Path, start: Start) -> None:
    pipes = folder / "bells" / "topic-a"
    waiter, pipe = start(wait_for_ever, folder)
    told(pipe)
    assert len(list(pipes.iterdir())) == 1
    waiter.kill()
    waiter.join()
    transport = EmbeddedTransport(folder)
    commit_text(transport, "a")
    assert list(pipes.iterdir()) == []
    transport.close()


@pytest.mark.slow
@pytest.mark.law("lost")
def test_a_killed_member_is_replaced_before_its_session_runs_out(folder: Path, start: Start) -> None:
    transport = EmbeddedTransport(folder)
    member = transport.member("g", ["a"], name="me", session_timeout_s=1000.0)
    other, pipe = start(be_member, folder)
    assert told(pipe) == 1
    transport.wait([member], 5.0)
    assert len(member.assignment()) == 1
    other.kill()
    other.join()

    def has_all() -> bool:
        transport.wait([member], 1.0)
        return len(member.assignment()) == 2

    await_true("the killed one's partition", has_all, 120.0)
    transport.close()
    assert list((folder / "bells" / "group-g").iterdir()) == []


@pytest.mark.slow
@pytest.mark.law("lost")
def test_who_comes_in_the_place_of_a_killed_member_gets_its_partitions_at_once(folder: Path, start: Start) -> None:
    other, pipe = start(be_member, folder)
    assert told(pipe) == 2
    other.kill()
    other.join()
    transport = EmbeddedTransport(folder)
    member = transport.member("g", ["a"], name="other", session_timeout_s=1000.0)
    assert len(member.assignment()) == 2
    transport.close()
    assert list((folder / "bells" / "group-g").iterdir()) == []


def test_records_without_a_wake_up_are_found_soon(folder: Path) -> None:
    """As if the writer had died between its commit and the byte in the pipe."""
    transport, other = EmbeddedTransport(folder), EmbeddedTransport(folder)
    reader = transport.reader({A0: 0})
    transport.wait([reader], 0.0)
    shutil.rmtree(folder / "bells")
    commit_text(other, "a")
    started = time.monotonic()
    transport.wait([reader], 300.0)
    assert time.monotonic() - started < 120.0
    assert len(reader.poll()) == 1
    transport.close()
    other.close()


@pytest.mark.slow
def test_who_waits_looks_now_and_then(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = EmbeddedTransport(folder)
    member = transport.member("g", ["a"], name="idle")
    for place, position in member.committed(member.assignment()).items():
        member.seek(place, position.offset)
    num_looks, has_data = 0, EmbeddedMember.has_data

    def counted(member: EmbeddedMember) -> bool:
        nonlocal num_looks
        num_looks += 1
        return has_data(member)

    monkeypatch.setattr(EmbeddedMember, "has_data", counted)
    transport.wait([member], 1.2)
    transport.close()
    assert num_looks <= 5, "twice a second; a loop that spins looks thousands of times"


def test_forgetting_to_close_harms_nothing(folder: Path) -> None:
    forgotten = EmbeddedTransport(folder)
    commit_text(forgotten, "a")
    del forgotten
    transport = EmbeddedTransport(folder)
    assert len(transport.reader({A0: 0}).poll()) == 1
    transport.close()
    transport.close()


def test_a_missing_log_is_an_error_where_one_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no log there"):
        EmbeddedTransport(tmp_path / "log", create=False)
    assert not (tmp_path / "log").exists()


def test_another_format_is_refused(folder: Path) -> None:
    with sqlite3.connect(folder / "log.sqlite") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="format 99"):
        EmbeddedTransport(folder)


@pytest.mark.parametrize("content", ["text", "sqlite"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "log.sqlite"
    if content == "text":
        path.write_bytes(b"not a log at all " * 1000)
    else:
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE t(x)")
        db.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="was expected"):
        EmbeddedTransport(tmp_path)
    assert path.read_bytes() == before
