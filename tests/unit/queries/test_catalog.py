"""The catalog counts what the audit counts, at any moment, however the log came about and whatever befell the file."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.outcomes import GroupResult
from rftstream.errors import ConfigError, TransportError
from rftstream.queries.audits.audit import audit
from rftstream.queries.catalog.counts import CatalogCounts, count_fates, count_letters, read_rates
from rftstream.queries.catalog.database import CatalogDatabase, CatalogReader
from rftstream.queries.catalog.finding import (
    GroupFilter,
    find_batch,
    find_group,
    find_groups,
    find_letters_page,
    find_put_back,
)
from rftstream.queries.catalog.moments import Moment, find_moment
from rftstream.queries.catalog.problems import find_problems
from rftstream.queries.catalog.updating import FILE, CatalogUpdater
from rftstream.queries.curves.history import HistoryReader, read_history
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.service.role import Log
from rftstream.testing import Faults, MemoryRun, Simulation
from tests.unit.synthetic import SyntheticLog, task, verified

CONFIG: dict[str, Any] = {
    "run": {"name": "demo", "steps": 12},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "feeder": {"groups_per_batch": 2, "group_size": 3, "max_staleness": 1},
    "explorer": {"count": 2, "policy": "fake"},
    "verifier": {"count": 2},
    "trainer": {"backend": "fake"},
    "policies": {"fake": {"fail_share": 0.03}},
    "transport": {"partitions": 4},
}
FAULTS = Faults(share=0.03, kills=4, pauses=3, restarts=2, takeovers=2, joins=1, aborts=2, unknowns=2, silences=2)


def make_config() -> RunConfig:
    return loader.from_dict(CONFIG)


def opened(run: MemoryRun, process: str = "studio") -> OpenRun:
    return OpenRun(run.folder, run.config, run.transport(process))


def now(run: OpenRun) -> Moment:
    return Moment(version=read_history(Log(run.transport)).version)


def counts_of(updater: CatalogUpdater, moment: Moment) -> CatalogCounts:
    catalog = updater.open_catalog()
    assert catalog is not None
    with catalog:
        return count_fates(catalog, moment)


def num_texts(updater: CatalogUpdater) -> int:
    catalog = updater.open_catalog()
    assert catalog is not None
    with catalog:
        return int(catalog.rows("SELECT count(*) FROM texts")[0][0])


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.law("conservation")
@pytest.mark.parametrize("seed", range(4))
def test_it_counts_what_the_audit_counts_now_and_at_every_moment(tmp_path: Path, seed: int) -> None:
    simulation = Simulation(make_config(), folder=tmp_path, seed=seed, faults=FAULTS)
    run = opened(simulation)
    updater = CatalogUpdater(run, folder=tmp_path / "index", chunk_records=40)
    seen: list[tuple[Moment, CatalogCounts]] = []

    def look() -> None:
        simulation.at(0.1, look)
        updater.update()
        if not updater.total:
            return
        try:
            report = audit(run.transport)
        except TransportError:  # a commit of positions is pending, and no time passes while we look
            return
        found = counts_of(updater, now(run))
        assert found.groups == report.groups
        assert found.rollouts == report.rollouts
        at_s = simulation.clock.now() - 1e-6  # before whatever comes next
        seen.append((Moment(at_s=at_s, version=report.version), found))

    try:
        look()
        simulation.run()
        look()
        assert seen[-1][1].groups.trained >= 4 and len(seen) > 2, simulation.to_text()
        for moment, counts in seen:  # as it was, told by the catalog of the end
            found = counts_of(updater, moment)
            assert (found.groups, found.rollouts, found.newest_batch) == (
                counts.groups, counts.rollouts, counts.newest_batch
            )  # fmt: skip
    finally:
        updater.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[MemoryRun, SyntheticLog, CatalogUpdater]]:
    memory = MemoryRun(make_config(), folder=tmp_path)
    memory.put_manifest()
    updater = CatalogUpdater(opened(memory), folder=tmp_path / "index")
    yield memory, SyntheticLog(memory.transport(), partitions=4, group_size=2), updater
    updater.close()


Run = tuple[MemoryRun, SyntheticLog, CatalogUpdater]


def test_fates_of_all_kinds(run: Run) -> None:
    memory, log, updater = run
    log.step(0, resumed=True)
    log.flow(0, 1, 2, 3)
    log.admit(4, 5)
    log.sample(4)
    log.batch(0, [0, 1], unscored=["sums/0/1/0/1"])
    log.decide(2, GroupResult.filtered)
    log.decide(3, GroupResult.expired, only=[0])
    log.late(3, 1)
    log.step(1)
    updater.update()
    report, counts = audit(memory.transport()), counts_of(updater, Moment(version=1))
    assert (counts.groups, counts.rollouts) == (report.groups, report.rollouts)
    with CatalogReader(updater.path) as catalog:
        moment = Moment(version=1)
        fates = {one.sequence: one.fate for one in find_groups(catalog, moment, GroupFilter())}
        assert fates == {0: "trained", 1: "trained", 2: "filtered", 3: "expired", 4: "pending", 5: "pending"}
        group = find_group(catalog, moment, "sums/0/1/0")
        assert group is not None and [one.fate for one in group.siblings] == ["trained", "dead"]
        assert group.siblings[1].unscored == "timeout" and group.num_scored == 1
        late = find_group(catalog, moment, "sums/0/3/0")
        assert late is not None and [one.late for one in late.siblings] == [False, True]
        waiting = find_group(catalog, moment, "sums/0/5/0")
        assert waiting is not None and {one.stage for one in waiting.siblings} == {"waiting"}
        assert [one.sequence for one in find_groups(catalog, moment, GroupFilter(fate="pending"))] == [5, 4]
        assert [one.sequence for one in find_groups(catalog, moment, GroupFilter(), before=2, limit=1)] == [1]
        assert [one.sequence for one in find_groups(catalog, moment, GroupFilter(batch=0))] == [1, 0]
        assert [one.num_groups for one in find_problems(catalog, moment, order="hardest", limit=2)] == [1, 1]
        [share] = find_batch(catalog, moment, 0)
        assert (share.begin_offset, share.count) == (0, 3)
        rate = read_rates(catalog, moment, now=memory.clock.now())["rollouts"]
        assert rate.total == 10 and rate.seconds < 120, "a run that is shorter than the window"
        assert rate.records_per_s == pytest.approx(10 / rate.seconds)
        now = memory.clock.now()
        paused = read_rates(catalog, moment, now=now, at_work_s=lambda at: at - 3.0 * (at >= now))["rollouts"]
        assert paused.seconds == pytest.approx(max(1.0, rate.seconds - 3.0)), "3 s of a pause are left out"


@pytest.mark.law("twice", "conservation")
def test_a_twin_counts_once(run: Run) -> None:
    _, log, updater = run
    log.flow(0)
    log.put("verified", *(verified(one, reward=0.5) for one in log.siblings(0)))
    log.put("tasks", *(task(one) for one in log.siblings(0)))
    log.decide(0, GroupResult.filtered)
    log.decide(0, GroupResult.dead)
    updater.update()
    counts = counts_of(updater, Moment())
    assert (counts.groups.admitted, counts.groups.filtered, counts.groups.dead) == (1, 1, 0)
    assert (counts.rollouts.admitted, counts.rollouts.filtered) == (2, 2)


def test_only_what_is_new_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log, updater = run
    log.flow(*range(20))
    assert updater.update() and not updater.update()
    assert not updater.read_texts(()) and not updater.read_texts(()) and num_texts(updater) == 40
    log.flow(20)
    readers, polled = [], list[Any]()
    transport = updater._run.transport
    make = transport.reader

    def noted(positions: Any, **more: Any) -> Any:
        reader = make(positions, **more)
        poll = reader.poll
        monkeypatch.setattr(reader, "poll", lambda *most, **how: (polled.extend(found := poll(*most, **how)), found)[1])
        readers.append(reader)
        return reader

    monkeypatch.setattr(transport, "reader", noted)
    assert updater.update()
    assert len(polled) == 3 * 2 + 3, "of one partition of tasks, rollouts and verified each, from the last one seen on"
    assert not updater.read_texts(()) and num_texts(updater) == 42
    assert len(polled) == 3 * 2 + 3 + 2 + 1, "and of rollouts, for texts"
    log.flow(21)
    assert updater.update() and not updater.read_texts(()) and num_texts(updater) == 44
    assert len(readers) == 2, "they are kept while there is something to read: on Kafka one costs connections"
    assert not updater.update()
    assert counts_of(updater, Moment()).groups.admitted == 22


@pytest.mark.parametrize("damage", ["garbage", "cut", "other run", "other format"])
def test_what_cannot_be_used_is_made_anew(run: Run, damage: str, tmp_path: Path) -> None:
    memory, log, updater = run
    log.flow(0, 1, 2)
    updater.update()
    updater.close()
    file = tmp_path / "index" / FILE
    for end in ("-wal", "-shm"):
        file.with_name(file.name + end).unlink(missing_ok=True)
    match damage:
        case "garbage":
            file.write_bytes(b"no database" * 1000)
        case "cut":
            file.write_bytes(file.read_bytes()[:5000])
        case "other run" | "other format":
            import sqlite3

            db = sqlite3.connect(file)
            db.execute("UPDATE facts SET value = 'x'" if damage == "other run" else "PRAGMA user_version = 99")
            db.commit()
            db.close()
    again = CatalogUpdater(opened(memory), folder=tmp_path / "index")
    again.update()
    assert counts_of(again, Moment()).groups.admitted == 3
    again.close()


def test_another_log_under_the_same_name_is_read_anew(tmp_path: Path) -> None:
    for admitted in (5, 2):  # the second log ends before the place up to which the first one was read
        memory = MemoryRun(make_config(), folder=tmp_path)
        memory.put_manifest()
        log = SyntheticLog(memory.transport(), partitions=4, group_size=2)
        log.flow(*range(admitted))
        updater = CatalogUpdater(opened(memory), folder=tmp_path / "index")
        while updater.update() or updater.read_texts(()):
            pass
        assert counts_of(updater, Moment()).groups.admitted == admitted and num_texts(updater) == 2 * admitted
        updater.close()


def test_a_second_updater_leaves_the_file_to_the_first(run: Run, tmp_path: Path) -> None:
    memory, log, updater = run
    log.flow(0)
    updater.update()
    second = CatalogUpdater(opened(memory, "other"), folder=tmp_path / "index")
    log.flow(1)
    assert not second.update() and second.done < second.total, "the first has not read all"
    assert counts_of(second, Moment()).groups.admitted == 1
    updater.update()
    assert not second.update() and second.done == second.total == updater.total
    assert counts_of(second, Moment()).groups.admitted == 2
    second.close()


def test_a_folder_that_cannot_be_written_is_done_without(run: Run, tmp_path: Path) -> None:
    memory, log, _ = run
    log.flow(0)
    place = tmp_path / "file"
    place.write_text("no folder")
    updater = CatalogUpdater(opened(memory), folder=place / "index")
    updater.update()
    assert counts_of(updater, Moment()).groups.admitted == 1 and updater.path.is_file()
    updater.close()
    assert not updater.path.exists()


def test_a_file_that_cannot_be_opened_is_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log, updater = run
    log.flow(0)

    def full(self: CatalogDatabase, path: Path, identity: str) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(CatalogDatabase, "__init__", full)
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError):
                updater.update()
            assert updater.open_catalog() is None
    updater.update()
    assert counts_of(updater, Moment()).groups.admitted == 1


def test_nothing_before_the_run_has_begun(tmp_path: Path) -> None:
    memory = MemoryRun(make_config(), folder=tmp_path)
    updater = CatalogUpdater(opened(memory), folder=tmp_path / "index")
    assert not updater.update() and updater.open_catalog() is None
    memory.put_manifest()
    updater.update()
    assert counts_of(updater, Moment()).groups.admitted == 0
    updater.close()


def test_a_page_may_come_while_the_file_is_made(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log, updater = run
    log.flow(0)
    seen: list[CatalogReader | None] = []

    def opened_at_last(self: CatalogDatabase, identity: str) -> sqlite3.Connection:
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            db.execute("PRAGMA journal_mode=WAL")  # as SQLite leaves it at first
        seen.append(updater.open_catalog())
        return original(self, identity)

    original = CatalogDatabase._opened
    monkeypatch.setattr(CatalogDatabase, "_opened", opened_at_last)
    updater.update()
    assert seen == [None]
    assert counts_of(updater, Moment()).groups.admitted == 1


def test_dead_letters_by_kind(run: Run) -> None:
    _, log, updater = run
    for offset, (reason, detail) in enumerate([("error", "no 1"), ("error", "no 22"), ("timeout", "slow")]):
        log.put("dead", DeadLetter(
            topic="rollouts", partition=0, offset=offset, key=b"k", value=b"v", headers=(), role="verifier",
            reason=reason, detail=detail, tries=3,
        ))  # fmt: skip
    log.admit(0)
    updater.update()
    with CatalogReader(updater.path) as catalog:
        kinds = count_letters(catalog, Moment())
        assert [(one.reason, one.error, one.count) for one in kinds] == [("error", "no N", 2), ("timeout", "slow", 1)]
        page = find_letters_page(catalog, Moment(), reason="error", limit=1)
        assert [one.id for one in page] == ["verifier/rollouts/0/1"]
        assert find_letters_page(catalog, Moment(), reason="error", before=page[0].offset)[0].error == "no 1"


def test_groups_that_were_put_back(run: Run) -> None:
    memory, log, updater = run
    log.flow(0, 1)
    log.decide(0, GroupResult.dead)
    log.decide(1, GroupResult.dead)
    again = [
        replace(one, group_id="sums/0/0/1", rollout_id=f"sums/0/0/1/{one.sibling}", sequence=2)
        for one in log.siblings(0)
    ]
    log.put("tasks", *map(task, again))
    updater.update()
    with CatalogReader(updater.path) as catalog:
        assert find_put_back(catalog, Moment(), ["sums/0/0/0", "sums/0/1/0"]) == {"sums/0/0/0"}
        assert not find_put_back(catalog, Moment(at_s=memory.clock.now() - 1), ["sums/0/0/0"])


def test_moments(tmp_path: Path) -> None:
    memory = MemoryRun(make_config(), folder=tmp_path)
    memory.put_manifest()
    log = SyntheticLog(memory.transport(), partitions=4, group_size=2)
    times = []
    log.step(0, resumed=True)
    for version in (1, 2, 3):
        memory.clock.advance(60)
        times.append(memory.clock.now())
        log.trained[version] = version
        log.step(version)
    reader = HistoryReader(Log(memory.transport()))
    reader.read()
    assert find_moment("", reader) == Moment(at_s=math.inf, version=3)
    assert find_moment("v2", reader) == Moment(at_s=times[1], version=2, text="v2")
    assert find_moment(f"{times[0] + 1}", reader).version == 1
    assert find_moment("2023-11-14T22:15:20Z", reader).version == 2  # 1,700,000,120 s
    assert find_moment("2000-01-01", reader).version == 0
    for wrong, said in (
        ("v9", "no such version; the run has v0 to v3"),
        ("x", "expected a version"),
        ("v²", "expected"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_moment(wrong, reader)


def test_the_history_goes_on_where_it_ended(tmp_path: Path) -> None:
    memory = MemoryRun(make_config(), folder=tmp_path)
    memory.put_manifest()
    log = SyntheticLog(memory.transport(), partitions=4, group_size=2)
    reader = HistoryReader(Log(memory.transport()))
    assert reader.history().version == 0
    for version in (1, 2):
        log.trained[version] = version
        log.step(version, metrics={"reward": float(version)})
        assert reader.read() and not reader.read()
        assert reader.history() == read_history(Log(memory.transport()))
    log.step(1, epoch=2, resumed=True)  # version 2 is out of force
    assert reader.read()
    assert reader.history() == read_history(Log(memory.transport()))
    assert [one.name.version for one in reader.history().steps] == [1]


def test_its_folder_is_that_of_the_runs_index(run: Run) -> None:
    memory, _, _ = run
    folder = RunFolder(memory.folder.path)
    (folder.path / "config.toml").write_text("")
    updater = CatalogUpdater(opened(memory))
    assert updater.path == folder.index / FILE
    updater.close()
