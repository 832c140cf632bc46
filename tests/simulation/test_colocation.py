"""A trainer and engines that share one device: whatever goes wrong, never are both on it, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest.mock import patch

import pytest

from rftstream.backends.fake import FakeBackend
from rftstream.config import loader
from rftstream.policies.fake import FakePolicy
from rftstream.roles.evaluator.step import EvaluatorStep
from rftstream.roles.explorer.step import ExplorerStep
from rftstream.roles.trainer.step import TrainerStep
from rftstream.testing import Simulation
from rftstream.testing.devices import MemoryLock
from tests.simulation.grid import MAX_TICKS_OF_PIPELINES, SLOW, draw_config, draw_faults, is_short, judge_by, user_loads
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds


def on_device(simulation: Simulation) -> tuple[list[str], list[str]]:
    """Names of the processes whose engine has the device's memory, and of those whose trainer has it."""
    engines, trainers = [], []
    for process in simulation.processes:
        step: Any = None if process.service is None else process.service.step  # type: ignore[attr-defined]
        if isinstance(step, ExplorerStep | EvaluatorStep) and not cast(FakePolicy, step._policy).is_asleep:
            engines.append(process.name)
        elif isinstance(step, TrainerStep) and cast(FakeBackend, step._backend.backend).is_on_device:
            trainers.append(process.name)
    return engines, trainers


def play(seed: int, folder: Path) -> Simulation:
    """The run of this seed in the grid, on one device, and with an evaluator in every other one."""
    random = Random(f"grid {seed}")
    config, faults = draw_config(random), draw_faults(random)
    config = loader.replace(config, trainer__colocate=True)
    if seed % 2 and not config.evaluations:
        config = loader.replace(
            config, evaluations={"held-out": {"source": "arithmetic", "options": {"size": 4}, "every": 2}}
        )
    tick_s = random.choice([0.001, 0.001, 0.01, 0.1])
    if config.policies["fake"]["tokens_per_s"] == SLOW:
        tick_s = max(tick_s, 1 / SLOW)
    simulation = Simulation(config, folder=folder, seed=seed, tick_s=tick_s, faults=faults)
    user_loads(simulation, random)
    laws = Laws(simulation, judge_by(config))
    simulation.watch = watching(simulation, laws)
    try:
        with patch.object(FakeBackend, "update", lasting(simulation, Random(f"updates {seed}"))):
            simulation.run(MAX_TICKS_OF_PIPELINES)  # engines look at the lock all the time
        laws.check_end()
    except BaseException as error:
        error.add_note(f"{loader.to_toml(config)}\n{simulation.to_text()}\n\nseed {seed}")
        raise
    return simulation


def watching(simulation: Simulation, laws: Callable[[], None]) -> Callable[[], None]:
    def watch() -> None:
        laws()
        engines, trainers = on_device(simulation)
        assert not (engines and trainers), f"at once: {engines} and {trainers}"
        assert len(trainers) <= 1, trainers

    return watch


def lasting(simulation: Simulation, random: Random) -> Callable[..., Any]:
    """An update that takes its time now and then, and in which the trainer may be killed or stopped. The others go on
    meanwhile."""
    update, injector = FakeBackend.update, simulation.faults

    def update_for_a_while(self: FakeBackend, *arguments: Any) -> Any:
        engines, _ = on_device(simulation)
        assert not engines, f"at once: {engines} and an update"
        self.is_on_device = True
        injector.at("in an update")
        if injector.current is not None and random.random() < 0.3:
            injector._hold(injector.current, random.uniform(0.01, 3.0), "in an update")
        return update(self, *arguments)

    return update_for_a_while


@pytest.mark.law("lost", "twice", "conservation", "never-waits")
@seeds(2, range(50), fits=is_short)
def test_whatever_goes_wrong_one_of_them_has_the_device(tmp_path: Path, seed: int) -> None:
    simulation = play(seed, tmp_path)
    assert simulation.device.num_taken > 0
    assert simulation.device.sharing == set()
    assert simulation.device.asking is None


def take_at_once(self: MemoryLock) -> bool:
    return True


def stay(self: FakeBackend) -> None:
    pass


@pytest.mark.parametrize(
    ("owner", "name", "other"), [(MemoryLock, "take", take_at_once), (FakeBackend, "leave_device", stay)]
)
def test_the_law_is_broken_where_a_trainer_does_not_wait_or_stays(
    tmp_path: Path, owner: type, name: str, other: Callable[[Any], Any]
) -> None:
    with patch.object(owner, name, other), pytest.raises(AssertionError, match="at once"):
        play(0, tmp_path)
