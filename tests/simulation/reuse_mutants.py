"""Rules about groups that batches have once more, left out one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rftstream.contracts import ids
from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome
from rftstream.roles.buffer import reuse as reuse_module
from rftstream.roles.buffer.reuse import ReusedBodies, ReusePool
from rftstream.roles.buffer.step import BufferStep
from rftstream.roles.trainer.retention.checkpoints import CompletedGroups
from rftstream.service.role import SingleTransaction
from tests.simulation.changes import changed


def uses_forgotten() -> Iterator[None]:
    """Whoever comes next does not read what was used."""
    recover, learn = BufferStep.recover, ReusePool.learn_uses
    is_recovering = False

    def recovered(self: BufferStep, *arguments: Any) -> Any:
        nonlocal is_recovering
        is_recovering = True
        try:
            return recover(self, *arguments)
        finally:
            is_recovering = False

    def mutated(self: ReusePool, reuse: BatchReuse) -> None:
        if not is_recovering:
            learn(self, reuse)

    with changed(BufferStep, "recover", recovered), changed(ReusePool, "learn_uses", mutated):
        yield


def _with_outputs(change: Callable[[Any], Any]) -> Iterator[None]:
    advance = BufferStep.advance

    def mutated(self: BufferStep) -> SingleTransaction | None:
        made = advance(self)
        if made is None:
            return None
        outputs = [change(one) for one in made.outputs]
        return SingleTransaction(tuple(one for one in outputs if one is not None), made.positions)

    with changed(BufferStep, "advance", mutated):
        yield


def uses_untold() -> Iterator[None]:
    """Batches have groups once more, and nothing says so."""
    yield from _with_outputs(lambda one: None if isinstance(one.message, BatchReuse) else one)


def uses_counted_as_new() -> Iterator[None]:
    """Manifests count them as groups, so that admission believes that more is trained."""

    def counted(one: Any) -> Any:
        if not isinstance(one.message, BatchManifest) or not one.message.reused:
            return one
        total = one.message.total_groups + len(one.message.reused)
        return replace(one, message=replace(one.message, total_groups=total))

    yield from _with_outputs(counted)


def any_age() -> Iterator[None]:
    """Nothing is too old to be used once more."""
    due = reuse_module._is_due

    def mutated(held: Any, limits: Any, batch: int, before: int) -> bool:
        offer = replace(held.offer, until=max(held.offer.until, batch))
        return due(replace(held, offer=offer), limits, batch, before)

    with (
        changed(reuse_module, "_is_due", mutated),
        changed(ReusePool, "_forget_too_old", lambda self, batch: None),
    ):
        yield


def reusable_deleted() -> Iterator[None]:
    """Retention does not ask whether a batch may have a group once more."""
    add = CompletedGroups.add

    def mutated(self: CompletedGroups, outcome: GroupOutcome) -> None:
        add(self, replace(outcome, offers=(), offsets=()))

    with changed(CompletedGroups, "add", mutated):
        yield


def luck_of_the_clock() -> Iterator[None]:
    with changed(reuse_module, "derive_seed", lambda *names: ids.derive_seed(0, time.perf_counter_ns())):
        yield


def bodies_without_operators() -> Iterator[None]:
    """Masks and terms are forgotten when a group is used once more."""
    experiences = ReusedBodies.experiences

    def mutated(self: ReusedBodies, one: Any, *arguments: Any) -> Any:
        bare = replace(one, outcome=replace(one.outcome, decisions=(), masks=()))
        return experiences(self, bare, *arguments)

    with changed(ReusedBodies, "experiences", mutated):
        yield


RULES: dict[str, tuple[str, str, Callable[[], Iterator[None]]]] = {
    "uses-forgotten": ("twice", "a restart forgets which groups were used", uses_forgotten),
    "uses-untold": ("conservation", "a batch has groups once more without a word", uses_untold),
    "uses-counted-as-new": ("conservation", "a group that is used once more counts as a new one", uses_counted_as_new),
    "any-age": ("staleness", "a group of any age is used once more", any_age),
    "reusable-deleted": ("lost", "retention deletes what a batch may use once more", reusable_deleted),
    "luck-of-the-clock": ("derived", "which groups are used nobody can derive again", luck_of_the_clock),
    "bodies-without-operators": (
        "lineage",
        "the second use forgets masks and terms",
        bodies_without_operators,
    ),
}
"""Name -> the law that it breaks, what is left out, and the change."""

AT_RESTARTS = frozenset({"uses-forgotten"})
"""Those that only a restart of the buffer shows."""
