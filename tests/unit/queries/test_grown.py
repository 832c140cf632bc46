"""What a look at a run reads: no more of a log that has grown tenfold."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from rftstream.algorithms.reward_changes import changes_to_text
from rftstream.config.loader import from_dict
from rftstream.contracts import codec
from rftstream.contracts.control import DesiredState, RunManifest, RunState, Trimmed
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord
from rftstream.contracts.summaries import Summary
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.models.spec import ModelSpec
from rftstream.queries.catalog.database import CatalogDatabase, CatalogReader
from rftstream.queries.catalog.finding import GroupFilter, find_groups
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.problems import ORDERS, count_problems, find_problems, list_tasksets
from rftstream.queries.curves import coarse
from rftstream.queries.curves.history import CoarseHistory, HistoryReader, read_glance, read_history
from rftstream.queries.curves.model_card import card_text
from rftstream.queries.records.dead import read_dead
from rftstream.queries.records.inspect import list_topics
from rftstream.queries.state.status_reading import read_status
from rftstream.queries.traces import versions_on_log
from rftstream.queries.traces.lineage import number, version_of
from rftstream.queries.traces.versions_on_log import VersionsOnLog
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.runs.observer import Observer
from rftstream.service.control_view import FIRST_RECORDS, ControlReader, read_control, read_manifest
from rftstream.service.records import newest_summaries, steps_glance
from rftstream.service.role import Log
from rftstream.transport.base import Transport
from rftstream.transport.memory.transport import MemoryLog
from tests.unit.grown import announced, count_reads, grow, play, summarise
from tests.unit.synthetic import SyntheticLog

pytestmark = pytest.mark.law("bounded")

CONFIG = {
    "run": {"name": "demo", "steps": 999},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
}
LOOKS: dict[str, Callable[[OpenRun], object]] = {
    "status": read_status,
    "dead": lambda run: read_dead(Log(run.transport), now=0.0),
    "inspect": lambda run: list_topics(Log(run.transport)),
    "control": lambda run: read_control(run.transport),
    "observer": lambda run: observed(run.transport),
    "model card": lambda run: card_text(Log(run.transport), run.config, SPEC, 1),
}
MANIFEST = RunManifest(
    run="demo", created_at=0.0, config="", digests={}, partitions=1, shares=1, seed=0, rftstream_version="0"
)
SPEC = ModelSpec(name="fake", folder=Path("absent"), dtype="bfloat16", context=None)


def observed(transport: Transport, *, whole: bool = False) -> Observer:
    """Return what the session of a run knows after its start."""
    with contextlib.closing(Observer(transport, whole=whole)) as observer:
        observer.catch_up()
    return observer


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> SyntheticLog:
    monkeypatch.setattr(steps_glance, "FIRST_OFFSETS", 8)
    monkeypatch.setattr(steps_glance, "NEWEST_OFFSETS", 16)
    return SyntheticLog(MemoryLog(lambda: 0.0, marks=True).connect("test"))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS)
def test_a_look_reads_no_more_of_a_longer_log(
    look: str, log: SyntheticLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, run = count_reads(monkeypatch), OpenRun(RunFolder(tmp_path), from_dict(CONFIG), log.transport)
    counts: list[Counter[str]] = []
    for first, rounds in ((0, 48), (48, 432)):
        grow(log, rounds, first=first, rejected=GroupResult.expired)
        newest = VersionName(trainer_epoch=1, version=first + rounds)
        log.put("control", Trimmed(name=newest, checkpoints=(newest,)))  # which is judged by the steps
        read.clear()
        LOOKS[look](run)
        counts.append(Counter({topic: count for topic, count in read.items() if topic != "control"}))
    assert counts[0] == counts[1]
    assert bool(counts[0]) is (look != "inspect")


def test_a_glance_says_what_the_whole_history_says(log: SyntheticLog) -> None:
    play(log, 40)
    log.step(30, epoch=2, resumed=True)  # a newer trainer went back
    for version in range(31, 71):
        log.trained[version] = version
        log.step(version, epoch=2, metrics={"reward": 1.0, "spent/requests": 5.0}, staleness=((1,), (0, 1)))
    summarise(log)
    glance, whole = read_glance(Log(log.transport)), read_history(Log(log.transport))
    assert len(glance.steps) < 40 < len(whole.steps) == glance.num_steps == whole.num_steps == 70
    assert glance.current == whole.current
    assert glance.steps == tuple(step for step in whole.steps if step in glance.steps)
    assert glance.spent() == {"requests": sum(step.metrics["spent/requests"] for step in whole.steps)}
    tokens, groups = glance.staleness()
    assert tokens == [3 * 30 + 40, sum(range(30))]
    assert groups == [30, 40]
    assert glance.rewards()[-5:] == whole.rewards()[-5:]
    some, every = observed(log.transport).curve, observed(log.transport, whole=True).curve
    assert len(some.steps()) < len(every.steps()) == len(whole.steps)
    assert (some.version, some.num_steps) == (every.version, every.num_steps) == (70, 70)
    assert some.last == every.last == whole.steps[-1]
    assert some.reward_last() == every.reward_last() == 1.0
    assert (some.reward_first(), every.reward_first()) == pytest.approx((0.01, 0.03)), "of three and of seven"


def test_a_glance_finds_where_the_reward_changed(log: SyntheticLog) -> None:
    """Also among steps that it passes over."""
    log.step(0, resumed=True)
    for version in range(1, 121):
        log.trained[version] = version
        scorers = {"sums": f"exact {1 + (version > 40) + (version > 70)}", **({"maze": "goal"} if version % 2 else {})}
        log.step(version, metrics={"reward": float(version)}, scorers=scorers)
    summarise(log)
    glance, whole = read_glance(Log(log.transport)), read_history(Log(log.transport))
    assert len(glance.steps) < len(whole.steps)
    assert [(one.version, one.after) for one in whole.reward_changes] == [(41, "exact 2"), (71, "exact 3")]
    assert glance.reward_changes == whole.reward_changes
    assert whole.rewards() == [*range(71, 121)] and whole.reward_ends() == (73, 118, 5)
    assert whole.comparable().steps == whole.steps[70:]
    curve = observed(log.transport).curve
    assert curve.reward_first() is None and curve.rewards()[-2:] == [119, 120]


@pytest.mark.parametrize(("first", "last"), [(5, 90), (150, 460)])
def test_a_glance_finds_all_turns_of_two_rewards(first: int, last: int, log: SyntheticLog) -> None:
    """Whichever of the changes is found by halves, also where a trainer went back over some of them."""
    log.step(0, resumed=True)
    for epoch, versions in ((1, range(1, last - 4)), (2, range(last - 9, 701))):
        if epoch == 2:
            log.step(versions[0] - 1, epoch=2, resumed=True)
        for version in versions:
            log.trained[version] = version
            mixed = first <= version < last and version % 5 < 2
            scorers = {"sums": "closeness 2" if version >= last or mixed else "closeness 1"}
            log.step(version, epoch=epoch, metrics={"reward": 1.0}, scorers=scorers)
    summarise(log)
    glance, whole = read_glance(Log(log.transport)), read_history(Log(log.transport))
    assert len(glance.steps) < len(whole.steps)
    assert glance.reward_changes == whole.reward_changes
    (line,) = changes_to_text(glance.reward_changes)
    assert f"score in turns, {len(whole.reward_changes)} times from version {first:,}" in line


def test_who_looks_again_reads_of_control_what_is_new(log: SyntheticLog, monkeypatch: pytest.MonkeyPatch) -> None:
    read, look = count_reads(monkeypatch), ControlReader(log.transport)
    assert read_manifest(log.transport) is None
    log.put("control", MANIFEST)
    log.step(0, resumed=True)
    for version in range(1, 41):
        log.trained[version] = version
        log.step(version)
        name = VersionName(trainer_epoch=1, version=version)
        log.put("control", Trimmed(name=name, checkpoints=(name,)))
        assert (before := look.read()) == read_control(log.transport)
    read.clear()
    assert look.read() == before and read["control"] == 0
    log.put("control", RunState(state=DesiredState.paused, by="me"))
    read.clear()
    assert look.read().desired is DesiredState.paused is not before.desired, "what was returned does not change"
    assert read["control"] == 1
    read.clear()
    assert read_manifest(log.transport) == MANIFEST and read["control"] <= FIRST_RECORDS


def test_a_version_is_found_in_a_few_reads(log: SyntheticLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions_on_log, "AROUND", 4)
    grow(log, 60)
    noise = tuple((name, b"7") for name in ("trainer_epoch", "version", "writer_epoch"))
    log.put_raw(*(NewRecord(topic, 0, b"?", b"?", noise) for topic in ("steps", "weights")))  # out of order
    log.step(40, epoch=2, resumed=True)  # a newer trainer went back
    for version in range(41, 101):
        log.trained[version] = version
        log.step(version, epoch=2)
        if version != 70:
            log.put("weights", announced(version, epoch=2))
    summarise(log)
    read = count_reads(monkeypatch)
    for topic in ("steps", "weights"):
        expected = {name: record for record, _ in Log(log.transport).in_force(topic) if (name := version_of(record))}
        for epoch, version in ((1, 0), (1, 1), (1, 31), (1, 45), (1, 60), (2, 40), (2, 45), (2, 70), (2, 100), (3, 1)):
            name = VersionName(trainer_epoch=epoch, version=version)
            read.clear()
            assert VersionsOnLog(Log(log.transport)).find(topic, name) == expected.get(name)
            assert read[topic] < len(expected) / 2, name
    versions = VersionsOnLog(Log(log.transport))
    assert [(run.trainer_epoch, run.first, run.last) for run in versions.runs] == [(1, 0, 60), (2, 40, 100)]
    assert [number(record, "trainer_epoch") for record in versions.steps_of(45)] == [1, 2]
    monkeypatch.setattr(versions_on_log, "search_by_halves", lambda *_, **__: (0, 0))  # a foreign record has misled it
    assert VersionsOnLog(Log(log.transport)).find("steps", name=VersionName(trainer_epoch=2, version=90)) is not None


@pytest.mark.slow
def test_old_summaries_are_found_in_a_few_reads(log: SyntheticLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest_summaries, "FIRST_LOOK", 8)
    grow(log, 60)
    told = [one for _, one in Log(log.transport).in_force("summaries") if isinstance(one, Summary)]
    read = count_reads(monkeypatch)
    for below in (1, 30, 100, 10**9):
        read.clear()
        found = newest_summaries.newest_summaries(log.transport, "outcomes", codec.from_record, below=below)
        old = [one for one in told if one.topic == "outcomes" and one.through <= below]
        assert [one for _, one in found] == old[:-3:-1]
        assert read["summaries"] < len(told) / 2


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_page_of_problems_looks_at_no_more_rows_of_more(order: str, tmp_path: Path) -> None:
    num_steps = []
    for count in (100, 1000):
        path = tmp_path / f"{count}.sqlite3"
        database = CatalogDatabase(path, "run")
        with database.transaction() as db:
            for sequence in range(2 * count):  # every problem twice, some without a reward
                problem, reward = sequence % count, None if sequence % 7 == 0 else (sequence * 31 % 101) / 101
                db.execute(
                    "INSERT INTO groups(sequence, group_id, taskset, problem, group_size, admitted_at, decided_at,"
                    " result, reason, reward_mean, min_version) VALUES (?, ?, ?, ?, 2, 1.0, 2.0, 0, '', ?, ?)",
                    (
                        sequence,
                        str(sequence),
                        f"t{problem % 3}",
                        problem,
                        None if sequence % 2 else reward,
                        sequence * 4 // count,
                    ),
                )
                if sequence % 2:  # its task came first
                    db.execute("UPDATE groups SET reward_mean = ? WHERE sequence = ?", (reward, sequence))
        database.close()
        with contextlib.closing(CatalogReader(path)) as catalog:
            for taskset in ("", "t1"):
                now, then = (
                    (find_problems(catalog, moment, taskset=taskset, order=order, skip=5, limit=40),
                     count_problems(catalog, moment, taskset=taskset))
                    for moment in (Moment(), Moment(at_s=1e9))
                )  # fmt: skip
                assert now == then and len(now[0]) == min(40, now[1] - 5)
            since = find_problems(catalog, Moment(), version_from=3, order=order, limit=count)
            groups = find_groups(catalog, Moment(), GroupFilter(), limit=count // 4 * 5, with_siblings=False)
            ends = {one.problem: (one.reward_first, one.reward_newest) for one in since}
            rewards = {group.problem: [] for group in groups}
            for group in groups[::-1]:
                rewards[group.problem] += [group.reward_mean] if group.reward_mean is not None else []
            assert ends == {one: (some[0], some[-1]) if some else (None, None) for one, some in rewards.items()}
            changes = [one[1] - one[0] for one in ends.values() if None not in one]
            if order == "forgotten":
                assert changes == sorted(changes) and changes[0] < 0 < changes[-1]
            ticks: list[int] = []
            catalog._db.set_progress_handler(lambda: ticks.append(1), 10)  # noqa: B023  asked before the next one is made
            find_problems(catalog, Moment(), order=order)
            count_problems(catalog, Moment())
            list_tasksets(catalog)
            num_steps.append(len(ticks))
    assert num_steps[1] <= 1.2 * num_steps[0] + 2


def test_a_chart_is_drawn_of_no_more_than_some_steps(log: SyntheticLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarse, "MAX_CHARTED", 8)
    reader = HistoryReader(Log(log.transport))
    log.step(0, resumed=True)
    for version in range(1, 101):
        log.trained[version] = version
        log.step(version, metrics={"reward": float(version)} | ({"rare": 4.0} if version == 50 else {}))
        if version % 5 == 0:
            log.put("evals", EvalResult(
                evaluation="held-out", name=VersionName(trainer_epoch=1, version=version), num_tasks=1, num_samples=1,
                num_unscored=0, metrics={"mean": version / 100}, generations=None,
            ))  # fmt: skip
        if version in (7, 60, 61, 100):
            reader.read()
            charted, whole = reader.charted(), read_history(Log(log.transport))
            assert charted == CoarseHistory().of(whole), "whatever was put together before"
            assert charted is reader.charted()
            assert len(charted.steps) == (7 if version == 7 else min(8, len(charted.steps)))
            assert charted.steps[-1].name.version == version == charted.version
    widths = [after.name.version - before.name.version for before, after in pairwise(charted.steps)]
    widths = [charted.steps[0].name.version, *widths]
    means = [step.metrics["reward"] for step in charted.steps]
    assert sum(width * mean for width, mean in zip(widths, means, strict=True)) == pytest.approx(5050)
    assert [step.metrics["rare"] for step in charted.steps if "rare" in step.metrics] == [4.0]
    assert 4 <= len(charted.evaluations) <= 8 and charted.evaluations[-1].name.version == 100
    glance = reader.glance()
    assert (glance.num_steps, len(glance.steps), glance.current) == (100, 24, whole.current)
    log.step(20, epoch=2, resumed=True)  # the rest is out of force
    reader.read()
    assert reader.charted() == CoarseHistory().of(read_history(Log(log.transport)))
    assert reader.charted().steps[-1].name.version == 20
    assert reader.charted(until_s=-1.0).steps == ()


def test_no_point_of_a_chart_is_of_two_rewards_or_stages(log: SyntheticLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reward from version 34 on, another stage from version 71 on, and one that lasts for a single step."""
    monkeypatch.setattr(coarse, "MAX_CHARTED", 8)
    reader = HistoryReader(Log(log.transport))
    log.step(0, resumed=True)
    for version in range(1, 101):
        log.trained[version] = version
        kind = (version >= 34) + (version >= 71) + (version == 90)
        metrics = {"stage": float((version >= 71) + (version == 90)), "kind": float(kind)}
        log.step(version, metrics=metrics, scorers={"sums": f"a {version >= 34}"})
        result = EvalResult(
            evaluation="held-out", name=VersionName(trainer_epoch=1, version=version), num_tasks=1, num_samples=1,
            num_unscored=0, metrics={"mean": float(version >= 34)}, generations=None, scorer="a",
            scorer_version=str(version >= 34),
        )  # fmt: skip
        log.put("evals", result)
        reader.read()
        charted = reader.charted()
        assert {step.metrics["kind"] for step in charted.steps} <= {0.0, 1.0, 2.0, 3.0}
        assert {one.metrics["mean"] for one in charted.evaluations} <= {0.0, 1.0}
        assert len(charted.steps) <= 8 + 4 and len(charted.evaluations) <= 8 + 1
    assert [kind for kind, _ in groupby(step.metrics["kind"] for step in charted.steps)] == [0, 1, 2, 3, 2]
    assert charted == CoarseHistory().of(read_history(Log(log.transport)))
