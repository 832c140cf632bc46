"""What benchmarks of training share: the plan of a step, and sides that have steps in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rftstream.backends.base import UpdatePlan


def make_plan(lr: float, tokens_per_microbatch: int) -> UpdatePlan:
    return UpdatePlan(
        lr=lr, minibatches=1, updates_per_batch=1, max_grad_norm=1.0, tokens_per_microbatch=tokens_per_microbatch
    )


def best_steps(
    sides: Mapping[str, Callable[[], float]], repeats: int, clock: Callable[[], float] = time.process_time
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each side's best step, and what its first step returned. The sides take turns, so that all
    meet what else the machine does."""
    best = dict.fromkeys(sides, float("inf"))
    first: dict[str, float] = {}
    for _ in range(repeats):
        for name, step in sides.items():
            began = clock()
            returned = step()
            best[name] = min(best[name], clock() - began)
            first.setdefault(name, returned)
    return best, first
