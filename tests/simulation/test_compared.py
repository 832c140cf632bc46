"""Runs whose reward compares siblings, whatever goes wrong between them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rftstream.contracts.versions import EvalResult
from rftstream.testing import Faults
from tests.simulation.compared import with_compared
from tests.simulation.grid import check_seed, draw_config, is_short
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds
from tests.simulation.test_simulation import run
from tests.unit.served import Server


@pytest.mark.law("lost", "twice", "conservation", "unscorable", "staleness", "replay")
@seeds(3, range(100), fits=is_short)
def test_siblings_are_judged_together_whatever_goes_wrong(tmp_path: Path, seed: int) -> None:
    check_seed(seed, tmp_path, compared=True)


@pytest.mark.law("lost", "twice")
@seeds(2, range(20), fits=is_short)
def test_kills_between_siblings(tmp_path: Path, seed: int) -> None:
    """Of verifiers alone, again and again."""
    faults = Faults(share=0.2, roles=("verifier",), kills=40, joins=2, aborts=10, unknowns=10)
    simulation = check_seed(seed, tmp_path, faults=faults, compared=True)
    laws = simulation.watch
    assert isinstance(laws, Laws) and laws.compared is not None
    if laws.finished is not None and laws.finished.reason == "steps" and laws.version:
        assert laws.compared.num_judged


def test_the_runs_have_all_that_may_matter() -> None:
    configs = [with_compared(draw_config(Random(f"grid {seed}")), seed) for seed in range(40)]
    assert {config.verifier.group_timeout_s for config in configs} >= {None, 3.0, 60.0, 200.0}
    assert {config.verifier.max_waiting_bytes for config in configs} == {1, 2000, 1 << 28}
    assert {config.feeder.group_size for config in configs} == {1, 2, 3, 4, 5, 6}
    assert {config.verifier.max_concurrent for config in configs} == {1, 4, 256}


def nearer_wins(body: Mapping[str, Any]) -> dict[str, Any]:
    """A judge that cannot say how good an answer is, only which of two is nearer to the right one."""
    texts = dict(re.findall(r"<(problem|answer_\w) \w+>\n(.*?)\n</", body["messages"][-1]["content"], re.DOTALL))
    left, right = re.findall(r"(\d+)\+(\d+)=", texts["problem"])[-1]
    off = [
        abs(int(found[0]) - int(left) - int(right)) if (found := re.findall(r"\d+", texts[name])) else 10_000
        for name in ("answer_a", "answer_b")
    ]
    better = "tie" if off[0] == off[1] else "A" if off[0] < off[1] else "B"
    return {"choices": [{"message": {"content": json.dumps({"reasoning": "", "better": better})}}]}


@pytest.mark.slow
@pytest.mark.parametrize("pairing", ["bracket", "round_robin"])
def test_a_judge_that_can_only_compare_teaches(tmp_path: Path, pairing: str) -> None:
    """Nothing that sees one rollout could tell a right answer here, and versions are better at exact answers."""
    server = Server(nearer_wins)
    judge = {"name": "tournament", "url": server.url, "model": "judge", "pairing": pairing}
    held_out = {"source": "arithmetic", "options": {"size": 40}, "every": 40, "reward": "exact"}
    try:
        simulation = run(
            tmp_path, 1, run__steps=40, feeder__groups_per_batch=4, feeder__group_size=4,
            tasksets={"sums": {"source": "arithmetic", "reward": {**judge, "cache_folder": str(tmp_path / "cache")}}},
            evaluations={"held-out": held_out}, policies={"fake": {"answer_depends_on": "weights"}},
            backends={"fake": {"skill_rate": 2.0}},
        )  # fmt: skip
    finally:
        server.close()
    means = [one.metrics["mean"] for one in simulation.messages("evals") if isinstance(one, EvalResult)]
    assert means[-1] > 0.9 > 0.5 > means[0]
