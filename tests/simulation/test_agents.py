"""Agents in simulated runs whose processes are killed, stopped and refused: the laws of calls hold, and of the run."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.gateway.keys import PREFIX, GatewayKeys
from rftstream.roles.explorer import agent_session as session_module
from rftstream.roles.explorer.agent_loop import AgentLoop
from rftstream.roles.explorer.agent_session import AgentSession
from rftstream.roles.explorer.model_calls import CallAnswer
from rftstream.testing import Faults, Simulation
from tests.simulation.agents import CallLaws, SimulatedAgent, check_told
from tests.simulation.laws import Laws
from tests.simulation.mutants import changed

CONFIG = loader.from_dict({
    "run": {"name": "simulated", "steps": 3},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic", "environment": "agent", "reward": "environment"}},
    "sampling": {"max_tokens": 400},
    "feeder": {"groups_per_batch": 2, "group_size": 2, "max_staleness": 1},
    "explorer": {"count": 2, "policy": "fake", "idle_timeout_s": 300.0},
    "trainer": {"backend": "fake"},
    "transport": {"partitions": 3},
    "policies": {"fake": {"tokens_per_s": 20.0, "mean_tokens": 8.0, "sigma": 0.6}},
})  # fmt: skip

FAULTS = Faults(share=0.04, roles=("explorer",), kills=20, pauses=4, aborts=10, unknowns=10, silences=10, restarts=6)


def play(folder: Path, seed: int, faults: Faults = FAULTS) -> tuple[CallLaws, list[SimulatedAgent]]:
    """A run with six agents, to its end; AssertionError if a law does not hold."""
    simulation = Simulation(CONFIG, folder=folder, seed=seed, faults=faults, tick_s=0.005)
    simulation.watch = laws = Laws(simulation)
    laws.unfinished = calls = CallLaws(laws)
    agents = [SimulatedAgent(simulation, calls, number) for number in range(6)]

    def act() -> bool:
        for agent in agents:
            agent.act()
        return False

    simulation.run(max_ticks=60_000, until=act)
    assert simulation.failed is None, simulation.to_text()
    check_told(agents, calls)
    report = simulation.audit()
    assert report.balanced and not any(report.twins.values()), report.to_text()
    assert sum(agent.num_ended for agent in agents) >= 6
    return calls, agents


@pytest.mark.parametrize("seed", range(6))
def test_the_laws_hold_with_agents(tmp_path: Path, seed: int) -> None:
    calls, _ = play(tmp_path, seed)
    assert calls.num_told >= 12


def test_faults_lead_to_answers_that_are_told_again(tmp_path: Path) -> None:
    assert sum(play(tmp_path / str(seed), seed)[0].num_told_again for seed in range(6, 10)) > 0


# --------------------------------------------------------------------------------------------- rules left out


@contextmanager
def answered_before_commit() -> Iterator[None]:
    """An answer leaves as soon as it is handed out to be saved."""
    original = AgentLoop.unsaved

    def unsaved(self: AgentLoop, key: int) -> Any:
        found = original(self, key)
        if found is not None:
            self._sessions[key].acknowledge()
        return found

    with changed(AgentLoop, "unsaved", unsaved):
        yield


@contextmanager
def retries_sampled_again() -> Iterator[None]:
    """A retry is a new sample."""
    with changed(AgentSession, "answered_before", lambda self, call: None):
        yield


@contextmanager
def any_answer_replayed() -> Iterator[None]:
    """A retry gets the answer of the newest call, whatever that was asked."""

    def answered_before(self: AgentSession, call: Any) -> Any:
        return self.rollout.calls[-1] if call.is_retry and self.rollout.calls else None

    with changed(AgentSession, "answered_before", answered_before):
        yield


@contextmanager
def answer_made_again() -> Iterator[None]:
    """A recorded answer is made anew for a retry, at another time."""

    def made_again(*, number: int, body: bytes) -> CallAnswer:
        return CallAnswer(number=number, body=body + b" ")

    with changed(session_module, "CallAnswer", made_again):
        yield


@contextmanager
def any_key_accepted() -> Iterator[None]:
    """A key opens the rollout that it names, whoever made it."""

    def rollout_of(self: GatewayKeys, key: str) -> str | None:
        name = key.removeprefix(PREFIX).partition(".")[0]
        return base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()

    with changed(GatewayKeys, "rollout_of", rollout_of):
        yield


@pytest.mark.parametrize(
    "rule",
    [answered_before_commit, retries_sampled_again, any_answer_replayed, answer_made_again, any_key_accepted],
)
def test_a_rule_left_out_is_noticed(tmp_path: Path, rule: Callable[[], Any]) -> None:
    for seed in range(8):
        try:
            with rule():
                play(tmp_path / str(seed), seed)
        except Exception:
            return
    raise AssertionError("nobody noticed")
