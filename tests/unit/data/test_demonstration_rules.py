"""What a run file may ask of demonstrations, and which of them are never trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rftstream.config.loader import from_dict, to_toml
from rftstream.config.sections import RunConfig
from rftstream.data.demonstrations.split import held_out_numbers, trained_numbers
from rftstream.errors import ConfigError
from rftstream.runs.manifest import check_same_run, make_manifest
from rftstream.runs.writes.load_demonstrations import check_demonstrations
from tests.suite.each import each

TASKS = {"sums": {"source": "arithmetic"}}


def make(algorithm: str, *, experts: Any = None, tasks: bool = True) -> RunConfig:
    values: dict[str, Any] = {"run": {"name": "a", "steps": 5}, "model": {"path": "fake"},
                              "trainer": {"algorithm": algorithm}}  # fmt: skip
    values |= {"tasksets": TASKS} if tasks else {}
    return from_dict(values | ({"experts": experts} if experts is not None else {}))


@each(
    ("algorithm", "experts", "tasks"),
    [("grpo", None, True), ("mix", {}, True), ("chord", {}, True), ("sft", {"source": "a.jsonl"}, False),
     ("dpo", {"source": "a.jsonl"}, False)],
)  # fmt: skip
def test_what_fits(algorithm: str, experts: Any, tasks: bool) -> None:
    check_demonstrations(make(algorithm, experts=experts, tasks=tasks))


@each(
    ("algorithm", "experts", "tasks", "problem"),
    [
        ("grpo", {}, True, "trainer.algorithm 'grpo' takes none"),
        ("sft", None, True, "'sft' learns from demonstrations, but there are none"),
        ("sft", {}, True, "'sft' learns nothing from rollouts, expected none"),
        ("mix", {"source": "a.jsonl"}, False, "'mix' learns from rollouts, too, but there are no tasksets"),
    ],
)
def test_what_does_not(algorithm: str, experts: Any, tasks: bool, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_demonstrations(make(algorithm, experts=experts, tasks=tasks))


@each("share", [0.0, 0.1, 0.25, 1 / 3, 0.9])
def test_what_is_held_out_is_spread_exact_and_stays_so(share: float) -> None:
    for size in range(40):
        trained, held_out = trained_numbers(size, share), held_out_numbers(size, share)
        assert sorted([*trained, *held_out]) == list(range(size))
        assert len(held_out) == int(size * share)
        assert held_out_numbers(size + 7, share)[: len(held_out)].tolist() == held_out.tolist()
    assert np.diff(held_out_numbers(40, 0.25)).tolist() == [4] * 9


def test_half_a_pass_does_not_go_on_in_another_order() -> None:
    before = make("mix", experts={"held_out": 0.1})
    manifest = make_manifest(before, "a", {}, 0.0)
    check_same_run(manifest, before, {})
    check_same_run(manifest, make("mix", experts={"held_out": 0.1, "ratio": 0.5, "passes": 3}), {})
    with pytest.raises(ConfigError, match=r"experts.held_out 0.1 -> 0.2"):
        check_same_run(manifest, make("mix", experts={"held_out": 0.2}), {})
    assert "held_out = 0.1" in to_toml(before)
