"""People answer questions in the studio: each answer once, under the name of the token, as the command adds it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rftstream.contracts import codec
from rftstream.contracts.feedback import Feedback, FeedbackKind, PairChoice
from rftstream.contracts.questions import Question
from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys
from rftstream.studio.access import StudioRole
from rftstream.studio.text_diff import diff_texts
from rftstream.studio.watched_run import WatchedRun
from rftstream.testing import Simulation
from tests.suite.each import each
from tests.unit.studio.studio_scene import SECRET, client, make_config, rules, shown, watch

OWN = {"origin": "http://testserver"}
HOSTILE = '<script>alert("x")</script>\u202egnirts \u200f مرحبا 👩\u200d🚀 </textarea>'


class Scene:
    """A finished run that asks about everything, and a studio over it."""

    def __init__(self, folder: Path, role: StudioRole = StudioRole.annotator, **feedback: Any) -> None:
        settings = {"share": 1.0, "pairs": 1.0, "quorum": 2, **feedback}
        self.run = Simulation(make_config(feedback=settings), folder=folder, seed=3)
        self.run.run()
        self.watched: WatchedRun = watch(self.run)
        self.watched.follow_once()
        self.browser: TestClient = client([self.watched], rules(local_role=role))

    def questions(self, kind: str = "label") -> list[Question]:
        return [one for one in self.run.messages("questions") if isinstance(one, Question) and one.kind == kind]

    def votes(self) -> list[Feedback]:
        return [one for one in self.run.messages("feedback") if isinstance(one, Feedback)]

    def page(self, name: str = "") -> str:
        answer = self.browser.get(f"/runs/demo/questions{'/' if name else ''}{name.replace('+', '%2B')}")
        assert answer.status_code == 200, answer.text[:500]
        return html.unescape(answer.text)

    def send(self, name: str, **fields: str) -> Any:
        return self.browser.post(f"/runs/demo/questions/{name.replace('+', '%2B')}", data=fields, headers=OWN)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with shown(lambda: Scene(tmp_path)) as found:
        yield found


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One run for all tests that write nothing."""
    with shown(lambda: Scene(tmp_path_factory.mktemp("run"))) as found:
        yield found


def test_a_question_that_records_no_order_is_shown(scene: Scene) -> None:
    """A record may leave it out."""
    label = scene.questions()[0]
    name = label.question_id.replace("label/", "rating/")
    asked = replace(label, question_id=name, kind=FeedbackKind.rating, order=())
    producer = scene.run.transport("asker").producer("asker")
    producer.start()
    producer.commit([codec.to_record(asked, "questions", 0, run=scene.run.folder.run_id, writer_epoch=1)])
    scene.watched.follow_once()
    assert f"<code>{name}</code>" in scene.page(name) and "takes 2 people" in scene.page(name)


def test_a_pair_is_shown_in_the_order_that_is_recorded(scene: Scene) -> None:
    asked = next(one for one in scene.questions("pair") if one.order == (1, 0))
    page = scene.page(asked.question_id)
    shown = re.findall(r'<h2><b class="letter">([AB])</b> <a href="/runs/demo/rollouts/([^"]+)"', page)
    assert shown == [("A", asked.rollouts[1]), ("B", asked.rollouts[0])]
    assert re.search(r'value="second" data-key="a"', page) and re.search(r'value="first" data-key="b"', page)
    done = scene.send(asked.question_id, choice="second", shown_at=_time_of(page), comment=HOSTILE)
    assert done.status_code == 303
    assert done.headers["location"].startswith("/runs/demo/questions/next?said=pair")
    (vote,) = scene.votes()
    assert (vote.choice, vote.order, vote.rollouts) == (PairChoice.second, (1, 0), asked.rollouts)
    assert (vote.source, vote.revision, vote.comment) == ("studio", 0, HOSTILE)
    assert vote.annotator == GatewayKeys(SECRET.encode(), scene.run.folder.run_id).annotator("ada")
    assert vote.lead_time_s is not None and 0 <= vote.lead_time_s < 600
    again = scene.browser.get(f"/runs/demo/questions/{asked.question_id.replace('+', '%2B')}")
    assert "<script>" not in again.text and again.text.count("</textarea>") == again.text.count("<textarea")
    assert "A is better" in again.text


def _time_of(page: str) -> str:
    found = re.search(r'name="shown_at" value="([\d.]+)"', page)
    assert found is not None
    return found[1]


def test_twice_an_edit_and_taken_back(scene: Scene) -> None:
    name = scene.questions()[0].question_id
    assert scene.send(name, number="1").status_code == 303
    assert scene.send(name, number="1").status_code == 303, "said already: it is not written again"
    assert [one.revision for one in scene.votes()] == [0]
    scene.send(name, number="0.5")
    assert [(one.reward, one.revision) for one in scene.votes()] == [(1.0, 0), (0.5, 1)]
    back = scene.send(name, retract="1")
    assert back.headers["location"] == f"/runs/demo/questions/{name}"
    assert [one.kind for one in scene.votes()][-1] is FeedbackKind.retract
    assert "You said" not in scene.page(name)
    assert scene.send(name, retract="1").status_code == 303 and len(scene.votes()) == 3
    never = scene.send(scene.questions()[1].question_id, retract="1")
    assert never.status_code == 400 and "nothing of this annotator stands" in never.text


def test_the_queue_goes_on_to_what_one_has_not_answered(scene: Scene) -> None:
    seen: list[str] = []
    address = "/runs/demo/questions/next"
    for _ in range(4):
        location = scene.browser.get(address).headers["location"]
        name = location.removeprefix("/runs/demo/questions/").partition("?")[0].replace("%2B", "+")
        assert name not in seen
        seen.append(name)
        fields = {"choice": "tie"} if name.startswith("pair") else {"number": "1"}
        address = scene.send(name, **fields).headers["location"]
    assert scene.page().count(">answered<") == 4
    said = scene.browser.get("/runs/demo/questions", params={"said": seen[0]})
    assert "You said of" in said.text and 'name="retract"' in said.text
    first = scene.browser.get("/runs/demo/questions/next").headers["location"]
    after = {"after": first.removeprefix("/runs/demo/questions/").replace("%2B", "+")}
    assert scene.browser.get("/runs/demo/questions/next", params=after).headers["location"] != first


def test_two_people_judge_and_others_are_not_seen_before(scene: Scene) -> None:
    name = scene.questions()[1].question_id
    scene.send(name, number="1")
    bob = client([scene.watched], _named("bob"))
    its_page = f"/runs/demo/rollouts/{scene.questions()[1].rollouts[0]}"
    assert "1 of 2 votes" in scene.browser.get(its_page).text and "of 2 votes" not in bob.get(its_page).text
    before = bob.get(f"/runs/demo/questions/{name}").text
    assert "1 of 2 votes" not in before and "You said" not in before
    bob.post(f"/runs/demo/questions/{name}", data={"number": "1"}, headers=OWN)
    after = bob.get(f"/runs/demo/questions/{name}").text
    assert "2 of 2 votes, 100 % agree; judged: 1; changes: correction" in after
    assert "2 of 2 votes, 100 % agree; judged: 1; changes: correction" in bob.get(its_page).text
    assert ">judged</a> 1<" in bob.get("/runs/demo/questions").text
    assert name in bob.get("/runs/demo/questions?state=judged").text


def _named(name: str) -> Any:
    from rftstream.studio.access import Viewer

    found = rules(local_role=StudioRole.annotator)
    found.local = Viewer(name=name, role=StudioRole.annotator, is_local=True)
    return found


def test_a_correction_with_its_difference(scene: Scene) -> None:
    rollout = scene.questions()[0].rollouts[0]
    name = f"correction/{rollout}"
    page = scene.page(name)
    said = page[page.index("data-submit>") + len("data-submit>") + 1 :].partition("</textarea>")[0]
    draft = scene.send(name, correction=f"{said} 42", show="1")
    assert draft.status_code == 200 and "nothing is sent yet" in draft.text and scene.votes() == []
    assert "<ins> 42</ins>" in draft.text
    hostile = scene.send(name, correction=HOSTILE, show="1").text
    assert "<script>" not in hostile and hostile.count("</textarea>") == 1
    assert scene.send(name, correction="a\r\nb").status_code == 303
    assert scene.votes()[0].correction == "a\nb"
    assert "What you changed" in scene.page(name)
    empty = scene.send(name, correction="  ")
    assert empty.status_code == 400 and "expected" in empty.text


def test_a_rating_and_a_flag_that_nobody_asked_for(scene: Scene) -> None:
    rollout = scene.questions()[0].rollouts[0]
    page = scene.page(f"rating/{rollout}")
    assert all(f'value="{number}" data-key="{number}"' in page for number in range(1, 6))
    assert "nobody asked" in page and "changes no reward" in page
    assert scene.send(f"rating/{rollout}", number="4").status_code == 303
    assert scene.send(f"flag/{rollout}", flag="").status_code == 303
    assert scene.send(f"flag/{rollout}", flag="leaks the answer").status_code == 303
    assert [(one.kind, one.reward, one.comment) for one in scene.votes()] == [
        (FeedbackKind.rating, 4.0, None),
        (FeedbackKind.flag, None, None),
        (FeedbackKind.flag, None, "leaks the answer"),
    ]


@each(
    ("name", "fields", "status", "said"),
    [
        ("label/sums/0/999/0/0", {"number": "1"}, 404, "no group"),
        ("label/{group}/9", {"number": "1"}, 404, "has the rollouts 0 to 2"),
        ("label/{group}/0+1", {"number": "1"}, 404, "no question"),
        ("pair/{group}/1+0", {"choice": "tie"}, 404, "no question"),
        ("pair/{group}/1+1", {"choice": "tie"}, 404, "no question"),
        ("retract/{group}/1", {"number": "1"}, 404, "no question"),
        ("pair/{group}/0+1", {"choice": "<script>"}, 400, "expected one of"),
        ("pair/{group}/0+1", {}, 400, "expected one of"),
        ("label/{group}/0", {"number": "nan"}, 400, "expected a finite number"),
        ("label/{group}/0", {"number": "1; drop"}, 400, "expected a number"),
        ("label/{group}/0", {}, 400, "expected a number"),
    ],
)
def test_votes_that_cannot_be(quiet: Scene, name: str, fields: dict[str, str], status: int, said: str) -> None:
    group = quiet.questions()[0].group_id
    answer = quiet.send(name.format(group=group), **fields)
    assert answer.status_code == status and said in html.unescape(answer.text)
    assert "<script>" not in answer.text and quiet.votes() == []


def test_what_is_no_form(quiet: Scene) -> None:
    address = f"/runs/demo/questions/{quiet.questions()[0].question_id}"
    for body in (b"\xff\xfe", b"&".join(b"a=%d" % n for n in range(1000)), b"number=%ff"):
        assert quiet.browser.post(address, content=body, headers=OWN).status_code == 400
    assert quiet.browser.post(address, content=b"x" * 10_000_000, headers=OWN).status_code == 413
    assert quiet.votes() == []


def test_after_the_expiry_it_is_recorded_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    scene = Scene(tmp_path, expires_s=0.001)
    with scene.browser:
        name = scene.questions()[0].question_id
        assert "an answer is recorded now, and changes nothing" in scene.page(name)
        assert scene.send(name, number="1").status_code == 303
        assert "expired: it changes nothing" in re.sub("<[^>]+>", "", scene.page(name))
        assert ">expired</a> " in scene.browser.get("/runs/demo/questions?state=expired").text
    scene.watched.stop()


@pytest.mark.slow
def test_a_viewer_sees_questions_and_answers_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    scene = Scene(tmp_path, role=StudioRole.viewer)
    with scene.browser:
        name = scene.questions()[0].question_id
        assert name in scene.page()
        page = scene.page(name)
        assert "annotators answer" in page and 'method="post"' not in page
        assert scene.send(name, number="1").status_code == 403
        assert scene.votes() == []
    scene.watched.stop()


@each(
    ("before", "after"),
    [("", ""), ("a b", "a c b"), ("x\n" * 3000, "x\n" * 2999), ("w " * 5000, "v " * 5000), ("1 = 2", "")],
)
def test_a_difference_has_both_texts(before: str, after: str) -> None:
    pieces = diff_texts(before, after)
    assert "".join(one.text for one in pieces if one.kind != "added") == before
    assert "".join(one.text for one in pieces if one.kind != "removed") == after
    assert diff_texts("a b", "a c b") == [("same", "a "), ("added", "c "), ("same", "b")]
