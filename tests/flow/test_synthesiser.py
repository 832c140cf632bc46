"""The synthesiser alone: what it makes of what it reads, what it rejects, and that a kill leaves no twin."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.problems import NewProblem, ProblemKind, RejectedProblem, RejectReason
from rftstream.errors import ConfigError
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.disturbed import FaultAt
from tests.flow.scene import Scene
from tests.flow.test_growing import new_problem
from tests.flow.writers import is_request, served, terms, writer
from tests.unit.served import Server


def scene_of(folder: Path, server: Server | None = None, **synthesiser: Any) -> Scene:
    section: dict[str, Any] = {"check_samples": 2, **synthesiser}
    if server is not None:
        section |= {"ask": "server", "server": {"url": server.url, "model": "writer", "tries": 1}}
    tasksets = {"sums": {"source": "arithmetic", "shuffle": False}, "more": {"source": "log:problems"}}
    return Scene(folder, tasksets=tasksets, synthesiser=section)


def admitted(scene: Scene) -> list[NewProblem]:
    return [one for one in scene.messages("problems") if isinstance(one, NewProblem) and one.maker == "model"]


def rejected(scene: Scene) -> list[RejectedProblem]:
    return [one for one in scene.messages("problems") if isinstance(one, RejectedProblem)]


# --------------------------------------------------------------------------------------------- what is made


def test_a_group_that_is_decided_is_reworded_and_varied(tmp_path: Path) -> None:
    with served(writer) as server:
        scene = scene_of(tmp_path, server, make=("reworded", "varied"))
        synthesiser = RoleDriver(scene, "synthesiser")
        scene.decide(0, GroupResult.batched, batch=0)
        scene.decide(0, GroupResult.expired, late=True)
        scene.decide(1, GroupResult.filtered)
        synthesiser.work()
        made = {one.problem_id: one for one in admitted(scene)}
        assert set(made) == {f"sums/0/{n}/0/outcomes/{kind}/0" for n in (0, 1) for kind in ("reworded", "varied")}
        reworded, varied = (made[f"sums/0/1/0/outcomes/{kind}/0"] for kind in ("reworded", "varied"))
        assert (reworded.parent, reworded.parent_group, reworded.made_by) == ("sums/1", "sums/0/1/0", "writer")
        assert (reworded.num_samples, reworded.num_agreed, reworded.version) == (2, 2, None)
        assert " plus " in reworded.problem.messages[-1].content
        assert varied.problem.answer != reworded.problem.answer
        assert rejected(scene) == []
        assert synthesiser.service.health()["problems_admitted"] == 4


def test_it_reads_what_it_is_told_to(tmp_path: Path) -> None:
    with served(writer) as server:
        scene = scene_of(tmp_path / "tasks", server, read="tasks")
        scene.admit(3, 4)
        RoleDriver(scene, "synthesiser").work()
        assert sorted(one.parent or "" for one in admitted(scene)) == ["sums/3", "sums/4"]

        scene = scene_of(tmp_path / "verified", server, read="verified", solved=(1.0, 1.0))
        for sequence, reward in ((5, 1.0), (6, 0.0)):
            scene.verify(sequence, (reward, 0.0))
        RoleDriver(scene, "synthesiser").work()
        assert [one.parent for one in admitted(scene)] == ["sums/5"]

        scene = scene_of(tmp_path / "problems", server, read="problems", make=("varied",))
        scene.put("problems", new_problem("20+1="), new_problem("20+2="))
        RoleDriver(scene, "synthesiser").work()
        assert sorted(one.parent or "" for one in admitted(scene)) == ["more/0", "more/1"], "its own have no children"


def test_only_what_is_partly_solved_is_taken_and_only_a_share_of_it(tmp_path: Path) -> None:
    with served(writer) as server:
        scene = scene_of(tmp_path / "solved", server, solved=(0.0, 0.5))
        scene.decide(0, GroupResult.batched, batch=0)  # all its rollouts are right
        RoleDriver(scene, "synthesiser").work()
        assert admitted(scene) == []

        scene = scene_of(tmp_path / "share", server, share=0.3)
        for sequence in range(40):
            scene.decide(sequence, GroupResult.filtered)
        RoleDriver(scene, "synthesiser").work()
        assert 4 <= len(admitted(scene)) <= 20


def test_enough_is_enough(tmp_path: Path) -> None:
    with served(writer) as server:
        scene = scene_of(tmp_path, server, most=3, max_concurrent=1)
        synthesiser = RoleDriver(scene, "synthesiser")
        for sequence in range(8):
            scene.decide(sequence, GroupResult.filtered)
        synthesiser.work()
        assert 3 <= len(admitted(scene)) <= 4


def test_the_policy_itself_is_asked_with_its_newest_weights(tmp_path: Path) -> None:
    """The fake policy answers sums: what it says is taken for a problem, and it attempts that."""
    scene = scene_of(tmp_path, pattern=r"(?P<problem>\d+)", check_agree=(0.0, 1.0))
    synthesiser = RoleDriver(scene, "synthesiser")
    scene.decide(0, GroupResult.filtered)
    synthesiser.work()
    assert synthesiser.service.health()["waits_for"] == "the first weights"
    name = scene.announce(0, skill=9.0)
    synthesiser.work()
    (made,) = admitted(scene)
    assert made.version == name
    assert made.made_by == "fake"
    assert made.num_samples == 2
    assert made.problem.messages[-1].content == made.problem.answer, "it said the answer of the parent"


# --------------------------------------------------------------------------------------------- what is rejected


@pytest.mark.parametrize(("said", "kinds", "reason"), [
    ("Sure! Adding numbers is a wonderful thing.", ("reworded",), RejectReason.unreadable),
    ('{"question": "1+1="}', ("reworded",), RejectReason.unreadable),
    ('{"problem": "9+9="}', ("varied",), RejectReason.no_answer),
    ('{"problem": "9+9=", "answer": "17"}', ("varied",), RejectReason.disagreed),
    ('{"problem": "20+1=", "answer": "21"}', ("varied",), RejectReason.known),
    ("", ("reworded",), RejectReason.refused),
])  # fmt: skip
def test_what_is_no_problem_is_rejected_with_the_reason(
    tmp_path: Path, said: str, kinds: tuple[str, ...], reason: RejectReason
) -> None:
    with served(lambda asked: said if is_request(asked) else writer(asked)) as server:
        if reason is RejectReason.refused:
            server.answers.append((400, {"error": "too long for me"}))
        scene = scene_of(tmp_path, server, make=kinds)
        scene.put("problems", new_problem("20+1=", answer="21"))
        synthesiser = RoleDriver(scene, "synthesiser")
        synthesiser.work()
        scene.decide(0, GroupResult.filtered)
        synthesiser.work()
        (one,) = rejected(scene)
        assert (one.reason, one.parent, one.kind) == (reason, "sums/0", ProblemKind(kinds[0]))
        assert one.said == said
        assert one.detail
        assert admitted(scene) == []


def test_a_model_that_answers_prose_is_told_after_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(lambda asked: "What a lovely problem. Let us think step by step.") as server:
        scene = scene_of(tmp_path, server)
        synthesiser = RoleDriver(scene, "synthesiser")
        for sequence in range(60):
            scene.decide(sequence, GroupResult.filtered)
        with caplog.at_level(logging.WARNING):
            synthesiser.work()
        assert Counter(one.reason for one in rejected(scene)) == {RejectReason.unreadable: 60}
        told = synthesiser.service.health()["rejects_most"]
        assert isinstance(told, str)
        assert "50 of the last 50 problems that writer made were rejected, 50 of them as unreadable" in told
        assert "What a lovely problem" in told
        assert caplog.text.count("problems list RUN --rejected") == 1


def test_a_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    with served(writer) as server:
        server.answers.append((503, {"error": "loading"}))
        scene = scene_of(tmp_path, server)
        synthesiser = RoleDriver(scene, "synthesiser")
        scene.decide(0, GroupResult.filtered)
        synthesiser.work()
        assert "503" in str(synthesiser.service.health()["waits_for"])
        assert scene.messages("problems") == [], "nothing is rejected for a server that is away"
        scene.clock.advance(2.0)
        synthesiser.work()
        assert [one.parent for one in admitted(scene)] == ["sums/0"]
        assert synthesiser.service.health()["waits_for"] == ""
        synthesiser.stop()


# --------------------------------------------------------------------------------------------- kills


@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize("point", ["before_commit", "in_commit", "after_commit"])
def test_a_killed_synthesiser_leaves_no_twin_and_loses_nothing(tmp_path: Path, point: str) -> None:
    """Its model says something else each time, so that what is made twice would show."""
    count = 0

    def wordy(asked: str) -> str:
        nonlocal count
        if not is_request(asked):
            return writer(asked)
        count += 1
        left, right = terms(asked)
        return json.dumps({"problem": f"number {'x' * count}: {left} plus {right}"})

    with served(wordy) as server:
        scene = scene_of(tmp_path, server, max_concurrent=3, per_parent=2)
        scene.log.fault = deaths = FaultAt(point, Kill, "synthesiser", every=2)
        for sequence in range(12):
            scene.decide(sequence, GroupResult.filtered)
        synthesiser = RoleDriver(scene, "synthesiser")
        for _ in range(200):
            try:
                synthesiser.work()
            except Kill:
                synthesiser.restart()
            scene.clock.advance(11.0)  # the session of the dead member ends, and its transaction
            if len(admitted(scene)) == 24:
                break
        synthesiser.work()
        assert deaths.num_visits >= 4
        ids = [one.problem_id for one in admitted(scene)]
        assert sorted(ids) == sorted({f"sums/0/{n}/0/outcomes/reworded/{k}" for n in range(12) for k in range(2)})
        assert scene.audit().twins.get("problems", 0) == 0
        assert not any(scene.transport().admin.lag("synthesiser", "outcomes").values())


# --------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(("changed", "told"), [
    ({"into": "sums"}, "synthesiser.into: got 'sums'.*growing tasksets: more"),
    ({"tasksets": ("sum",)}, "synthesiser.tasksets: unknown 'sum'"),
    ({"read": "problems", "tasksets": ("sums",)}, "'sums' does not grow"),
    ({"make": ()}, "synthesiser.make: is empty"),
    ({"solved": (0.9, 0.1)}, "synthesiser.solved: got 0.9 to 0.1"),
    ({"ask": "server"}, "synthesiser.server: found none with ask = 'server'"),
    ({"pattern": "(?P<text>.*)"}, "lacks the group problem"),
    ({"make": ("varied",), "pattern": "(?P<problem>.*)"}, "lacks the group answer"),
    ({"pattern": "(?P<problem>"}, "no regular expression"),
    ({"prompts": {"reworded": "Say it."}}, "found no {problem}"),
    ({"prompts": {"harder": "{problem}"}}, "synthesiser.prompts.harder: is not made"),
])  # fmt: skip
def test_what_is_wrong_with_the_section_is_told(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        scene_of(tmp_path, **changed)


def test_a_worker_without_the_section_is_told_so(scene: Scene) -> None:
    with pytest.raises(ConfigError, match=r"the run file has no \[synthesiser\]"):
        RoleDriver(scene, "synthesiser")
