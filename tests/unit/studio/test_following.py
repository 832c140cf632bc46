"""What pages say while the studio knows less than the log has: before it has read it, and behind a run that goes on."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rftstream.queries.catalog.updating import CatalogUpdater
from rftstream.queries.records import listed_texts
from rftstream.queries.state.following import Look, RunFollower
from rftstream.runs.folder import OpenRun
from rftstream.runs.making.create import write_config
from rftstream.studio.watched_run import WatchedRun
from rftstream.testing import MemoryRun, Simulation
from tests.suite.each import each
from tests.unit.studio.studio_scene import client, make_config, watch
from tests.unit.synthetic import SyntheticLog

EMPTY = ("✓</span>", "No such", "nothing looks wrong", ">none<", "No checkpoint", "0 problems", ">0</a>", 'big">0<')
"""Words for nothing."""


@pytest.fixture
def simulation(tmp_path: Path) -> Simulation:
    simulation = Simulation(make_config(), folder=tmp_path, seed=3)
    simulation.run()
    return simulation


def test_what_is_not_read_yet_is_not_nothing(simulation: Simulation) -> None:
    """Another studio makes the catalog, and has read nothing so far."""
    watched, second = watch(simulation), watch(simulation, "second")
    with (
        closing(CatalogUpdater(OpenRun(simulation.folder, simulation.config, simulation.transport("other")))) as other,
        client([watched, second]) as browser,
    ):
        other.update(lambda: True)
        watched.follow_once()
        assert watched.snapshot.status is not None and not watched.snapshot.is_read
        for page in ("", "/groups", "/rollouts", "/problems", "/dead", "/flow"):
            text = browser.get(f"/runs/demo{page}").text
            shown = text[text.index("<main") :]
            assert "<b>reading the log</b> 0 %" in shown, page
            assert not [word for word in EMPTY if word in shown], page
        assert (
            "not read yet" in browser.get("/runs/demo").text and "Not read yet" in browser.get("/runs/demo/groups").text
        )
        assert "0% of the log is read: try again" in browser.get("/runs/demo/problems/sums/0").text
        listed = browser.get("/").text
        assert '<td colspan="6">not read yet</td>' in listed, "the second one was not looked at"
        other.update()
        watched.follow_once()
        assert watched.snapshot.is_read
        for page in ("", "/groups", "/rollouts"):
            text = browser.get(f"/runs/demo{page}").text.lower()
            assert "not read yet" not in text and "reading the log" not in text, page
    watched.stop()
    second.stop()


def test_what_resume_sets_is_seen_by_an_open_studio(simulation: Simulation) -> None:
    watched = watch(simulation)
    watched.follow_once()
    with client([watched]) as browser:
        assert "of 6 steps" in browser.get("/runs/demo").text
        write_config(make_config(run={"name": "demo", "steps": 260}), simulation.folder)
        watched.follow_once()
        assert "of 260 steps" in browser.get("/runs/demo").text
        assert watched.look(lambda run, _: run.config.steps) == 260
    watched.stop()


@pytest.fixture
def behind(simulation: Simulation) -> Iterator[tuple[WatchedRun, TestClient]]:
    """A studio that knows all rollouts, and whose texts are read by another one, which has read none so far."""
    watched = watch(simulation)
    with (
        closing(CatalogUpdater(OpenRun(simulation.folder, simulation.config, simulation.transport("other")))) as other,
        client([watched]) as browser,
    ):
        other.update()
        watched.follow_once()
        yield watched, browser
    watched.stop()


@each(("address",), [("/rollouts?order=best",), ("/groups",), ("/problems",), ("",)])
def test_rows_on_the_screen_have_their_texts_first(behind: tuple[WatchedRun, TestClient], address: str) -> None:
    watched, browser = behind
    assert watched.snapshot.num_texts_left
    text = browser.get(f"/runs/demo{address}").text
    said = re.findall(r'<a class="line"[^>]*>(.*?)</a>', text)
    assert said and not [one for one in said if "not read yet" in one], said
    assert re.search(r'class="asked"[^>]*>\d\+\d=<', text), "what they were asked, too"
    assert (">being read<" in text) is (address == "/problems"), "the reference answers"


def test_a_text_whose_record_the_index_has_not_come_to_is_not_no_text(
    behind: tuple[WatchedRun, TestClient], simulation: Simulation
) -> None:
    watched, browser = behind
    with closing(sqlite3.connect(simulation.folder.index / "studio.sqlite3")) as index, index:
        index.execute("UPDATE rollouts SET rollout_offset = NULL")  # outcomes are read first
    read = watched.snapshot
    for is_read, said, unsaid in ((False, "text not read yet", "no text"), (True, "no text", "text not read yet")):
        watched.snapshot = replace(read, is_read=is_read, revision=read.revision + 1 + is_read)
        for page in ("/problems", "/groups"):
            text = browser.get(f"/runs/demo{page}").text
            assert said in text and unsaid not in text, (page, is_read)


def test_texts_beyond_the_most_are_not_read_yet(
    behind: tuple[WatchedRun, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed_texts, "MOST", 1)
    text = behind[1].get("/runs/demo/rollouts").text
    assert "text not read yet" in text and "no text" not in text


def test_a_card_has_no_colour_that_looks_like_right_or_wrong(simulation: Simulation) -> None:
    watched = watch(simulation)
    watched.follow_once()
    with client([watched]) as browser:
        listed = browser.get("/runs/demo/problems").text
        found = re.findall('href="(/runs/demo/problems/sums/[0-9]+)"', listed)
        text = browser.get(found[0]).text
        assert '<article class="sibling">' in text and 'class="sibling ' not in text
        assert re.search("<span>[0-9]+ tokens?</span>", text) and not re.search(r"\b1 tokens", text)
    watched.stop()


def test_a_run_that_begins_or_ends_during_a_look_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes long where much is to be read. The one under way has seen the state before."""
    memory = MemoryRun(make_config(), folder=tmp_path)
    memory.put_manifest()
    watched, told = watch(memory), list[str]()
    look = RunFollower.look

    def held_up(follower: RunFollower, *args: Any) -> Look:
        found = look(follower, *args)
        session.close()
        watched.check_state()
        told.append(said())
        return found

    def said() -> str:
        found = re.search('state</h2><p class="big">([^<]*)', browser.get("/runs/demo").text)
        assert found is not None
        return found[1]

    with ExitStack() as session, client([watched]) as browser:
        watched.listener = lambda: told.append(said())
        watched.follow_once()
        session.enter_context(memory.folder.held())
        watched.check_state()
        monkeypatch.setattr(RunFollower, "look", held_up)
        watched.follow_once()
        watched.check_state()
    assert told[:2] == ["stopped", "running"] and set(told[2:]) == {"stopped"}
    watched.stop()


def test_a_page_says_how_far_it_is_behind_a_run_that_goes_on(tmp_path: Path) -> None:
    memory = MemoryRun(make_config(), folder=tmp_path)
    memory.put_manifest()
    SyntheticLog(memory.transport(), partitions=4).step(0, resumed=True)
    watched = watch(memory)
    with memory.folder.held(), client([watched]) as browser:
        watched.follow_once()
        assert " behind: " not in browser.get("/runs/demo").text
        watched.snapshot = replace(watched.snapshot, read_at=watched.snapshot.read_at - 50)  # a look that takes long
        watched.snapshot = replace(watched.snapshot, share_read=0.997)  # as nearly always while it goes on
        assert "reading the log" not in browser.get("/runs/demo?uncached=1").text
        since = datetime.fromtimestamp(watched.snapshot.read_at, UTC)
        said = f"<b>as of {since:%H:%M:%S} UTC</b>"
        assert said in browser.get("/runs/demo").text
        revision = watched.snapshot.revision
        watched.follow_once()
        assert watched.snapshot.revision > revision and said not in browser.get("/runs/demo").text
    with client([watched]) as browser:
        watched.check_state()  # it has ended, and what it wrote last is not read
        watched.snapshot = replace(watched.snapshot, read_at=watched.snapshot.read_at - 50)
        text = browser.get("/runs/demo").text
        assert " behind: " in text and ">stopped</p>" in text
        watched.snapshot = replace(watched.snapshot, share_read=0.997)
        assert "<b>reading the log</b>" in browser.get("/runs/demo?uncached=2").text
        watched.follow_once()
        watched.snapshot = replace(watched.snapshot, read_at=watched.snapshot.read_at - 50)
        assert " behind: " not in browser.get("/runs/demo?uncached=3").text
    watched.stop()


def test_the_list_of_runs_says_which_one_an_error_ended(tmp_path: Path) -> None:
    for folder, ended in (
        ("a", "ERROR   run ended by=error exit_code=6 error=x"),
        ("b", "INFO    run ended by=SIGINT"),
    ):
        memory = MemoryRun(make_config(), folder=tmp_path / folder)
        memory.put_manifest()
        (memory.folder.path / "logs").mkdir(parents=True)
        (memory.folder.path / "logs" / "run.log").write_text(f"2026-01-31 12:00:00.000 {ended}\n")
        watched, other = watch(memory), watch(memory, "other")
        watched.follow_once()
        with client([watched, other]) as browser:
            assert ("ended by an error" in browser.get("/").text) == (folder == "a")
        watched.stop()
        other.stop()


def test_a_run_folder_that_is_moved_is_missed_and_is_found_when_it_is_back(tmp_path: Path) -> None:
    simulation = Simulation(make_config(), folder=tmp_path / "run", seed=3)
    simulation.run()
    watched = watch(simulation)
    with client([watched]) as browser:
        watched.follow_once()
        assert "the run folder is gone" not in browser.get("/runs/demo").text
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        watched.follow_once()
        for page in ("", "/rollouts", "/problems/sums/0", "/charts", "/flow"):
            text = browser.get(f"/runs/demo{page}").text
            assert f"{simulation.folder.path}: the run folder is gone" in text and "has not begun" not in text, page
        assert browser.get("/").status_code in (200, 302)
        (tmp_path / "elsewhere").rename(tmp_path / "run")
        watched.follow_once()
        assert "the run folder is gone" not in browser.get("/runs/demo").text
    watched.stop()
