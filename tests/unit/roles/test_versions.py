"""Whose weights somebody still needs, as a trainer that has just started knows it."""

from __future__ import annotations

import pytest

from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced, WeightsKind
from rftstream.roles.trainer.versions import Versions
from rftstream.testing.memory_run import MemoryStore
from rftstream.weights.publisher import object_name

pytestmark = pytest.mark.law("lineage")


def named(epoch: int, version: int) -> VersionName:
    return VersionName(trainer_epoch=epoch, version=version)


def step(name: VersionName) -> StepRecord:
    return StepRecord(
        name=name, batch_sequence=None, positions=(), trained_groups=0, trained_rollouts=0, weights_digest=None,
        metrics={}, resumed=name.version == 0, recorded_at=0.0,
    )  # fmt: skip


def announced(name: VersionName, parent: VersionName | None) -> WeightsAnnounced:
    kind = WeightsKind.full if parent is None else WeightsKind.delta
    return WeightsAnnounced(
        model="fake", name=name, kind=kind, parent=parent, object=object_name(name, kind), num_bytes=1, digest="",
        weights_digest="", dtype="float32", resumed=parent is None, announced_at=0.0, gone=(), delta=None,
    )  # fmt: skip


def test_the_best_keeps_what_it_is_made_from_though_a_later_trainer_began_before_it() -> None:
    first = [named(1, version) for version in range(4)]
    parents = dict(zip(first[1:], first, strict=False))
    versions, store = Versions({}, keep=2), MemoryStore()
    for name in (*first, named(2, 0)):
        versions.record(step(name))
    for name in (*first, named(2, 0)):
        versions.announce(announced(name, parents.get(name)))
        store.objects[object_name(name, WeightsKind.delta if name in parents else WeightsKind.full)] = b"."
    versions.evaluate(EvalResult(
        evaluation="held-out", name=first[2], num_tasks=1, num_samples=1, num_unscored=0, metrics={}, generations=None,
        best=True,
    ))  # fmt: skip
    assert versions.to_delete(store, named(3, 0), (), None) == (first[3],)
