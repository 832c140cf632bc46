"""Who gets in: names, origins, tokens, roles, limits; and what every answer tells the browser."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.errors import ConfigError
from rftstream.studio.access import Sessions, StudioRole, TokenFile, default_token_file, digest_of
from rftstream.studio.events import RunEvents
from rftstream.studio.guard import HEADERS, RateLimits
from rftstream.studio.watched_run import RunSnapshot, WatchedRun
from rftstream.testing import MemoryRun
from tests.unit.studio.studio_scene import client, make_config, rules, watch


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedRun]:
    run = MemoryRun(make_config(), folder=tmp_path / "run")
    run.put_manifest()
    found = watch(run)
    found.follow_once()
    yield found
    found.stop()


def test_every_answer_has_the_headers(watched: WatchedRun) -> None:
    with client([watched]) as browser:
        for address in (
            "/",
            "/runs/demo",
            "/nothing",
            "/static/studio.css",
            "/static/nothing",
            "/runs/demo/charts.json",
        ):
            answer = browser.get(address)
            for name, value in HEADERS.items():
                assert answer.headers[name] == value, address
        policy = HEADERS["content-security-policy"]
        assert "unsafe" not in policy and "http" not in policy
        assert browser.get("/runs/demo").headers["cache-control"] == "no-store"


def test_another_name_is_not_answered(watched: WatchedRun) -> None:
    with client([watched]) as browser:
        for host in ("evil.example", "127.0.0.1.evil.example", "", "[::1", "testserver:80@evil.example"):
            assert browser.get("/runs/demo", headers={"host": host}).status_code in (400, 421), host
        assert browser.get("/runs/demo", headers={"host": "127.0.0.1:8765"}).status_code == 200


def test_nobody_gets_in_without_a_token(watched: WatchedRun, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.make("ada", StudioRole.viewer)
    with client([watched], rules(tokens.path)) as browser:
        assert browser.get("/runs/demo").status_code == 401
        asked = browser.get("/runs/demo", headers={"accept": "text/html"})
        assert (asked.status_code, asked.headers["location"]) == (303, "/login")
        for wrong in ("Bearer x", f"Basic {token}", f"Bearer {token}x", "Bearer", f"bearer  {token[:-1]}"):
            assert browser.get("/runs/demo", headers={"authorization": wrong}).status_code == 401, wrong
        assert browser.get("/runs/demo/events", headers={"accept": "text/event-stream"}).status_code == 401
        assert browser.get("/runs/demo", headers={"authorization": f"Bearer {token}"}).status_code == 200
        assert browser.get("/login").status_code == browser.get("/static/studio.css").status_code == 200


def test_a_browser_logs_in_and_out(watched: WatchedRun, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.make("ada", StudioRole.operator)
    own = {"origin": "http://testserver"}
    with client([watched], rules(tokens.path)) as browser:
        assert browser.post("/login", data={"token": "guess"}, headers=own).status_code == 401
        done = browser.post("/login", data={"token": token}, headers=own)
        cookie = done.headers["set-cookie"].lower()
        assert done.status_code == 303 and "httponly" in cookie and "samesite=strict" in cookie
        assert token not in done.headers["set-cookie"], "the cookie is not the token"
        page = browser.get("/runs/demo")
        assert page.status_code == 200 and "ada, operator" in page.text
        assert browser.post("/logout", headers={"origin": "http://evil.example"}).status_code == 403
        assert browser.post("/logout").status_code == 403, "a browser says where it comes from"
        assert browser.post("/logout", headers=own).status_code == 303
        assert browser.get("/runs/demo").status_code == 401
        browser.post("/login", data={"token": token}, headers=own)
        tokens.make("ada", StudioRole.viewer)  # another token in its place
        assert browser.get("/runs/demo").status_code == 401, "a token that was taken back ends its sessions"


def test_tokens_are_guessed_slowly(watched: WatchedRun, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    tokens.make("ada", StudioRole.viewer)
    with client([watched], rules(tokens.path)) as browser:
        own = {"origin": "http://testserver"}
        seen = [browser.post("/login", data={"token": "x"}, headers=own).status_code for _ in range(15)]
    assert seen[:10] == [401] * 10 and 429 in seen[10:]


def test_a_flood_is_slowed_down(watched: WatchedRun) -> None:
    with client([watched], rules(limits=RateLimits(per_s=0.001, burst=5))) as browser:
        answers = [browser.get("/static/studio.css") for _ in range(7)]
    assert [one.status_code for one in answers] == [200] * 5 + [429] * 2
    assert int(answers[-1].headers["retry-after"]) > 0


def test_limits_remember_few_addresses() -> None:
    limits = RateLimits(burst=1, per_s=0.001, num_addresses=10)
    assert not any(limits.take(str(n)) for n in range(100))
    assert len(limits._left) == 10


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_pages_cannot_be_written_to(watched: WatchedRun, method: str) -> None:
    with client([watched], rules(local_role=StudioRole.operator)) as browser:
        answer = browser.request(method, "/runs/demo", headers={"origin": "http://testserver"})
        assert answer.status_code == 405
        large = browser.request(method, "/login", headers={"origin": "http://testserver"}, content=b"x" * 100_000)
        assert large.status_code == 413


# --------------------------------------------------------------------------------------------- tokens


def test_the_file_has_digests_alone(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "deep" / "tokens.json")
    first, second = tokens.make("ada", StudioRole.viewer), tokens.make("bob@x", StudioRole.annotator)
    text = tokens.path.read_text()
    assert first not in text and second not in text and digest_of(first) in text
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600
    found = tokens.find(second)
    assert found is not None and (found.name, found.role) == ("bob@x", StudioRole.annotator)
    assert tokens.find("") is None and tokens.find("\ud800") is None
    again = tokens.make("ada", StudioRole.operator)
    assert tokens.find(first) is None and tokens.find(again) is not None and len(tokens.entries()) == 2


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    assert tokens.entries() == []
    for damaged in (
        "{",
        "[]",
        '{"tokens": [{"name": "x"}]}',
        '{"tokens": [{"name": "x", "role": "king", "sha256": ""}]}',
    ):
        tokens.path.write_text(damaged)
        with pytest.raises(ConfigError, match="expected the tokens of the studio"):
            tokens.entries()
    tokens.path.write_text(json.dumps({"tokens": []}))
    tokens.path.chmod(0o666)
    with pytest.raises(ConfigError, match="others may write"):
        tokens.entries()
    with pytest.raises(ConfigError, match="expected 1 to 64 letters"):
        TokenFile(tmp_path / "other").make("a b", StudioRole.viewer)


def test_where_tokens_are_kept() -> None:
    assert default_token_file({"XDG_STATE_HOME": "/state"}) == Path("/state/rftstream/studio/tokens.json")
    assert default_token_file({}).name == "tokens.json"


def test_sessions_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, sessions = TokenFile(tmp_path / "tokens.json"), Sessions()
    name = sessions.begin(tokens.make("ada", StudioRole.viewer))
    assert sessions.find(name, tokens) is not None and sessions.find("other", tokens) is None
    later = time.monotonic() + 13 * 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert sessions.find(name, tokens) is None


# --------------------------------------------------------------------------------------------- events


def test_browsers_hear_of_changes_once(watched: WatchedRun) -> None:
    async def listen() -> list[str]:
        events = RunEvents()
        events.attach(watched)
        heard: list[str] = []

        async def browser(last_id: str) -> None:
            async for data in events.stream(watched, last_id):
                if b"event: changed" in data:
                    heard.append(f"{last_id or 'new'} {data.decode().splitlines()[0]}")
                    return

        async with asyncio.timeout(30):
            waiting = [asyncio.create_task(browser("")) for _ in range(3)]
            behind = asyncio.create_task(browser("0"))
            await behind
            while events.num_listeners < 3:
                await asyncio.sleep(0)
            change(watched)
            await asyncio.gather(*waiting)
        return heard

    def change(run: WatchedRun) -> Any:
        run.snapshot = RunSnapshot(revision=run.snapshot.revision + 1, status=run.snapshot.status)
        run.listener()

    before = watched.snapshot.revision
    heard = asyncio.run(listen())
    assert heard == [f"0 id: {before}", *[f"new id: {before + 1}"] * 3]
