"""Operators ask something of the run in the studio, by the functions of the commands; who asked stands on the log."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rftstream.contracts.control import DesiredState, Request, RequestKind, RunState
from rftstream.studio.access import StudioRole, TokenFile
from rftstream.studio.app import FORMS
from rftstream.studio.guard import RateLimits
from rftstream.studio.watched_run import WatchedRun
from rftstream.testing import MemoryRun, Simulation
from tests.commands import call
from tests.unit.studio.studio_scene import client, make_config, rules, watch

OWN = {"origin": "http://testserver"}


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[tuple[MemoryRun, WatchedRun]]:
    run = MemoryRun(make_config(), folder=tmp_path / "run")
    run.put_manifest()
    watched = watch(run)
    watched.follow_once()
    yield run, watched
    watched.stop()


def operator(watched: WatchedRun) -> TestClient:
    return client([watched], rules(local_role=StudioRole.operator))


def states(run: MemoryRun) -> list[RunState]:
    return [one for one in run.messages("control") if isinstance(one, RunState)]


def ask(browser: TestClient, **fields: Any) -> Any:
    return browser.post("/runs/demo/requests", data=fields, headers=OWN)


def test_pause_go_on_and_drain(open_run: tuple[MemoryRun, WatchedRun]) -> None:
    run, watched = open_run
    with operator(watched) as browser:
        assert ask(browser, ask="pause", reason="<script>the disk</script>").status_code == 303
        (state,) = states(run)
        assert (state.state, state.reason) == (DesiredState.paused, "<script>the disk</script>")
        assert state.by.startswith("ada, by the studio of ")
        page = browser.get("/runs/demo/requests")
        assert "<script>the disk" not in page.text and "ada, by the studio of" in page.text and ">paused<" in page.text
        again = ask(browser, ask="pause")
        assert "it+was+so+already" in again.headers["location"] and len(states(run)) == 1
        ask(browser, ask="unpause")
        assert [one.state for one in states(run)][1:] == [DesiredState.running]
        assert "expected a mark that it is meant" in ask(browser, ask="drain").text
        assert ask(browser, ask="drain", sure="1").status_code == 303
        refused = ask(browser, ask="unpause")
        assert refused.status_code == 400 and "not taken back" in refused.text
        assert ask(browser, ask="delete").status_code == ask(browser).status_code == 400


def test_evaluations_are_asked_of_who_is_alive(open_run: tuple[MemoryRun, WatchedRun]) -> None:
    run, watched = open_run
    with operator(watched) as browser:
        nobody = ask(browser, ask="evaluate", versions="0")
        assert nobody.status_code == 400 and "no evaluator is alive" in nobody.text
        wrong = ask(browser, ask="evaluate", versions="1;2")
        assert wrong.status_code == 400 and "expected numbers with commas" in wrong.text
        unknown = ask(browser, ask="evaluate", evaluation="other")
        assert unknown.status_code == 400 and "held-out" in unknown.text
    assert not [one for one in run.messages("control") if isinstance(one, Request)]


def test_dead_groups_are_put_back(tmp_path: Path) -> None:
    config = make_config(policies={"fake": {"fail_share": 0.6}}, buffer={"min_siblings": 3})
    run = Simulation(config, folder=tmp_path, seed=3)
    run.run()
    watched = watch(run)
    watched.follow_once()
    with operator(watched) as browser:
        page = browser.get("/runs/demo/dead").text
        folder = shlex.quote(str(run.folder.path.absolute()))
        assert f"rftstream dead retry {folder} GROUP" in html.unescape(page), "from any folder"
        group = page.partition('name="group" value="')[2].partition('"')[0]
        send = lambda **fields: browser.post("/runs/demo/dead", data=fields, headers=OWN)  # noqa: E731
        assert "none is chosen" in send().text
        assert "no dead group has it" in html.unescape(send(group="sums/0/999/0").text)
        assert send(group=group).status_code == 303
        (request,) = retries(run)
        assert (request.request_id, request.by[:17]) == (f"retry/{group}", "ada, by the studi")
        assert f"retry/{group}" in browser.get("/runs/demo/requests").text
        assert send(everything="1", sample="1").status_code == 303
        assert len(retries(run)) > 1
    watched.stop()


def retries(run: MemoryRun) -> list[Request]:
    return [one for one in run.messages("control") if isinstance(one, Request) and one.kind is RequestKind.retry_dead]


# --------------------------------------------------------------------------------------------- who may


NEEDED = {path: form.role for path, form in FORMS.items()}


@pytest.mark.parametrize("role", list(StudioRole))
@pytest.mark.parametrize("path", list(NEEDED))
def test_roles(open_run: tuple[MemoryRun, WatchedRun], tmp_path: Path, role: StudioRole, path: str) -> None:
    run, watched = open_run
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.make("ada", role)
    address = f"/runs/demo{path}"
    for name, value in {"{kind}": "label", "{taskset}": "sums", "{siblings}": "0"}.items():
        address = address.replace(name, value)
    for name in ("taskset_pass", "problem", "attempt"):
        address = address.replace(f"{{{name}:count}}", "0")
    before = len(run.records("control")) + len(run.records("feedback"))
    with client([watched], rules(tokens.path)) as browser:
        mine = {"authorization": f"Bearer {token}"}
        wanted = {"ask": "nonsense", "number": "1"}
        done = browser.post(address, data=wanted, headers=mine)
        assert (done.status_code == 403) == (role < NEEDED[path]), done.text[:300]
        foreign = {**mine, "origin": "http://evil.example"}
        assert browser.post(address, data=wanted, headers=foreign).status_code == 403
        for site in ("cross-site", "same-site"):
            assert browser.post(address, data=wanted, headers={**mine, "sec-fetch-site": site}).status_code == 403
        assert browser.post(address, data=wanted, headers={**OWN, "origin": "null"}).status_code == 403
        wrong = {"authorization": f"Bearer {token}x"}
        assert browser.post(address, data=wanted, headers=wrong).status_code == 401
        assert browser.post(address, data=wanted, headers=OWN).status_code == 401
        tokens.revoke("ada")
        assert browser.post(address, data=wanted, headers=mine).status_code == 401
    assert len(run.records("control")) + len(run.records("feedback")) == before


def test_on_loopback_a_token_gives_its_role(open_run: tuple[MemoryRun, WatchedRun], tmp_path: Path) -> None:
    _, watched = open_run
    guard = rules()
    guard.tokens = tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.make("bob", StudioRole.operator)
    with client([watched], guard) as browser:
        assert ask(browser, ask="pause").status_code == 403, "who has no token looks"
        assert browser.get("/runs/demo", headers={"authorization": "Bearer guess"}).status_code == 401
        browser.post("/login", data={"token": token}, headers=OWN)
        assert "bob, operator" in browser.get("/runs/demo").text
        assert ask(browser, ask="pause").status_code == 303
        browser.post("/logout", headers=OWN)
        assert "ada, viewer" in browser.get("/runs/demo").text
        assert ask(browser, ask="unpause").status_code == 403


def test_what_one_person_sends_is_limited(open_run: tuple[MemoryRun, WatchedRun]) -> None:
    _, watched = open_run
    guard = rules(local_role=StudioRole.operator)
    guard.write_limits = RateLimits(per_s=0.001, burst=3)
    with client([watched], guard) as browser:
        seen = [ask(browser, ask="unpause").status_code for _ in range(5)]
        assert seen == [303] * 3 + [429] * 2
        assert browser.get("/runs/demo").status_code == 200, "who looks is not held up"


def test_tokens_are_listed_and_taken_back(tmp_path: Path) -> None:
    tokens = str(tmp_path / "tokens.json")
    assert call("studio", "--new-token", "ada=annotator", "--tokens", tokens).exit_code == 0
    assert call("studio", "--list-tokens", "--tokens", tokens).output == "ada annotator\n"
    assert call("studio", "--revoke-token", "bob", "--tokens", tokens).exit_code == 2
    assert "taken back" in call("studio", "--revoke-token", "ada", "--tokens", tokens).output
    assert call("studio", "--list-tokens", "--tokens", tokens).output == ""
