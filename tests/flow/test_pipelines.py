"""Operators in feeder and buffer: what they skip, change, reject, mask and shape, and that a kill changes nothing."""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts import codec
from rftstream.contracts.batches import Experience
from rftstream.contracts.control import Drawn, TasksEnded
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, OperatorAction
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import Sampling, Task
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.data.operators.base import KEEP, Change, Draw, Mask, Reject, ScoredGroup, Shape, Skip, TokenSpan
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.pipeline import PlacedOperator, TaskPipeline
from rftstream.data.operators.watch import OperatorWatch
from rftstream.errors import StopRule
from rftstream.queries.audits.audit import audit
from rftstream.queries.audits.operator_totals import OperatorReader, OperatorTotals
from rftstream.queries.facts.database import Index
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene, problem

OWN = "tests.flow.test_pipelines:"


class Sizes:
    """A task operator of one's own: problem n gets 1 + n % 3 rollouts."""

    def decide(self, draw: Draw, facts: Facts, seed: int) -> Change:
        return Change(group_size=1 + draw.index % 3, problem=problem(f"{draw.index}+0="))


class Raises:
    """Raises for every third problem or group, and answers nonsense for the one after."""

    def decide(self, what: Draw | ScoredGroup, facts: Facts, seed: int) -> Any:
        number = int(what.group_id.split("/")[2]) % 3
        if number == 0:
            raise ValueError(f"no {what.group_id}")
        return KEEP if number == 1 else "nonsense"


class RaisesLate(Raises):
    side = "experience"


class Seen:
    """Skips whatever was ever decided, and half of the rest by its seed: as sensitive to facts and seeds as can be."""

    def decide(self, draw: Draw, facts: Facts, seed: int) -> Any:
        if facts.problem(draw.taskset, draw.index).num_groups:
            return Skip("seen")
        return Skip("unlucky") if seed % 2 else KEEP


class Shaper:
    side = "experience"

    def decide(self, group: ScoredGroup, facts: Facts, seed: int) -> Any:
        return Shape({one.sibling: 0.5 for one in group.rollouts if one.reward > 0}, "bonus")


class Masker:
    side = "experience"

    def decide(self, group: ScoredGroup, facts: Facts, seed: int) -> Any:
        return Mask({group.rollouts[0].sibling: (TokenSpan(0, 0, 5),)}, "first")


class ByFacts:
    """Rejects by facts and seed."""

    side = "experience"

    def decide(self, group: ScoredGroup, facts: Facts, seed: int) -> Any:
        return Reject(f"after {facts.seen}") if seed % 3 == 0 else KEEP


def own(name: str) -> dict[str, Any]:
    return {"op": OWN + name}


def feeding(folder: Path, *operators: dict[str, Any], **settings: Any) -> Scene:
    return Scene(folder, manifest=False, pipeline=list(operators), **settings)


def buffering(folder: Path, *operators: dict[str, Any], **settings: Any) -> Scene:
    return Scene(folder, **{"pipeline": list(operators), "feeder__max_staleness": 100, **settings})


def tasks_of(scene: Scene) -> list[Task]:
    tasks = [message for message in scene.messages("tasks") if isinstance(message, Task)]
    return sorted(tasks, key=lambda task: (task.ids.sequence, task.ids.sibling))


def drawn_of(scene: Scene) -> list[Drawn]:
    return [message for message in scene.messages("control") if isinstance(message, Drawn)]


def outcomes_of(scene: Scene) -> list[GroupOutcome]:
    return [one for one in scene.messages("outcomes") if isinstance(one, GroupOutcome) and not one.late]


def experiences_of(scene: Scene) -> list[Experience]:
    return [one for one in scene.messages("batches") if isinstance(one, Experience)]


def indexes_of(scene: Scene) -> list[int]:
    return [int(task.ids.group_id.split("/")[2]) for task in tasks_of(scene) if task.ids.sibling == 0]


def check_balance(scene: Scene) -> Drawn:
    """What was drawn was admitted, put back, left out or skipped."""
    drawn = drawn_of(scene)[-1]
    groups = {task.ids.group_id for task in tasks_of(scene)}
    skipped = sum(n for ops in drawn.skipped.values() for reasons in ops.values() for n in reasons.values())
    assert drawn.admitted == len(groups)
    left_out = sum(drawn.left_out.values())
    assert sum(drawn.drawn.values()) == drawn.admitted - drawn.put_back + left_out + skipped
    return drawn


# --------------------------------------------------------------------------------------------- task side


def test_without_operators_there_is_nothing_new_on_the_log(tmp_path: Path) -> None:
    scene = feeding(tmp_path)
    RoleDriver(scene, "feeder").work()
    assert not drawn_of(scene)
    assert {task.seen for task in tasks_of(scene)} == {None}
    buffered = buffering(tmp_path / "buffer")
    buffered.verify(0)
    buffered.verify(1)
    RoleDriver(buffered, "buffer").work()
    assert {(one.seen, one.decisions, tuple(one.parts)) for one in outcomes_of(buffered)} == {(None, (), ())}


def test_operators_skip_in_order_and_each_skip_is_counted(tmp_path: Path) -> None:
    source = {"source": "arithmetic", "passes": 1, "shuffle": False, "options": {"size": 40, "high": 20}}
    operators = ({"op": "length", "max_characters": 4}, {"op": "regex", "skip": "^1", "field": "answer"})
    scene = feeding(tmp_path, *operators, tasksets={"sums": source}, feeder__groups_per_batch=100)
    RoleDriver(scene, "feeder").work()
    drawn = check_balance(scene)
    assert drawn.drawn == {"sums": 40}
    skipped = drawn.skipped["sums"]
    assert set(skipped) == {"length", "regex"}
    assert skipped["length"]["too long"] > 0
    for task in tasks_of(scene):
        assert sum(len(one.content) for one in task.problem.messages) <= 4
        assert not (task.problem.answer or "").startswith("1")
    (end,) = [one for one in scene.messages("control") if isinstance(one, TasksEnded)]
    assert (end.reason, end.admitted) == ("taskset", drawn.admitted)


def test_operators_of_a_taskset_are_asked_about_it_alone(tmp_path: Path) -> None:
    source = {"source": "arithmetic"}
    never = {**source, "pipeline": [{"op": "regex", "skip": "."}]}
    scene = feeding(tmp_path, tasksets={"sums": source, "never": never}, feeder__groups_per_batch=10)
    RoleDriver(scene, "feeder").work()
    assert {task.ids.taskset for task in tasks_of(scene)} == {"sums"}
    assert set(check_balance(scene).skipped) == {"never"}


def test_an_operator_gives_each_problem_its_own_number_of_rollouts(tmp_path: Path) -> None:
    """Admission counts groups, so that a batch is as many groups as before."""
    scene = feeding(tmp_path, own("Sizes"), feeder__groups_per_batch=3)
    RoleDriver(scene, "feeder").work()
    assert check_balance(scene).admitted == 6
    for task in tasks_of(scene):
        index = int(task.ids.group_id.split("/")[2])
        assert task.ids.group_size == 1 + index % 3
        assert task.problem.messages[0].content == f"{index}+0="
    assert check_balance(scene).changed["sums"][OWN + "Sizes"] == 6


def test_solve_rate_skips_what_is_always_or_never_solved(tmp_path: Path) -> None:
    source = {"source": "arithmetic", "shuffle": False, "options": {"size": 8}}
    operator = {"op": "solve_rate", "keep": [0.1, 0.9], "explore": 0.0}
    scene = feeding(tmp_path, operator, tasksets={"sums": source}, feeder__groups_per_batch=4)
    feeder = RoleDriver(scene, "feeder")
    feeder.work()
    assert indexes_of(scene) == list(range(8))
    for sequence in range(8):
        scene.decide(sequence, GroupResult.batched, batch=0)  # rewards of 1.0
    scene.step(1, trained=4)
    with pytest.raises(StopRule, match=r"no_signal|solve_rate \(too easy\)") as stopped:
        feeder.work()
    assert stopped.value.reason == "no_signal"
    assert check_balance(scene).skipped["sums"]["solve_rate"]["too easy"] >= 1000


def test_an_operator_that_fails_is_named_and_skips_the_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = {"source": "arithmetic", "shuffle": False}
    scene = feeding(tmp_path, own("Raises"), tasksets={"sums": source}, feeder__groups_per_batch=5)
    with caplog.at_level(logging.ERROR):
        RoleDriver(scene, "feeder").work()
    assert indexes_of(scene) == [1 + 3 * n for n in range(10)]
    skipped = check_balance(scene).skipped["sums"][OWN + "Raises"]
    assert set(skipped) == {"raised ValueError", "answered nonsense"}
    assert "pipeline.0" in caplog.text
    assert "sums/0/3/0: the operator raised ValueError: no sums/0/3/0" in caplog.text


class Waits:
    """Answers once it was complained about."""

    complained = threading.Event()

    def decide(self, draw: Draw, facts: Facts, seed: int) -> Any:
        assert self.complained.wait(60)
        return KEEP


def test_an_operator_that_hangs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    placed = PlacedOperator("Waits", "pipeline.0", 0, Waits())
    pipeline, watch = TaskPipeline({"sums": (placed,)}, 0), OperatorWatch(hangs_after_s=0.05).start()
    pipeline.watched_by(watch)
    watch_log = logging.getLogger("rftstream.data.operators.watch")
    handler = Complained()
    watch_log.addHandler(handler)
    try:
        draw = Draw(group_id="sums/0/7/0", taskset="sums", taskset_pass=0, index=7, problem=problem("1+1="),
                    sampling=Sampling(), group_size=2)  # fmt: skip
        with caplog.at_level(logging.WARNING):
            assert pipeline.decide(draw, Facts()).skipped is None
    finally:
        watch_log.removeHandler(handler)
        watch.close()
    said, *_, answered = [record.getMessage() for record in caplog.records if record.name == watch_log.name]
    assert said.startswith("pipeline.0 (Waits): sums/0/7/0: the operator has not answered for")
    assert "(now at " in said
    assert answered.endswith("s to answer")


class Complained(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "has not answered" in record.getMessage():
            Waits.complained.set()


# --------------------------------------------------------------------------------------------- experience side


def test_truncated_siblings_are_left_out_and_filtered(tmp_path: Path) -> None:
    scene = buffering(tmp_path, {"op": "truncated"}, feeder__group_size=3, feeder__groups_per_batch=1)
    put_group(scene, 0, (0.0, 1.0, 1.0), truncated=(1,))
    put_group(scene, 1, (0.0, 1.0, 1.0), truncated=(1, 2))
    RoleDriver(scene, "buffer").work()
    first, second = sorted(outcomes_of(scene), key=lambda one: one.sequence)
    assert (first.result, second.result) == ("batched", "filtered")
    assert second.reason == "truncated: a limit ended it"
    assert [one.rejected for one in first.rollouts] == [None, "truncated: a limit ended it", None]
    (decision,) = first.decisions
    assert (decision.operator, decision.action, decision.siblings) == ("truncated", OperatorAction.reject, (1,))
    assert [one.ids.sibling for one in experiences_of(scene)] == [0, 2]
    assert first.seen == 0


@pytest.mark.law("conservation")
def test_an_audit_counts_rejected_siblings_as_filtered(tmp_path: Path) -> None:
    scene = Scene(tmp_path, manifest=False, pipeline=[{"op": "truncated"}], feeder__group_size=3,
                  feeder__groups_per_batch=1, feeder__max_staleness=0)  # fmt: skip
    RoleDriver(scene, "feeder").work()
    tasks = tasks_of(scene)
    statuses = [RolloutStatus.truncated, RolloutStatus.completed, RolloutStatus.completed]
    verified = [
        VerifiedRollout(ids=task.ids, rollout=scene.rollout(task.ids, status=status),
                        verdict=Verdict(reward=float(number), scorer="exact", scorer_version="1"))
        for number, (task, status) in enumerate(zip(tasks, statuses, strict=True))
    ]  # fmt: skip
    scene.put("rollouts", *(one.rollout for one in verified if one.rollout is not None))
    scene.put("verified", *verified)
    RoleDriver(scene, "buffer").work()
    report = scene.audit()
    assert report.problems == ()
    assert (report.rollouts.filtered, report.rollouts.pending_by_stage["batched"]) == (1, 2)
    scene.step(1, trained=1)
    report = scene.audit()
    assert (report.balanced, report.rollouts.trained, report.rollouts.filtered) == (True, 2, 1)
    assert report.to_json()["operators"] == {
        "drawn": None,
        "groups": [{"operator": "truncated", "action": "reject", "reason": "a limit ended it", "groups": 1}],
    }
    assert "truncated (a limit ended it)  reject in 1 group" in report.to_text()
    assert report.operators == OperatorReader(Log(scene.transport())).read(read_control(scene.transport()))


def test_neither_audits_nor_the_studio_read_an_outcome_again_to_count_what_operators_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = buffering(tmp_path, {"op": "truncated"}, manifest=False, feeder__groups_per_batch=1, feeder__group_size=3)
    RoleDriver(scene, "feeder").work()
    follower = OperatorReader(Log(scene.transport()))
    reports, decoded, from_record = [], [], codec.from_record
    for sequence in range(3):
        put_group(scene, sequence, (0.0, 1.0, 1.0), truncated=(1,))
        RoleDriver(scene, "buffer").work()
        with closing(Index(tmp_path, "a run")) as index, monkeypatch.context() as patched:
            patched.setattr(codec, "from_record", lambda one: (decoded.append(one.topic), from_record(one))[1])
            reports.append(audit(scene.transport(), index).operators)
            assert reports[-1] == follower.read(read_control(scene.transport()))
    assert decoded.count("outcomes") == 6, "a new one for each audit, and for who follows"
    assert [report.groups["truncated", "reject", "a limit ended it"] for report in reports if report] == [1, 2, 3]


@pytest.mark.law("conservation")
def test_an_audit_balances_what_was_drawn(tmp_path: Path) -> None:
    source = {"source": "arithmetic", "passes": 1, "shuffle": False, "options": {"size": 40, "high": 20}}
    scene = feeding(tmp_path, {"op": "length", "max_characters": 4}, own("Sizes"), tasksets={"sums": source},
                    feeder__groups_per_batch=100)  # fmt: skip
    RoleDriver(scene, "feeder").work()
    drawn, report = check_balance(scene), scene.audit()
    assert (report.balanced, report.groups.admitted) == (True, drawn.admitted)
    assert report.operators is not None
    assert (report.operators.num_drawn, report.operators.num_skipped) == (40, 40 - drawn.admitted)
    assert f"drawn: 40 problems: {drawn.admitted} groups admitted, {40 - drawn.admitted} skipped" in report.to_text()
    assert "length (too long), sums" in report.to_text()
    again = report.operators.to_json()["drawn"]
    assert again["changed"] == {"sums": {OWN + "Sizes": drawn.admitted}}
    assert report.operators.problems(drawn.admitted) == []
    wrong = OperatorTotals(drawn=replace(drawn, skipped={"sums": {"length": {"too long": 3}}}))
    assert [sentence.partition(",")[0] for sentence in wrong.problems(drawn.admitted - 1)] == [
        "control: 40 problems drawn", f"tasks: {drawn.admitted - 1} groups",
    ]  # fmt: skip


def test_repetition_is_rejected_or_masked(tmp_path: Path) -> None:
    for action in ("reject", "mask"):
        scene = buffering(tmp_path / action, {"op": "repetition", "ngram": 3, "max_share": 0.5, "action": action},
                          feeder__groups_per_batch=1, feeder__group_size=3)  # fmt: skip
        put_group(scene, 0, (0.0, 1.0, 1.0), num_tokens=(30, 500, 30))  # the scene's tokens repeat after 200
        RoleDriver(scene, "buffer").work()
        (outcome,) = outcomes_of(scene)
        (decision,) = outcome.decisions
        assert (decision.siblings, decision.action) == ((1,), action)
        masks = {one.ids.sibling: sum(one.segments[0].loss_mask.data) for one in experiences_of(scene)}
        assert masks == ({0: 30, 2: 30} if action == "reject" else {0: 30, 1: 0, 2: 30})
        assert decision.num_tokens == (0 if action == "reject" else 500)


def test_zero_variance_looks_at_a_part_and_never_at_the_shaped_reward(tmp_path: Path) -> None:
    operators = (own("Shaper"), {"op": "zero_variance", "on": "right"})
    scene = buffering(tmp_path, *operators, feeder__groups_per_batch=1)
    put_group(scene, 0, (0.25, 0.5), parts=({"right": 0.0}, {"right": 0.0}))
    put_group(scene, 1, (0.25, 0.25), parts=({"right": 0.0}, {"right": 1.0}))
    RoleDriver(scene, "buffer").work()
    first, second = sorted(outcomes_of(scene), key=lambda one: one.sequence)
    assert (first.result, first.reason) == ("filtered", "zero_variance: no spread of right")
    assert (second.result, second.parts) == ("batched", {"right": 0.5})
    assert [one.action for one in second.decisions] == ["shape"]


def test_a_term_is_added_and_the_verdict_is_kept(tmp_path: Path) -> None:
    scene = buffering(tmp_path, own("Shaper"), own("Masker"), feeder__groups_per_batch=1)
    put_group(scene, 0, (0.0, 1.0))
    RoleDriver(scene, "buffer").work()
    first, second = experiences_of(scene)
    assert (first.reward, first.terms, first.verified_reward) == (0.0, {}, None)
    assert (second.reward, second.terms, second.verified_reward) == (1.5, {"bonus": 0.5}, 1.0)
    (outcome,) = outcomes_of(scene)
    assert [one.reward for one in outcome.rollouts] == [0.0, 1.0]
    assert [(one.action, one.siblings, one.terms, one.num_tokens) for one in outcome.decisions] == [
        ("shape", (1,), (0.5,), 0),
        ("mask", (0,), (), 1),  # four of the five masked tokens are the prompt's
    ]
    assert list(first.segments[0].loss_mask.data) == [0, 0, 0, 0, 0, 1]


def test_an_operator_that_rejects_everything_ends_the_run_by_its_name(tmp_path: Path) -> None:
    scene = buffering(tmp_path, own("RaisesLate"), {"op": "zero_variance"}, buffer__max_refill=4)
    buffer = RoleDriver(scene, "buffer")
    for sequence in (0, 2, 3):
        scene.verify(sequence)
    buffer.work()
    buffer.restart()
    scene.verify(1, (1.0, 1.0))
    with pytest.raises(StopRule, match="RaisesLate: raised ValueError 2") as stopped:
        buffer.work()
    assert stopped.value.reason == "no_signal"
    assert {one.sequence: one.reason for one in outcomes_of(scene)} == {
        0: f"{OWN}RaisesLate: raised ValueError",
        1: "zero_variance",
        2: f"{OWN}RaisesLate: answered nonsense",
        3: f"{OWN}RaisesLate: raised ValueError",
    }


def put_group(
    scene: Scene,
    sequence: int,
    rewards: tuple[float, ...],
    *,
    truncated: tuple[int, ...] = (),
    num_tokens: tuple[int, ...] = (),
    parts: tuple[dict[str, float], ...] = (),
) -> None:
    """A group on `verified`, sibling by sibling."""
    for one, reward in zip(scene.siblings(sequence, size=len(rewards)), rewards, strict=True):
        status = RolloutStatus.truncated if one.sibling in truncated else RolloutStatus.completed
        count = num_tokens[one.sibling] if num_tokens else 2
        verdict = Verdict(reward=reward, scorer="exact", scorer_version="1", parts=parts[one.sibling] if parts else {})
        rollout = scene.rollout(one, status=status, num_tokens=count)
        scene.put("verified", VerifiedRollout(ids=one, rollout=rollout, verdict=verdict))
