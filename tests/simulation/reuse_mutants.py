"""Rules about groups that batches have once more, left out one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rftstream.contracts import ids
from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome
from rftstream.roles.buffer import reuse as reuse_module
from rftstream.roles.buffer.reuse import ReusedBodies, ReusePool
from rftstream.roles.buffer.step import BufferStep
from rftstream.roles.trainer.retention.completed_groups import CompletedGroups
from rftstream.service.role import SingleTransaction
from tests.simulation.changes import Change, around, instead, together


@contextmanager
def uses_forgotten() -> Iterator[None]:
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

    with patch.object(BufferStep, "recover", recovered), patch.object(ReusePool, "learn_uses", mutated):
        yield


def with_outputs(change: Callable[[Any], Any]) -> Change:
    """Change each output of the buffer, or leave it out."""

    @around(BufferStep, "advance")
    def mutated(advance: Any, self: BufferStep) -> SingleTransaction | None:
        made = advance(self)
        if made is None:
            return None
        outputs = [change(one) for one in made.outputs]
        return SingleTransaction(tuple(one for one in outputs if one is not None), made.positions)

    return mutated


def counted_as_new(one: Any) -> Any:
    """Manifests count them as groups, so that admission believes that more is trained."""
    if not isinstance(one.message, BatchManifest) or not one.message.reused:
        return one
    total = one.message.total_groups + len(one.message.reused)
    return replace(one, message=replace(one.message, total_groups=total))


@around(reuse_module, "_is_due")
def due_at_any_age(due: Any, held: Any, limits: Any, batch: int, before: int) -> bool:
    offer = replace(held.offer, until=max(held.offer.until, batch))
    return bool(due(replace(held, offer=offer), limits, batch, before))


@around(CompletedGroups, "add")
def reusable_deleted(add: Any, self: CompletedGroups, outcome: GroupOutcome) -> None:
    """Retention does not ask whether a batch may have a group once more."""
    add(self, replace(outcome, offers=(), offsets=()))


@around(ReusedBodies, "experiences")
def bodies_without_operators(experiences: Any, self: ReusedBodies, one: Any, *arguments: Any) -> Any:
    return experiences(self, replace(one, outcome=replace(one.outcome, decisions=(), masks=())), *arguments)


RULES: dict[str, tuple[str, str, Change]] = {
    "uses-forgotten": ("twice", "a restart forgets which groups were used", uses_forgotten),
    "uses-untold": (
        "conservation", "a batch has groups once more without a word",
        with_outputs(lambda one: None if isinstance(one.message, BatchReuse) else one),
    ),
    "uses-counted-as-new": (
        "conservation", "a group that is used once more counts as a new one", with_outputs(counted_as_new)
    ),
    "any-age": (
        "staleness", "a group of any age is used once more",
        together(due_at_any_age, instead(ReusePool, _forget_too_old=lambda self, batch: None)),
    ),
    "reusable-deleted": ("lost", "retention deletes what a batch may use once more", reusable_deleted),
    "luck-of-the-clock": (
        "derived", "which groups are used nobody can derive again",
        instead(reuse_module, derive_seed=lambda *names: ids.derive_seed(0, time.perf_counter_ns())),
    ),
    "bodies-without-operators": ("lineage", "the second use forgets masks and terms", bodies_without_operators),
}  # fmt: skip
"""Name -> the law that it breaks, what is left out, and the change."""

AT_RESTARTS = frozenset({"uses-forgotten"})
"""Those that only a restart of the buffer shows."""
