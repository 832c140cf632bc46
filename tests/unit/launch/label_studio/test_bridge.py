"""Questions become tasks, annotations votes, each exactly once, whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.feedback import Feedback, PairChoice
from rftstream.data.feedback.rows import vote_of
from rftstream.errors import ConfigError, LabelStudioError, ProducerLost, TransactionAborted
from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys
from rftstream.integrations.label_studio import client, mirror
from rftstream.queries.people.feedback import read_feedback
from rftstream.runs.writes.feedback import add_votes
from rftstream.service.role import Log
from tests.label_studio_server import FakeLabelStudio, choice, running, words
from tests.unit.launch.label_studio.scene import PAIR, RATING, SECRET, Killed, Scene
from tests.waiting import wait_until

pytestmark = pytest.mark.slow  # each has a server of its own

SOURCE = "label-studio"


@pytest.fixture
def server() -> Iterator[tuple[FakeLabelStudio, str]]:
    with running() as found:
        yield found


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[FakeLabelStudio, str]) -> Iterator[Scene]:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setattr(client, "PAUSE_S", 0.01)
    found = Scene(tmp_path, *server)
    yield found
    found.close()


def begun(scene: Scene) -> tuple[Any, str]:
    """A bridge after its first round, and the first question that asks for a rating."""
    bridge = scene.bridge()
    bridge.round()
    return bridge, scene.questions(RATING)[0].question_id


def stands(scene: Scene, question_id: str) -> list[tuple[str, object]]:
    """What stands on a question by each annotator, as the commands read it."""
    view = read_feedback(Log(scene.run.transport("reader")), scene.run.config)
    newest: dict[str, Feedback] = {}
    for line in view.votes:
        if line.vote is not None and line.vote.question_id == question_id:
            newest[line.vote.annotator] = line.vote
    return [(str(one.kind), one.choice or one.correction or one.reward) for one in newest.values()]


# --------------------------------------------------------------------------------------------- both ways


def test_questions_become_tasks_in_a_project_of_their_kind(scene: Scene) -> None:
    bridge = scene.bridge()
    report = bridge.round()
    pairs, ratings = scene.questions(PAIR), scene.questions(RATING)
    assert (report.questions, report.open, report.new_tasks) == (
        len(pairs + ratings),
        len(pairs + ratings),
        len(pairs + ratings),
    )
    assert sorted(row["title"] for row in scene.fake.projects.values()) == [
        "demo: how good is an answer", "demo: which answer is better",
    ]  # fmt: skip
    assert {row["maximum_annotations"] for row in scene.fake.projects.values()} == {2}
    swapped = next(one for one in pairs if one.order == (1, 0))
    (shown,) = scene.fake.tasks_of(swapped.question_id)
    texts = {
        one.ids.rollout_id: one.rollout.turns[-1].content
        for one in scene.run.messages("verified")
        if getattr(one, "rollout", None) is not None and one.rollout.turns
    }
    assert (shown["data"]["a"], shown["data"]["b"]) == (texts[swapped.rollouts[1]], texts[swapped.rollouts[0]])
    (single,) = scene.fake.tasks_of(ratings[0].question_id)
    assert single["data"]["original"] == single["data"]["response"] == texts[ratings[0].rollouts[0]]
    assert "[reference answer]" in single["data"]["prompt"]
    assert not bridge.round().did_something
    assert not scene.bridge().round().did_something, "another bridge finds what is there"
    scene.assert_no_twin()


def test_a_pair_a_rating_a_correction_and_a_flag_come_back(scene: Scene) -> None:
    bridge, _ = begun(scene)
    swapped = next(one for one in scene.questions(PAIR) if one.order == (1, 0))
    straight = next(one for one in scene.questions(PAIR) if one.order == (0, 1))
    rated, other = scene.questions(RATING)[:2]
    scene.fake.annotate(swapped.question_id, 7, choice("choice", "A"), words("comment", "clearer"))
    scene.fake.annotate(straight.question_id, 7, choice("choice", "A is better"))
    original = scene.fake.tasks_of(other.question_id)[0]["data"]["original"]
    scene.fake.annotate(rated.question_id, 7, choice("rating", "4"), words("correction", "42"), choice("flag", "x"))
    scene.fake.annotate(other.question_id, 7, choice("rating", "2"), words("correction", original))
    report = bridge.round()
    assert report.votes == {"pair": 2, "rating": 2, "correction": 1, "flag": 1} and not report.edits
    (first,) = [one for one in scene.votes() if one.question_id == swapped.question_id]
    assert (first.choice, first.order, first.comment) == (PairChoice.second, (1, 0), "clearer")
    assert first.annotator == GatewayKeys(SECRET.encode(), "demo").annotator("label-studio:7")
    assert (first.source, first.lead_time_s) == (SOURCE, 2.5) and first.given_at > 1_800_000_000
    assert scene.said(straight.question_id) == [("pair", PairChoice.first, 0)]
    assert scene.said(rated.question_id) == [("rating", 4.0, 0)]
    assert scene.said(f"correction/{rated.rollouts[0]}") == [("correction", "42", 0)]
    assert scene.said(f"flag/{rated.rollouts[0]}") == [("flag", None, 0)]
    assert scene.said(f"correction/{other.rollouts[0]}") == [], "left as it was: no correction"
    assert not bridge.round().votes
    scene.assert_no_twin()


def test_edits_are_revisions_and_deletions_take_back(scene: Scene) -> None:
    bridge, _ = begun(scene)
    name, other = (one.question_id for one in scene.questions(RATING)[:2])
    correction = name.replace("rating/", "correction/")
    first = scene.fake.annotate(name, 7, choice("rating", "4"), words("correction", "42"))
    scene.fake.annotate(other, 7, choice("rating", "1"))
    bridge.round()
    scene.fake.edit(first, choice("rating", "5"), words("correction", "42"))
    assert (bridge.round().votes, scene.said(correction)) == ({"rating": 1}, [("correction", "42", 0)])
    scene.fake.edit(first, choice("rating", "5"))
    assert bridge.round().votes == {"retract": 1}, "the correction alone was taken away"
    scene.fake.edit(first, choice("rating", "5"))
    assert not bridge.round().votes, "an edit that says the same"
    scene.fake.delete(first)
    assert bridge.round().votes == {"retract": 1}
    assert scene.said(name) == [("rating", 4.0, 0), ("rating", 5.0, 1), ("retract", None, 2)]
    scene.fake.annotate(name, 7, choice("rating", "3"))
    assert bridge.round().votes == {"rating": 1} and scene.said(name)[-1] == ("rating", 3.0, 3)
    assert scene.said(other) == [("rating", 1.0, 0)]
    scene.assert_no_twin()


@pytest.mark.law("twice")
def test_one_person_twice_is_one_vote_the_newest(scene: Scene) -> None:
    bridge, name = begun(scene)
    first = scene.fake.annotate(name, 7, choice("rating", "1"))
    second = scene.fake.annotate(name, 7, choice("rating", "2"))
    skipped = scene.fake.annotate(name, 7, choice("rating", "3"), skipped=True)
    bridge.round()
    assert scene.said(name) == [("rating", 2.0, 0)]
    (task,) = scene.fake.tasks_of(name)
    assert (task["is_labeled"], task["data"]["state"]) == (False, "open"), "one person is no quorum of two"
    scene.fake.edit(first, choice("rating", "5"))
    scene.fake.delete(skipped)
    bridge.round()
    assert scene.said(name)[1:] == [("rating", 5.0, 1)]
    scene.fake.delete(first)
    bridge.round()
    assert scene.said(name)[2:] == [("rating", 2.0, 2)], "what is left stands"
    scene.fake.annotate(name, 8, choice("rating", "2"))
    assert (bridge.round().marked, task["is_labeled"]) == (0, True), "enough people, and not judged yet"
    bridge.round()
    assert (task["is_labeled"], task["data"]["state"]) == (True, "judged")
    scene.fake.delete(second)
    bridge.round()
    bridge.round()
    assert (task["is_labeled"], task["data"]["state"]) == (False, "open"), "taken back: it waits again"
    scene.assert_no_twin()


def test_what_is_over_leaves_the_queue_and_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[FakeLabelStudio, str]
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    scene = Scene(tmp_path, *server, expires_s=5_000.0)
    bridge = scene.bridge()
    assert bridge.round().new_tasks
    scene.run.clock.advance(6_000.0)
    name = scene.questions(RATING)[0].question_id
    scene.fake.annotate(name, 7, choice("rating", "1"))
    report = bridge.round()
    assert (report.open, report.votes, report.marked) == (0, {"rating": 1}, len(scene.fake.tasks))
    assert {(row["is_labeled"], row["data"]["state"]) for row in scene.fake.tasks.values()} == {(True, "expired")}
    assert all(row["data"]["prompt"] for row in scene.fake.tasks.values()), "its texts stay"
    assert not bridge.round().did_something
    view = read_feedback(Log(scene.run.transport("reader")), scene.run.config)
    assert [str(line.judgement.effect) for line in view.votes] == ["expired"]
    scene.close()


def test_a_gold_question_looks_like_any_other(scene: Scene, tmp_path: Path) -> None:
    bridge, _ = begun(scene)
    question = scene.questions(RATING)[0]
    answer = vote_of({"rollout": question.rollouts[0], "by": "operator", "rating": 5}, "gold")
    add_votes(scene.run.transport("operator"), scene.run.config, scene.run.folder, [answer], gold=True)
    mine = scene.fake.annotate(question.question_id, 7, choice("rating", "1"))
    report = bridge.round()
    (task,) = scene.fake.tasks_of(question.question_id)
    assert (report.votes, report.marked, task["data"]["state"], task["is_labeled"]) == ({"rating": 1}, 0, "open", False)
    scene.fake.delete(mine)
    assert bridge.round().votes == {"retract": 1}
    assert not scene.bridge().round().did_something


def test_what_cannot_be_read_changes_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    bridge, name = begun(scene)
    mine = scene.fake.annotate(name, 7, choice("rating", "4"))
    bridge.round()
    scene.fake.edit(mine, choice("rating", "very good"), words("correction", "x" * 1_000_001))
    assert (bridge.round().unread, bridge.round().votes) == (2, {})
    assert stands(scene, name) == [("rating", 4.0)]
    assert "rating and correction cannot be read" in caplog.text
    scene.fake.annotate(name, 8, {"from_name": "rating"}, {"value": 3}, "nonsense")  # type: ignore[arg-type]
    assert not bridge.round().votes
    hostile = '<script>alert("x")</script>\u202egnirts 👩\u200d🚀'
    scene.fake.annotate(name, 9, words("correction", hostile))
    bridge.round()
    assert scene.said(f"correction/{scene.questions(RATING)[0].rollouts[0]}") == [("correction", hostile, 0)]


def test_a_user_or_a_task_that_is_gone_takes_nothing_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, _ = begun(scene)
    name, other = (one.question_id for one in scene.questions(RATING)[:2])
    scene.fake.annotate(name, 7, choice("rating", "4"))
    scene.fake.annotate(other, 7, choice("rating", "4"))
    bridge.round()
    (task,) = scene.fake.tasks_of(name)
    task["annotations"][0]["completed_by"] = None
    del scene.fake.tasks[scene.fake.tasks_of(other)[0]["id"]]
    monkeypatch.setattr(mirror, "FULL_EVERY_S", 0.0)
    report = bridge.round()
    assert (report.votes, report.new_tasks) == ({}, 1), "the question still waits, so it is asked again"
    assert stands(scene, name) == stands(scene, other) == [("rating", 4.0)]
    scene.fake.tasks.clear()
    scene.fake.projects.clear()
    assert not scene.bridge().round().votes
    assert stands(scene, name) == stands(scene, other) == [("rating", 4.0)]


def test_tasks_that_are_there_twice_are_one_question(scene: Scene) -> None:
    bridge, name = begun(scene)
    (task,) = scene.fake.tasks_of(name)
    scene.fake._make_task(task["project"], dict(task["data"]))
    bridge.round()
    assert [row["data"]["state"] for row in scene.fake.tasks_of(name)] == ["open", "twin"]
    assert [row["is_labeled"] for row in scene.fake.tasks_of(name)] == [False, True]
    on_first = scene.fake.annotate(name, 7, choice("rating", "1"))
    on_second = scene.fake.annotate(name, 7, choice("rating", "2"), task=1)
    bridge.round()
    scene.fake.delete(on_second)
    bridge.round()
    assert scene.said(name) == [("rating", 2.0, 0), ("rating", 1.0, 1)]
    scene.fake.delete(on_first)
    bridge.round()
    assert scene.said(name)[-1] == ("retract", None, 2)
    scene.assert_no_twin(tasks=2)


def test_other_runs_and_other_servers_are_left_alone(scene: Scene) -> None:
    _, name = begun(scene)
    project = scene.fake.tasks_of(name)[0]["project"]
    scene.fake._make_task(project, {"question": "rating/sums/9/9/9/9"})
    scene.fake._make_task(project, {"text": "somebody's own"})
    again = dict(scene.fake.projects[project], id=999, description="rftstream run demo, begun in 1999: rating")
    scene.fake.projects[999] = again
    scene.fake._make_task(999, {"question": name})
    assert not scene.bridge().round().did_something
    scene.fake.annotate(name, 7, choice("rating", "4"))
    assert scene.bridge(source="second").round().votes == {"rating": 1}
    assert scene.bridge().round().votes == {"rating": 1}, "user 7 of another server is somebody else"
    assert len({one.annotator for one in scene.votes()}) == 2
    assert not scene.bridge(source="second").round().votes


# --------------------------------------------------------------------------------------------- only what has changed


def test_most_rounds_read_only_what_has_changed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.integrations.label_studio.projects.PAGE", 3)
    bridge, _ = begun(scene)
    assert len(scene.fake.tasks) > 9
    names = [one.question_id for one in scene.questions(RATING)]
    scene.fake.annotate(names[0], 7, choice("rating", "1"))

    def requests() -> int:
        before = len(scene.fake.requests)
        bridge.round()
        return scene.fake.requests[before:].count("GET /api/tasks")

    bridge.round()
    assert requests() == 2, "a page of each project"
    annotations = [scene.fake.annotate(name, 7, choice("rating", "5")) for name in names[:7]]
    assert requests() <= 5
    assert [stands(scene, name) for name in names[:7]] == [[("rating", 5.0)]] * 7
    for one in annotations[1:]:
        scene.fake.delete(one)
    requests()
    assert [stands(scene, name) for name in names[1:7]] == [[("retract", None)]] * 6
    assert not scene.bridge().round().did_something, "it lists all, page by page"
    scene.assert_no_twin()


def test_a_change_that_bears_an_old_date_is_found_by_the_next_full_listing(scene: Scene) -> None:
    bridge, _ = begun(scene)
    bridge.round()
    name = scene.questions(RATING)[0].question_id
    (task,) = scene.fake.tasks_of(name)
    before = task["updated_at"]
    scene.fake.annotate(name, 7, choice("rating", "1"))
    task["updated_at"] = before
    scene.run.clock.advance(mirror.FULL_EVERY_S + 1)
    bridge.round()
    assert scene.said(name) == [("rating", 1.0, 0)]


# --------------------------------------------------------------------------------------------- kills


class KillAt:
    """Kills at the step of a number. `points` are the steps that were passed."""

    def __init__(self, number: int) -> None:
        self.number, self.points = number, list[str]()

    def __call__(self, point: str) -> None:
        self.points.append(point)
        if len(self.points) == self.number:
            raise Killed(point)


def people_speak(scene: Scene) -> dict[str, list[tuple[str, object]]]:
    """People answer, edit and delete; returns what stands in the end."""
    names = [one.question_id for one in scene.questions(RATING)[:4]]
    pair = next(one for one in scene.questions(PAIR) if one.order == (1, 0))
    found = [row["annotations"] for name in names for row in scene.fake.tasks_of(name)]
    scene.fake.edit(found[0][0]["id"], choice("rating", "5"), words("correction", "mended"))
    scene.fake.delete(found[1][0]["id"])
    scene.fake.annotate(names[2], 7, choice("rating", "1"))
    scene.fake.annotate(names[2], 8, choice("rating", "1"))
    scene.fake.annotate(pair.question_id, 7, choice("choice", "B"))
    return {
        names[0]: [("rating", 5.0)],
        names[0].replace("rating", "correction"): [("correction", "mended")],
        names[1]: [("retract", None)],
        names[2]: [("rating", 1.0), ("rating", 1.0)],
        pair.question_id: [("pair", PairChoice.first)],
    }


@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize("when", ["the first tasks", "votes"])
def test_killed_at_every_step_and_started_again_there_is_no_twin_and_nothing_is_lost(scene: Scene, when: str) -> None:
    """Each time the bridge is killed one step later. People go on in between, and the next bridge begins anew."""
    expected: dict[str, list[tuple[str, object]]] = {}
    if when == "votes":
        scene.bridge().round()
        for one in scene.questions(RATING)[:2]:
            scene.fake.annotate(one.question_id, 7, choice("rating", "2"))
        scene.bridge().round()
        expected = people_speak(scene)
    kills, last = 0, ""
    while True:
        at = KillAt(kills + 1)
        try:
            scene.bridge(step=at).round()
        except Killed:
            kills += 1
            last = at.points[-1]
            scene.assert_no_twin()
            if when == "votes" and kills % 5 == 0:  # said and taken back between two kills
                name = scene.questions(RATING)[3].question_id
                scene.fake.delete(scene.fake.annotate(name, 9, choice("rating", "3")))
            if kills > 200:
                raise AssertionError(f"never comes to an end: {last}") from None
            continue
        break
    assert kills > 6, "it was killed at every step"
    scene.bridge().round()
    assert not scene.bridge().round().did_something
    assert {name: stands(scene, name) for name in expected} == expected
    assert len(scene.fake.tasks) == len(scene.questions(PAIR)) + len(scene.questions(RATING))
    scene.assert_no_twin()


@pytest.mark.law("lost", "twice")
def test_killed_between_reading_and_the_commit(scene: Scene) -> None:
    _, name = begun(scene)
    mine = scene.fake.annotate(name, 7, choice("rating", "2"))
    for point in ("before commit", "after commit"):

        def step(at: str, point: str = point) -> None:
            if at == point:
                raise Killed(at)

        with pytest.raises(Killed):
            scene.bridge(step=step).round()
        assert len(scene.said(name)) == (0 if point == "before commit" else 1)
    scene.fake.edit(mine, choice("rating", "3"))
    assert scene.bridge().round().votes == {"rating": 1}
    assert scene.said(name) == [("rating", 2.0, 0), ("rating", 3.0, 1)]
    scene.assert_no_twin()


def test_a_commit_that_fails_is_made_up_for_by_the_next_round(scene: Scene) -> None:
    failing = [TransactionAborted("no room")]

    def step(point: str) -> None:
        if point == "before commit" and failing:
            raise failing.pop()

    bridge = scene.bridge(step=step)
    bridge.round()
    bridge.round()
    name = scene.questions(RATING)[0].question_id
    scene.fake.annotate(name, 7, choice("rating", "2"))
    with pytest.raises(TransactionAborted):
        bridge.round()
    assert bridge.round().votes == {"rating": 1}
    assert scene.said(name) == [("rating", 2.0, 0)]


@pytest.mark.law("fencing")
def test_a_bridge_that_was_left_behind_cannot_write_what_is_old(scene: Scene) -> None:
    _, name = begun(scene)
    mine = scene.fake.annotate(name, 7, choice("rating", "1"))

    def meanwhile(point: str) -> None:
        if point == "before commit" and not scene.votes():
            scene.fake.edit(mine, choice("rating", "5"))
            scene.bridge().round()

    old = scene.bridge(step=meanwhile)
    with pytest.raises(ProducerLost):
        old.round()
    assert scene.said(name) == [("rating", 5.0, 0)]
    old.side.begin()
    assert not old.round().votes
    scene.assert_no_twin()


# --------------------------------------------------------------------------------------------- Label Studio fails


def test_a_token_that_expires_in_the_middle_is_renewed(scene: Scene) -> None:
    scene.fake.uses_of_a_token = 1
    bridge, name = begun(scene)
    scene.fake.annotate(name, 7, choice("rating", "1"))
    bridge.round()
    assert scene.said(name) == [("rating", 1.0, 0)]
    assert bridge.server.counts.refreshes > 5
    scene.assert_no_twin()
    scene.fake.refuses_token = True
    with pytest.raises(ConfigError, match=r"refuses the personal access token of .*token \(401: Token is invalid"):
        bridge.round()


@pytest.mark.parametrize("fault", ["down", "half", "error", "silent"])
def test_each_request_fails_once(scene: Scene, fault: str) -> None:
    """Reading is tried again; what writes is looked after by the next round."""
    bridge = scene.bridge()
    name = scene.questions(RATING)[0].question_id
    failed = 0
    for number in range(40):
        if number == 20:
            scene.fake.annotate(name, 7, choice("rating", "1"))
        scene.fake.faults = [*["fine"] * (number % 12), fault]
        try:
            bridge.round()
        except LabelStudioError as error:
            failed += 1
            assert "/api/" in str(error) and "access-" not in str(error)
    scene.fake.faults = []
    bridge.round()
    assert scene.said(name) == [("rating", 1.0, 0)]
    assert failed < 20
    assert bridge.server.counts.tries_again
    scene.assert_no_twin()


def test_down_for_long_takes_nothing_back(scene: Scene) -> None:
    bridge, name = begun(scene)
    scene.fake.annotate(name, 7, choice("rating", "1"))
    bridge.round()
    for fault in ("down", "half", "error"):
        scene.fake.faults = [fault] * 3
        with pytest.raises(LabelStudioError):
            bridge.round()
    scene.fake.faults = []
    assert not bridge.round().votes
    assert scene.said(name) == [("rating", 1.0, 0)]


def test_one_task_that_is_refused_keeps_nobody_back(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    name = scene.fake.refused = scene.questions(RATING)[1].question_id
    bridge = scene.bridge()
    report = bridge.round()
    assert report.new_tasks == report.open - 1 == len(scene.fake.tasks)
    assert "400: Validation error {'non_field_errors': ['bad item']}" in caplog.text
    assert not bridge.round().did_something
    scene.fake.refused = ""
    assert scene.bridge().round().new_tasks == 1 and scene.fake.tasks_of(name)
    scene.assert_no_twin()


def test_a_slow_server_that_makes_the_tasks_later_gets_none_twice_that_counts(scene: Scene) -> None:
    """The bridge gives up and sends them again; then the first ones appear, too."""
    slow = iter(["slow"])

    def at_import(point: str) -> None:
        if point.startswith("before POST") and point.endswith("/import") and (fault := next(slow, "")):
            scene.fake.faults = [fault]
            bridge.server._timeout_s = 2.0  # of this request alone

    bridge = scene.bridge(step=at_import)
    with pytest.raises(LabelStudioError, match=r"no whole answer within 2 s"):
        bridge.round()
    bridge.server._timeout_s = 300.0
    bridge.round()
    scene.fake.released.set()
    twice = [one.question_id for one in scene.questions(RATING) + scene.questions(PAIR)]
    wait_until(lambda: any(len(scene.fake.tasks_of(name)) > 1 for name in twice))
    bridge.round()
    bridge.round()
    for name in twice:
        rows = scene.fake.tasks_of(name)
        assert [row["data"]["state"] for row in rows] == ["open", "twin"][: len(rows)]
        for user, row in enumerate(rows):
            scene.fake.annotate(name, user, choice("rating" if name.startswith("rating") else "choice", "1"), task=0)
            assert row["is_labeled"] is (row is not rows[0])
    scene.assert_no_twin(tasks=2)
