"""Runs with simulated agents, whose explorers are killed, stopped and refused."""

from __future__ import annotations

from pathlib import Path

from rftstream.config import loader
from rftstream.testing import Faults, Simulation
from tests.simulation.agents import CallLaws, SimulatedAgent, check_told
from tests.simulation.joined import with_joined
from tests.simulation.laws import Laws

AGENTS_CONFIG = loader.from_dict({
    "run": {"name": "simulated", "steps": 3},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic", "environment": "agent", "reward": "environment"}},
    "sampling": {"max_tokens": 400},
    "feeder": {"groups_per_batch": 2, "group_size": 2, "max_staleness": 1},
    "explorer": {"count": 2, "policy": "fake", "idle_timeout_s": 300.0},
    "trainer": {"backend": "fake"},
    "transport": {"partitions": 3},
    "policies": {"fake": {"tokens_per_s": 20.0, "mean_tokens": 8.0, "sigma": 0.6, "values_beside": 3}},
})  # fmt: skip

AGENTS_FAULTS = Faults(
    share=0.04, roles=("explorer",), kills=20, pauses=4, aborts=10, unknowns=10, silences=10, restarts=6
)


def play_agents(
    folder: Path, seed: int, faults: Faults = AGENTS_FAULTS, *, joined: bool = False
) -> tuple[CallLaws, list[SimulatedAgent]]:
    """A run with six agents, to its end; AssertionError if a law does not hold. `joined`: with users' loops for
    samplers and trainer. In runs with an odd seed, most rollouts are episodes of several agents."""
    config = with_joined(AGENTS_CONFIG) if joined else AGENTS_CONFIG
    simulation = Simulation(config, folder=folder, seed=seed, faults=faults, tick_s=0.005)
    simulation.watch = laws = Laws(simulation)
    laws.unfinished = calls = CallLaws(laws)
    agents = [SimulatedAgent(simulation, calls, number, roles=seed % 2 == 1) for number in range(6)]

    def act() -> bool:
        for agent in agents:
            agent.act()
        return False

    simulation.run(max_ticks=60_000, until=act)
    assert simulation.failed is None, simulation.to_text()
    check_told(agents, calls)
    report = simulation.audit()
    assert report.balanced and not any(report.twins.values()) and not report.foreign, report.to_text()
    assert sum(agent.num_ended for agent in agents) >= 6
    return calls, agents
