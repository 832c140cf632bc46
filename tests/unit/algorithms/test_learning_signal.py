"""Which steps have no learning signal, what is said about them, and when they end a run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rftstream.algorithms import ALGORITHMS
from rftstream.algorithms.base import Spread, spread_needed
from rftstream.algorithms.by_taskset import build_algorithm
from rftstream.algorithms.learning_signal import find_no_signal, is_without_signal, likely_cause
from rftstream.config.parts import registry
from rftstream.roles.trainer.update_cycle import SignalWatch
from tests.flow.scene import make_config
from tests.suite.each import each

FLAT = {"zero_variance_share": 1.0, "reward": 0.0, "reward_std": 0.0}


@each(("values", "spread", "without"), [
    (FLAT, "group", True),
    (FLAT, "batch", True),
    (FLAT, "none", False),
    ({**FLAT, "zero_variance_share": 0.99}, "group", False),
    ({**FLAT, "reward": 0.5, "reward_std": 0.5}, "group", True),
    ({**FLAT, "reward": 0.5, "reward_std": 0.5}, "batch", False),
    ({**FLAT, "reward": 0.1, "reward_std": 1e-9}, "batch", True),  # rounding of a mean of squares
    ({"loss": 0.0}, "group", False),
])  # fmt: skip
def test_which_steps_have_none(values: dict[str, float], spread: Spread, without: bool) -> None:
    assert is_without_signal(values, spread) is without


NEEDS: dict[str, Spread] = {
    "opd": "none", "topr": "none", "asymre": "none", "ppo": "batch", "reinforce_plus_plus": "batch", "gigpo": "batch",
    "remax": "group", "mix": "group", "chord": "group",
}  # fmt: skip
"""What algorithms need that do not say it by `compares_siblings` already."""


def test_what_each_algorithm_needs() -> None:
    siblings: dict[str, Spread] = {name: "group" for name, record in ALGORITHMS.items() if record.compares_siblings}
    for name, spread in {**siblings, **NEEDS}.items():
        part = registry.resolve("algorithm", name, where="here")
        assert spread_needed(part(part.Config())) == spread, (
            f'{name}: its class sets needs_spread = "{spread}", or its line in ALGORITHMS changes compares_siblings'
        )
    unchecked = ALGORITHMS.keys() - siblings.keys() - NEEDS.keys() - {"sft", "dpo", "reward_model"}
    assert not unchecked, f"{unchecked}: put each into NEEDS in tests/unit/algorithms/test_learning_signal.py"
    compared = registry.resolve("algorithm", "reinforce_plus_plus", where="here")
    assert spread_needed(compared(compared.Config(group_baseline=True))) == "group"


@pytest.mark.parametrize(("others", "needs"), [("grpo", "group"), ("topr", "none"), ("reinforce_plus_plus", "batch")])
def test_of_several_algorithms_all_have_to_be_without(others: str, needs: str) -> None:
    tasksets = {"sums": {"source": "arithmetic"}, "more": {"source": "arithmetic", "algorithm": others}}
    config = make_config(trainer__algorithm="rloo", tasksets=tasksets)
    assert spread_needed(build_algorithm(config)) == needs


@each(("values", "settings", "says"), [
    ({"truncated_share": 0.94}, {},
     "in another column; or 94% of the completions are cut off at sampling.max_tokens, perhaps before the answer; or "),
    ({"truncated_share": 0.94}, {}, "every reward is 0. Likely causes: the reward never matches"),
    ({"truncated_share": 0.94, "reward": 1.0}, {}, "every reward is 1. Likely causes: all is solved"),
    ({"truncated_share": 0.94, "reward": 0.5, "reward_std": 0.5}, {}, "Likely causes: 94% of the completions are cut"),
    ({"entropy": 9e-7}, {}, "Likely causes: the policy says one thing alone, as after a too high trainer.lr"),
    ({"reward": 1.0, "entropy": 9e-7}, {}, "every reward is 1. Likely causes: all is solved"),
    ({"truncated_share": 0.05}, {}, "every reward is 0. Likely causes: the reward never matches"),
    ({"reward": 1.0}, {}, "every reward is 1. Likely causes: all is solved"),
    ({"reward": 0.25, "reward_std": 1e-9}, {}, "every reward is 0.25. Likely causes: the reward does not look at the"),
    ({"reward": 0.25, "part/a": 0.25, "part/b": 0.0}, {}, "every reward is 0.25 (a 0.25, b 0). Likely causes: "),
    ({"reward": 0.5, "reward_std": 0.5}, {}, "never inside a group. Likely causes: the reward does not look at the"),
    ({"reward": 0.5, "reward_std": 0.5}, {"sampling__temperature": 0.0}, "Likely causes: sampling.temperature is 0"),
    ({}, {"sampling__temperature": 0.01}, "; or sampling.temperature is 0.01, which makes siblings nearly the same"),
    ({"reward": 0.5, "reward_std": 0.5}, {"feeder__group_size": 1}, "Likely causes: feeder.group_size is 1"),
])  # fmt: skip
def test_the_likely_causes(values: dict[str, float], settings: dict[str, Any], says: str) -> None:
    assert says in likely_cause({**FLAT, **values}, make_config(**settings))


def test_few_steps_are_not_worth_a_word() -> None:
    config = make_config()
    assert find_no_signal({}, config) is None
    assert find_no_signal({**FLAT, "steps_without_signal": 9.0}, config) is None
    found = find_no_signal({**FLAT, "steps_without_signal": 10.0}, config)
    assert found is not None
    assert found.to_text().startswith("no signal for 10 steps: every reward is 0.")
    assert found.to_json() == {"steps": 10, "cause": found.cause}


def test_it_is_said_when_there_are_twice_as_many_and_anew_after_a_signal(caplog: pytest.LogCaptureFixture) -> None:
    watch = SignalWatch(make_config(trainer__max_steps_without_signal=0))
    caplog.set_level(logging.WARNING)
    told = []
    for steps in [*range(1, 45), 0, *range(1, 12)]:
        before = len(caplog.records)
        assert watch.look({**FLAT, "steps_without_signal": float(steps)}) is None
        told += [steps] if len(caplog.records) > before else []
    assert told == [10, 20, 40, 10]
    assert caplog.messages[0].startswith("no signal for 10 steps: every reward is 0. Likely causes: the reward never")


def test_by_default_a_hundred_steps_end_a_run() -> None:
    watch = SignalWatch(make_config())
    ended = [steps for steps in range(301) if watch.look({**FLAT, "steps_without_signal": float(steps)}) is not None]
    assert ended == [100, 200, 300]
