"""The choice of the next evaluation: requested ones, one every N versions, and the final one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rftstream.algorithms.reward_changes import by_newest_scorer
from rftstream.clock import Clock
from rftstream.config.loader import sampling_for
from rftstream.config.sections import EvaluationSection, RunConfig
from rftstream.contracts.control import Request, RequestKind, RunFinished
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import EvalResult, VersionName, WeightsAnnounced
from rftstream.data.tasksets.base import Taskset
from rftstream.errors import WeightsError, WeightsGone
from rftstream.models.rendering import Renderer
from rftstream.roles.explorer.weights_update import RETRY_S
from rftstream.service.role import FOREVER, Received
from rftstream.weights.follower import WeightsFollower

LONGEST_RETRY_S = 60.0
"""Longest pause between two tries to read the weights of a version. The first is RETRY_S, and each is twice as long."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A set of problems with the sampling settings."""

    name: str
    section: EvaluationSection
    taskset: Taskset
    sampling: Sampling
    renderer: Renderer | None = None
    """The renderer, if the set has its own chat template."""

    @property
    def num_tasks(self) -> int:
        """Number of problems that are evaluated."""
        return min(len(self.taskset), self.section.num_tasks or len(self.taskset))


def build_evaluation(
    name: str, section: EvaluationSection, taskset: Taskset, config: RunConfig, renderer: Renderer | None = None
) -> Evaluation:
    """Return the evaluation of a section of the run file, with its sampling resolved."""
    sampling = sampling_for(config, section.sampling, where=f"evaluations.{name}.sampling")
    return Evaluation(name, section, taskset, sampling, renderer)


@dataclass(frozen=True, slots=True)
class DueEvaluation:
    """An evaluation of a version that is still to be made."""

    evaluation: Evaluation
    announced: WeightsAnnounced
    """Announcement of the version."""
    request_id: str | None = None
    """The request that it answers; None if the schedule made it due."""


class EvalResults:
    """Results by evaluation and version. Its owner calls `note` for every record of `evals`, in log order, and `find`
    at any time."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[EvalResult]] = {}

    def note(self, result: EvalResult) -> None:
        """Add the next record."""
        self._found.setdefault((result.evaluation, result.name.version), []).append(result)

    def find(self, evaluation: str, name: VersionName, follower: WeightsFollower) -> EvalResult | None:
        """Return the newest result in force of this version, or None.

        A result of an older trainer counts if the newer trainer began with the same state. `follower` must have
        received the announcements."""
        known = self._found.get((evaluation, name.version), ())
        return next(
            (result for result in reversed(known) if result.name == name or follower.find(result.name) is not None),
            None,
        )


@dataclass(eq=False)
class DueEvaluations:
    """The evaluations that are still to be made. The evaluator's step makes it at each recovery and calls `absorb` for
    each record that it reads. Whenever the step is free, it asks `next`. It calls `note` once the result is on the log,
    or `failed` if the weights cannot be read.

    `follower` knows which versions are in force. `only` has the ids of the requests to answer; nothing else is due
    then. With None all evaluations are made."""

    evaluations: Mapping[str, Evaluation]
    follower: WeightsFollower
    clock: Clock
    only: Collection[str] | None
    _results: EvalResults = field(default_factory=EvalResults, init=False)
    _answered: set[str] = field(default_factory=set, init=False)
    """Requests with a result, as request/evaluation."""
    _requests: dict[str, Request] = field(default_factory=dict, init=False)
    _made: dict[str, list[EvalResult]] = field(default_factory=dict, init=False)
    """Evaluation -> its results, in the order of the log."""
    _finished: RunFinished | None = field(default=None, init=False)
    """The record of the run's end; None before."""
    _skipped: set[tuple[str, VersionName]] = field(default_factory=set, init=False)
    """Evaluations and versions that cannot be made, because the weights are gone or damaged."""
    _retries: dict[tuple[str, VersionName], tuple[float, float]] = field(default_factory=dict, init=False)
    """Evaluations and versions whose weights could not be read -> when they are tried again, and the pause before."""

    def answer_only(self, request_ids: Collection[str]) -> None:
        """Restrict the evaluations to these requests."""
        self.only = request_ids

    def absorb(self, received: Received) -> None:
        """Apply a record of `weights`, `evals` or `control`."""
        match received.message:
            case WeightsAnnounced() as announced:
                self.follower.announced(announced)
            case EvalResult() as result:
                self.note(result)
            case RunFinished() as finished:
                self._finished = finished
            case Request(kind=RequestKind.evaluate) as request:
                self._requests[request.request_id] = request
            case None if received.record.key == b"finished":
                self._finished = None

    def note(self, result: EvalResult) -> None:
        """Add a result that is on the log."""
        self._results.note(result)
        if result.request_id:
            self._answered.add(f"{result.request_id}/{result.evaluation}")
        self._made.setdefault(result.evaluation, []).append(result)

    def failed(self, due: DueEvaluation, error: WeightsError) -> float | None:
        """Note that the weights could not be read. Return the seconds until this evaluation is due again; None if it is
        left out, since the weights are gone for good, or the run is finished and waits for it."""
        key = due.evaluation.name, due.announced.name
        if isinstance(error, WeightsGone) or not error.retriable or self._finished is not None:
            self._skipped.add(key)
            return None
        _, before_s = self._retries.get(key, (0.0, 0.0))
        pause_s = min(LONGEST_RETRY_S, 2 * before_s or RETRY_S)
        self._retries[key] = self.clock.now() + pause_s, pause_s
        return pause_s

    def retry_in_s(self) -> float:
        """Return the seconds until an evaluation is tried again, which `next` does not return before."""
        now = self.clock.now()
        return min((at - now for at, _ in self._retries.values() if at > now), default=FOREVER)

    def _is_postponed(self, evaluation: Evaluation, name: VersionName) -> bool:
        """Whether it is tried again later. A finished run waits for no later time."""
        retry_at, _ = self._retries.get((evaluation.name, name), (0.0, 0.0))
        return self._finished is None and retry_at > self.clock.now()

    def is_best(self, result: EvalResult) -> bool:
        """Whether the mean of a new result is better than all earlier ones by the same scorer."""
        compared = by_newest_scorer([*self._made.get(result.evaluation, ()), result])
        means = [one.metrics.get("mean", -math.inf) for one in compared if one is not result]
        return result.metrics.get("mean", -math.inf) > max(means, default=-math.inf)

    def is_all_done(self) -> bool:
        """Whether the run is finished and no evaluation is due."""
        newest = self.follower.newest()
        reached = self._finished is not None and newest is not None and newest.name == self._finished.name
        return reached and self.next() is None

    def next(self) -> DueEvaluation | None:
        """Return the next evaluation to make: first requests, then versions from the oldest on."""
        if (requested := self._requested()) is not None or self.only is not None:
            return requested
        for announced in self.follower.in_force():
            for evaluation in self.evaluations.values():
                is_last = self._finished is not None and announced.name == self._finished.name
                if announced.name.version % evaluation.section.every and not is_last:
                    continue
                if not self._has(evaluation, announced.name) and not self._is_postponed(evaluation, announced.name):
                    return DueEvaluation(evaluation, announced)
        return None

    def _has(self, evaluation: Evaluation, name: VersionName) -> bool:
        """Whether the evaluation of this version has a result, or was skipped because the weights are gone."""
        skipped = (evaluation.name, name) in self._skipped
        return skipped or self._results.find(evaluation.name, name, self.follower) is not None

    def _requested(self) -> DueEvaluation | None:
        """Return the next requested evaluation."""
        for request in self._requests.values():
            wanted = [
                evaluation
                for evaluation in self.evaluations.values()
                if request.arguments.get("evaluation") in (None, evaluation.name)
                and f"{request.request_id}/{evaluation.name}" not in self._answered
            ]
            not_ours = self.only is not None and request.request_id not in self.only
            if not wanted or not_ours or request.expires_at < self.clock.now():
                continue
            announced = self._announced(request.arguments.get("version"))
            if announced is None:
                continue
            for evaluation in wanted:
                name = announced.name
                again = bool(request.arguments.get("again")) and (evaluation.name, name) not in self._skipped
                if (again or not self._has(evaluation, name)) and not self._is_postponed(evaluation, name):
                    return DueEvaluation(evaluation, announced, request.request_id)
        return None

    def _announced(self, version: object) -> WeightsAnnounced | None:
        """Return the announcement in force of this version, or of the newest version if `version` is None."""
        if version is None:
            return self.follower.newest()
        return next((found for found in self.follower.in_force() if found.name.version == version), None)
