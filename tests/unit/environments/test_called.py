"""Agents at a service that is called: what it answers ends the rollout, what is lost on the way is sent again."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rftstream.contracts.tasks import Task
from rftstream.environments import called
from rftstream.environments.agent import RemoteAgent
from rftstream.environments.called import CalledAgent, CalledAgentConfig
from rftstream.environments.hosts.agents import AgentResult, AgentWork
from rftstream.environments.launched_agents import agent_of
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostTimeout
from rftstream.http.client import Answer
from rftstream.roles.explorer.agents.launcher import MAX_STARTS
from rftstream.roles.explorer.model_calls import AgentBegins, RolloutEnd
from tests.contracts import samples
from tests.loopback import Asked, HttpServer, free_ports, taken_port
from tests.suite.each import each
from tests.unit.environments.hosts.scene import PROBLEM
from tests.unit.environments.hosts.test_launched import Launched
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

TASK = Task(ids=samples.IDS, problem=PROBLEM, sampling=samples.SAMPLING, seed=5, environment="agent")
TOKEN = "the token of the service"


class AgentService(HttpServer):
    """Answers calls by what it was given, in order: a status and a body, "drop" or "hold"; then with a reward."""

    def __init__(self, port: int = 0) -> None:
        self.answers: list[tuple[int, str] | str] = []
        self.headers: dict[str, str] = {}
        self.left = threading.Event()
        super().__init__(self.told, port=port)
        self.url += "/agent"

    def told(self, asked: Asked) -> object:
        answer = self.answers.pop(0) if self.answers else (200, '{"reward": 1.0, "parts": {"right": 1}}')
        if answer == "hold":
            asked.connection.settimeout(300)
            if not asked.connection.recv(1):
                self.left.set()
        return None if isinstance(answer, str) else (*answer, self.headers)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentService]:
    monkeypatch.setattr(called, "PAUSE_S", 0.01)
    with AgentService() as found:
        yield found


def run(url: str, **settings: Any) -> AgentResult:
    return asyncio.run(attempt(CalledAgent(CalledAgentConfig(url=url, **settings))))


async def attempt(agent: CalledAgent) -> AgentResult:
    work = AgentWork(
        problem=PROBLEM,
        base_url="http://127.0.0.1:9/v1",
        api_key="rft-a-key",
        seed=7,
        rollout_id="sums/0/1/0/0",
        launch_id="sums/0/1/0/0/launch/a",
    )
    return await agent.run(work)


def test_a_call_and_its_result(service: AgentService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_TOKEN", "abc")
    result = run(f"{service.url}?size=2", api_key="env:AGENT_TOKEN", options={"depth": 2})
    assert result == AgentResult(reward=1.0, parts={"right": 1.0})
    [call] = service.asked
    assert call.value == {
        "id": "sums/0/1/0/0/launch/a",
        "rollout_id": "sums/0/1/0/0",
        "problem": {
            "messages": [{"role": "user", "content": "Begin."}],
            "answer": "42",
            "tools": [],
            "info": {"level": 3},
            "data_source": "made",
        },
        "seed": 7,
        "base_url": "http://127.0.0.1:9/v1",
        "api_key": "rft-a-key",
        "options": {"depth": 2},
    }
    assert (call.key, call.headers["idempotency-key"]) == ("Bearer abc", call.value["id"])


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [(200, "", AgentResult()), (204, "", AgentResult()), (201, "0.5", AgentResult(reward=0.5))],
)
def test_forms_of_a_result(service: AgentService, status: int, body: str, expected: AgentResult) -> None:
    service.answers = [(status, body)]
    assert run(service.url) == expected


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, "<html>", "the answer is not JSON"),
        (200, '{"error": "KeyError: 1, for rft-a-key"}', r"^KeyError: 1, for \*\*\*$"),
        (200, '{"score": 1.0}', "unknown key 'score'"),
        (200, '{"reward": "good"}', r"agent\.reward: got 'good', expected a number"),
        (400, '{"error": "no such problem"}', "/agent: status 400: no such problem"),
        (422, '{"detail": [{"loc": "seed"}]}', "status 422: .*seed"),
        (400, "", "status 400: without a reason"),
    ],
)
def test_what_fails_the_rollout(service: AgentService, status: int, body: str, said: str) -> None:
    service.answers = [(status, body)]
    with pytest.raises(HostedCodeError, match=said):
        run(service.url)
    assert len(service.asked) == 1


@pytest.mark.parametrize("status", [302, 401, 403, 404, 405])
def test_what_every_call_would_get_ends_the_run(service: AgentService, status: int) -> None:
    """Unless the service has taken a call: then it is that rollout's alone."""
    agent = CalledAgent(CalledAgentConfig(url=service.url))
    service.answers, service.headers = [(status, "no"), (200, ""), (status, "no")], {"Location": "/elsewhere"}
    with pytest.raises(ConfigError, match=f"environments.agent.url: .*status {status}: .*every call would get that"):
        asyncio.run(attempt(agent))
    asyncio.run(attempt(agent))
    with pytest.raises(HostedCodeError, match=f"status {status}"):
        asyncio.run(attempt(agent))


def test_a_busy_service_is_called_again_with_the_same_id(
    service: AgentService, caplog: pytest.LogCaptureFixture
) -> None:
    service.answers = [(503, "starting"), (429, "{}"), (504, "")]
    with caplog.at_level(logging.WARNING):
        assert run(service.url).reward == 1.0
    assert len(service.asked) == 4 and len({call.value["id"] for call in service.asked}) == 1
    [record] = [one for one in caplog.records if one.name.startswith("rftstream.")]
    assert "sums/0/1/0/0: http://127.0.0.1:" in record.getMessage() and "status 503: starting" in record.getMessage()


def test_a_service_that_comes_late_is_called_and_one_that_never_comes_is_not_waited_for(
    service: AgentService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(called, "MAX_PAUSE_S", 0.02)
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}/agent"
    with pytest.raises(HostedCodeError, match=r"Error.*, for 0.05 s \(its patience_s\)"):
        run(url, patience_s=0.05)
    num_begun: list[int] = []

    async def late() -> AgentResult:
        agent = CalledAgent(CalledAgentConfig(url=url))
        work = AgentWork(problem=PROBLEM, base_url="", api_key="", seed=0, rollout_id="r", launch_id="r/launch/b")
        waits = asyncio.create_task(agent.run(work, lambda: num_begun.append(1)))
        while len(num_begun) < 3:
            await asyncio.sleep(0)
        with AgentService(port):
            return await waits

    assert asyncio.run(late()).reward == 1.0


def test_what_is_lost_or_broken_may_be_started_again(service: AgentService) -> None:
    service.answers = ["drop", (500, "Traceback"), (200, "x" * (called.MAX_ANSWER_BYTES + 1))]
    for said in ("/agent: ", "status 500: Traceback", "longer than"):
        with pytest.raises(HostError, match=said):
            run(service.url)


def test_a_run_that_takes_too_long(service: AgentService) -> None:
    service.answers = ["hold", (202, "")]
    for _ in range(2):
        with pytest.raises(HostTimeout, match=r"no end within 0\.1 s"):
            run(service.url, timeout_s=0.1)
    assert service.left.wait(300), "the service sees that nobody waits any more"


async def test_after_202_nothing_is_returned(service: AgentService) -> None:
    service.answers = [(202, "")]
    task = asyncio.create_task(attempt(CalledAgent(CalledAgentConfig(url=service.url))))
    await asyncio.to_thread(wait_until, lambda: not service.answers)
    assert await asyncio.wait([task], timeout=0.05) == (set(), {task})
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


@each("url", ["ftp://host/x", "http://", "host:80", "http://host:port/", "http://[::1/", "http://a/b c"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match=r"environments\.agent\.url: got .*, expected an address"):
        CalledAgent(CalledAgentConfig(url=url))


def test_secrets_are_looked_up_and_not_shown(service: AgentService, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="found a user or password in it") as found:
        CalledAgent(CalledAgentConfig(url="http://me:hush@host/"))
    assert "hush" not in str(found.value)
    with pytest.raises(ConfigError, match="NOBODY_SET_IT is not set"):
        CalledAgent(CalledAgentConfig(url=service.url, api_key="env:NOBODY_SET_IT"))
    monkeypatch.setenv("NAME_OF_NOTHING", "two words")
    with pytest.raises(ConfigError, match="no header can hold") as broken:
        CalledAgent(CalledAgentConfig(url=service.url, api_key="env:NAME_OF_NOTHING"))
    assert "two words" not in str(broken.value)
    monkeypatch.setenv("NAME_OF_NOTHING", "hush-hush")
    service.answers = [(400, "it is not Bearer hush-hush")]
    with pytest.raises(HostedCodeError, match=r"it is not Bearer \*\*\*"):
        run(f"{service.url}?word=hush", api_key="env:NAME_OF_NOTHING")


def test_a_service_that_nobody_started_is_told() -> None:
    with taken_port() as port:
        assert asyncio.run(CalledAgent(CalledAgentConfig(url=f"http://127.0.0.1:{port}/")).probe())


def test_agents_that_come_by_themselves_are_not_called() -> None:
    assert agent_of(RemoteAgent.Config()) is None
    assert isinstance(agent_of(RemoteAgent.Config(url="http://127.0.0.1:9")), CalledAgent)


# --------------------------------------------------------------------------------------------- the launcher


def called_by(service: AgentService) -> Launched:
    return Launched(
        CalledAgent(CalledAgentConfig(url=service.url)), anew=[TASK.ids.taskset],
        public_url="https://agents.example.com/v1",
        key_of=lambda rollout_id, launch: f"key of {rollout_id} {launch}",
    )  # fmt: skip


def test_each_launch_has_an_id_of_its_own_and_its_tries_share_it(service: AgentService) -> None:
    service.answers = ["drop", (503, ""), (200, "{}")]
    launched = called_by(service)
    assert launched.launcher.begins_anew(TASK) and launched.launcher.launch(TASK)
    assert launched.end() == RolloutEnd()
    begun = [one.launch for one in launched.found if isinstance(one, AgentBegins)]
    launched.found.clear()
    assert launched.launcher.launch(TASK)
    assert launched.end() == RolloutEnd(reward=1.0, parts={"right": 1.0})
    launched.launcher.close()
    rollout_id, bodies = TASK.ids.rollout_id, [call.value for call in service.asked]
    assert [body["id"].startswith(f"{rollout_id}/launch/") for body in bodies] == [True] * 4
    assert len({body["id"] for body in bodies[:3]}) == 1 and bodies[3]["id"] != bodies[0]["id"]
    assert {(body["base_url"], body["rollout_id"]) for body in bodies} == {
        ("https://agents.example.com/v1", rollout_id)
    }
    launches = [body["id"].rpartition("/")[2] for body in bodies]
    assert [body["api_key"] for body in bodies] == [f"key of {rollout_id} {launch}" for launch in launches]
    begun += [one.launch for one in launched.found if isinstance(one, AgentBegins)]
    assert begun == launches, "the key of a launch is good for all its tries"


def test_a_service_that_loses_every_call(service: AgentService) -> None:
    service.answers = ["drop"] * 10
    launched = called_by(service)
    launched.launcher.launch(TASK)
    assert str(launched.end().error).startswith(f"it was lost {MAX_STARTS} times: http://127.0.0.1:")
    launched.launcher.close()
    assert len(service.asked) == MAX_STARTS


def test_a_rollout_that_is_over_ends_its_call(service: AgentService) -> None:
    service.answers = ["hold"]
    launched = called_by(service)
    launched.launcher.launch(TASK)
    wait_until(lambda: not service.answers)
    launched.launcher.cancel([TASK.ids.rollout_id])
    assert service.left.wait(300)
    launched.launcher.close()
    assert [type(one) for one in launched.take()] == [AgentBegins]


def test_tasks_of_other_tasksets_are_not_called(service: AgentService) -> None:
    launched = called_by(service)
    assert not launched.launcher.launch(replace(TASK, ids=replace(TASK.ids, taskset="another")))
    launched.launcher.close()
    assert not service.asked


@each(
    ("text", "low", "high"),
    [
        ("", 0.0, 0.0), ("soon", 0.0, 0.0), ("7", 7.0, 7.0), ("0", 0.0, 0.0), ("9" * 40, 9e8, 1e9),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0, 0.0), ("Tue, 21 Oct 2098 07:28:00 GMT", 1e8, 1e10),
        ("Tue, 21 Oct 2098 07:28:00 -0000", 1e8, 1e10),
    ],
)  # fmt: skip
def test_when_a_service_wants_to_be_called_again(text: str, low: float, high: float) -> None:
    """In seconds, or as a date."""
    assert low <= Answer(503, {"retry-after": text}, b"").retry_after_s <= high
