"""A run as an object: its tables are those of the studio's index, its frames are the tables, its reports those of the
commands; what is wrong is said in one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from markupsafe import escape

import rftstream
from rftstream.api import final_rows
from rftstream.api.html import html_table
from rftstream.api.rollouts import COLUMNS, RunRollout
from rftstream.api.run import Run
from rftstream.config import loader
from rftstream.contracts.rollouts import Rollout
from rftstream.queries.audits.audit import audit
from rftstream.queries.catalog.finding import FATES
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.updating import CatalogUpdater
from rftstream.queries.curves.history import read_history
from rftstream.queries.records.problem_list import text_of
from rftstream.queries.traces.trace import trace
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.runs.making.create import write_config
from rftstream.service.role import Log
from rftstream.testing import Faults, Simulation
from tests.suite.each import each
from tests.unit.tiny_run import make_run, write_run_file

HOSTILE = "<script>alert(1)</script>"
CONFIG: dict[str, Any] = {
    "run": {"name": "demo", "steps": 6},
    "model": {"path": "fake"},
    "feeder": {"groups_per_batch": 2, "group_size": 3, "max_staleness": 1},
    "explorer": {"policy": "fake"},
    "trainer": {"backend": "fake"},
    "policies": {"fake": {"fail_share": 0.05}},
    "transport": {"partitions": 4},
    "evaluations": {"held-out": {"source": "arithmetic", "options": {"size": 4}, "every": 3}},
}

FAULTS = Faults(share=0.02, restarts=1, takeovers=1)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("look")
    rows = [{"question": f"{HOSTILE} {i}", "answer": str(i)} for i in range(5)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasksets = {
        "sums": {"source": "arithmetic"},
        "more": {"source": f"jsonl:{folder}/t.jsonl", "columns": {"prompt": "question"}, "reward": "exact"},
    }
    simulation = Simulation(loader.from_dict({**CONFIG, "tasksets": tasksets}), folder=folder, seed=3)
    write_config(simulation.config, simulation.folder)  # its index lies there, not in a cache that other tests share
    simulation.run()
    with Run(OpenRun(simulation.folder, simulation.config, simulation.transport("api"))) as run:
        yield run


def in_range(value: float | None, least: float, most: float) -> bool:
    return value is not None and least <= value <= most


def tokens_of(one: RunRollout) -> int:
    assert one.num_tokens is not None
    return one.num_tokens


FILTERS: dict[str, tuple[dict[str, Any], Callable[[RunRollout], bool]]] = {
    "fate": ({"fate": "trained"}, lambda one: one.fate == "trained"),
    "status": ({"status": "failed"}, lambda one: one.status == "failed"),
    "taskset": ({"taskset": "more"}, lambda one: one.taskset == "more"),
    "reward": ({"reward_from": 0.5, "reward_to": 1.0}, lambda one: in_range(one.reward, 0.5, 1.0)),
    "tokens": ({"tokens_from": 2, "order": "oldest"}, lambda one: tokens_of(one) >= 2),
    "problem": ({"taskset": "more", "problem": 2}, lambda one: (one.taskset, one.problem) == ("more", 2)),
    "batch": ({"batch": 1, "order": "shortest"}, lambda one: one.batch == 1),
    "version": ({"version_from": 1, "version_to": 2}, lambda one: 1 <= version_of(one) <= 2),
    "text": ({"text": "7"}, lambda one: "7" in one.body().rollout.turns[-1].content),  # type: ignore[union-attr]
    "best": ({"order": "best"}, lambda one: one.reward is not None),
    "few": ({"fate": "dead", "reward_from": 5.0}, lambda one: False),
}


def version_of(one: RunRollout) -> int:
    rollout = one.body().rollout
    spans = [] if rollout is None else [span for segment in rollout.segments for span in segment.versions]
    return spans[0].version if spans else -1


@each("name", FILTERS)
def test_a_filter_finds_what_it_says_and_a_frame_has_the_same_rows(demo: Run, name: str) -> None:
    given, wanted = FILTERS[name]
    table = demo.rollouts(**given)
    found = list(table)
    every = list(demo.rollouts())
    assert len(every) > 30
    if name != "text":  # rollouts that failed have no turns
        assert {one.rollout_id for one in found} == {one.rollout_id for one in every if wanted(one)}
    assert all(map(wanted, found))
    assert table.count() == len(found)
    frame = table.to_pandas()
    assert list(frame.columns) == list(COLUMNS)
    for column in COLUMNS:
        theirs = [None if pd.isna(value) else value for value in frame[column].tolist()]
        assert theirs == [getattr(one, column) for one in found], column
    assert list(table.head(2)) == found[:2]
    assert table.head(2).to_pandas(["rollout_id"])["rollout_id"].tolist() == [one.rollout_id for one in found[:2]]
    assert table.first() == (found[0] if found else None)


def assert_frame_is(run: Run) -> int:
    """Hold that the frame of all rollouts has the rows of the table. Return how many there are."""
    rows, frame = list(run.rollouts()), run.rollouts().to_pandas()
    for column in COLUMNS:
        theirs = [None if pd.isna(value) else value for value in frame[column].tolist()]
        assert theirs == [getattr(one, column) for one in rows], column
    assert run.rollouts().head(3).to_pandas(["rollout_id"])["rollout_id"].tolist() == [o.rollout_id for o in rows[:3]]
    return len(rows)


@pytest.mark.slow
def test_frames_of_a_run_that_goes_on_are_its_rows_whatever_became_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_rows, "LEAST", 1)
    config = loader.from_dict({**CONFIG, "tasksets": {"sums": {"source": "arithmetic"}}})
    simulation = Simulation(config, folder=tmp_path, seed=5, faults=FAULTS)
    (simulation.folder.path / "config.toml").touch()  # so that the index lies in it
    run = Run(OpenRun(simulation.folder, simulation.config, simulation.transport("api")))
    monkeypatch.setattr(Run, "_as_it_is", lambda self: self._index.run)
    counts: list[int] = []

    def look() -> None:
        simulation.at(0.05, look)
        counts.append(assert_frame_is(run))

    look()
    simulation.run()
    every = assert_frame_is(run)
    assert len(set(counts)) > 1
    file, folder = simulation.folder.index / final_rows.FILE, simulation.folder.index
    with run._index.catalog() as opened:
        assert opened is not None
        kept = final_rows.read_final(folder, *opened)
        assert kept is not None and kept.num_rows > every // 2
        assert final_rows.read_final(folder, opened[0], Moment(version=1)) is None  # the run went back to version 1
    for damage in (b"", file.read_bytes()[:-100], file.read_bytes().replace(b"sums/0", b"sums/1")):
        file.write_bytes(damage)
        assert assert_frame_is(run) == every
    run.close()


@pytest.mark.slow
def test_bodies_are_those_of_the_log(demo: Run) -> None:
    columns = ["rollout_id", "prompt", "completion", "messages", "token_ids", "logprobs", "loss_mask", "version"]
    frame = demo.rollouts().to_pandas(columns).set_index("rollout_id")
    messages = [message for _, message in Log(demo._index.run.transport).in_force("rollouts")]
    assert len(frame) == len(messages)
    for one in messages:
        assert isinstance(one, Rollout)
        row = frame.loc[one.ids.rollout_id]
        assert one.problem is not None and row["prompt"] == text_of(one.problem)
        assert row["completion"] == "\n".join(turn.content for turn in one.turns)
        asked = [message.content for message in one.problem.messages]
        assert [said["content"] for said in row["messages"]] == [*asked, *(turn.content for turn in one.turns)]
        for name, ours in (("token_ids", "token_ids"), ("logprobs", "behavior_logprobs"), ("loss_mask", "loss_mask")):
            values = [value for segment in one.segments for value in getattr(segment, ours).numpy().tolist()]
            assert list(row[name]) == pytest.approx(values, rel=0, abs=0)
    asked = demo.problems(taskset="more").to_pandas(["problem", "prompt"]).itertuples(index=False)
    prompts = demo.rollouts(taskset="more").to_pandas(["problem", "prompt"]).itertuples(index=False)
    assert {tuple(row) for row in asked} == {tuple(row) for row in prompts}
    (shown,) = demo.problems().head(1).to_pandas(["prompt"]).prompt
    assert f"<td>{escape(shown)}</td>" in demo.problems()._repr_html_()
    data = demo.rollouts(order="best").head(4).to_dataset(["fate", "group_id", "reward", "completion"])
    assert data[0]["fate"] == "trained" and len(data) == 4


TABLES: dict[str, tuple[Callable[[Run], Any], Callable[[Run], list[Any]], str]] = {
    "steps": (Run.steps, lambda run: [s.name.version for s in read_history(log_of(run)).steps], "version"),
    "evaluations": (Run.evaluations, lambda run: [0, 3, 6], "version"),
    "batches": (Run.batches, lambda run: list(range(run.batches().first().batch, -1, -1)), "batch"),  # type: ignore[union-attr]
    "groups": (Run.groups, lambda run: sorted({one.group_id for one in run.rollouts()}), "group_id"),
    "samples": (lambda run: run.samples("held-out"), lambda run: [], "problem"),
    "problems": (Run.problems, lambda run: sorted({one.problem for one in run.rollouts()}), "problem"),
    "dead_letters": (Run.dead_letters, lambda run: [one.id for one in run.dead_letters()], "id"),
    "feedback": (Run.feedback, lambda run: [], "kind"),
}


def log_of(run: Run) -> Log:
    return Log(run._index.run.transport)


@each("name", TABLES)
def test_each_table_is_iterated_framed_and_shown(demo: Run, name: str) -> None:
    make, wanted, column = TABLES[name]
    table = make(demo)
    rows, frame = list(table), table.to_pandas()
    assert len(rows) == len(frame) == table.count()
    assert tuple(frame.columns)[: len(table.columns)] == table.columns, "as the reference says, also without a row"
    expected = wanted(demo)
    found = frame[column].tolist() if expected else []
    assert found == expected or sorted(set(found)) == expected
    assert list(table.head(1)) == rows[:1]
    assert ("<table>" in table._repr_html_()) is bool(rows)


@pytest.mark.slow
def test_reports_are_those_of_the_commands_and_show_themselves(demo: Run) -> None:
    opened = demo._index.run
    one = demo.rollouts(taskset="more", fate="trained").first()
    found = {rollout.fate for fate in FATES for rollout in demo.rollouts(fate=fate)}
    assert found == {*demo.rollouts().to_pandas().fate}, "each of the column's words is one of the filter"
    assert one is not None
    assert demo.audit().to_json() == audit(opened.transport).to_json() and demo.audit().fine
    assert demo.trace(one.rollout_id).to_json() == trace(opened, one.rollout_id).to_json()
    assert demo.status().to_text().splitlines()[0].startswith("demo")
    assert demo.diff(demo).settings == ()
    judged = demo.diff(demo).to_json()["evaluations"]["held-out"]
    assert judged[0] == judged[1] and judged[0]["newest"]["version"] == 6
    lines = [line for line in demo.diff(demo).to_text().splitlines() if line.startswith("eval held-out newest")]
    assert [line.count("at version 6") for line in lines] == [2]
    assert demo.plot("reward", "held-out")._repr_png_().startswith(b"\x89PNG")
    assert demo.rollout(one.rollout_id) == one and demo.group(one.group_id).group_id == one.group_id
    assert demo.summary["version"] == 6 and demo.id == "demo"
    assert [token.logprob for token in one.tokens() if token.sampled] == pytest.approx(
        demo.rollouts(problem=one.problem, taskset="more").to_pandas(["rollout_id", "logprobs", "loss_mask"])
        .set_index("rollout_id").loc[one.rollout_id, "logprobs"][-tokens_of(one):].tolist()
    )  # fmt: skip
    shown = [one.show(color)._repr_html_() for color in ("logprob", "advantage", "version", "mask")]
    shown += [demo.trace(one.rollout_id)._repr_html_() or "", html_table([{HOSTILE: HOSTILE}]), one._repr_html_()]
    assert all("<script" not in text for text in shown)
    assert "alert(1)" in shown[0] and 'class="t ' in shown[0]


def in_a_thread(do: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


WRONG: dict[str, tuple[Callable[[Run], object], str]] = {
    "filter": (lambda run: run.rollouts(fat="trained"), "rollouts: unknown filter 'fat'; did you mean 'fate'?"),  # type: ignore[arg-type]
    "fate": (lambda run: run.groups(fate="traind"), "groups: fate: unknown 'traind'; known: batched, dead, expired,"),
    "taskset": (
        lambda run: run.rollouts(taskset="sum"),
        "rollouts: taskset: unknown 'sum'; known: more, sums; did you",
    ),
    "evaluation": (lambda run: run.samples("heldout"), "samples: evaluation: unknown 'heldout'; known: held-out; did"),
    "order of samples": (lambda run: run.samples("held-out", order="lost"), "samples: order: unknown 'lost'; known: "),
    "order": (lambda run: run.problems(order="hard"), "problems: order: unknown 'hard'; known: easiest, forgotten"),
    "rows": (lambda run: run.problems().head(-1), "problems: head: got -1, expected a number of rows, 0 or more"),
    "text for a list": (
        lambda run: run.rollouts().to_pandas("reward"),
        "columns: got the text 'reward', expected",
    ),
    "a run for its path": (
        lambda run: rftstream.join(run, role="explorer"),
        "run: got a Run, expected the path",
    ),
    "column": (lambda run: run.rollouts().to_pandas(["rewrd"]), "did you mean 'reward'?"),
    "column of the log": (lambda run: run.problems().to_pandas(["promt"]), "did you mean 'prompt'?"),
    "column of rows": (lambda run: run.steps().to_pandas(["rewrd"]), "steps: column: unknown 'rewrd'"),
    "metric": (lambda run: run.plot("rewrd"), "plot: unknown 'rewrd'; did you mean 'reward'?"),
    "rollout": (
        lambda run: run.rollout(f"{run.groups().first().group_id}/99"),
        "no such rollout; its group has the rollouts 0 to 2",
    ),  # type: ignore[union-attr]
    "group": (lambda run: run.group("x"), "x: no such group in demo; expected an id as sums/0/17/0"),
    "trace": (lambda run: run.trace("v99"), "trace: v99"),
    "color": (lambda run: run.rollouts().first().show("red"), "color: unknown 'red'; known: advantage"),  # type: ignore[union-attr]
    "stopped": (lambda run: run.stop(), "this run is not live on this host"),
    "thread": (
        lambda run: in_a_thread(run.rollouts().count),
        "demo: opened in another thread, to which its log belongs",
    ),
    "version": (lambda run: run.version(99), "version: the store has no version (any more)"),
}


@each("name", WRONG)
def test_what_is_wrong_is_said_in_a_sentence(demo: Run, name: str) -> None:
    do, sentence = WRONG[name]
    with pytest.raises(rftstream.ConfigError) as raised:
        do(demo)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("package", ["pandas", "polars", "pyarrow", "datasets"])
def test_a_missing_package_is_named_with_what_installs_it(
    demo: Run, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "rftstream.api.frames", raising=False)
    make = {"polars": "to_polars", "datasets": "to_dataset"}.get(package, "to_pandas")
    with pytest.raises(rftstream.ConfigError, match=rf"steps: .*needs the package {package}.*install"):
        getattr(demo.steps(), make)()


def test_a_folder_that_is_no_run_and_a_run_that_has_not_begun(tmp_path: Path) -> None:
    with pytest.raises(
        rftstream.ConfigError, match=r"no config\.toml in it, so it is not a run folder; name one, or a run file"
    ):
        rftstream.open(tmp_path)
    RunFolder(tmp_path / "far").logs.mkdir(parents=True)
    with pytest.raises(
        rftstream.ConfigError, match="only logs of workers for another host's run, which may be removed"
    ):
        rftstream.open(tmp_path / "far")
    make_run(RunFolder(tmp_path / "runs" / "tiny"), write_run_file(tmp_path))
    with rftstream.open(tmp_path / "runs" / "tiny") as run:
        assert list(run.rollouts()) == list(run.groups()) == list(run.steps()) == []
        assert run.rollouts().to_pandas().empty and run.summary == {} and list(run.follow()) == []
        assert "<pre" in (run._repr_html_() or "")


def test_whoever_looks_next_writes_the_index_and_makes_a_lost_one_anew(demo: Run) -> None:
    demo.rollouts(text="=").first()  # all texts are read
    first, second = CatalogUpdater(demo._index.run), CatalogUpdater(demo._index.run)
    try:
        first.update()
        second.update()
        assert first.read_texts(()) is False and second.done == first.done == first.total  # it reads along
        num_read = second.texts.done
        first.rest()
        second.path.unlink()
        assert second.update() and second.done == second.total  # it has the lock now, and made the file anew
        first.update()
        assert first.is_behind  # the other one has no texts yet
        while second.read_texts(()):
            pass
        assert second.texts.done == num_read
        second.rest()
        assert not first.update() and not first.is_behind  # and it again, with the other's file
    finally:
        first.close()
        second.close()


def test_the_index_is_free_between_two_questions_and_read_while_another_holds_it(demo: Run) -> None:
    count = demo.rollouts().count()
    other = CatalogUpdater(demo._index.run)
    try:
        other.update()
        assert not other.is_behind and other.read_texts(()) is False  # it holds the index, which is complete
        assert other.done == other.total > 0
        assert demo.rollouts().count() == count
    finally:
        other.close()
    assert demo.rollouts(text="1").count() > 0
