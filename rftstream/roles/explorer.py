"""The explorer: tasks -> rollouts, with the newest weights that the trainer announced.

A task waits while the policy is older than its `min_version`. Weights are taken over between two decoding steps; what
runs goes on with them. After a rollback of the trainer the older version is taken over once nothing is in hand that
needs a newer one, and nothing new is begun before.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from rftstream import codec, metrics
from rftstream.clock import Clock
from rftstream.errors import ContractError, WeightsError
from rftstream.messages import (
    GroupOutcome,
    Problem,
    Rollout,
    RolloutIds,
    RolloutStatus,
    Sampling,
    Task,
    VersionName,
    WeightsAnnounced,
)
from rftstream.policies.base import Policy
from rftstream.rendering import Renderer
from rftstream.roles.turn_loop import Attempt, TurnLoop, oldest_version
from rftstream.runtime.role import FOREVER, Done, Item, Publish, Received
from rftstream.topics import MAX_RECORD_BYTES
from rftstream.transport.base import Record
from rftstream.weights.follower import WeightsFollower

log = logging.getLogger(__name__)

MAX_BODY_BYTES = MAX_RECORD_BYTES - 256 * 1024
"""Of a rollout: the verdict and the headers that come on top must fit as well."""


class ExplorerStep:
    def __init__(
        self,
        *,
        policy: Policy,
        loop: TurnLoop,
        follower: WeightsFollower,
        max_concurrent: int,
        renderers: Mapping[str, Renderer],
        truncate: Collection[str],
        fetch_rollout: Callable[[str], Rollout | None],
        clock: Clock,
    ) -> None:
        """`fetch_rollout`: the rollout that stands at a place of the log, if there is one."""
        self._policy = policy
        self._loop = loop
        self._follower = follower
        self._max_concurrent = max_concurrent
        self._renderers = renderers
        """Of tasksets with a chat template of their own."""
        self._truncate = frozenset(truncate)
        """Tasksets whose long prompts are cut."""
        self._fetch_rollout = fetch_rollout
        self._clock = clock
        self._waiting: deque[Item] = deque()
        self._active: dict[int, Item] = {}
        self._done: list[Done] = []
        self._decided: dict[str, None] = {}
        """Groups with an outcome, newest last, as many as could still have tasks on the way."""
        self._weights_retry_at = 0.0

    # ------------------------------------------------------------------------------------------ the loop's side

    @property
    def room(self) -> int:
        return self._max_concurrent - len(self._waiting) - len(self._active)

    def follow(self, received: Received) -> None:
        match received.message:
            case WeightsAnnounced() as announced:
                self._follower.announced(announced)
            case GroupOutcome() as outcome if not outcome.late:
                self._decided[outcome.group_id] = None
                while len(self._decided) > 100_000:
                    del self._decided[next(iter(self._decided))]

    def start(self, item: Item) -> None:
        stored = self._stored(_task(item))
        if stored is None:
            self._waiting.append(item)
        else:
            self._done.append(self._finish(item, stored))

    def drop(self, numbers: Collection[int]) -> None:
        gone = set(numbers)
        self._waiting = deque(item for item in self._waiting if item.number not in gone)
        for number in gone & set(self._active):
            del self._active[number]
            self._loop.abort(str(number))

    def not_begun(self) -> Collection[int]:
        return [item.number for item in self._waiting]

    def advance(self) -> Sequence[Done]:
        behind = self._take_over_weights()
        self._begin(behind)
        for attempt in self._loop.step():
            item = self._active.pop(int(attempt.key), None)
            if item is not None:
                self._done.append(
                    self._finish(item, self._rollout(_task(item), attempt), num_sampled=attempt.num_tokens)
                )
        done, self._done = self._done, []
        return done

    def idle_s(self) -> float:
        if self._done or (self._active and self._policy.num_active):
            return 0.0
        if self._weights_retry_at > self._clock.now():
            return self._weights_retry_at - self._clock.now()
        return FOREVER

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> Publish:
        return Publish(
            "rollouts",
            record.partition,
            Rollout(
                ids=ids,
                status=RolloutStatus.undecodable,
                problem=None,
                turns=(),
                segments=(),
                num_tokens=0,
                sampling=Sampling(),
                error=str(error),
                finished_at=self._clock.now(),
            ),
        )

    def health(self) -> Mapping[str, object]:
        version = self._policy.version
        return {
            "version": version.version if version else None,
            "waiting": len(self._waiting),
            "sampling": len(self._active),
            "weights_refused": self._follower.num_refused,
        }

    def close(self) -> None:
        self._policy.close()

    # ------------------------------------------------------------------------------------------ weights

    def _take_over_weights(self) -> bool:
        """Loads the newest version; True while an older one has to be taken over but can't yet."""
        newest = self._follower.newest()
        current = self._policy.version
        if newest is None or newest.name == current:
            return False
        if any(_task(item).ids.min_version > newest.name.version for item in self._active.values()):
            return True
        if self._weights_retry_at > self._clock.now():
            return False
        started = time.perf_counter()
        taken = newest.name
        try:
            tensors = self._follower.fetch(newest)
        except WeightsError as error:
            self._weights_retry_at = self._clock.now() + 1.0
            reached = self._follower.held()
            if reached is None or current is None or not _is_between(reached[0], current, newest.name):
                log.warning("%s; going on with %s", error, current)
                return False
            taken, tensors = reached
            log.warning("%s; going on with %s", error, taken)
        self._policy.load(tensors, taken)
        metrics.WEIGHTS_SECONDS.labels("explorer").observe(time.perf_counter() - started)
        metrics.VERSION.labels("explorer").set(taken.version)
        return False

    # ------------------------------------------------------------------------------------------ rollouts

    def _begin(self, behind: bool) -> None:
        """Begins what may begin, in order; what waits for newer weights holds up nothing but itself."""
        version = self._policy.version
        waiting: deque[Item] = deque()
        for item in self._waiting:
            task = _task(item)
            if task.ids.group_id in self._decided:
                self._done.append(self._finish(item, _skipped(task, self._clock.now())))
            elif behind or version is None or version.version < task.ids.min_version:
                waiting.append(item)
            else:
                self._active[item.number] = item
                self._loop.start(
                    str(item.number),
                    problem=task.problem,
                    sampling=task.sampling,
                    seed=task.seed,
                    environment=task.environment,
                    truncate=task.ids.taskset in self._truncate,
                    renderer=self._renderers.get(task.ids.taskset),
                )
        self._waiting = waiting

    def _stored(self, task: Task) -> Rollout | None:
        """The rollout that the task names, under the task's ids; None if it has to be sampled (again)."""
        if task.stored_rollout is None or task.ids.group_id in self._decided:
            return None
        rollout = self._fetch_rollout(task.stored_rollout)
        if rollout is None or rollout.status not in (RolloutStatus.completed, RolloutStatus.truncated):
            log.info("%s: no rollout at %s; it is sampled again", task.ids.rollout_id, task.stored_rollout)
            return None
        if not _same_task(rollout.ids, task.ids):
            log.warning("%s: %s holds %s; it is sampled again", task.ids.rollout_id, task.stored_rollout,
                        rollout.ids.rollout_id)  # fmt: skip
            return None
        oldest = oldest_version(rollout.segments)
        if oldest is not None and oldest < task.ids.min_version:
            log.info("%s: %s was sampled by version %d, expected at least %d; it is sampled again",
                     task.ids.rollout_id, task.stored_rollout, oldest, task.ids.min_version)  # fmt: skip
            return None
        return replace(rollout, ids=task.ids)

    def _rollout(self, task: Task, attempt: Attempt) -> Rollout:
        return Rollout(
            ids=task.ids,
            status=attempt.status,
            problem=task.problem,
            turns=attempt.turns,
            segments=attempt.segments,
            num_tokens=attempt.num_tokens,
            sampling=task.sampling,
            error=attempt.error,
            metrics=attempt.metrics,
            started_at=attempt.started_at,
            finished_at=self._clock.now(),
        )

    def _finish(self, item: Item, rollout: Rollout, num_sampled: int = 0) -> Done:
        rollout, value = _recordable(rollout)
        metrics.ROLLOUTS.labels(str(rollout.status)).inc()
        metrics.SAMPLED_TOKENS.labels("explorer").inc(num_sampled)
        return Done(item.number, (Publish("rollouts", item.received.record.partition, rollout, value),))


def _is_between(name: VersionName, current: VersionName, newest: VersionName) -> bool:
    """Whether a version is of the newest trainer, and newer than the current one."""
    return name.trainer_epoch == newest.trainer_epoch == current.trainer_epoch and name.version > current.version


def _recordable(rollout: Rollout) -> tuple[Rollout, bytes]:
    """The rollout and its bytes; what no record can hold keeps its ids, its length and the reason, and little else."""
    try:
        value = codec.encode(rollout)
    except ContractError as error:  # by something that the environment said
        rollout = _without_content(rollout, RolloutStatus.failed, str(error))
        value = codec.encode(rollout)
    if len(value) > MAX_BODY_BYTES:
        why = f"{len(value)} bytes, expected at most {MAX_BODY_BYTES}"
        rollout = _without_content(rollout, RolloutStatus.oversized, why)
        value = codec.encode(rollout)
    if len(value) > MAX_BODY_BYTES:
        rollout = replace(rollout, problem=Problem(messages=()))
        value = codec.encode(rollout)
    return rollout, value


def _without_content(rollout: Rollout, status: RolloutStatus, error: str) -> Rollout:
    return replace(rollout, status=status, turns=(), segments=(), error=error, metrics={}, attachments={})


def _same_task(stored: RolloutIds, ids: RolloutIds) -> bool:
    """Whether they differ in the attempt alone."""
    then, now = stored.group_id.rpartition("/")[0], ids.group_id.rpartition("/")[0]
    return then == now and stored.sibling == ids.sibling


def _task(item: Item) -> Task:
    assert isinstance(item.received.message, Task)
    return item.received.message


def _skipped(task: Task, now: float) -> Rollout:
    return Rollout(
        ids=task.ids,
        status=RolloutStatus.skipped,
        problem=task.problem,
        turns=(),
        segments=(),
        num_tokens=0,
        sampling=task.sampling,
        error="its group was decided before",
        finished_at=now,
    )
