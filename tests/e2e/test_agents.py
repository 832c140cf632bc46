"""Agents elsewhere, against a whole run of two explorers."""

from __future__ import annotations

import contextlib
import json
import socket
from random import randrange
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from rftstream.gateway.keys import SECRET_VARIABLE
from tests.agents_elsewhere import AgentThreads, Gateways
from tests.e2e.workplace import FAKE, Workplace

pytestmark = pytest.mark.slow

SECRET = "a secret for this test alone"
RUN = (
    FAKE.replace('source = "arithmetic"', 'source = "arithmetic"\nenvironment = "agent"\nreward = "environment"')
    .replace("max_tokens = 8", "max_tokens = 400")
    .replace('policy = "fake"', 'policy = "fake"\ngateway_address = "127.0.0.1:PORT"\nidle_timeout_s = 200.0')
    + """
[policies.fake]
tokens_per_s = 60.0
mean_tokens = 8.0
sigma = 0.4
"""
)


def free_port(count: int = 1) -> int:
    """Return the first of so many free ports in a row. They are below those that the system gives to whoever asks for
    any, so nobody gets them before the explorer does, and while it starts again."""
    while True:
        port = randrange(12_000, 32_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for number in range(count):
                probes.enter_context(socket.create_server(("127.0.0.1", port + number)))
            return port


class Seekers:
    """Asks for rollouts where it got the last one, and elsewhere if it is told that some wait there."""

    def __init__(self, gateways: Gateways, base_url: str, token: str) -> None:
        self._gateways, self._base_url, self._token = gateways, base_url, token
        self.seen: set[str] = set()
        """Gateways that gave a rollout."""

    def work(self, number: int) -> None:
        at = self._base_url
        while True:
            try:
                request = Request(f"{at}/sessions", b"{}", {"authorization": f"Bearer {self._token}"}, method="POST")
                with urlopen(request, timeout=60) as answer:
                    session = json.loads(answer.read())
            except HTTPError as error:
                assert error.code == 503 and error.headers["retry-after"]
                at = next(iter(json.loads(error.read())["gateways"]), at)
                self._gateways.wait(0.1)
            except (URLError, ConnectionError):
                self._gateways.wait(0.1)  # before the run, or after it
            else:
                assert session["base_url"] == at
                self.seen.add(at)
                self._answer(session)

    def _answer(self, session: dict[str, Any]) -> None:
        body = {"model": "m", "messages": session["problem"]["messages"]}
        for path, value in (("/chat/completions", body), ("/rollouts/end", {"reward": 1.0})):
            headers = {"authorization": f"Bearer {session['api_key']}"}
            with (
                contextlib.suppress(URLError, ConnectionError),
                urlopen(Request(session["base_url"] + path, json.dumps(value).encode(), headers), timeout=60),
            ):
                pass


@pytest.mark.heavy("agents in processes of their own, and two explorers")
@pytest.mark.timeout(600)
def test_agents_find_the_explorer_that_has_rollouts(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two explorers share one fixed port as the setting; all agents know the first one alone."""
    port = free_port(2)
    place.write("tiny.toml", RUN.replace("PORT", str(port)).replace("[explorer]", "[explorer]\ncount = 2"))
    run = place.start("run", "tiny.toml", "--json", env={SECRET_VARIABLE: SECRET})
    view = place.view("runs/tiny")

    monkeypatch.setenv(SECRET_VARIABLE, SECRET)

    def access() -> Any:
        done = place.look("token", "runs/tiny", "--json")
        return done.result if done.code == 0 else {"gateways": []}  # its folder is still being made

    place.wait_for(lambda: len(access()["gateways"]) == 2, "both gateways")
    told = access()
    urls = {f"http://127.0.0.1:{number}/v1" for number in (port, port + 1)}
    assert {one["base_url"] for one in told["gateways"]} == urls
    gateways = Gateways(view.folder.logs)
    agents = Seekers(gateways, f"http://127.0.0.1:{port}/v1", told["token"])
    threads = AgentThreads(gateways, agents.work, 6)
    try:
        done = run.finish()
    finally:
        threads.join()
    assert done.code == 0, done.err
    assert agents.seen == urls
    view.assert_nothing_lost()
    place.assert_nobody_left()
