"""Rules of data pipelines, left out one at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rftstream.contracts.control import Drawn
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.tasks import Task
from rftstream.data.operators import pipeline as pipeline_module
from rftstream.data.operators.facts import Facts
from rftstream.roles.feeder.cursor import OperatorCounts
from rftstream.roles.feeder.step import FeederStep
from rftstream.service.role import SingleTransaction
from tests.simulation.changes import Change, around, instead


@around(FeederStep, "advance")
def facts_past_seen(advance: Any, self: FeederStep) -> SingleTransaction | None:
    """The feeder decides by one outcome more than its tasks say."""
    transaction = advance(self)
    if transaction is None:
        return None
    outputs = [
        replace(one, message=replace(one.message, seen=max(0, one.message.seen - 1)))
        if isinstance(one.message, Task | Drawn) and one.message.seen is not None
        else one
        for one in transaction.outputs
    ]
    return SingleTransaction(tuple(outputs), transaction.positions)


@contextmanager
def skips_counted_twice() -> Iterator[None]:
    """Every seventh of them."""
    skip, number = OperatorCounts.skip, 0

    def mutated(self: OperatorCounts, taskset: str, operator: str, reason: str) -> None:
        nonlocal number
        number += 1
        for _ in range(2 if number % 7 == 0 else 1):
            skip(self, taskset, operator, reason)

    with patch.object(OperatorCounts, "skip", mutated):
        yield


@around(Facts, "absorb")
def late_ones_unseen(absorb: Any, self: Facts, outcome: GroupOutcome) -> None:
    absorb(self, outcome)
    self.seen -= outcome.late


RULES: dict[str, tuple[str, str, Change]] = {
    "facts-past-seen": ("derived", "operators decide by later facts than the log says", facts_past_seen),
    "skips-counted-twice": ("conservation", "a skip counts twice", skips_counted_twice),
    "late-ones-unseen": ("derived", "late siblings are no part of the facts' number", late_ones_unseen),
    "seeds-of-the-clock": (
        "derived", "operators get seeds that nobody can derive again",
        instead(pipeline_module, derive_seed=lambda *names: time.perf_counter_ns()),
    ),
}  # fmt: skip
"""Name -> the law that it breaks, what is left out, and the change."""
