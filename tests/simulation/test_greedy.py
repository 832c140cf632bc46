"""Groups with a greedy sibling: the same laws, some of them without it, with everything going wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.contracts.batches import Experience
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import StepRecord
from rftstream.testing import Faults, Simulation
from tests.simulation.grid import UNSCORABLE, judge_by
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds
from tests.simulation.test_simulation import EVERYTHING

pytestmark = pytest.mark.law("lost", "twice", "order", "conservation", "unscorable")

CONFIG = loader.from_dict({
    "run": {"name": "greedy", "steps": 6},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic", "reward": UNSCORABLE}},
    "rewards": {UNSCORABLE: {"unscorable_share": 0.2}},
    "sampling": {"temperature": 0.7},
    "feeder": {"groups_per_batch": 3, "group_size": 3, "max_staleness": 1},
    "verifier": {"max_dead_share": 0.9},
    "explorer": {"count": 2, "policy": "fake", "partial_every_s": 0.2},
    "policies": {"fake": {"answer_depends_on": "task", "tokens_per_s": 30.0, "mean_tokens": 6.0, "fail_share": 0.1}},
    "trainer": {"algorithm": "remax", "backend": "fake", "checkpoint_every": 2},
    "transport": {"partitions": 3},
})  # fmt: skip


def play(folder: Path, seed: int, faults: Faults) -> Laws:
    simulation = Simulation(CONFIG, folder=folder, seed=seed, faults=faults)
    simulation.watch = laws = Laws(simulation, judge_by(CONFIG))
    simulation.run()
    laws.check_end()
    assert simulation.audit().fine
    return laws


@seeds(1, range(20))
def test_laws_hold_for_groups_with_a_greedy_sibling(tmp_path: Path, seed: int) -> None:
    """Who was killed changes nothing of who is greedy, and nothing of the batches."""
    calm = play(tmp_path / "calm", seed, Faults())
    laws = play(tmp_path / "much", seed, EVERYTHING)
    laws.compare(calm)
    messages = laws.simulation.messages
    found = [one for topic in ("tasks", "rollouts", "batches") for one in messages(topic)
             if isinstance(one, (Task, Rollout, Experience))]  # fmt: skip
    assert {type(one) for one in found} == {Task, Rollout, Experience}
    assert all(one.sampling.temperature == (0.0 if one.ids.sibling == 0 else 0.7) for one in found)
    steps = [one for one in messages("steps") if isinstance(one, StepRecord) and one.batch_sequence is not None]
    assert sum(step.metrics["groups_without_baseline"] for step in steps) > 0
