"""What audits keep changes nothing that they say, whatever happened to it; and it is not read twice."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.commands import cli
from rftstream.contracts.control import RunManifest
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import ConfigError
from rftstream.queries.audits.audit import audit
from rftstream.queries.audits.balance import AuditReport
from rftstream.queries.facts import database
from rftstream.queries.facts import database as indexes
from rftstream.queries.facts.database import FILE, SEAL, Index, StoreError, folder_of, opened_index
from rftstream.queries.traces.trace import trace
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.service.role import Log
from rftstream.transport.embedded.transport import EmbeddedTransport
from tests.unit.queries.test_audit import RandomRun, new_log
from tests.unit.queries.test_trace import Scene
from tests.unit.synthetic import SyntheticLog, outcome, task

KEPT = {
    "tasks",
    "rollouts",
    "verified",
    "batches",
    "outcomes",
    "experts",
    "problems",
    "questions",
    "judgements",
    "weights",
}


def audited(log: SyntheticLog, folder: Path, identity: str = "this run") -> tuple[AuditReport, list[str]]:
    """With what is kept, after it was seen to say the same as without."""
    with closing(Index(folder, identity)) as index:
        report = audit(log.transport, index)
    told: list[str] = []
    assert report == audit(log.transport, doing=told.append)
    for topic in ("outcomes", "tasks"):
        end = sum(log.transport.admin.end_offsets(topic).values())
        none_left = end == sum(log.transport.admin.begin_offsets(topic).values())  # all of it may be deleted
        said = [line for line in told if topic in line]
        assert none_left or said[-1] == f"reading {topic}, {end:,} of {end:,} offsets"
    return report, index.notes


def num_rows(folder: Path, table: str) -> int:
    with closing(Index(folder, "this run", looking=True)) as index:
        return index.number(f"SELECT count(*) FROM {table}")


@pytest.fixture
def log() -> SyntheticLog:
    log = new_log()
    log.flow(*range(6))
    log.batch(0, [0, 1])
    log.step(1)
    log.decide(2, GroupResult.dead)
    return log


# --------------------------------------------------------------------------------------------- the same


def _twins(run: RandomRun) -> None:
    if run.admitted:
        run.log.put("tasks", task(run.log.siblings(run.random.randrange(run.admitted))[0]))
        run.log.put("outcomes", outcome(run.log.siblings(run.random.randrange(run.admitted)), GroupResult.expired))


def _garbage(run: RandomRun) -> None:
    for topic in ("rollouts", "outcomes", "batches"):
        run.log.put_raw(NewRecord(topic, 0, b"?", b"?", (("contract", b"group_outcome"),)))


def _trim(run: RandomRun) -> None:
    admin = run.log.transport.admin
    topic = run.random.choice(sorted(KEPT))
    ends, begins = admin.end_offsets(topic), admin.begin_offsets(topic)
    admin.delete_before({place: run.random.randint(begins[place], end) for place, end in ends.items()})


def _damage(random: Random, folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    if not files:
        return
    path = random.choice(files)
    content = bytearray(path.read_bytes())
    match random.randrange(4):
        case 0:
            path.unlink()
            return
        case 1:
            del content[random.randrange(len(content)) :]
        case 2:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        case _:
            content += random.randbytes(100)  # behind the rows: as a writer leaves it that died
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.law("conservation")
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_audit_says_the_same_with_an_index_and_without(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.mktemp("index")
    run = RandomRun(seed)
    for _ in range(6):
        run.go(run.random.randrange(20))
        if run.random.random() < 0.2:
            run.random.choice([_twins, _garbage, _trim])(run)
        if run.random.random() < 0.3:
            _damage(run.random, folder)
        audited(run.log, folder)


def test_only_what_is_new_is_read(log: SyntheticLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audited(log, tmp_path)
    log.flow(6)
    log.batch(1, [3])
    read: list[str] = []
    make = type(log.transport).reader

    def watched(self: Any, positions: Any, *, bodies: bool = True) -> Any:
        reader = make(self, positions, bodies=bodies)
        poll = reader.poll
        reader.poll = lambda *given, **named: [
            one
            for one in poll(*given, **named)
            if read.append(str(one)) or True  # type: ignore[func-returns-value]
        ]
        return reader

    monkeypatch.setattr(type(log.transport), "reader", watched)
    with closing(Index(tmp_path, "this run")) as index:
        audit(log.transport, index)
    kept = [one for one in read if one.partition("[")[0] in KEPT]
    # of each partition that has grown the last known record, and the new ones
    assert sorted(kept) == sorted([
        "tasks[0]@5", "tasks[0]@6", "tasks[0]@7", "rollouts[0]@5", "rollouts[0]@6", "rollouts[0]@7",
        "verified[0]@5", "verified[0]@6", "verified[0]@7", "batches[0]@4", "batches[0]@5", "batches[0]@6",
        "batches[0]@7", "outcomes[0]@2", "outcomes[0]@3",
    ])  # fmt: skip


# --------------------------------------------------------------------------------------------- not to be used


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / FILE).write_bytes(b""),
        lambda folder: (folder / FILE).unlink(),
        lambda folder: (folder / FILE).write_bytes(b"no database"),
        lambda folder: (folder / SEAL).write_text("{}"),
        lambda folder: (folder / SEAL).write_bytes(b"\xff"),
        lambda folder: (folder / SEAL).unlink(),
        lambda folder: _flip(folder / FILE, 5000),
        lambda folder: (folder / SEAL).write_text((folder / SEAL).read_text().replace('"crc32": ', '"crc32": 1')),
    ],
)
def test_what_is_damaged_is_rebuilt_and_said(
    log: SyntheticLog, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    audited(log, tmp_path)
    damage(tmp_path)
    _, notes = audited(log, tmp_path)
    (note,) = notes
    assert note.startswith(f"{tmp_path / FILE}: damaged")
    assert note.endswith("rebuilt")
    assert audited(log, tmp_path)[1] == [], "it was mended"


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_file_of_an_earlier_release_is_made_anew_and_what_it_kept_otherwise_goes(
    log: SyntheticLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.rows").write_bytes(b"rows")
    audited(log, tmp_path)
    assert not (tmp_path / "tasks.rows").exists()
    monkeypatch.setattr(database, "FORMAT", 1000)
    assert audited(log, tmp_path)[1] == [f"{tmp_path / FILE}: of another release; rebuilt"]


def test_a_writer_that_died_leaves_the_file_as_it_was(log: SyntheticLog, tmp_path: Path) -> None:
    audited(log, tmp_path)
    log.admit(6, 7)
    with closing(Index(tmp_path, "this run")) as index:
        index.read(Log(log.transport), "tasks")
    assert num_rows(tmp_path, "on_tasks") == 12
    assert audited(log, tmp_path)[1] == []
    assert num_rows(tmp_path, "on_tasks") == 16


def test_a_file_that_fails_while_it_is_read_is_done_without(log: SyntheticLog, tmp_path: Path) -> None:
    """As where the disk is full."""
    with closing(Index(tmp_path, "this run")) as index:
        index.execute("DROP TABLE on_tasks")
        assert audit(log.transport, index) == audit(log.transport)
        assert "no such table" in index.notes[0]
        assert index.notes[0].endswith("the whole log is read")
    assert audited(log, tmp_path)[1] == []
    with closing(Index(tmp_path, "this run")) as index:
        index.execute("DROP TABLE on_tasks")
        index.folder = None
        with pytest.raises(StoreError):
            audit(log.transport, index)


def test_another_run_of_the_same_name(log: SyntheticLog, tmp_path: Path) -> None:
    audited(log, tmp_path)
    other = new_log()
    other.flow(*range(9))
    _, notes = audited(other, tmp_path, "another run")
    assert notes == [f"{tmp_path / FILE}: of another run of this name; rebuilt"]


@pytest.mark.parametrize(("flows", "says"), [
    ([range(20, 0, -2), range(1, 20, 2)], "tasks[0]@5 is not the record that was read"),
    ([[0]], "tasks[0] ends before 6, up to where it was read"),
], ids=["another way", "shorter"])  # fmt: skip
def test_another_log_of_the_same_run(log: SyntheticLog, tmp_path: Path, flows: list[Iterable[int]], says: str) -> None:
    """One from a backup: longer, with other records where the last ones were; or one that lost records."""
    audited(log, tmp_path)
    other = new_log()
    for sequences in flows:
        other.flow(*sequences)
    _, notes = audited(other, tmp_path)
    assert any(says in note for note in notes)


def test_what_was_deleted_from_the_log_leaves_the_index(log: SyntheticLog, tmp_path: Path) -> None:
    audited(log, tmp_path)
    log.transport.admin.delete_before({TopicPartition("tasks", 0): 4, TopicPartition("tasks", 1): 5})
    report, notes = audited(log, tmp_path)
    assert (report.rollouts.admitted, notes) == (3, [])
    log.admit(6)
    assert audited(log, tmp_path)[0].rollouts.admitted == 5
    assert num_rows(tmp_path, "on_tasks") == 5


# --------------------------------------------------------------------------------------------- runs


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OpenRun]:
    scene = Scene(tmp_path / "demo")
    scene.put("control", _manifest())
    with closing(scene.run.transport):
        yield scene.run


def _manifest(created_at: float = 1.0) -> RunManifest:
    return RunManifest(run="demo", created_at=created_at, config="", digests={}, partitions=2, shares=1, seed=0,
                       rftstream_version="1")  # fmt: skip


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_the_command_keeps_an_index_unless_told_not_to(run: OpenRun) -> None:
    path = run.folder.path
    without = call("audit", path, "--no-index", "--json")
    assert not (path / "index").exists()
    first = call("audit", path, "--json")
    assert {file.name for file in (path / "index").iterdir()} == {FILE, SEAL, "lock"}
    assert json.loads(without.stdout) == json.loads(first.stdout) == json.loads(call("audit", path, "--json").stdout)
    (path / "index" / FILE).write_bytes(b"?")
    damaged = call("audit", path, "--json")
    assert f"{FILE}: damaged; rebuilt" in damaged.stderr
    assert damaged.stdout == first.stdout


def test_an_index_that_cannot_be_kept_is_done_without(run: OpenRun) -> None:
    path = run.folder.path
    (path / "index").write_text("a file is in the way")
    result = call("audit", path, "--json")
    assert "the whole log is read" in result.stderr
    assert json.loads(result.stdout) == json.loads(call("audit", path, "--json", "--no-index").stdout)


def test_two_audits_at_once(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "LOCK_WAIT_S", 0.0)
    with opened_index(run) as one:
        assert one is not None
        with opened_index(run) as other:
            assert other is not None
            assert audit(run.transport, one) == audit(run.transport, other)
            assert len(other.notes) == 1
            assert "held by another audit" in other.notes[0]
        with opened_index(run, looking=True) as looked:
            assert looked is not None
            assert not looked.marks("tasks")
    with opened_index(run) as after:
        assert after is not None
        assert audit(run.transport, after) == audit(run.transport)
        assert after.notes == []


def test_an_audit_waits_for_another(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_index(run):
        pass
    descriptor = os.open(run.folder.path / "index" / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    monkeypatch.setattr(indexes.time, "sleep", lambda seconds: fcntl.flock(descriptor, fcntl.LOCK_UN))
    with opened_index(run) as index:
        assert index is not None
        assert index.notes == []
    os.close(descriptor)


def test_a_run_begun_anew_under_its_name(run: OpenRun) -> None:
    call("audit", run.folder.path)
    with closing(Index(run.folder.path / "index", "of a run before")) as index:
        audit(run.transport, index)
    assert "of another run of this name; rebuilt" in call("audit", run.folder.path).stderr


def test_without_a_manifest_there_is_no_index(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "demo")
    with closing(scene.run.transport), opened_index(scene.run) as index:
        assert index is None


def test_a_run_without_a_folder_here_has_its_index_in_the_cache(
    run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    elsewhere = OpenRun(RunFolder(tmp_path / "elsewhere" / "demo"), run.config, run.transport)
    assert folder_of(elsewhere).parent == tmp_path / "cache" / "rftstream" / "index"
    with opened_index(elsewhere) as index:
        audit(run.transport, index)
    assert (folder_of(elsewhere) / FILE).stat().st_size
    assert not elsewhere.folder.path.exists()


# --------------------------------------------------------------------------------------------- trace

NAMES = ["sums/0/1/0/1", "sums/0/1/0", "sums/0/3/0/0", "sums/0/4/0", "batch:0", "batch:1", "v1", "tasks[1]@1"]


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_says_the_same_with_an_index_and_without(run: OpenRun, name: str) -> None:
    log = SyntheticLog(run.transport)
    before = trace(run, name).to_json()
    call("audit", run.folder.path)
    with opened_index(run, looking=True) as index:
        assert trace(run, name, index).to_json() == before
    log.put("tasks", task(log.siblings(1)[1]))  # a twin that the index does not know
    log.decide(3, GroupResult.expired)
    with opened_index(run, looking=True) as index:
        found = trace(run, name, index)
    assert found.to_json() == trace(run, name).to_json()


def test_a_trace_does_without_a_damaged_file(run: OpenRun) -> None:
    call("audit", run.folder.path)
    file = run.folder.index / FILE
    with opened_index(run, looking=True) as index:
        assert index is not None
        page = index.number("SELECT rootpage FROM sqlite_master WHERE name = 'names'")
    content = bytearray(file.read_bytes())
    content[4096 * (page - 1) : 4096 * page] = b"\xff" * 4096
    file.write_bytes(content)
    with opened_index(run, looking=True) as index:
        assert index is not None
        assert index.folder == run.folder.index, "its size is right, and nobody has read all of it"
        assert trace(run, NAMES[0], index).to_json() == trace(run, NAMES[0]).to_json()


def test_a_name_that_is_not_there_gets_the_same_hint(run: OpenRun) -> None:
    call("audit", run.folder.path)
    with pytest.raises(ConfigError) as without:
        trace(run, "sums/0/9/0/1")
    with opened_index(run, looking=True) as index, pytest.raises(ConfigError) as indexed:
        trace(run, "sums/0/9/0/1", index)
    assert str(indexed.value).startswith("trace: sums/0/9/0/1: no such rollout")
    assert str(indexed.value) == str(without.value)


def test_a_trace_reads_no_more_than_it_must(run: OpenRun) -> None:
    call("audit", run.folder.path)
    assert not isinstance(run.transport, OpenRun)
    assert isinstance(run.transport, EmbeddedTransport)
    with opened_index(run, looking=True) as index:
        from rftstream.queries.traces.lineage import Headers

        headers = Headers(run.transport, index)
        found, start = headers.of_group(headers.places("tasks"), b"sums/0/1/0")
        assert [str(record) for record in found] == ["tasks[1]@0", "tasks[1]@1"]
        assert start == Log(run.transport).ends("tasks")
