"""Settings that say how many: a run ends well, and its audit balances, with each at its smallest and far above.

A new setting of this kind needs a row in BOUNDS, or in ELSEWHERE."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from rftstream.config.sections import RunConfig
from tests.broker.driven import DrivenRun
from tests.e2e.workplace import Workplace

pytestmark = pytest.mark.law("bounded", "conservation")

SECTIONS = ("feeder", "explorer", "verifier", "buffer", "trainer", "evaluator", "transport", "weights", "retention")

BOUNDS: dict[str, tuple[int, int]] = {
    "feeder.groups_per_batch": (1, 9),
    "feeder.group_size": (1, 17),
    "feeder.max_staleness": (0, 5),
    "explorer.count": (1, 3),
    "explorer.max_concurrent": (1, 1000),
    "explorer.yield_after_tokens": (1, 1_000_000),
    "explorer.repetition_tokens": (0, 1_000_000),
    "explorer.repetition_period": (1, 100_000),
    "verifier.count": (1, 2),
    "verifier.max_concurrent": (1, 1000),
    "verifier.processes": (1, 2),
    "verifier.max_batch": (1, 1000),
    "verifier.tries": (1, 9),
    "buffer.max_refill": (1, 1_000_000),
    "buffer.min_siblings": (1, 17),
    "buffer.max_body_bytes": (1, 1 << 40),
    "trainer.minibatches": (1, 9),
    "trainer.updates_per_batch": (1, 3),
    "trainer.tokens_per_microbatch": (1, 1 << 30),
    "trainer.shares": (1, 11),
    "trainer.checkpoint_every": (1, 100),
    "trainer.keep_checkpoints": (2, 50),
    "trainer.publish_every": (1, 6),
    "trainer.max_skips_in_a_row": (1, 1000),
    "trainer.warmup_steps": (0, 1000),
    "transport.partitions": (1, 129),
    "weights.anchor_every": (1, 1000),
    "weights.keep": (2, 100),
    "retention.checkpoints": (2, 50),
}
"""Setting -> its smallest value that makes a run, and one above what the run has of it."""

ELSEWHERE: dict[str, str] = {
    **{f"{section}.threads": "no role computes with arrays here" for section in SECTIONS},
    "explorer.gateway_max_body_bytes": "tests/unit/gateway/test_http.py",
    "explorer.max_calls": "tests/flow/test_agents.py",
    "explorer.max_calls_at_once": "tests/flow/test_agents.py",
    "trainer.reference_every": "tests/flow/test_trainer.py",
    "trainer.keep_every": "tests/flow/test_trainer_checkpoints.py",
    "trainer.max_steps_without_signal": "tests/flow/test_trainer.py",
    "evaluator.count": "tests/flow/test_evaluator.py",
    "evaluator.max_concurrent": "tests/flow/test_evaluator.py",
}
"""Setting -> where it is tested, as it says nothing in a run without agents, references and evaluations; or why not."""

SMALLEST, LARGEST = ({name: values[number] for name, values in BOUNDS.items()} for number in (0, 1))


def counts_of(cls: Any) -> set[str]:
    """Return the fields that are whole numbers."""

    def is_count(kind: Any) -> bool:
        if get_origin(kind) is Annotated:
            return get_args(kind)[0] is int
        return kind is int or any(is_count(one) for one in get_args(kind) if get_origin(kind) is not tuple)

    hints = get_type_hints(cls, include_extras=True)
    return {field.name for field in dataclasses.fields(cls) if is_count(hints[field.name])}


def test_every_setting_that_says_how_many_has_a_row() -> None:
    hints = get_type_hints(RunConfig)
    found = set()
    for section in SECTIONS:
        (cls,) = {one for one in (hints[section], *get_args(hints[section])) if dataclasses.is_dataclass(one)}
        found |= {f"{section}.{name}" for name in counts_of(cls)}
    known = BOUNDS.keys() | ELSEWHERE.keys()
    assert found - known == set(), "no row"
    assert BOUNDS.keys() - found == set(), "no such setting"
    assert not [place for place in ELSEWHERE.values() if place.startswith("tests/") and not Path(place).exists()]


def run_with(place: Workplace, values: dict[str, int], name: str = "bounds", servers: str | None = None) -> None:
    """Play a run to its end, then go on with it for a step, and look whether anything is lost."""
    run = DrivenRun.make(place, name, servers, *(f"{setting}={value}" for setting, value in values.items()))
    assert run.to_the_end().version == 6
    run.resume("run.steps=7")
    assert run.to_the_end().version == 7


@pytest.mark.slow
@pytest.mark.parametrize("values", [SMALLEST, LARGEST], ids=["smallest", "largest"])
def test_all_at_once(place: Workplace, values: dict[str, int]) -> None:
    run_with(place, values)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["smallest", "largest"])
@pytest.mark.parametrize("setting", BOUNDS)
def test_each_alone(place: Workplace, setting: str, number: int) -> None:
    needs = {"buffer.min_siblings": ("feeder.group_size",), "trainer.publish_every": ("feeder.max_staleness",)}
    needs |= {"retention.checkpoints": ("trainer.keep_checkpoints",)}
    run_with(place, {name: BOUNDS[name][number] for name in (setting, *needs.get(setting, ()))})
