"""The evaluator: weights -> evals. It makes the evaluations requested on `control`, those of version 0, of every N-th
version, and the final one.

Its state is `evals`: an evaluation with a result there is done, and is repeated only on request. All versions are
evaluated with the same seeds, so that two versions differ by their weights alone."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.config.sections import RunConfig, name_of_part
from rftstream.contracts.control import Claim
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import Problem, RolloutIds, Task
from rftstream.contracts.versions import EvalResult
from rftstream.core.samples import summarise_samples
from rftstream.errors import WeightsError
from rftstream.models.rendering import Renderer, joined, pieces_of_turns
from rftstream.policies.base import LOOK_S, Policy
from rftstream.policies.colocated import EngineShare
from rftstream.rewards.base import Scorer, ScoreReply, ScoreRequest
from rftstream.roles.evaluator import EVALUATOR
from rftstream.roles.evaluator.agents import AgentSamples
from rftstream.roles.evaluator.due import DueEvaluation, DueEvaluations, Evaluation
from rftstream.roles.explorer.attempt import Attempt
from rftstream.roles.explorer.fit_to_record import rollout_of
from rftstream.roles.explorer.turn_loop import TurnLoop
from rftstream.roles.verifier.step import reward_input
from rftstream.service.role import Log, Publish, Received, SingleStep, SingleTransaction
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sample:
    problem: Problem
    index: int
    attempt: Attempt | None = None
    reply: ScoreReply | None = None


@dataclass(slots=True)
class _Running:
    due: DueEvaluation
    waiting: deque[str] = field(default_factory=deque)
    samples: dict[str, _Sample] = field(default_factory=dict)
    unscored: deque[Attempt] = field(default_factory=deque)
    """Samples that the scorer has not got yet."""
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


class EvaluatorStep(SingleStep):
    """The step of the evaluator. It samples tasks with announced weights, one evaluation of one version at a time.
    `workers/evaluator.py` makes it, and SingleService calls it in this order:

    - `recover` reads `control` and `evals` (the results so far), and lets `weights` be read from the beginning.
    - `absorb` applies announcements, results and requests.
    - `advance` begins the next due evaluation, samples and scores a slice of it, and returns its result when all
      samples are scored. An interrupted evaluation starts over.
    - After the commit the result is noted, and the next evaluation may begin.
    - `done` is true when the run is finished and its last version has all its results.

    `answer_only`, called before `recover`, restricts it to some requests."""

    outlives_the_run = True

    def __init__(
        self,
        *,
        config: RunConfig,
        evaluations: Mapping[str, Evaluation],
        policy: Policy,
        loop: TurnLoop,
        agents: AgentSamples | None = None,
        scorer: Scorer,
        follower: WeightsFollower,
        store: ObjectStore,
        clock: Clock,
        share: EngineShare | None = None,
    ) -> None:
        """`agents` makes the samples of agents, if an evaluation has such samples. `share` is the evaluator's part of
        the device, if the policy shares it with a trainer."""
        self._share = share
        self._config = config
        self._evaluations = evaluations
        self._policy = policy
        self._loop = loop
        self._agents = agents
        self._scorer = scorer
        self._make_follower = follower.fresh
        self._follower = follower
        self._store = store
        self._clock = clock
        self._only: Collection[str] | None = None
        self._reset()

    def _reset(self) -> None:
        """Forget all state from the log, which is read again."""
        self._follower = self._make_follower()
        self._due = DueEvaluations(self._evaluations, self._follower, self._clock, self._only)
        self._running: _Running | None = None
        """The running evaluation; None between two evaluations."""
        self._epoch = 0

    def answer_only(self, request_ids: Collection[str]) -> None:
        """Make only the evaluations of these requests."""
        self._only = request_ids
        self._due.answer_only(request_ids)

    @property
    def done(self) -> bool:
        """Whether the run is finished, and its last version has all its results."""
        return self._running is None and self._due.is_all_done()

    # ------------------------------------------------------------------------------------------ reading

    def recover(self, log_: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        """Read requests and results. Announcements are read from the beginning afterwards."""
        if self._running is not None:
            for key in self._running.samples:
                self._loop.abort(key)
            if self._agents is not None:
                self._agents.abort_all()
        self._reset()
        self._epoch = claim.epoch
        for topic in ("control", "evals"):
            for received in log_.messages(topic):
                self.absorb(received)
        return log_.transport.admin.begin_offsets("weights")

    def absorb(self, received: Received) -> None:
        """Apply an announcement, a result, a request or the end of the run."""
        self._due.absorb(received)

    # ------------------------------------------------------------------------------------------ working

    def advance(self) -> SingleTransaction | None:
        """Begin the next due evaluation, or continue the running one. Return its result when it is complete."""
        is_awake = self._share is None or self._share.poll()
        if self._running is None:
            if not is_awake:
                return None
            due = self._due.next()
            if due is None or not self._load(due):
                return None
            self._running = self._begin(due)
        running = self._running
        self._work(running)
        if not running.finished:
            return None
        result = self._result(running)
        return SingleTransaction((Publish("evals", 0, result),), then=partial(self._end_with, result))

    def _load(self, due: DueEvaluation) -> bool:
        if self._policy.version == due.announced.name:
            return True
        began = time.perf_counter()
        try:
            self._policy.load(self._follower.fetch(due.announced), due.announced.name)
        except WeightsError as error:
            if self._policy.version is None and not error.retriable:
                raise
            retry_s = self._due.failed(due, error)
            outcome = "left out" if retry_s is None else f"tried again in {retry_s:g} s"
            log.warning("%s; evaluation %s of it is %s", error, due.evaluation.name, outcome)
            return False
        metrics.WEIGHTS_FETCH_SECONDS.labels(EVALUATOR.name).observe(time.perf_counter() - began)
        return True

    def _begin(self, due: DueEvaluation) -> _Running:
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
        while running.waiting and self._num_open < self._config.evaluator.max_concurrent:
            self._start(running, running.waiting.popleft())
        for attempt in [*self._loop.step(), *(() if self._agents is None else self._agents.step())]:
            running.samples[attempt.key].attempt = attempt
            running.unscored.append(attempt)
        while running.unscored and self._scorer.grouped is not None:
            self._score(running, running.unscored.popleft(), self._scorer.grouped)
        for reply in self._scorer.poll(0.0 if self._num_open else 0.02):
            if reply.request_id in running.samples:
                running.samples[reply.request_id].reply = reply

    def _score(self, running: _Running, attempt: Attempt, grouped: Collection[str]) -> None:
        """Give a sample to the scorer. If the reward compares siblings, the last sample of a problem brings all."""
        evaluation, index = running.due.evaluation, running.samples[attempt.key].index
        taskset = f"eval:{evaluation.name}"
        numbers = range(evaluation.section.n) if taskset in grouped else (int(attempt.key.partition("#")[2]),)
        attempts = {number: running.samples[f"{index}#{number}"].attempt for number in numbers}
        if None in attempts.values():
            return
        absent: dict[int, str] = {}
        requests: list[ScoreRequest] = []
        for number, one in attempts.items():
            assert one is not None
            if not _scorable(one):
                absent[number] = str(one.status)
                continue
            sample = running.samples[one.key]
            ids = _ids(evaluation, sample, one)
            rollout = rollout_of(one, ids, sample.problem, evaluation.sampling, self._clock.now())
            requests.append(
                ScoreRequest(
                    request_id=one.key,
                    taskset=taskset,
                    item=reward_input(rollout),
                    rollout_id=f"{evaluation.name} {one.key}",
                    group_id=str(index),
                    sibling=number,
                )
            )
        if requests and taskset in grouped:
            self._scorer.submit_group(requests, absent)
        elif requests:
            self._scorer.submit(requests[0])

    @property
    def _num_open(self) -> int:
        """Number of samples that are being made."""
        return self._loop.num_open + (0 if self._agents is None else self._agents.num_open)

    def _start(self, running: _Running, key: str) -> None:
        """Start a sample, either with an agent or with the turn loop and an environment."""
        evaluation, sample = running.due.evaluation, running.samples[key]
        seed = derive_seed(self._config.run.seed, "evaluation", evaluation.name, key)
        where = f"evaluations.{evaluation.name}.environment"
        environment = name_of_part(evaluation.section.environment, where)
        if self._agents is not None and self._agents.takes(environment):
            name = running.due.announced.name
            which = f"eval/{evaluation.name}/{name.trainer_epoch}-{name.version}/{self._epoch}"
            task = Task(
                ids=_agent_ids(which, evaluation, sample, key),
                problem=sample.problem,
                sampling=evaluation.sampling,
                seed=seed,
                environment=environment,
            )
            self._agents.start(key, task, evaluation.renderer, which)
            return
        self._loop.start(
            key,
            problem=sample.problem,
            sampling=evaluation.sampling,
            seed=seed,
            environment=environment,
            where=where,
            truncate=True,
            renderer=evaluation.renderer,
            name=f"{evaluation.name} {key}",
            group=f"{evaluation.name} {sample.index}",
        )

    def _result(self, running: _Running) -> EvalResult:
        due, section = running.due, running.due.evaluation.section
        rewards: dict[int, list[float]] = {}
        extra: dict[str, list[float]] = {}
        for sample in running.samples.values():
            if sample.reply is not None and sample.reply.score is not None:
                score, measured = sample.reply.score, {} if sample.attempt is None else sample.attempt.metrics
                rewards.setdefault(sample.index, []).append(score.reward)
                for name, value in {**measured, **score.parts, **score.metrics}.items():
                    extra.setdefault(f"metric/{name}", []).append(value)
                for role, reward in score.roles.items():
                    if reward is not None:
                        extra.setdefault(f"role/{role}", []).append(reward)
            if (
                sample.attempt is not None
                and (posted := sample.attempt.posted) is not None
                and posted.reward is not None
            ):
                extra.setdefault("environment_reward", []).append(posted.reward)
        attempts = [sample.attempt for sample in running.samples.values() if sample.attempt is not None]
        values = {name: sum(column) / len(column) for name, column in extra.items()}
        values = metrics.fit_names(values, {name: len(column) for name, column in extra.items()})
        values |= summarise_samples(rewards.values(), section.k, pass_reward=section.pass_reward)
        if attempts:
            values["length_mean"] = sum(attempt.num_tokens for attempt in attempts) / len(attempts)
            values["truncated_share"] = sum(attempt.status is RolloutStatus.truncated for attempt in attempts) / len(
                attempts
            )
        num_unscored = len(running.samples) - sum(map(len, rewards.values()))
        values["unscored_share"] = num_unscored / max(1, len(running.samples))
        if section.canary and "mean" in values:
            values["canary"] = values["mean"]
        values["seconds"] = self._clock.now() - running.started_at
        evaluation = due.evaluation.name
        for name, value in values.items():
            metrics.set_named(metrics.EVALUATION, value, evaluation, name)
        replies = [sample.reply for sample in running.samples.values() if sample.reply is not None]
        replies.sort(key=lambda reply: reply.score is None)  # a sample without a reward does not say who gives it
        scorer, scorer_version = next(((one.scorer, one.scorer_version) for one in replies if one.scorer), ("", ""))
        result = EvalResult(
            evaluation=evaluation,
            name=due.announced.name,
            num_tasks=due.evaluation.num_tasks,
            num_samples=section.n,
            num_unscored=num_unscored,
            metrics=values,
            generations=self._store_generations(running),
            request_id=due.request_id,
            evaluated_at=self._clock.now(),
            scorer=scorer,
            scorer_version=scorer_version,
        )
        return replace(result, best=not section.canary and self._due.is_best(result))

    def _store_generations(self, running: _Running) -> str:
        """Store every completion with its reward, one JSON object a line. The claim's epoch in the name distinguishes a
        repeated evaluation."""
        renderer = running.due.evaluation.renderer or self._loop.renderer
        lines = [
            generation_line(key, sample.problem, sample.attempt, sample.reply, renderer)
            for key, sample in running.samples.items()
        ]
        due = running.due
        target = f"evals/{due.evaluation.name}/{due.announced.name.stem}-{self._epoch}-{due.request_id or 'due'}.jsonl"
        self._store.put(target, ("\n".join(lines) + "\n").encode())
        return target

    def _end_with(self, result: EvalResult) -> None:
        """Note the result, which is on the log, so that the next evaluation may begin."""
        self._due.note(result)
        self._running = None

    # ------------------------------------------------------------------------------------------ the rest

    def idle_s(self) -> float:
        """Return 0 while there is something to sample or to score."""
        running = self._running
        if self._share is not None and (running is None or not self._share.is_awake):
            return self._share.idle_s
        if running is None:
            return 0.0 if self._due.next() is not None else self._due.retry_in_s()
        num_open = self._num_open
        may_start = running.waiting and num_open < self._config.evaluator.max_concurrent
        waits = num_open and not may_start and not self._scorer.num_active
        until_agents = LOOK_S if self._agents is None else self._agents.idle_s()
        return min(self._policy.idle_s(), self._loop.idle_s(), until_agents, LOOK_S) if waits else 0.0

    def health(self) -> Mapping[str, object]:
        """Return the running evaluation and its progress."""
        running, agents = self._running, self._agents
        gateway = {} if agents is None else {"gateway": agents.gateway_url, "agents_wanted": agents.num_free}
        if running is None:
            return {"evaluating": None, **gateway}
        return {
            **gateway,
            "evaluating": running.due.announced.name.version,
            "evaluation": running.due.evaluation.name,
            "samples_done": running.num_done,
            "samples": len(running.samples),
        }

    def close(self) -> None:
        """Close the environments, the policy and the scorer."""
        if self._agents is not None:
            self._agents.close()
        self._loop.close()
        self._policy.close()
        self._scorer.close()


def _scorable(attempt: Attempt) -> bool:
    return attempt.status in (RolloutStatus.completed, RolloutStatus.truncated)


def _ids(evaluation: Evaluation, sample: _Sample, attempt: Attempt) -> RolloutIds:
    return replace(RolloutIds.of(str(sample.index), taskset=evaluation.name), rollout_id=attempt.key)


def _agent_ids(which: str, evaluation: Evaluation, sample: _Sample, key: str) -> RolloutIds:
    """Return ids that no other evaluation has, and no other attempt at this evaluation. So a late request of an agent
    matches no sample."""
    group_id, sibling = f"{which}/{sample.index}", int(key.partition("#")[2])
    return RolloutIds.of(group_id, taskset=evaluation.name, sibling=sibling, group_size=evaluation.section.n)


# ------------------------------------------------------------------------------------------
#
# The stored completions of an evaluation: one JSON object a line, in the object store.


def generation_line(
    key: str, problem: Problem, attempt: Attempt | None, reply: ScoreReply | None, renderer: Renderer
) -> str:
    """Return one sample as a JSON line. `shown` is a turn's text with its sampled special tokens, `posted` the reward
    from the environment."""
    score = reply.score if reply is not None else None
    if reply is not None:
        reason: Any = reply.reason
    else:
        reason = attempt.error if attempt is not None else None
    turns = attempt.turns if attempt is not None else ()
    shown = pieces_of_turns(renderer, turns, attempt.segments if attempt is not None else ())
    return json.dumps(
        {
            "sample": key,
            "prompt": [{"role": message.role, "content": message.content} for message in problem.messages],
            "answer": problem.answer,
            "completion": [
                {"role": turn.role, "content": turn.content, "shown": joined(pieces)}
                | ({} if turn.reward is None else {"reward": turn.reward})
                for turn, pieces in zip(turns, shown, strict=True)
            ],
            "reward": score.reward if score is not None else None,
            "posted": None if attempt is None or attempt.posted is None else attempt.posted.reward,
            "reason": reason,
            **({"detail": score.detail} if score is not None and score.detail else {}),
            "num_tokens": attempt.num_tokens if attempt is not None else 0,
        },
        ensure_ascii=False,
    )
