"""Whole runs whose taskset grows by what the policy makes, with everything going wrong: nothing twice, all of it drawn
as it can be computed again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.problems import NewProblem, RejectedProblem
from rftstream.contracts.tasks import Task
from rftstream.testing import Faults, Simulation
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds
from tests.simulation.test_simulation import EVERYTHING

pytestmark = pytest.mark.law("lost", "twice", "derived", "conservation")


def growing() -> RunConfig:
    return loader.from_dict({
        "run": {"name": "growing", "steps": 8}, "model": {"path": "fake"},
        "tasksets": {"sums": {"source": "arithmetic"}, "more": {"source": "log:problems", "passes": 2}},
        "feeder": {"groups_per_batch": 3, "group_size": 2, "max_staleness": 2},
        "explorer": {"policy": "fake"}, "policies": {"fake": {"answer_depends_on": "task"}},
        "synthesiser": {"count": 2, "make": ["reworded", "harder"], "pattern": r"(?P<problem>(?P<answer>\d+))",
                        "check_samples": 2, "check_agree": [0.0, 1.0], "max_concurrent": 4},
        "trainer": {"backend": "fake", "checkpoint_every": 3}, "transport": {"partitions": 3},
    })  # fmt: skip


def play(folder: Path, seed: int, faults: Faults) -> Simulation:
    simulation = Simulation(growing(), folder=folder, seed=seed, faults=faults)
    simulation.watch = laws = Laws(simulation)
    simulation.run()
    laws.check_end()
    return simulation


def test_what_the_policy_makes_joins_and_is_drawn(tmp_path: Path) -> None:
    simulation = play(tmp_path, 1, Faults())
    made = {one.parent for one in simulation.messages("problems") if isinstance(one, NewProblem)}
    assert len(made) > 5
    assert any(task.ids.taskset == "more" for task in simulation.messages("tasks") if isinstance(task, Task))


@seeds(2, range(20))
def test_a_taskset_grows_while_everything_goes_wrong(tmp_path: Path, seed: int) -> None:
    simulation = play(tmp_path, seed, EVERYTHING)
    told = [one for one in simulation.messages("problems") if isinstance(one, NewProblem | RejectedProblem)]
    twins = [name for name, count in Counter(one.problem_id for one in told).items() if count > 1]
    assert not twins
    groups = {task.ids.group_id for task in simulation.messages("tasks") if isinstance(task, Task)}
    assert all(one.parent_group in groups for one in told), "all that was made is of a group of this run"
    recomputed = simulation.recompute()
    assert recomputed.fine, recomputed.to_text()
    assert recomputed.num_draws
    report = simulation.audit()
    assert report.fine, report.to_text()
    assert "problems" in report.twins
