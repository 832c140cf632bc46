"""Rules of data pipelines, left out one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from rftstream.contracts.control import Drawn
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.tasks import Task
from rftstream.data.operators import pipeline as pipeline_module
from rftstream.data.operators.facts import Facts
from rftstream.roles.feeder.cursor import OperatorCounts
from rftstream.roles.feeder.step import FeederStep
from rftstream.service.role import SingleTransaction
from tests.simulation.changes import changed


def facts_past_seen() -> Iterator[None]:
    """The feeder decides by one outcome more than its tasks say."""
    advance = FeederStep.advance

    def mutated(self: FeederStep) -> SingleTransaction | None:
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

    with changed(FeederStep, "advance", mutated):
        yield


def skips_counted_twice() -> Iterator[None]:
    """Every seventh of them."""
    skip, number = OperatorCounts.skip, 0

    def mutated(self: OperatorCounts, taskset: str, operator: str, reason: str) -> None:
        nonlocal number
        number += 1
        for _ in range(2 if number % 7 == 0 else 1):
            skip(self, taskset, operator, reason)

    with changed(OperatorCounts, "skip", mutated):
        yield


def late_ones_unseen() -> Iterator[None]:
    """Late siblings are no part of `seen`."""
    absorb = Facts.absorb

    def mutated(self: Facts, outcome: GroupOutcome) -> None:
        absorb(self, outcome)
        self.seen -= outcome.late

    with changed(Facts, "absorb", mutated):
        yield


def seeds_of_the_clock() -> Iterator[None]:
    with changed(pipeline_module, "derive_seed", lambda *names: time.perf_counter_ns()):
        yield


RULES: dict[str, tuple[str, str, Callable[[], Iterator[None]]]] = {
    "facts-past-seen": ("derived", "operators decide by later facts than the log says", facts_past_seen),
    "skips-counted-twice": ("conservation", "a skip counts twice", skips_counted_twice),
    "late-ones-unseen": ("derived", "late siblings are no part of the facts' number", late_ones_unseen),
    "seeds-of-the-clock": ("derived", "operators get seeds that nobody can derive again", seeds_of_the_clock),
}
"""Name -> the law that it breaks, what is left out, and the change."""
