"""What a rescore, and a replay without some verdicts, say before they begin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.contracts.verdicts import with_environment
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.open import open_taskset
from rftstream.launch.result import RunResult
from rftstream.launch.sessions.replay_pipeline import PipelinePlan
from rftstream.launch.sessions.rescore import say_given, say_other_problems, say_same
from rftstream.queries.audits.audit import audit
from rftstream.queries.decisions.comparison import compare
from rftstream.replay.mended import MendedImport, Operated
from rftstream.runs.folder import OpenRun, RunFolder, create_log
from rftstream.runs.manifest import make_manifest
from rftstream.service.role import Log
from rftstream.transport.embedded.transport import EmbeddedTransport
from tests.configs import small_run
from tests.unit.synthetic import SyntheticLog, rollout, task, verified


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OpenRun]:
    config, folder = small_run(transport={"partitions": 2}), RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with closing(EmbeddedTransport(folder.log)) as transport:
        create_log(transport, config)
        yield OpenRun(folder, config, transport)


def test_problems_that_were_mended_are_not_what_rollouts_are_scored_by(run: OpenRun) -> None:
    then, said = {"model": "a", "taskset.sums": "1", "taskset.same": "1"}, list[str]()
    SyntheticLog(run.transport).put("control", make_manifest(run.config, "run", then, 0.0))
    say_other_problems(run, {**then, "model": "b", "taskset.late": "1"}, said.append)
    assert said == []
    say_other_problems(run, {**then, "taskset.sums": "2"}, said.append)
    assert len(said) == 1 and said[0].startswith("sums: its data has changed since run began, but rollouts are ")


@pytest.mark.law("lineage")
def test_new_answers_are_those_of_the_same_question(run: OpenRun, tmp_path: Path) -> None:
    """In its place, else by its prompt; a question that is gone, or has two answers, keeps what was recorded."""
    log, said = SyntheticLog(run.transport), list[str]()
    before = tasks_of(tmp_path / "before.jsonl", *((n, str(n)) for n in range(6)))
    for one in (one for number in range(6) for one in log.siblings(number)):
        problem = before.problem(one.sequence)
        log.put("tasks", replace(task(one), problem=problem))
        log.put("rollouts", replace(rollout(one), problem=problem))
    now = tasks_of(tmp_path / "now.jsonl", (0, "0"), (1, "mended"), (3, "moved"), (5, "a"), (5, "b"))
    with closing(EmbeddedTransport(tmp_path / "new")) as target:
        create_log(target, run.config)
        MendedImport(run.transport, target, "new", said.append, {"sums": now}).run(
            lambda: make_manifest(run.config, "new", {}, 0.0)
        )
        for topic in ("tasks", "rollouts"):
            found = {one.message.ids.sequence: one.message.problem.answer for one in Log(target).messages(topic)}  # type: ignore[union-attr]
            assert found == {0: "0", 1: "mended", 2: "2", 3: "moved", 4: "4", 5: "5"}
        assert not audit(target).problems
    told = "sums: 2 of 6 problems have another answer or columns now: sums/1, sums/3; 3 are not there by"
    assert said[-1].startswith(told)


def test_new_answers_are_found_where_a_question_shows_an_image(run: OpenRun, tmp_path: Path) -> None:
    """The feeder has put it into the run's store, which the new records name, too."""
    config = small_run(tasksets={"sums": {"source": "squares"}})
    now, log, said = open_taskset("sums", config.tasksets["sums"], config), SyntheticLog(run.transport), list[str]()
    for one in (one for number in range(2) for one in log.siblings(number)):
        (message,) = (problem := now.problem(one.sequence)).messages
        kept = replace(message, media=(replace(message.media[0], url="store:media/one"),))
        log.put("tasks", replace(task(one), problem=replace(problem, messages=(kept,), answer="wrong")))
    with closing(EmbeddedTransport(tmp_path / "new")) as target:
        create_log(target, run.config)
        MendedImport(run.transport, target, "new", said.append, {"sums": now}).run(
            lambda: make_manifest(run.config, "new", {}, 0.0)
        )
        for one in Log(target).messages("tasks"):
            problem, sequence = one.message.problem, one.message.ids.sequence  # type: ignore[union-attr]
            assert (problem.answer, problem.info) == (now.problem(sequence).answer, now.problem(sequence).info)
            assert problem.messages[0].media[0].url == "store:media/one"
    assert said[-1] == "sums: 2 of 2 problems have another answer or columns now: sums/0, sums/1"


OPERATORS = """
from dataclasses import dataclass, replace
from rftstream.data.operators.base import Change

class Grade:
    @dataclass
    class Config:
        pass

    def __init__(self, options):
        pass

    def decide(self, draw, facts, seed):
        (asked,), number = draw.problem.messages, draw.problem.info.get("number", 0)
        asked, info = replace(asked, content=asked.content + "?"), {"number": number, "grade": draw.index + number}
        return Change(problem=replace(draw.problem, messages=(asked,), info=info))
"""


def test_new_answers_keep_what_an_operator_adds(run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds it to the problem of now, also where it changes the prompt by which the problem is found."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_grades.py").write_text(OPERATORS)
    config = small_run(pipeline=[{"op": "own_grades:Grade"}], transport={"partitions": 2})
    log, before = SyntheticLog(run.transport), tasks_of(tmp_path / "before.jsonl", (0, "0"), (1, "1"), (2, "2"))
    then = Operated(config, {"sums": before})
    for one in (one for number in range(3) for one in log.siblings(number)):
        problem = then(one.group_id, before.problem(one.sequence))
        assert problem.info["grade"] == one.sequence
        log.put("tasks", replace(task(one), problem=problem))
    (tmp_path / "now.jsonl").write_text(
        '{"prompt": "question 0", "answer": "zero"}\n{"prompt": "question 2", "answer": "2", "number": 5}\n'
    )
    now = open_taskset("sums", small_run(tasksets={"sums": {"source": f"jsonl:{tmp_path}/now.jsonl"}}).tasksets["sums"],
                       run.config)  # fmt: skip
    with closing(EmbeddedTransport(tmp_path / "new")) as target:
        create_log(target, run.config)
        MendedImport(run.transport, target, "new", [].append, {"sums": now}, Operated(config, {"sums": now})).run(
            lambda: make_manifest(run.config, "new", {}, 0.0)
        )
        problems = {one.message.ids.sequence: one.message.problem for one in Log(target).messages("tasks")}  # type: ignore[union-attr]
    found = {number: (problem.answer, problem.info) for number, problem in problems.items()}
    assert found == {
        0: ("zero", {"number": 0, "grade": 0}),
        1: ("1", {"number": 0, "grade": 1}),  # it is gone
        2: ("2", {"number": 5, "grade": 6}),  # it has moved to 1
    }


def tasks_of(path: Path, *rows: tuple[int, str]) -> Taskset:
    """A taskset of questions by number, with their answers."""
    path.write_text("".join(f"{json.dumps({'prompt': f'question {n}', 'answer': answer})}\n" for n, answer in rows))
    config = small_run(tasksets={"sums": {"source": f"jsonl:{path}"}})
    return open_taskset("sums", config.tasksets["sums"], config)


def test_nothing_can_change_only_where_the_scorer_has_scored_all(run: OpenRun) -> None:
    log, said = SyntheticLog(run.transport), list[str]()
    log.flow(0)
    say_same(run, {"sums": "exact 1", "unseen": "exact 1"}, said.append)
    assert len(said) == 1 and said[0].startswith("sums: exact 1 has scored all of ")
    log.admit(1)
    log.sample(1)
    for one in map(verified, log.siblings(1)):
        assert one.verdict is not None
        log.put("verified", replace(one, verdict=replace(one.verdict, scorer_version="2")))
    for scorer in ("exact 1", "exact 2"):
        say_same(run, {"sums": scorer}, said.append)
    assert len(said) == 1, "the other version's rewards change"


def test_a_rescore_plays_nothing_again(run: OpenRun) -> None:
    log, said = SyntheticLog(run.transport), list[str]()
    for number, digest in enumerate("ab"):
        log.admit(number)
        log.sample(number)
        for one in map(verified, log.siblings(number)):
            assert one.verdict is not None
            by = replace(one.verdict, scorer="environment", scorer_version=with_environment("1", digest))
            log.put("verified", replace(one, verdict=by))
    say_same(run, {"sums": "environment 1"}, said.append)
    assert said.pop().startswith("sums: environment 1 has scored all of "), (
        "each rollout keeps its environment's reward"
    )
    config = small_run(tasksets={name: {"source": "arithmetic", "reward": name} for name in ("exact", "environment")})
    say_given(config, ("exact", "environment"), said.append)
    assert [line.partition(" its ")[0] for line in said] == ["environment: the reward of"]


def test_a_plan_without_what_another_scorer_judged_names_the_algorithm_for_what_is_left() -> None:
    for unscored, algorithm, is_advised in ((8, "grpo", True), (8, "topr", False), (0, "grpo", False)):
        plan = PipelinePlan(run="/a", run_dir="/b", operators=(), changed=(), unscored=unscored, algorithm=algorithm)
        assert ("better with --algorithm topr" in plan.to_text()) == is_advised


def test_a_comparison_tells_parts_apart_and_shows_what_was_right(tmp_path: Path) -> None:
    config, logs = small_run(transport={"partitions": 2}), list[EmbeddedTransport]()
    for name, parts in (("old", {"same": 0.0, "form": 1.0}), ("new", {"same": 1.0, "form": 1.0, "human": 1.0})):
        logs.append(EmbeddedTransport(tmp_path / name))
        create_log(logs[-1], config)
        log = SyntheticLog(logs[-1])
        log.admit(0)
        log.sample(0)
        for one in map(verified, log.siblings(0)):
            assert one.verdict is not None and one.rollout is not None and one.rollout.problem is not None
            problem = replace(one.rollout.problem, answer="3.0")
            verdict = replace(one.verdict, reward=parts["same"] + parts["form"], parts=parts)
            log.put("verified", replace(one, verdict=verdict, rollout=replace(one.rollout, problem=problem)))
    found = compare(*logs)
    lines = [line.split() for line in found.to_text().splitlines()]
    assert f"people judged {found.num_both} of them, {found.num_both} as the scorer had" in found.to_text()
    assert ["same", "0", "1", "1"] in lines and ["form", "1", "1", "0"] in lines
    [problem] = found.to_json()["problems"]
    assert [problem[name] for name in ("problem", "num_moved", "old", "new", "answer")] == [
        0,
        found.num_both,
        1,
        2,
        "3.0",
    ]
    assert [*lines[-2][:2], *lines[-1][3:]] == [
        "problems",
        "moved",
        "2",
        *f"{found.num_both} of {found.num_both} 3.0".split(),
    ]
    assert {moved.answer for moved in found.moved} == {"3.0"} and "answer" in found.moved[0].to_json()
    assert any(line[1:4] == ["1", "2", "3.0"] for line in lines)
    for transport in logs:
        transport.close()


def test_groups_that_were_left_out_did_not_die(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    for source, said in ((None, "8 groups died: "), (tmp_path / "a", "8 groups are not trained here: ")):
        result = RunResult(
            run_dir=tmp_path, reason="steps", steps=1, new_steps=1, version=1, reward_first=0.0, reward_last=1.0,
            wall_s=1.0, dead_groups=8, sampled_by=source,
        )  # fmt: skip
        line = next(line for line in result.summary().splitlines() if "dead list" in line)
        assert line.startswith(said) and ("dead retry" in line) == (source is None)


def test_a_resumed_run_tells_its_new_rollouts_from_all_dead_groups(tmp_path: Path) -> None:
    """The rollouts are those of this command, the groups those that still lie there: the two do not belong together."""
    (tmp_path / "config.toml").touch()
    result = RunResult(
        run_dir=tmp_path, reason="steps", steps=170, new_steps=10, version=170, reward_first=None, reward_last=1.0,
        wall_s=1.0, dead_groups=28, no_reward=24,
    )  # fmt: skip
    said = result.summary()
    assert "24 new rollouts without a reward: " in said and "28 groups died in all: " in said
