"""An environment on a server: what is lost on the way is sent again, and is answered once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rftstream.environments import served
from rftstream.environments.served import ServedEnvironment
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostTimeout
from tests.loopback import Asked, HttpServer
from tests.suite.each import each
from tests.unit.environments.hosts.scene import PROBLEM, say

pytestmark = pytest.mark.anyio


class GameServer(HttpServer):
    """Counts down from the seed. `troubles` are given first: a status and a body, "drop" (the connection, after the
    request was carried out) or "hang"."""

    def __init__(self) -> None:
        self.sessions: dict[str, dict[str, Any]] = {}
        self.troubles: list[tuple[int, bytes] | str] = []
        self.release = threading.Event()
        super().__init__(self.told)
        self.url += "/games"

    def told(self, asked: Asked) -> object:
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble == "hang":
            self.release.wait(300)
        if isinstance(trouble, tuple):
            return trouble
        done = self.play(asked.path.removeprefix("/games/"), asked.value)
        return None if trouble == "drop" else done

    def play(self, resource: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if resource in ("start", "load"):
            left = body["state"] if resource == "load" else body["seed"]
            session = f"s{len(self.sessions)}"
            self.sessions[session] = {"left": left, "answers": {}}
            return 200, {"session": session, "messages": [f"{left} left"], "state": left, "tools": [{"name": "t"}]}
        session = self.sessions.get(body["session"])
        if session is None:
            return 404, {"error": "no such session"}
        if resource == "close":
            return 200, {}
        if body["said"]["content"] == "wrong":
            return 400, {"error": "ValueError: that is wrong"}
        if body["turn"] not in session["answers"]:
            session["left"] -= 1
            done = session["left"] == 0
            reply = {"done": done, "messages": [f"{session['left']} left"], "reward": 1.0 if done else None}
            session["answers"][body["turn"]] = {"reply": reply, "state": session["left"]}
        return 200, session["answers"][body["turn"]]


@pytest.fixture
def games(monkeypatch: pytest.MonkeyPatch) -> Iterator[GameServer]:
    monkeypatch.setattr(served, "PAUSE_S", 0.001)
    with GameServer() as server:
        yield server
        server.release.set()


def environment(games: GameServer, seed: int = 3, **settings: Any) -> ServedEnvironment:
    config = ServedEnvironment.Config(url=games.url, **settings)
    return ServedEnvironment(config, problem=PROBLEM, seed=seed)


async def play(own: ServedEnvironment) -> list[str]:
    seen = [(await own.start())[0].content]
    done = False
    while not done:
        reply = await own.reply(say("next"))
        seen.append(reply.messages[0].content)
        done = reply.done
    assert reply.reward == 1.0
    await own.close()
    return seen


def test_a_game(games: GameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAME_KEY", "the key")
    own = environment(games, options={"level": 2}, api_key="env:GAME_KEY")
    assert asyncio.run(play(own)) == ["3 left", "2 left", "1 left", "0 left"]
    assert asyncio.run(own.tools()) == ({"name": "t"},)
    first, *rest = games.asked
    assert (first.path, first.key) == ("/games/start", "Bearer the key")
    body = first.value
    assert (body["options"], body["seed"], body["problem"]["answer"]) == ({"level": 2}, 3, "42")
    assert [(one.path, one.value.get("turn")) for one in rest] == [
        ("/games/reply", 1), ("/games/reply", 2), ("/games/reply", 3), ("/games/close", None),
    ]  # fmt: skip


@pytest.mark.slow
def test_many_at_once(games: GameServer) -> None:
    async def many() -> list[list[str]]:
        return await asyncio.gather(*(play(environment(games, seed=4)) for _ in range(50)))

    assert asyncio.run(many()) == [["4 left", "3 left", "2 left", "1 left", "0 left"]] * 50


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["drop", (503, b"busy"), (429, b""), (500, b'{"error": "x"}')])
async def test_what_is_lost_is_sent_again_and_counts_once(games: GameServer, trouble: Any) -> None:
    own = environment(games)
    await own.start()
    games.troubles = [trouble, trouble]
    assert (await own.reply(say("next"))).messages[0].content == "2 left"
    await own.close()


@pytest.mark.slow
def test_a_server_that_lost_the_session(games: GameServer) -> None:
    async def lose() -> None:
        own = environment(games)
        await own.start()
        await own.reply(say("next"))
        games.sessions.pop("s0")
        games.sessions["other"] = {}
        assert (await own.reply(say("next"))).messages[0].content == "1 left"
        state = own.save()
        assert state == b"1"
        await own.close()
        other = environment(games)
        await other.load(state)
        assert (await other.reply(say("next"))).done
        own._state = None
        own._session = "s99"
        with pytest.raises(HostError, match="status 404: no such session"):
            await own.reply(say("next"))
        for one in (own, other):
            await one.close()

    asyncio.run(lose())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("troubles", "error", "expected"),
    [
        ([(400, b'{"error": "KeyError: x"}')], HostedCodeError, "start: status 400: KeyError: x"),
        ([(404, b"<html>nothing here")], HostedCodeError, "status 404: <html>nothing here"),
        ([(200, b"[1]")], HostedCodeError, "got .1., expected a JSON object"),
        ([(200, b"{")], HostedCodeError, "the answer is not JSON"),
        ([(200, b"{}")], HostedCodeError, "has no 'session'"),
        ([(200, b" " * (17 << 20))], HostedCodeError, "more than 16777216 bytes"),
        ([(503, b"busy")] * 3, HostError, "status 503: busy, after 3 tries"),
        (["drop"] * 3, HostError, "Server disconnected .*, after 3 tries"),
        (["hang"] * 3, HostTimeout, "timed out, after 3 tries"),
    ],
)
def test_servers_that_fail(games: GameServer, troubles: list[Any], error: type[Exception], expected: str) -> None:
    games.troubles = troubles

    async def fail() -> None:
        own = environment(games, timeout_s=0.2 if "hang" in troubles else 300.0)
        try:
            await own.start()
        finally:
            await own.close()

    with pytest.raises(error, match=expected):
        asyncio.run(fail())


@pytest.mark.parametrize("begun", [False, True])
async def test_what_is_cancelled_ends_its_session_on_the_server(games: GameServer, begun: bool) -> None:
    """The request that is on its way has its connection to itself, and may begin a session that nobody knows yet."""
    own = environment(games)
    if begun:
        await own.start()
    games.troubles = ["hang"]
    num_before = len(games.asked)
    task = asyncio.create_task(own.reply(say("next")) if begun else own.start())
    while len(games.asked) == num_before:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    closing = asyncio.create_task(own.close())
    await asyncio.sleep(0)
    games.release.set()
    await closing
    assert [one.path.rpartition("/")[2] for one in games.asked][-2:] == ["reply" if begun else "start", "close"]
    assert games.asked[-1].value == {"session": "s0"}


async def test_what_the_environment_finds_wrong(games: GameServer) -> None:
    own = environment(games)
    await own.start()
    with pytest.raises(HostedCodeError, match="ValueError: that is wrong"):
        await own.reply(say("wrong"))
    await own.close()


@each("url", ["", "127.0.0.1:9", "ftp://x", "http://"])
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match=r"environments\.served\.url"):
        ServedEnvironment(ServedEnvironment.Config(url=url), problem=PROBLEM, seed=0)
