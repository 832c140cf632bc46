"""Agents that an explorer starts: what becomes of each goes to its inbox, and nothing is heard of a cancelled one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.tasks import Task
from rftstream.environments.hosts.agents import AgentResult, HostedAgent, HostedAgentConfig
from rftstream.errors import ConfigError
from rftstream.roles.explorer.agents.launcher import MAX_STARTS, AgentLauncher, LaunchedAgents, end_of_result
from rftstream.roles.explorer.model_calls import AgentBegins, AgentRequest, CallInbox, RolloutEnd
from tests.contracts import samples
from tests.unit.environments.hosts.scene import PROBLEM
from tests.waiting import wait_until

TASK = Task(ids=samples.IDS, problem=PROBLEM, sampling=samples.SAMPLING, seed=5, environment="hosted_agent")
FATAL = """
import os, signal

def fatal(problem, base_url, api_key, seed):
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Launched:
    """A launcher of one agent, and what it has put into the inbox."""

    def __init__(self, agent: Any, **more: Any) -> None:
        self.inbox, self.found, self.rings, self.agent = CallInbox(), list[Any](), list[int](), agent
        launched = LaunchedAgents(
            agents={TASK.ids.taskset: agent},
            base_url="http://127.0.0.1:9/v1",
            ring=lambda: self.rings.append(1),
            **more,
        )
        self.launcher = AgentLauncher(launched, self.inbox)

    def end(self) -> RolloutEnd:
        """Wait for the end of the agent."""
        wait_until(lambda: any(isinstance(one, AgentRequest) for one in self.take()))
        (request,) = (one for one in self.found if isinstance(one, AgentRequest))
        assert isinstance(request.wanted, RolloutEnd) and request.rollout_id == TASK.ids.rollout_id
        return request.wanted

    def take(self) -> list[Any]:
        self.found += self.inbox.take()
        return self.found

    @property
    def num_begun(self) -> int:
        return sum(isinstance(one, AgentBegins) for one in self.take())


def hosted(path: Path, name: str, **settings: Any) -> Launched:
    return Launched(HostedAgent(HostedAgentConfig(target=f"{path}:{name}", **settings)))


def end_of(path: Path, name: str, **settings: Any) -> RolloutEnd:
    """Run an agent to its end."""
    launched = hosted(path, name, **settings)
    try:
        assert launched.launcher.launch(TASK)
        return launched.end()
    finally:
        launched.launcher.close()


@pytest.mark.slow
def test_ends(foreign: Path) -> None:
    assert end_of(foreign, "blocking") == RolloutEnd(reward=5.0)
    assert end_of(foreign, "silent") == RolloutEnd()
    assert end_of(foreign, "wrong") == RolloutEnd(error="LookupError: no such thing")
    slow = end_of(foreign, "endless", options={"mark": str(foreign.parent / "mark")}, timeout_s=0.5)
    assert slow.error is None and str(slow.cut_short).startswith("the agent took too long: ")


@pytest.mark.slow
def test_a_host_that_dies_is_replaced_some_times(foreign: Path) -> None:
    foreign.write_text(FATAL)
    launched = hosted(foreign, "fatal")
    launched.launcher.launch(TASK)
    assert str(launched.end().error).startswith(f"it was lost {MAX_STARTS} times: ")
    assert launched.num_begun == MAX_STARTS
    launches = [one.launch for one in launched.found if isinstance(one, AgentBegins)]
    assert len(set(launches)) == MAX_STARTS, "each start has a key of its own"
    launched.launcher.close()


def test_nothing_is_heard_of_an_agent_that_is_cancelled(foreign: Path) -> None:
    mark = foreign.parent / "mark"
    launched = hosted(foreign, "endless", options={"mark": str(mark)})
    launched.launcher.launch(TASK)
    wait_until(mark.exists)
    launched.launcher.cancel([TASK.ids.rollout_id, "another one"])
    wait_until(lambda: mark.read_text() == "cancelled")
    launched.launcher.close()
    assert [type(one) for one in launched.take()] == [AgentBegins]


def test_one_that_leaves_cancels_its_agents(foreign: Path) -> None:
    mark = foreign.parent / "mark"
    launched = hosted(foreign, "endless", options={"mark": str(mark)})
    launched.launcher.launch(TASK)
    wait_until(mark.exists)
    launched.launcher.close()
    wait_until(lambda: mark.read_text() == "cancelled")
    assert [type(one) for one in launched.take()] == [AgentBegins]


def test_a_target_that_is_not_there_ends_the_explorer(foreign: Path) -> None:
    launched = hosted(foreign, "nobody")
    launched.launcher.launch(TASK)
    wait_until(lambda: launched.rings)
    with pytest.raises(ConfigError, match="has no 'nobody'"):
        launched.launcher.check()
    launched.launcher.close()
    assert not launched.take()


def test_agents_elsewhere_are_not_started() -> None:
    launcher = AgentLauncher(LaunchedAgents(agents={}), CallInbox())
    assert not launcher.launch(replace(TASK, environment="agent")) and not launcher.begins_anew(TASK)
    launcher.cancel_all()
    launcher.check()
    launcher.close()


def test_numbers_that_no_record_may_hold() -> None:
    assert end_of_result(AgentResult(reward=float("nan"))).error == "agent.reward: got nan, expected finite numbers"
    many = {str(number): 0.0 for number in range(257)}
    assert end_of_result(AgentResult(parts=many)).error == "agent.parts: got 257 numbers, expected at most 256"
    assert end_of_result(AgentResult(reward=0.0, metrics={"a": 1.0})) == RolloutEnd(reward=0.0, metrics={"a": 1.0})
