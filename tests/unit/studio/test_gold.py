"""Gold questions in the studio: asked and answered like the others, and the right answer is never shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.feedback import GOLD_ANNOTATOR
from rftstream.contracts.questions import Question
from rftstream.data.feedback.rows import read_gold, read_votes
from rftstream.errors import ConfigError
from rftstream.queries.people.feedback import FeedbackRecords, read_feedback
from rftstream.runs.writes.feedback import Added, VoteRevisions, add_votes
from rftstream.service.role import Log
from rftstream.studio.access import StudioRole
from tests.unit.studio.studio_scene import shown
from tests.unit.studio.test_api import ROOT, ApiScene

SECRET_NUMBER = 0.8125
"""The right answer to each gold label: a number that stands nowhere else."""


class GoldScene(ApiScene):
    """A studio over a run of which four labels and two pairs are gold, before anybody has voted."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, gold=0.5)
        self.folder = folder
        labels, pairs = self.questions()[:4], self.questions("pair")[:2]
        self.gold = {one.question_id: one for one in [*labels, *pairs]}
        self.added = self.say_gold(
            *({"rollout": one.rollouts[0], "label": SECRET_NUMBER, "comment": "sesame"} for one in labels),
            *({"rollouts": one.rollouts, "choice": "both_bad", "comment": "sesame"} for one in pairs),
        )

    def say_gold(self, *rows: Any, **options: Any) -> Added:
        return self.add(read_gold(self.file(*rows)), gold=True, **options)

    def add(self, votes: Any, **options: Any) -> Added:
        return add_votes(self.run.transport("adds"), self.run.config, self.run.folder, votes, **options)

    def file(self, *rows: Any) -> Path:
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def asked(self, role: StudioRole = StudioRole.annotator) -> list[dict[str, Any]]:
        found = self.get("/runs/demo/questions", role).json()["questions"]
        return [one for one in found if not one["answered"]]

    def see(self, path: str, role: StudioRole) -> str:
        answer = self.browser.get(path.replace("+", "%2B"), headers=self.bearer(role))
        assert answer.status_code in (200, 403), (path, answer.status_code)
        return str(answer.text)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[GoldScene]:
    with shown(lambda: GoldScene(tmp_path)) as found:
        yield found


def answer_of(one: dict[str, Any], *, right: bool = True) -> dict[str, Any]:
    if one["kind"] == "pair":
        return {"rollouts": one["rollouts"], "choice": "both_bad" if right else "first", "order": one["order"]}
    return {"rollout": one["rollouts"][0], "label": SECRET_NUMBER if right else 0.0}


def test_gold_is_asked_like_the_others_and_counted_per_annotator(scene: GoldScene) -> None:
    asked = scene.asked()
    gold = [one for one in asked if one["question_id"] in scene.gold]
    assert 3 <= len(gold) <= 6 and len(asked) == len(scene.asked(StudioRole.viewer)) + len(gold)
    plain = next(one for one in asked if one not in gold)
    for one in gold:
        assert one.keys() == plain.keys()
        assert (one["reason"], one["state"], one["num_votes"], one["quorum"]) == ("share", "open", 0, 2)
        real: Question = scene.gold[one["question_id"]]
        assert (tuple(one["rollouts"]), tuple(one["order"]), one["kind"]) == (real.rollouts, real.order, real.kind)
        assert one["asked_at"] in {other["asked_at"] for other in asked if other not in gold}
    for number, one in enumerate(gold):
        said = scene.post(answer_of(one, right=number > 0)).json()
        assert (said["written"], said["expired"], said["applies"]) == (True, False, True)
    scene.post(answer_of(plain))
    assert not {one["question_id"] for one in scene.asked()} & {one["question_id"] for one in gold}
    found = scene.get("/runs/demo/annotators", StudioRole.operator).json()
    (figures,) = found["annotators"]
    assert (figures["gold"]["count"], figures["gold"]["total"]) == (len(gold) - 1, len(gold))
    assert sum(figures["votes"].values()) == 1 and found["gold_questions"] == 6
    low, high = figures["gold"]["interval"]
    assert low < figures["gold"]["share"] < high
    assert scene.watched.people().effects == {"gold": 6 + len(gold), "counted": 1}


@pytest.mark.slow
def test_the_right_answer_is_never_shown(scene: GoldScene) -> None:
    """Looks at all that shows something of questions, votes or their rollouts, as each role, before and after votes."""
    operator, annotator = StudioRole.operator, StudioRole.annotator

    def look_everywhere() -> None:
        for role in StudioRole:
            pages = [f"/runs/demo{path}" for path in ("", "/questions", "/annotators", "/dead", "/requests", "/groups")]
            pages += [f"/runs/demo/questions?state={state}" for state in ("open", "judged", "expired")]
            pages += [f"{ROOT}/runs/demo{path}" for path in ("", "/questions", "/annotators", "/groups")]
            for one in scene.gold.values():
                pages += [f"/runs/demo/questions/{one.question_id}", f"/runs/demo/groups/{one.group_id}"]
                pages += [f"/runs/demo/rollouts/{one.rollouts[0]}", f"{ROOT}/runs/demo/rollouts/{one.rollouts[0]}"]
            for path in pages:
                text = scene.see(path, role)
                assert "sesame" not in text and str(SECRET_NUMBER) not in text and GOLD_ANNOTATOR not in text, path
                assert role is operator or path.endswith("/annotators") or "gold" not in text, (path, role)

    look_everywhere()
    for one in [other for other in scene.asked() if other["question_id"] in scene.gold]:
        scene.post(answer_of(one, right=False))
        page = scene.see(f"/runs/demo/questions/{one['question_id']}", annotator)
        assert "You said" in page and "changes nothing" not in page and "nobody asked" not in page
    look_everywhere()
    assert "right about gold" in scene.see("/runs/demo/annotators", operator)


def test_an_annotator_sees_only_oneself(scene: GoldScene) -> None:
    asked = [one for one in scene.asked() if one["question_id"] not in scene.gold][:3]
    for role in (StudioRole.annotator, StudioRole.operator):
        for one in asked:
            scene.post(answer_of(one, right=role is StudioRole.operator or one is not asked[0]), role)
    everybody = scene.get("/runs/demo/annotators", StudioRole.operator).json()
    assert len(everybody["annotators"]) == 2
    assert sum(one["questions"] for one in everybody["all_together"].values()) == 3
    own = scene.get("/runs/demo/annotators", StudioRole.annotator).json()
    (figures,) = own["annotators"]
    assert figures["gold"] is None and own["gold_questions"] is None and own["all_together"] == {}
    other = next(one["annotator"] for one in everybody["annotators"] if one["annotator"] != figures["annotator"])
    page = scene.see("/runs/demo/annotators", StudioRole.annotator)
    assert figures["annotator"] in page and other not in page and "How you judge" in page
    assert other in scene.see("/runs/demo/annotators", StudioRole.operator)
    assert scene.get("/runs/demo/annotators", StudioRole.viewer).status_code == 403
    assert scene.browser.get("/runs/demo/annotators", headers=scene.bearer(StudioRole.viewer)).status_code == 403


def test_the_queue_of_the_pages_has_gold(scene: GoldScene) -> None:
    seen = []
    for _ in range(6):
        answer = scene.browser.get("/runs/demo/questions/next", headers=scene.bearer(StudioRole.annotator))
        name = answer.headers["location"].removeprefix("/runs/demo/questions/").partition("?")[0].replace("%2B", "+")
        seen.append(name)
        fields = {"choice": "tie"} if name.startswith("pair") else {"number": "1"}
        address = f"/runs/demo/questions/{name.replace('+', '%2B')}"
        assert scene.browser.post(address, data=fields, headers=scene.bearer(StudioRole.annotator)).status_code == 303
    assert len(set(seen)) == 6 and 1 <= len(set(seen) & set(scene.gold)) <= 5


# --------------------------------------------------------------------------------------------- added


def test_right_answers_are_added_once(scene: GoldScene) -> None:
    assert scene.added.to_text() == "6 right answers: 4 label, 2 pair added"
    first = next(iter(scene.gold.values()))
    row = {"rollout": first.rollouts[0], "label": SECRET_NUMBER, "comment": "sesame"}
    assert scene.say_gold(row).to_text() == "1 right answers: nothing added; 1 there already"
    assert scene.say_gold({**row, "label": 0.5}, dry_run=True).to_text().startswith("1 right answers: 1 label to be")
    assert scene.say_gold({**row, "label": 0.5}).edits == 1
    back = {"rollout": first.rollouts[0], "retract": "label"}
    assert scene.say_gold(back).kinds == {"retract": 1}
    assert scene.say_gold(back).known == 1
    with pytest.raises(ConfigError, match="nothing of this annotator stands"):
        scene.say_gold({"rollout": scene.questions()[5].rollouts[0], "retract": "label"})
    assert {one.annotator for one in scene.votes()} == {GOLD_ANNOTATOR}


def test_what_is_no_right_answer(scene: GoldScene) -> None:
    label, pair = scene.questions()[5].rollouts[0], list(scene.questions("pair")[3].rollouts)
    wrong: list[tuple[Any, str]] = [
        ({"rollout": label, "label": 1.0, "by": "ada"}, "by: a right answer is nobody's vote"),
        ({"rollout": label, "correction": "4"}, "correction: cannot be right or wrong"),
        ({"rollout": label, "flag": True}, "flag: cannot be right or wrong"),
        ({"rollout": label, "rating": 6.0}, "rating: got 6.0, expected 1.0 to 5.0"),
        ({"rollout": label}, "found no answer"),
        ({"rollout": "sums/0/999/0/0", "label": 1.0}, "not scored in this run"),
        ({"rollouts": pair, "choice": "cannot_judge"}, "cannot_judge is no answer"),
        (["label"], "expected an object"),
    ]
    for row, said in wrong:
        with pytest.raises(ConfigError, match=said):
            scene.say_gold(row)
    assert len(scene.votes()) == 6


def test_what_somebody_has_answered_cannot_become_gold(scene: GoldScene) -> None:
    name = scene.questions()[5].rollouts[0]
    scene.add(read_votes(scene.file({"rollout": name, "label": 1.0, "by": "ada"})))
    with pytest.raises(ConfigError, match="somebody has answered it already"):
        scene.say_gold({"rollout": name, "label": 1.0})
    scene.say_gold({"rollout": name, "rating": 3.0})  # another question


def test_votes_are_read_on_from_where_they_were_read_last(scene: GoldScene) -> None:
    """The studio keeps what was said; somebody else's votes in between are seen all the same."""
    log, kept, records = Log(scene.run.transport("reads")), VoteRevisions(), FeedbackRecords()
    assert len(kept.follow(log)) == 6
    name = scene.questions()[5].rollouts[0]
    for number in (0.25, 0.5):
        scene.add(read_votes(scene.file({"rollout": name, "label": number, "by": "annotator"})))
        assert len(kept.follow(log)) == 7 and kept.follow(log) == VoteRevisions().follow(log)
        view, anew = (read_feedback(log, scene.run.config, kept=one) for one in (records, FeedbackRecords()))
        assert sorted(view.votes, key=str) == sorted(anew.votes, key=str) and view.questions == anew.questions
        assert view.judgements == anew.judgements and view.gold == anew.gold
    assert scene.post({"rollout": name, "label": 0.5}).json()["written"] is False
    done = scene.post({"rollout": name, "label": 0.75}).json()
    assert done["written"] and done["edit"]
    assert [one.revision for one in scene.votes()[6:]] == [0, 1, 2]
