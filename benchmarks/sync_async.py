"""Sampling and training in turns, or at the same time: wall time of the same number of steps, beside the best possible.

Lengths have a long tail, so who trains in turns waits for the longest of each batch with an idle engine and an idle
trainer. Engine (32 places in two explorers, so many tokens a second in each) and optimizer step are simulated by
waiting; processes, log, weights and rewards are real. The bound is the same run without anything that takes time but
tokens and steps (_ideal.py), with the lengths that the run's own tasks have. Time runs from the first token to the last
step; all processes are up by then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._ideal import Plan, ideal_s
from benchmarks._simulated import MEAN_TOKENS, Flow, begin, flow_of, started, tokens_of
from rftstream.contracts.ids import derive_seed

SYNCHRONOUS = Plan(
    steps=24,
    groups_per_batch=8,
    group_size=4,
    max_staleness=0,
    on_stale="wait",
    slots=32,
    tokens_per_s=MEAN_TOKENS / 0.4,
    step_s=0.4,
)
"""A completion of mean length takes as long as a step: over a long time engine and trainer are equally busy."""
WAIT = replace(SYNCHRONOUS, max_staleness=6)
DROP = replace(SYNCHRONOUS, max_staleness=12, on_stale="drop")
EXPLORERS = 2
LIMIT_S = 170.0
AIM = 2.5
EXPIRED_LIMIT = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    wall_s: float
    ideal_s: float
    expired_share: float
    admitted_T: Sequence[int]
    """Tokens of each rollout that was admitted, as the model of the engine has them."""
    trained_T: Sequence[int]


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        sync = _measure(Path(folder), "synchronous", SYNCHRONOUS)
        wait = _measure(Path(folder), "wait", WAIT)
        drop = _measure(Path(folder), "drop", DROP)
    names = {
        f"{SYNCHRONOUS.steps} steps, in turns": sync,
        f"{WAIT.steps} steps, max_staleness {WAIT.max_staleness}, wait": wait,
        f"{DROP.steps} steps, max_staleness {DROP.max_staleness}, drop": drop,
    }
    return [
        *(_row(name, "s", one.wall_s, one.ideal_s, "bound", one.ideal_s / one.wall_s) for name, one in names.items()),
        *_speedups("wait", sync, wait),
        *_speedups("drop", sync, drop),
        _row("groups expired, wait", "%", 100 * wait.expired_share, 0.0, "limit", None),
        _row(
            "groups expired, drop",
            "%",
            100 * drop.expired_share,
            100 * EXPIRED_LIMIT,
            "limit",
            EXPIRED_LIMIT / drop.expired_share if drop.expired_share else None,
        ),
        *_bias("wait", wait),
        *_bias("drop", drop),
    ]


def _measure(folder: Path, name: str, plan: Plan) -> Measured:
    with started(folder, name, plan, explorers=EXPLORERS, partitions=8) as (run_dir, process):
        begin(run_dir, process, [f"explorer-{number}" for number in range(EXPLORERS)])
        if code := process.wait(LIMIT_S):
            raise RuntimeError(f"sync_async: the run {name} ended with exit {code}; see {run_dir}/logs")
    with flow_of(run_dir) as flow:
        return Measured(
            wall_s=flow.wall_s,
            ideal_s=ideal_s(plan, _lengths(flow)),
            expired_share=flow.expired_share,
            admitted_T=[tokens_of(one.seed) for one in flow.tasks],
            trained_T=[
                int(sum(segment.loss_mask.numpy().sum() for segment in one.segments)) for one in flow.experiences
            ],
        )


def _lengths(flow: Flow) -> Callable[[int, int], int]:
    """Of the run's own tasks; should the bound admit others, as the same model draws them."""
    known = {(one.ids.sequence, one.ids.sibling): one.seed for one in flow.tasks}
    return lambda sequence, sibling: tokens_of(known.get((sequence, sibling)) or derive_seed(0, sequence, sibling))


def _speedups(name: str, sync: Measured, asynchronous: Measured) -> list[dict[str, Any]]:
    found, bound = sync.wall_s / asynchronous.wall_s, sync.ideal_s / asynchronous.ideal_s
    return [
        _row(f"times as fast as in turns, {name}", "x", found, bound, "bound", found / bound),
        _row(f"times as fast as in turns, {name}", "x", found, AIM, "aim", found / AIM),
    ]


def _bias(name: str, one: Measured) -> list[dict[str, Any]]:
    """Lengths of what was trained beside those of what was admitted: 1 says that nothing was lost for being long."""
    measures: dict[str, Callable[[Sequence[int]], float]] = {
        "mean": lambda tokens: float(np.mean(tokens)),
        "p95": lambda tokens: float(np.percentile(tokens, 95)),
        "longest": lambda tokens: float(max(tokens)),
    }
    rows = []
    for label, measure in measures.items():
        trained, admitted = measure(one.trained_T), measure(one.admitted_T)
        rows.append(
            _row(
                f"tokens of trained rollouts, {label}, {name}",
                "",
                trained,
                admitted,
                "of admitted ones",
                trained / admitted,
            )
        )
    return rows


def _row(name: str, unit: str, ours: float, reference: float, which: str, ratio: float | None) -> dict[str, Any]:
    return {
        "name": f"sync_async: {name}",
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "reference_name": which,
        "ratio": ratio,
    }
