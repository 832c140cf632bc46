"""The trainer's view of versions: which are in force, and whose weights are still needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from rftstream.algorithms.reward_changes import by_newest_scorer
from rftstream.config.sections import EvaluationSection
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.summaries import StepsSummary, WeightsSummary
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced
from rftstream.service.records.summaries import begin_with_summary, says_all
from rftstream.service.role import Log
from rftstream.weights.lineage import Lineage
from rftstream.weights.retention import to_delete
from rftstream.weights.stores.store import ObjectStore


class Versions:
    """The versions in force, and those of them that are still needed. The trainer's step makes it at each recovery, and
    passes every record of `steps`, `weights` and `evals` to it, in log order. VersionPublisher asks `to_delete` for
    each version. Checkpoints asks about checkpoints."""

    def __init__(self, evaluations: Mapping[str, EvaluationSection], keep: int) -> None:
        self._evaluations = evaluations
        self._keep = keep
        self._lineage = Lineage()
        self._recorded: dict[int, tuple[int, int]] = {}
        """Trainer epoch -> its first and its newest version."""
        self._newest: list[VersionName] = []
        """Announced versions in force, from the oldest kept anchor on."""
        self._parents: dict[VersionName, VersionName] = {}
        """Version that is only a delta -> its parent, as long as the version exists."""
        self._first: VersionName | None = None
        """The first version 0 that was announced."""
        self._due: set[tuple[str, VersionName]] = set()
        """Evaluations that are due and have no result."""
        self._evaluated: dict[tuple[str, int], list[VersionName]] = {}
        self._best: dict[str, VersionName] = {}
        self._results: dict[str, dict[int, EvalResult]] = {}
        """Evaluation -> version -> its newest result that has a mean."""
        self._gone: set[VersionName] = set()
        """Versions whose objects were given up and may still exist."""
        self._begun_with: set[VersionName] | None = None
        """The versions up to the end of a summary whose objects were not given up; None without a summary."""

    @property
    def any_recorded(self) -> bool:
        """Whether `steps` has a trained version: version 0 alone teaches nothing again."""
        return any(newest for _, newest in self._recorded.values())

    @property
    def newest(self) -> int:
        """The newest version in force according to `steps`."""
        return self._recorded[max(self._recorded)][1] if self._recorded else 0

    def record(self, step: StepRecord) -> None:
        """Apply a step. A step of a replaced trainer does not count."""
        if self._lineage.take(step.name, resumed=step.resumed):
            self._note(step.name)

    def begin(self, log_: Log, *, all_steps: bool) -> dict[TopicPartition, int]:
        """Begin after the summaries of `steps` (unless `all_steps` are to be read) and `weights`. Return the positions
        from which the two topics are read."""
        steps, weights = begin_with_summary(log_, "steps", whole=all_steps), begin_with_summary(log_, "weights")
        if weights.summary is not None and not says_all(weights.summary):
            weights = begin_with_summary(log_, "weights", whole=True)
        if steps.summary is not None and steps.summary.steps is not None:
            self._begin_steps(steps.summary.steps)
        if weights.summary is not None and weights.summary.weights is not None:
            self._begin_announcements(weights.summary.weights)
        return {**steps.positions, **weights.positions}

    def _begin_steps(self, summary: StepsSummary) -> None:
        for run in summary.versions:
            self._lineage.take(VersionName(trainer_epoch=run.trainer_epoch, version=run.first), resumed=run.resumed)
            self._recorded[run.trainer_epoch] = run.first, run.last

    def _begin_announcements(self, summary: WeightsSummary) -> None:
        self._begun_with = set()
        for run in summary.versions:
            for kept in run.kept or ():
                name = VersionName(trainer_epoch=run.trainer_epoch, version=kept.version)
                self._begun_with.add(name)
                self._announce(name, kept.parent)

    def _note(self, name: VersionName) -> None:
        first, _ = self._recorded.get(name.trainer_epoch, (name.version, 0))
        self._recorded[name.trainer_epoch] = first, name.version

    def announce(self, announced: WeightsAnnounced) -> None:
        """Apply an announcement, with the versions that are gone and the evaluations that are due."""
        self._gone |= set(announced.gone)
        for gone in announced.gone:
            self._parents.pop(gone, None)
        self._announce(announced.name, announced.parent)

    def _announce(self, name: VersionName, parent: VersionName | None) -> None:
        if parent is not None:  # also out of force: the best by an evaluation may be of another lineage
            self._parents[name] = parent
        if name.version == 0 and self._first is None:
            self._first = name
        if not self._lineage.in_force(name):
            return
        if self._newest and name.trainer_epoch != self._newest[-1].trainer_epoch:
            self._newest = list(filter(self._lineage.in_force, self._newest))
            self._due = {(evaluation, due) for evaluation, due in self._due if self._lineage.in_force(due)}
        self._newest.append(name)
        anchors = [place for place, version in enumerate(self._newest) if version not in self._parents]
        del self._newest[: anchors[-self._keep] if len(anchors) >= self._keep else 0]
        self._due |= {
            (evaluation, name)
            for evaluation, section in self._evaluations.items()
            if name.version % section.every == 0 and not self._has_result(evaluation, name)
        }

    def _was_given_up(self, name: VersionName) -> bool:
        """Whether an announcement listed the object of the version as gone."""
        begun = self._begun_with
        is_old = bool(begun) and name <= max(begun or ())
        return name in self._gone or (is_old and name not in (begun or ()))

    def evaluate(self, result: EvalResult) -> None:
        """Apply the result of an evaluation."""
        self._evaluated.setdefault((result.evaluation, result.name.version), []).append(result.name)
        self._due = {due for due in self._due if not self._has_result(*due)}
        if not math.isnan(result.metrics.get("mean", math.nan)):
            self._results.setdefault(result.evaluation, {})[result.name.version] = result
        if result.best:
            self._best[result.evaluation] = result.name

    def best_or_due(self, evaluation: str, names: Collection[VersionName]) -> set[VersionName]:
        """Return the best of these versions by an evaluation (the newest of several equal ones), and the versions that
        it has not evaluated yet. Only results by its newest scorer compare."""
        due = {name.version for judge, name in self._due if judge == evaluation}
        results = by_newest_scorer([*self._results.get(evaluation, {}).values()])
        found = {one.name.version: one.metrics["mean"] for one in results if self._lineage.in_force(one.name)}
        means = {name: (found[name.version], name.version) for name in names if name.version in found}
        best = {max(means, key=means.__getitem__)} if means else set()
        return best | {name for name in names if name.version in due}

    def in_force(self, name: VersionName) -> bool:
        """Whether a checkpoint of this version counts. Version 0 always does, since every trainer begins with it."""
        first, newest = self._recorded.get(name.trainer_epoch, (1, 0))
        return (first <= name.version <= newest or name.version == 0) and self._lineage.in_force(name)

    def to_delete(
        self,
        store: ObjectStore,
        name: VersionName,
        kept_checkpoints: Collection[VersionName],
        parent: VersionName | None,
    ) -> tuple[VersionName, ...]:
        """Return the versions whose objects are no longer needed once `name` is announced. Versions that were given up
        before stay so. `parent` is the version to which `name` is a delta, if it is one."""

        def stays(known: VersionName) -> bool:
            passed = known.trainer_epoch < name.trainer_epoch and known.version > name.version
            return self._lineage.in_force(known) and not passed and not self._was_given_up(known)

        gone = to_delete(
            store.list("versions/"),
            in_force=[*filter(stays, self._newest), name],
            newest_keep=self._keep,
            parents=self._parents if parent is None else {**self._parents, name: parent},
            kept_checkpoints=filter(stays, kept_checkpoints),
            due_evaluations=[due for _, due in self._due if stays(due)],
            best=[best for best in self._best.values() if not self._was_given_up(best)],
            first=None if self._first is None or self._was_given_up(self._first) else self._first,
        )
        self._gone.intersection_update(gone)  # missing objects need not be remembered
        return tuple(gone)

    def _has_result(self, evaluation: str, name: VersionName) -> bool:
        """Whether there is a result, by the evaluator's rule. A result of an older trainer counts if the newer one
        began with the same state."""
        return any(map(self._lineage.in_force, self._evaluated.get((evaluation, name.version), ())))
