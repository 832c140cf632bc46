"""Agents elsewhere, with the clients that they would use, against whole runs whose explorer is killed under them."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from random import randrange
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import anthropic
import openai
import pytest

from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys
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


class Agents:
    """Threads that ask for rollouts, make three calls in each, and end it, until the run has ended."""

    def __init__(self, base_url: str, token: str, befalls: Mapping[int, Callable[[], object]] | None = None) -> None:
        """`befalls`: what happens in the middle of the rollout that is the first, second and so on."""
        self.base_url, self.token = base_url, token
        self._befalls = befalls or {}
        self._num_begun = itertools.count(1)
        self.told: dict[str, list[str]] = {}
        """Rollout -> what the agent was told in each call."""
        self.rewards: dict[str, float] = {}
        self.seen: set[str] = set()
        """Gateways that gave a rollout."""
        self.ended = threading.Event()
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(6)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _work(self, number: int) -> None:
        try:
            count = 0
            while (session := self._post("/sessions", self.token, {}, f"{number}/{count}")) is not None:
                count += 1
                self._attempt(session, number)
        except BaseException as error:
            self.errors.append(error)

    def _attempt(self, session: dict[str, Any], number: int) -> None:
        rollout_id, key = session["rollout_id"], session["api_key"]
        if (befalls := self._befalls.get(next(self._num_begun))) is not None:
            befalls()
        talk = self._claude if number % 3 == 0 else self._responses if number % 3 == 1 else self._chat
        try:
            texts = talk(session["base_url"], key, session["problem"]["messages"][0]["content"])
        except (openai.APIConnectionError, anthropic.APIConnectionError):
            assert self.ended.is_set()
            return
        except (openai.ConflictError, anthropic.ConflictError):
            return
        self.told[rollout_id] = texts
        reward = len(texts[-1].strip()) / 8
        if self._post("/rollouts/end", key, {"reward": reward}, "end") is not None:
            self.rewards[rollout_id] = reward

    def _chat(self, base_url: str, key: str, question: str) -> list[str]:
        history: list[Any] = [{"role": "user", "content": question}]
        texts = []
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=60) as client:
            for turn in range(3):
                stream = client.chat.completions.create(model="m", messages=history, stream=True)
                texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
                history += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": f"{turn}+1="}]
        return texts

    def _responses(self, base_url: str, key: str, question: str) -> list[str]:
        history: list[Any] = [{"role": "user", "content": question}]
        texts = []
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=60) as client:
            for turn in range(3):
                found = client.responses.create(model="m", input=history)
                texts.append(found.output_text)
                history += [*found.output, {"role": "user", "content": f"{turn}+1="}]
        return texts

    def _claude(self, base_url: str, key: str, question: str) -> list[str]:
        history: list[Any] = [{"role": "user", "content": question}]
        texts = []
        with anthropic.Anthropic(base_url=base_url, api_key=key, max_retries=60) as client:
            for turn in range(3):
                found = client.messages.create(model="m", max_tokens=100, messages=history)
                assert found.content[0].type == "text"
                texts.append(found.content[0].text)
                history += [{"role": "assistant", "content": found.content}, {"role": "user", "content": f"{turn}+1="}]
        return texts

    def _post(self, path: str, key: str, body: dict[str, Any], name: str) -> Any:
        """Try until it is done; None if it never will be."""
        headers = {"authorization": f"Bearer {key}", "idempotency-key": name}
        while True:
            try:
                request = Request(self.base_url + path, json.dumps(body).encode(), headers, method="POST")
                with urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read())
            except HTTPError as error:
                if error.code != 503:
                    raise
            except (URLError, ConnectionError, TimeoutError):
                pass
            if self.ended.is_set():
                return None
            time.sleep(0.1)


class Seekers(Agents):
    """Agents that ask for rollouts where they got the last one, and elsewhere if they are told that some wait there."""

    def _work(self, number: int) -> None:
        try:
            at = self.base_url
            while not self.ended.is_set():
                try:
                    request = Request(f"{at}/sessions", b"{}", {"authorization": f"Bearer {self.token}"}, method="POST")
                    with urlopen(request, timeout=60) as answer:
                        session = json.loads(answer.read())
                except HTTPError as error:
                    assert error.code == 503 and error.headers["retry-after"]
                    at = next(iter(json.loads(error.read())["gateways"]), at)
                    self.ended.wait(0.1)
                except (URLError, ConnectionError):
                    self.ended.wait(0.1)  # before the run, or after it
                else:
                    assert session["base_url"] == at
                    self.seen.add(at)
                    self._answer(session)
        except BaseException as error:
            self.errors.append(error)

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
    place.view("runs/tiny")

    monkeypatch.setenv(SECRET_VARIABLE, SECRET)

    def access() -> Any:
        done = place.look("token", "runs/tiny", "--json")
        return done.result if done.code == 0 else {"gateways": []}  # its folder is still being made

    place.wait_for(lambda: len(access()["gateways"]) == 2, "both gateways")
    told = access()
    urls = {f"http://127.0.0.1:{number}/v1" for number in (port, port + 1)}
    assert {one["base_url"] for one in told["gateways"]} == urls
    agents = Seekers(f"http://127.0.0.1:{port}/v1", told["token"])
    agents.start()
    try:
        done = run.finish()
    finally:
        agents.join()
    assert done.code == 0, done.err
    assert agents.seen == urls
    place.view("runs/tiny").assert_nothing_lost()
    place.assert_nobody_left()


@pytest.mark.sampled(5, "kills")
@pytest.mark.law("lost", "twice")
@pytest.mark.timeout(600)
def test_an_explorer_is_killed_under_its_agents(place: Workplace) -> None:
    port = free_port()
    place.write("tiny.toml", RUN.replace("PORT", str(port)))
    run = place.start("run", "tiny.toml", "--json", env={SECRET_VARIABLE: SECRET})
    view = place.view("runs/tiny")
    token = GatewayKeys(SECRET.encode(), view.folder.run_id).session_token()
    deaths = {number: lambda: place.kill_worker("explorer-0") for number in (4, 12, 20)}  # of 36 at least
    agents = Agents(f"http://127.0.0.1:{port}/v1", token, deaths)
    agents.start()
    try:
        done = run.finish()
    finally:
        agents.join()
    assert done.code == 0, done.err
    view.assert_nothing_lost()
    rollouts = {one.ids.rollout_id: one for one in view.rollouts()}
    verified = {one.ids.rollout_id: one for one in view.verified()}
    others = {one.status: one.error for one in rollouts.values() if one.status not in ("completed", "skipped")}
    assert not others
    assert len(agents.told) >= 6 * 6
    for rollout_id, texts in agents.told.items():
        if rollout_id not in rollouts:
            continue  # the run ended before it
        rollout = rollouts[rollout_id]
        (segment,) = rollout.segments
        ids = segment.token_ids.numpy().tolist()
        recorded = [bytes(ids[call.start : call.start + call.count]).rstrip(b"\0").decode() for call in rollout.calls]
        assert recorded == texts, "each answer is on the log once, as the agent got it"
        assert sum(segment.loss_mask.numpy()) == rollout.num_tokens == sum(call.count for call in rollout.calls)
        found = verified.get(rollout_id)
        if rollout_id in agents.rewards and found is not None:
            assert found.verdict is not None and found.verdict.reward == agents.rewards[rollout_id]
    assert SECRET not in done.err + done.out
    for path in view.folder.path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    place.assert_nobody_left()
