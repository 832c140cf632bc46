"""The evaluator: weights -> evals. What was asked for on `control`, version 0, every N versions, and the final one.

Its state is `evals`: what has a result there is done, and done again only if that was asked for. The same seeds are
used for every version, so that two versions differ by their weights alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.config.loader import sampling_for
from rftstream.config.sections import EvaluationSection, RunConfig
from rftstream.contracts.control import Claim, Request, RequestKind, RunFinished
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import Problem, RolloutIds, Sampling
from rftstream.contracts.versions import EvalResult, VersionName, WeightsAnnounced
from rftstream.core.samples import summarise_samples
from rftstream.data.tasksets.base import Taskset
from rftstream.errors import WeightsError
from rftstream.models.rendering import Renderer
from rftstream.policies.base import LOOK_S, Policy
from rftstream.rewards.base import Scorer, ScoreReply, ScoreRequest
from rftstream.roles.evaluator import EVALUATOR
from rftstream.roles.evaluator.generations import generation_line
from rftstream.roles.explorer.turn_loop import Attempt, TurnLoop
from rftstream.roles.verifier.step import reward_input
from rftstream.service.role import FOREVER, Log, Publish, Received, SingleTransaction
from rftstream.service.step_defaults import SingleStepDefaults
from rftstream.weights.evaluated import EvalResults
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.store import ObjectStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out set and how it is asked."""

    name: str
    section: EvaluationSection
    taskset: Taskset
    sampling: Sampling
    renderer: Renderer | None = None
    """With a chat template of its own."""

    @property
    def num_tasks(self) -> int:
        return min(len(self.taskset), self.section.num_tasks or len(self.taskset))


@dataclass(frozen=True, slots=True)
class _Due:
    evaluation: Evaluation
    announced: WeightsAnnounced
    request_id: str | None = None


@dataclass(slots=True)
class _Sample:
    problem: Problem
    index: int
    attempt: Attempt | None = None
    reply: ScoreReply | None = None


@dataclass(slots=True)
class _Running:
    due: _Due
    waiting: deque[str] = field(default_factory=deque)
    samples: dict[str, _Sample] = field(default_factory=dict)
    started_at: float = 0.0

    @property
    def num_done(self) -> int:
        return sum(
            sample.reply is not None or (sample.attempt is not None and not _scorable(sample.attempt))
            for sample in self.samples.values()
        )

    @property
    def finished(self) -> bool:
        return self.num_done == len(self.samples)


class EvaluatorStep(SingleStepDefaults):
    """The step of the evaluator: it samples held-out tasks with announced weights, one evaluation of one version at a
    time. `workers/evaluator.py` makes it; SingleService calls it, in this order:

    - `recover` reads `control` and `evals` (what has a result), and has `weights` read from the beginning.
    - `absorb` takes announcements, results and requests.
    - `advance` begins what is due next, samples and scores a slice of it, and returns its result when all is scored.
      An evaluation that was interrupted is begun again.
    - `committed` notes the result, and the next evaluation may begin.
    - `done` is true when the run is finished and its last version has all its results.

    `answer_only`, called before `recover`, restricts it to some requests.
    """

    outlives_the_run = True

    def __init__(
        self,
        *,
        config: RunConfig,
        evaluations: Mapping[str, Evaluation],
        policy: Policy,
        loop: TurnLoop,
        scorer: Scorer,
        follower: WeightsFollower,
        store: ObjectStore,
        clock: Clock,
    ) -> None:
        self._config = config
        self._evaluations = evaluations
        self._policy = policy
        self._loop = loop
        self._scorer = scorer
        self._make_follower = follower.fresh
        self._follower = follower
        self._store = store
        self._clock = clock
        self._only: Collection[str] | None = None
        self._reset()

    def _reset(self) -> None:
        self._follower = self._make_follower()
        self._results = EvalResults()
        self._answered: set[str] = set()
        self._requests: dict[str, Request] = {}
        self._best: dict[str, float] = {}
        self._finished: RunFinished | None = None
        self._skipped: set[tuple[str, VersionName]] = set()
        """Weights that were gone or damaged: nothing can be said of them."""
        self._running: _Running | None = None
        self._epoch = 0

    def answer_only(self, request_ids: Collection[str]) -> None:
        """Does these requests and nothing that is due by itself."""
        self._only = request_ids

    @property
    def done(self) -> bool:
        if self._finished is None or self._running is not None:
            return False
        newest = self._follower.newest()
        reached = newest is not None and newest.name == self._finished.name
        return reached and self._next_due() is None

    # ------------------------------------------------------------------------------------------ reading

    def recover(self, log_: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        if self._running is not None:
            for key in self._running.samples:
                self._loop.abort(key)
        self._reset()
        self._epoch = claim.epoch
        for topic in ("control", "evals"):
            for received in log_.messages(topic):
                self.absorb(received)
        return log_.transport.admin.begin_offsets("weights")

    def absorb(self, received: Received) -> None:
        match received.message:
            case WeightsAnnounced() as announced:
                self._follower.announced(announced)
            case EvalResult() as result:
                self._note(result)
            case RunFinished() as finished:
                self._finished = finished
            case Request(kind=RequestKind.evaluate) as request:
                self._requests[request.request_id] = request
            case None if received.record.key == b"finished":
                self._finished = None

    def _note(self, result: EvalResult) -> None:
        self._results.note(result)
        if result.request_id:
            self._answered.add(f"{result.request_id}/{result.evaluation}")
        mean = result.metrics.get("mean", -math.inf)
        self._best[result.evaluation] = max(self._best.get(result.evaluation, -math.inf), mean)

    # ------------------------------------------------------------------------------------------ what is due

    def _next_due(self) -> _Due | None:
        if (requested := self._requested()) is not None or self._only is not None:
            return requested
        in_force = self._follower.in_force()
        for announced in in_force:
            for evaluation in self._evaluations.values():
                last = self._finished is not None and announced.name == self._finished.name
                if (announced.name.version % evaluation.section.every == 0 or last) and not self._has(
                    evaluation, announced.name
                ):
                    return _Due(evaluation, announced)
        return None

    def _has(self, evaluation: Evaluation, name: VersionName) -> bool:
        """A result, or nothing to get one from."""
        skipped = (evaluation.name, name) in self._skipped
        return skipped or self._results.find(evaluation.name, name, self._follower) is not None

    def _requested(self) -> _Due | None:
        for request in self._requests.values():
            wanted = [
                one
                for one in self._evaluations.values()
                if request.arguments.get("evaluation") in (None, one.name)
                and f"{request.request_id}/{one.name}" not in self._answered
            ]
            not_ours = self._only is not None and request.request_id not in self._only
            if not wanted or not_ours or request.expires_at < self._clock.now():
                continue
            announced = self._announced(request.arguments.get("version"))
            if announced is None:
                continue
            for evaluation in wanted:
                name = announced.name
                again = bool(request.arguments.get("again")) and (evaluation.name, name) not in self._skipped
                if again or not self._has(evaluation, name):
                    return _Due(evaluation, announced, request.request_id)
        return None

    def _announced(self, version: object) -> WeightsAnnounced | None:
        """The one in force of this number, the newest of None."""
        if version is None:
            return self._follower.newest()
        return next((one for one in self._follower.in_force() if one.name.version == version), None)

    # ------------------------------------------------------------------------------------------ working

    def advance(self) -> SingleTransaction | None:
        if self._running is None:
            due = self._next_due()
            if due is None or not self._load(due):
                return None
            self._running = self._begin(due)
        running = self._running
        self._work(running)
        if not running.finished:
            return None
        return SingleTransaction((Publish("evals", 0, self._result(running)),))

    def _load(self, due: _Due) -> bool:
        if self._policy.version == due.announced.name:
            return True
        began = time.perf_counter()
        try:
            self._policy.load(self._follower.fetch(due.announced), due.announced.name)
        except WeightsError as error:
            if self._policy.version is None and not error.retriable:
                raise
            log.warning("%s; evaluation %s of it is left out", error, due.evaluation.name)
            self._skipped.add((due.evaluation.name, due.announced.name))
            return False
        metrics.WEIGHTS_SECONDS.labels(EVALUATOR.name).observe(time.perf_counter() - began)
        return True

    def _begin(self, due: _Due) -> _Running:
        evaluation, running = due.evaluation, _Running(due, started_at=self._clock.now())
        for index in range(evaluation.num_tasks):
            problem = evaluation.taskset.problem(index)
            for number in range(evaluation.section.n):
                key = f"{index}#{number}"
                running.samples[key] = _Sample(problem, index)
                running.waiting.append(key)
        log.info(
            "evaluating %s at version %d: %d samples", evaluation.name, due.announced.name.version, len(running.samples)
        )
        return running

    def _work(self, running: _Running) -> None:
        evaluation = running.due.evaluation
        while running.waiting and self._loop.num_open < self._config.evaluator.max_concurrent:
            key = running.waiting.popleft()
            sample = running.samples[key]
            self._loop.start(
                key,
                problem=sample.problem,
                sampling=evaluation.sampling,
                seed=derive_seed(self._config.run.seed, "evaluation", evaluation.name, key),
                environment=evaluation.section.environment,
                truncate=True,
                renderer=evaluation.renderer,
                name=f"{evaluation.name} {key}",
            )
        for attempt in self._loop.step():
            sample = running.samples[attempt.key]
            sample.attempt = attempt
            if _scorable(attempt):
                rollout = _as_rollout(evaluation, sample, attempt)
                self._scorer.submit(
                    ScoreRequest(
                        request_id=attempt.key,
                        taskset=f"eval:{evaluation.name}",
                        item=reward_input(rollout),
                        rollout_id=f"{evaluation.name} {attempt.key}",
                        group_id=str(sample.index),
                    )
                )
        for reply in self._scorer.poll(0.0 if self._loop.num_open else 0.02):
            if reply.request_id in running.samples:
                running.samples[reply.request_id].reply = reply

    def _result(self, running: _Running) -> EvalResult:
        due, section = running.due, running.due.evaluation.section
        rewards: dict[int, list[float]] = {}
        extra: dict[str, list[float]] = {}
        for sample in running.samples.values():
            if sample.reply is not None and sample.reply.score is not None:
                rewards.setdefault(sample.index, []).append(sample.reply.score.reward)
                for name, value in {**sample.reply.score.parts, **sample.reply.score.metrics}.items():
                    extra.setdefault(f"metric/{name}", []).append(value)
        attempts = [sample.attempt for sample in running.samples.values() if sample.attempt is not None]
        values = {name: sum(column) / len(column) for name, column in extra.items()}
        values |= summarise_samples(rewards.values(), section.k, pass_reward=section.pass_reward)
        if attempts:
            values["length_mean"] = sum(attempt.num_tokens for attempt in attempts) / len(attempts)
            values["truncated_share"] = sum(attempt.status is RolloutStatus.truncated for attempt in attempts) / len(
                attempts
            )
        values["seconds"] = self._clock.now() - running.started_at
        evaluation = due.evaluation.name
        for name, value in values.items():
            metrics.EVALUATION.labels(evaluation, name).set(value)
        return EvalResult(
            evaluation=evaluation,
            name=due.announced.name,
            num_tasks=due.evaluation.num_tasks,
            num_samples=section.n,
            num_unscored=len(running.samples) - sum(map(len, rewards.values())),
            metrics=values,
            generations=self._store_generations(running),
            request_id=due.request_id,
            best=values.get("mean", -math.inf) > self._best.get(evaluation, -math.inf),
            evaluated_at=self._clock.now(),
        )

    def _store_generations(self, running: _Running) -> str:
        """Every completion with its reward, one JSON object a line. The claim's epoch keeps a redone one apart."""
        renderer = running.due.evaluation.renderer or self._loop.renderer
        lines = [
            generation_line(key, sample.problem, sample.attempt, sample.reply, renderer)
            for key, sample in running.samples.items()
        ]
        name = running.due.announced.name
        target = (
            f"evals/{running.due.evaluation.name}/{name.trainer_epoch:06d}-{name.version:08d}"
            f"-{self._epoch}-{running.due.request_id or 'due'}.jsonl"
        )
        self._store.put(target, ("\n".join(lines) + "\n").encode())
        return target

    def committed(self, transaction: SingleTransaction) -> None:
        for output in transaction.outputs:
            if isinstance(output.message, EvalResult):
                self._note(output.message)
                self._running = None

    # ------------------------------------------------------------------------------------------ the rest

    def idle_s(self) -> float:
        running = self._running
        if running is None:
            return 0.0 if self._next_due() is not None else FOREVER
        num_open = self._loop.num_open
        may_start = running.waiting and num_open < self._config.evaluator.max_concurrent
        waits = num_open and not may_start and not self._scorer.num_active
        return min(self._policy.idle_s(), LOOK_S) if waits else 0.0

    def health(self) -> Mapping[str, object]:
        running = self._running
        if running is None:
            return {"evaluating": None}
        return {
            "evaluating": running.due.announced.name.version,
            "evaluation": running.due.evaluation.name,
            "samples_done": running.num_done,
            "samples": len(running.samples),
        }

    def close(self) -> None:
        self._policy.close()
        self._scorer.close()


def build_evaluation(
    name: str, section: EvaluationSection, taskset: Taskset, config: RunConfig, renderer: Renderer | None = None
) -> Evaluation:
    """Return the evaluation of a section of the run file, with its sampling resolved."""
    sampling = sampling_for(config, section.sampling, where=f"evaluations.{name}.sampling")
    return Evaluation(name, section, taskset, sampling, renderer)


def _scorable(attempt: Attempt) -> bool:
    return attempt.status in (RolloutStatus.completed, RolloutStatus.truncated)


def _as_rollout(evaluation: Evaluation, sample: _Sample, attempt: Attempt) -> Rollout:
    ids = RolloutIds(
        rollout_id=attempt.key,
        group_id=str(sample.index),
        taskset=evaluation.name,
        sibling=0,
        group_size=1,
        sequence=0,
        min_version=0,
    )
    return Rollout(
        ids=ids,
        status=attempt.status,
        problem=sample.problem,
        turns=attempt.turns,
        segments=attempt.segments,
        num_tokens=attempt.num_tokens,
        sampling=evaluation.sampling,
    )
