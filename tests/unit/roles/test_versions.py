"""Whose weights somebody still needs, as a trainer that has just started knows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rftstream.config.loader import from_dict
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced, WeightsKind
from rftstream.roles.trainer.versions import Versions
from rftstream.service.role import Log
from rftstream.testing.memory_run import MemoryStore
from rftstream.transport.memory.transport import MemoryLog
from rftstream.weights.version_parts import object_name, parse_object_name
from tests.unit.grown import summarise
from tests.unit.synthetic import SyntheticLog

pytestmark = pytest.mark.law("lineage")

CONFIG = {
    "run": {"name": "kept", "steps": 99},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "evaluations": {"held-out": {"source": "arithmetic", "every": 5}},
}


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
    versions.evaluate(evaluated(first[2], best=True))
    assert versions.to_delete(store, named(3, 0), (), None) == (first[3],)


@pytest.mark.parametrize("summarised", [False, True])
def test_a_trainer_that_begins_with_a_summary_keeps_the_same(summarised: bool) -> None:
    log, store = SyntheticLog(MemoryLog(lambda: 0.0, marks=True).connect("test")), MemoryStore()
    evaluations = from_dict(CONFIG).evaluations
    versions = Versions(evaluations, keep=2)
    for version in range(60):
        name, parent = named(1, version), named(1, version - 1) if version % 6 else None
        gone = versions.to_delete(store, name, (), parent)
        message = replace(announced(name, parent), gone=gone)
        log.trained[version] = version
        log.step(version, resumed=version == 0)
        log.put("weights", message)
        versions.record(step(name))
        versions.announce(message)
        store.objects[message.object] = b"."
        for one in gone:
            for kind in WeightsKind if one.version % 7 != 3 else ():  # some stay, though they were given up
                store.objects.pop(object_name(one, kind), None)
        if version % 5 == 3 and version != 43:  # that of version 40 is not made
            result = evaluated(named(1, version - 3), best=version == 13)
            log.put("evals", result)
            versions.evaluate(result)
    if summarised:
        summarise(log)
    begun, reader = Versions(evaluations, keep=2), Log(log.transport)
    start = begun.begin(reader, all_steps=False)
    assert bool(start[TopicPartition("weights", 0)]) is summarised
    for topic, take in (("steps", begun.record), ("weights", begun.announce), ("evals", begun.evaluate)):
        for received in reader.messages(topic, start=start):
            take(received.message)
    for kept in ((), (named(1, 30), named(1, 41))):
        next_one = named(1, 60), kept, named(1, 59)
        goes = versions.to_delete(store, *next_one)
        assert begun.to_delete(store, *next_one) == goes != ()
        assert {named(1, 0), named(1, 10), named(1, 40), named(1, 59)} <= _there(store) - set(goes)


def test_the_best_checkpoint_is_the_best_by_the_newest_reward() -> None:
    """Each result has the time of its version; that of version 1 comes once more at last."""
    versions, names = Versions({}, keep=2), [named(1, version) for version in range(5)]
    for name in names:
        versions.record(step(name))
    scored = [(0.9, "old"), (0.8, "old"), (0.1, "new"), (0.2, "new")]
    for name, (mean, scorer) in zip(names, scored, strict=False):
        one = evaluated(name, best=False)
        versions.evaluate(replace(one, metrics={"mean": mean}, scorer=scorer, evaluated_at=float(name.version)))
        best = names[0] if scorer == "old" else name
        assert versions.best_or_due("held-out", names) == {best}
    again = replace(evaluated(names[1], best=False), metrics={"mean": 0.3}, scorer="new", evaluated_at=9.0)
    versions.evaluate(again)
    assert versions.best_or_due("held-out", names) == {names[1]}


def _there(store: MemoryStore) -> set[VersionName]:
    return {name for text in store.objects if (name := parse_object_name(text)) is not None}


def evaluated(name: VersionName, *, best: bool) -> EvalResult:
    return EvalResult(
        evaluation="held-out", name=name, num_tasks=1, num_samples=1, num_unscored=0, metrics={}, generations=None,
        best=best,
    )  # fmt: skip
