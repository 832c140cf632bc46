"""Rollouts of a thousand seconds outlive those who sample them: none loses more than one interval between two saves."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rftstream.config import loader
from rftstream.contracts.rollouts import PartialRollout, Rollout
from rftstream.roles.explorer.step import ExplorerStep
from rftstream.service.loops.concurrent import ConcurrentService
from rftstream.testing import Simulation
from rftstream.testing.simulation import SimulatedProcess
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds

pytestmark = pytest.mark.law("lost", "twice", "conservation")

LONG_S = 1000.0
RATE = 10.0
EVERY_S = 2.0
TICK_S = 0.05

CONFIG = loader.from_dict({
    "run": {"name": "simulated", "steps": 1},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "sampling": {"max_tokens": 20_000},
    "feeder": {"groups_per_batch": 2, "group_size": 2, "max_staleness": 0},
    "explorer": {"count": 2, "policy": "fake", "partial_every_s": EVERY_S},
    "trainer": {"backend": "fake"},
    "transport": {"partitions": 2},
    "policies": {"fake": {"tokens_per_s": RATE, "mean_tokens": LONG_S * RATE, "sigma": 0.0}},
})  # fmt: skip


def sampled_by(process: SimulatedProcess) -> dict[str, int]:
    """Tokens of each rollout that it is sampling."""
    service = process.service
    if not isinstance(service, ConcurrentService):
        return {}
    step = service.step
    assert isinstance(step, ExplorerStep)
    return {work.task.ids.rollout_id: step._loop.view(work.key).num_sampled for work in step._in_hand.active.values()}


def saved(simulation: Simulation) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for message in simulation.messages("partials"):
        assert isinstance(message, PartialRollout)
        tokens[message.ids.rollout_id] = tokens.get(message.ids.rollout_id, 0) + message.num_tokens
    return tokens


@seeds(1, range(10))
def test_killed_again_and_again_it_loses_at_most_one_interval(tmp_path: Path, seed: int) -> None:
    simulation = Simulation(CONFIG, folder=tmp_path, seed=seed, tick_s=TICK_S)
    simulation.watch = laws = Laws(simulation)
    random = Random(f"kills {seed}")
    began, kills, lost = simulation.clock.now(), 0, []
    while not simulation.records("rollouts"):
        until = simulation.clock.now() + random.uniform(60.0, 240.0)
        simulation.run(until=lambda until=until: simulation.clock.now() >= until or bool(laws.sampled))  # type: ignore[misc]
        victim = simulation.find(f"explorer-{kills % 2}")
        if laws.sampled or victim.service is None:
            continue
        before = saved(simulation)
        lost += [count - before.get(name, 0) for name, count in sampled_by(victim).items()]
        simulation.kill(victim)
        kills += 1
    simulation.run()
    laws.check_end()
    assert kills >= 4
    assert lost
    # What is sampled in an interval, in the tick that ends it, and until the others have had their turn.
    assert max(lost) <= RATE * (EVERY_S + 10 * TICK_S)
    rollouts = [one for one in simulation.messages("rollouts") if isinstance(one, Rollout)]
    assert {one.num_tokens for one in rollouts} == {int(LONG_S * RATE)}
    assert laws.unfinished.num_continued == len(rollouts) == 4
    took, away_s = simulation.clock.now() - began, simulation.config.transport.session_timeout_s
    assert LONG_S <= took <= LONG_S + kills * 3 * away_s, "and not a thousand seconds for each kill"
    assert simulation.audit().balanced
