"""Agents in hosts: what they return is checked, and they end when nobody waits for them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.environments.hosts.agents import (
    AgentResult,
    AgentWork,
    HostedAgent,
    HostedAgentConfig,
    result_from_plain,
)
from rftstream.errors import ConfigError, HostedCodeError, HostTimeout
from tests.loopback import HttpServer
from tests.suite.each import each
from tests.unit.environments.hosts.scene import PROBLEM
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
def endpoint() -> Iterator[HttpServer]:
    """Says 42 to everybody."""
    with HttpServer(lambda _: {"choices": [{"message": {"role": "assistant", "content": "42"}}]}) as server:
        yield server


def agent(foreign: Path, name: str, **settings: Any) -> HostedAgent:
    return HostedAgent(HostedAgentConfig(target=f"{foreign}:{name}", **settings))


def run(own: HostedAgent, *, url: str = "http://127.0.0.1:9/v1", seed: int = 3) -> AgentResult:
    return asyncio.run(own.run(AgentWork(problem=PROBLEM, base_url=url, api_key="a key", seed=seed)))


def test_an_agent_calls_its_endpoint(foreign: Path, endpoint: HttpServer) -> None:
    own = agent(foreign, "solve", options={"depth": 2})

    async def many() -> list[AgentResult]:
        url = f"{endpoint.url}/v1"
        runs = (own.run(AgentWork(problem=PROBLEM, base_url=url, api_key=f"key {n}", seed=n)) for n in range(20))
        return await asyncio.gather(*runs)

    results = asyncio.run(many())
    assert results == [AgentResult(reward=1.0, parts={"right": 1.0}, metrics={"calls": 1.0, "depth": 2.0})] * 20
    assert {one.path for one in endpoint.asked} == {"/v1/chat/completions"}
    assert {(one.key, one.value["seed"]) for one in endpoint.asked} == {(f"Bearer key {n}", n) for n in range(20)}
    assert [len(host.keys) for host in own._pool.hosts] == [0]


@pytest.mark.slow
def test_results(foreign: Path) -> None:
    assert run(agent(foreign, "blocking"), seed=5) == AgentResult(reward=5.0)
    assert run(agent(foreign, "silent")) == AgentResult(reward=None)
    with pytest.raises(HostedCodeError, match=r"^LookupError: no such thing$"):
        run(agent(foreign, "wrong"))
    with pytest.raises(HostedCodeError, match=r"agent\.reward: got 'well done', expected a number"):
        run(agent(foreign, "odd"))
    with pytest.raises(ConfigError, match="has no 'nobody'"):
        run(agent(foreign, "nobody"))
    with pytest.raises(ConfigError, match="target: missing"):
        HostedAgent(HostedAgentConfig())


@each(
    ("value", "expected"),
    [
        (None, AgentResult()),
        (True, AgentResult(reward=1.0)),
        ({}, AgentResult()),
        ({"reward": None, "parts": {"a": 1}}, AgentResult(parts={"a": 1.0})),
    ],
)
def test_forms_of_a_result(value: Any, expected: AgentResult) -> None:
    assert result_from_plain(value) == expected


def test_wrong_forms_of_a_result() -> None:
    with pytest.raises(HostedCodeError, match="unknown key 'score'"):
        result_from_plain({"score": 1.0})
    with pytest.raises(HostedCodeError, match=r"agent\.metrics: got 5"):
        result_from_plain({"metrics": 5})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["given up", "too slow"])
async def test_an_agent_that_nobody_waits_for_is_cancelled(foreign: Path, how: str) -> None:
    mark = foreign.parent / "mark"
    own = agent(foreign, "endless", options={"mark": str(mark)}, timeout_s=0.5 if how == "too slow" else 0.0)
    task = asyncio.create_task(own.run(AgentWork(problem=PROBLEM, base_url="", api_key="", seed=0)))
    if how == "too slow":
        with pytest.raises(HostTimeout):
            await task
    else:
        await asyncio.to_thread(wait_until, mark.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    [host] = own._pool.hosts
    wait_until(lambda: not host.stuck)
    wait_until(lambda: not mark.exists() or mark.read_text() == "cancelled")  # it may be cancelled before it begins
