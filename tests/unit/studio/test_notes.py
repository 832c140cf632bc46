"""Notes and tags of people: who may write them, where they are shown, and that they outlive whoever wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rftstream.errors import ConfigError
from rftstream.runs import notes as runs_notes
from rftstream.runs.folder import RunFolder
from rftstream.runs.notes import RunNotes
from rftstream.studio.access import StudioRole, TokenFile
from rftstream.studio.watched_run import WatchedRun
from rftstream.testing import Simulation
from tests.unit.studio.studio_scene import client, make_config, rules, watch

OWN = {"origin": "http://testserver"}
ROLLOUT, GROUP = "sums/0/1/0/2", "sums/0/1/0"
TASKSETS = {"sums": {"source": "arithmetic", "shuffle": False}}
HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    simulation = Simulation(make_config(tasksets=TASKSETS), folder=tmp_path_factory.mktemp("run"), seed=3)
    simulation.run()
    watched = watch(simulation)
    watched.follow_once()
    yield watched
    watched.stop()


@pytest.fixture
def watched(scene: WatchedRun) -> Iterator[WatchedRun]:
    yield scene
    for note in scene.notes.notes():
        scene.notes.remove(note.note_id, by="the test", any_writer=True)


def add(browser: TestClient, **fields: str) -> Any:
    return browser.post("/runs/demo/notes", data=fields, headers=OWN)


def test_notes_are_shown_where_they_belong_and_found_by_tag(watched: WatchedRun) -> None:
    places = {
        ROLLOUT: f"/runs/demo/rollouts/{ROLLOUT}",
        GROUP: f"/runs/demo/groups/{GROUP}",
        "v2": "/runs/demo/versions/2",
    }
    with client([watched], rules(local_role=StudioRole.annotator)) as browser:
        assert '"/runs/demo/notes"' not in browser.get("/runs/demo").text.partition("<main")[0], "no tab without notes"
        for target, address in places.items():
            assert '<h2 id="notes-title">' in browser.get(address).text and "note-of" not in browser.get(address).text
            done = add(browser, target=target, text=f"{HOSTILE} {target}", tags="Look-again, good")
            assert (done.status_code, done.headers["location"]) == (303, address)
            page = browser.get(address).text
            assert "&lt;script&gt;" in page and HOSTILE not in page and page.count("note-of") == 1
        assert add(browser, target="v1", tags="good").status_code == 303
        assert browser.get("/runs/demo/notes").text.count("note-of") == 4
        assert browser.get("/runs/demo/notes?tag=look-again").text.count("note-of") == 3
        assert ">Notes</a>" in browser.get("/runs/demo").text
        assert "Add a note" not in browser.get(f"{places['v2']}?as_of=v3").text, "an earlier moment is only looked at"


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"target": "sums/0/1/0/77", "text": "a"}, 404, "expected a rollout, a group or a version of this run"),
        ({"target": "v77", "text": "a"}, 404, "expected a rollout"),
        ({"target": "batch:1", "text": "a"}, 404, "expected a rollout"),
        ({"target": "", "text": "a"}, 400, "expected"),
        ({"target": ROLLOUT}, 400, "no text and no tag"),
        ({"target": ROLLOUT, "tags": "a&b"}, 400, "of up to 40 letters"),
        ({"target": ROLLOUT, "tags": " ".join("abcdefghijk")}, 400, "got 11 tags"),
        ({"target": ROLLOUT, "text": "a" * 4001}, 400, "expected at most 4,000"),
        ({"remove": "nothing"}, 400, "expected the id of a note"),
    ],
)
def test_what_is_no_note(watched: WatchedRun, fields: dict[str, str], status: int, said: str) -> None:
    with client([watched], rules(local_role=StudioRole.annotator)) as browser:
        answer = add(browser, **fields)
        assert answer.status_code == status and said in answer.text
        assert watched.notes.notes() == []


def test_programs_write_and_take_back_and_others_notes_need_an_operator(watched: WatchedRun, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    heads = {
        role: {"authorization": f"Bearer {tokens.make(role.name, role)}"} for role in StudioRole
    }  # fmt: skip
    with client([watched], rules(tokens.path)) as browser:

        def post(role: StudioRole, **body: Any) -> Any:
            return browser.post("/api/v1/runs/demo/notes", json=body, headers=heads[role])

        assert post(StudioRole.viewer, target=ROLLOUT, text="a").status_code == 403
        made = post(StudioRole.annotator, target=ROLLOUT, text="a", tags=["x"]).json()
        assert (made["by"], made["tags"], made["target"]) == ("annotator", ["x"], ROLLOUT)
        asked = browser.get(f"/api/v1/runs/demo/notes?target={ROLLOUT}&tag=x", headers=heads[StudioRole.viewer])
        assert asked.json() == [made]
        other = post(StudioRole.operator, target="v2", text="b").json()
        refused = post(StudioRole.annotator, remove=other["note_id"])
        assert refused.status_code == 400 and "written by operator" in refused.json()["error"]
        assert post(StudioRole.operator, remove=made["note_id"]).json() == made
        assert [note.text for note in watched.notes.notes()] == ["b"]
        paths = browser.get("/api/v1/openapi.json", headers=heads[StudioRole.viewer]).json()["paths"]
        assert set(paths["/api/v1/runs/{run}/notes"]) == {"get", "post"}


def test_notes_outlive_their_writer_and_a_line_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="no run folder on this host"):
        RunNotes(folder).add("v1", "a", (), by="ada")
    folder.config_file.write_text("")
    first, second = RunNotes(folder), RunNotes(folder)
    first.add("v1", "a", (), by="ada")
    with folder.notes_file.open("ab") as file:
        file.write(b'{"note_id": "half')
    note = second.add("v2", "b", ("x",), by="bob")
    assert [one.text for one in first.notes()] == ["b", "a"] and first.notes(tag="x") == [note]
    assert len(folder.notes_file.read_bytes().splitlines()) == 3
    monkeypatch.setattr(runs_notes, "MAX_BYTES", 300)
    with pytest.raises(ConfigError, match="expected room for notes"):
        first.add("v1", "a" * 200, (), by="ada")
    assert json.loads(folder.notes_file.read_text().splitlines()[-1])["by"] == "bob"
