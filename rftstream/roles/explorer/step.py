"""The explorer: tasks -> rollouts, with the newest weights that the trainer announced.

A task waits while the policy is older than its `min_version`. Weights are fetched beside sampling, and taken over
between two decoding steps; what runs goes on with them. After a rollback of the trainer what needs a newer version than
there is now is paused, also in the middle; the others go on.

What is not finished is saved to `partials` every so often, and when the worker is to leave; whoever gets the task next
goes on from there. A rollout that has had its share of tokens in one go is saved too, and makes room for those that
wait (the partial rollouts of Kimi k1.5, arXiv:2501.12599, section 2.6.2).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.config.sections import ExplorerSection
from rftstream.contracts import codec
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus
from rftstream.contracts.tasks import RolloutIds, Sampling, Task
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.core.repetition import repeats
from rftstream.errors import ContractError, WeightsError
from rftstream.models.rendering import Renderer
from rftstream.policies.base import LOOK_S, Policy
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.explorer.fit_to_record import MAX_BODY_BYTES, fit_to_record, skipped
from rftstream.roles.explorer.partials import TOPIC, Partials, numbers_of, tombstones
from rftstream.roles.explorer.pieces import CannotGoOnError, SavedRollout
from rftstream.roles.explorer.turn_loop import Attempt, TurnLoop, oldest_version
from rftstream.service.role import FOREVER, Done, Item, Publish, Received, Saved
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.snapshot import RawTensor

log = logging.getLogger(__name__)


LOOK_EVERY_S = 0.25
"""At what is being sampled: whether it has had its share, whether it repeats itself."""


@dataclass(slots=True)
class _Work:
    """A task in hand."""

    item: Item
    saved: SavedRollout | None = None
    """Where it goes on from, until it is begun."""
    pieces: list[int] = field(default_factory=list)
    """Numbers of those that are on the log, or on their way there."""
    is_paused: bool = False
    is_due: bool = False
    """To be saved, since it was paused."""
    leaves: bool | None = None
    """When the worker is to leave: whether it is given back, which it cannot be if it cannot be saved."""
    began_with: int = 0
    """Tokens that it had when its turn came."""
    may_save: bool = True

    @property
    def key(self) -> str:
        return str(self.item.number)

    @property
    def task(self) -> Task:
        assert isinstance(self.item.received.message, Task)
        return self.item.received.message

    @property
    def partition(self) -> int:
        return self.item.received.record.partition


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A version on its way."""

    target: WeightsAnnounced
    tensors: Future[Mapping[str, RawTensor]]
    began: float


class ExplorerStep:
    def __init__(
        self,
        *,
        policy: Policy,
        loop: TurnLoop,
        follower: WeightsFollower,
        settings: ExplorerSection,
        renderers: Mapping[str, Renderer],
        truncate: Collection[str],
        fetch_rollout: Callable[[str], Rollout | None],
        partials: Partials,
        process: str,
        clock: Clock,
        fetching: Executor,
    ) -> None:
        """`fetch_rollout`: the rollout that stands at a place of the log, if there is one. `fetching`: of one thread;
        where weights are fetched."""
        self._policy = policy
        self._loop = loop
        self._follower = follower
        self._settings = settings
        self._places = settings.max_concurrent
        """Rollouts that are sampled at once; with `yield_after_tokens` as many more wait for one of these."""
        if settings.yield_after_tokens:
            self._places = min(self._places, policy.slots)
        self._renderers = renderers
        """Of tasksets with a chat template of their own."""
        self._truncate = frozenset(truncate)
        """Tasksets whose long prompts are cut."""
        self._fetch_rollout = fetch_rollout
        self._partials = partials
        self._process = process
        self._clock = clock
        self._waiting: deque[_Work] = deque()
        self._active: dict[int, _Work] = {}
        self._done: list[Done] = []
        self._decided: dict[str, None] = {}
        """Groups with an outcome, newest last, as many as could still have tasks on the way."""
        self._fetching = fetching
        self._fetch: _Fetch | None = None
        self._weights_retry_at = 0.0
        self._look_at = 0.0
        self._save_at = clock.now() + settings.partial_every_s

    # ------------------------------------------------------------------------------------------ the loop's side

    @property
    def room(self) -> int:
        in_hand = len(self._waiting) + len(self._active)
        return (2 * self._places if self._settings.yield_after_tokens else self._places) - in_hand

    def follow(self, received: Received) -> None:
        match received.message:
            case WeightsAnnounced() as announced:
                self._follower.announced(announced)
            case GroupOutcome() as outcome if not outcome.late:
                self._decided[outcome.group_id] = None
                while len(self._decided) > 100_000:
                    del self._decided[next(iter(self._decided))]

    def start(self, item: Item) -> None:
        work = _Work(item)
        task, records = work.task, self._partials.of(work.partition, work.task.ids.rollout_id)
        work.pieces = numbers_of(records)
        stored = self._stored(task)
        if records and stored is None and task.ids.group_id not in self._decided:
            try:
                work.saved = self._partials.saved(task, records)
            except CannotGoOnError as error:
                self._begun_anew(work, str(error), sum(map(_num_tokens, records)))
        self._partials.forget(work.partition, task.ids.rollout_id)
        if stored is None:
            self._waiting.append(work)
        else:
            self._done.append(self._finish(work, stored))

    def drop(self, numbers: Collection[int]) -> None:
        gone = set(numbers)
        for work in self._waiting:
            if work.is_paused and work.item.number in gone:
                self._abort(work)
        self._waiting = deque(work for work in self._waiting if work.item.number not in gone)
        for number in gone & set(self._active):
            self._abort(self._active.pop(number))

    def not_begun(self) -> Collection[int]:
        return [work.item.number for work in self._waiting if not work.is_paused]

    def advance(self) -> Sequence[Done]:
        behind = self._take_over_weights()
        self._look(behind)
        self._begin(behind)
        for attempt in self._loop.step():
            work = self._active.pop(int(attempt.key), None)
            if work is not None:
                self._done.append(self._finish(work, self._rollout(work.task, attempt), attempt.num_tokens))
        done, self._done = self._done, []
        return done

    def idle_s(self) -> float:
        if self._done:
            return 0.0
        until_weights = self._weights_retry_at - self._clock.now()
        until_tokens = min(self._policy.idle_s(), LOOK_S) if self._active else FOREVER
        return min(until_tokens, until_weights if until_weights > 0 else FOREVER)

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        pieces = self._partials.of(record.partition, ids.rollout_id)
        self._partials.forget(record.partition, ids.rollout_id)
        rollout = Rollout(
            ids=ids,
            status=RolloutStatus.undecodable,
            problem=None,
            turns=(),
            segments=(),
            num_tokens=0,
            sampling=Sampling(),
            error=str(error),
            finished_at=self._clock.now(),
        )
        return (
            Publish("rollouts", record.partition, rollout),
            *tombstones(ids.rollout_id, record.partition, numbers_of(pieces)),
        )

    def health(self) -> Mapping[str, object]:
        version = self._policy.version
        return {
            "version": version.version if version else None,
            "waiting": len(self._waiting),
            "sampling": len(self._active),
            "paused": sum(work.is_paused for work in self._waiting),
            "weights_refused": self._follower.num_refused,
        }

    def close(self) -> None:
        self._fetching.shutdown(cancel_futures=True)
        self._policy.close()

    # ------------------------------------------------------------------------------------------ weights

    def _take_over_weights(self) -> bool:
        """Loads the newest version once it is here; True while an older one has to be taken over, and something is
        about to finish that needs a newer one."""
        began = time.perf_counter()
        newest = self._follower.newest()
        current = self._policy.version
        if newest is None or newest.name == current:
            return False
        too_old_for = [work for work in self._active.values() if work.task.ids.min_version > newest.name.version]
        if not all(self._pause(work) for work in too_old_for):
            return True
        if self._weights_retry_at > self._clock.now():
            return False
        fetch = self._fetch or self._begin_fetch(newest)
        if self._goes_on_meanwhile() and not fetch.tensors.done():
            self._fetch = fetch
            return False
        self._fetch = None
        taken, problem = fetch.target.name, None
        try:
            tensors = fetch.tensors.result()
        except WeightsError as error:
            problem = error
        if self._follower.find(taken) is None:  # the trainer was replaced meanwhile
            return self._take_over_weights()
        if problem is not None:
            if current is None and not problem.retriable:
                raise problem
            self._weights_retry_at = self._clock.now() + 1.0
            reached = self._follower.held()
            if reached is None or current is None or not _is_between(reached[0], current, newest.name):
                log.warning("%s; going on with %s", problem, current)
                return False
            taken, tensors = reached
            log.warning("%s; going on with %s", problem, taken)
        self._policy.load(tensors, taken)
        now = time.perf_counter()
        metrics.WEIGHTS_SECONDS.labels(EXPLORER.name).observe(now - fetch.began)
        metrics.HELD_UP_SECONDS.labels(EXPLORER.name).observe(now - began if self._active else 0.0)
        metrics.VERSION.labels(EXPLORER.name).set(taken.version)
        return False

    def _begin_fetch(self, newest: WeightsAnnounced) -> _Fetch:
        return _Fetch(newest, self._fetching.submit(self._follower.fetch, newest), time.perf_counter())

    def _goes_on_meanwhile(self) -> bool:
        """Whether anything is sampled with weights that are still in force: else nobody is held up by waiting."""
        current = self._policy.version
        return bool(self._active) and current is not None and self._follower.find(current) is not None

    # ------------------------------------------------------------------------------------------ rollouts

    def _begin(self, behind: bool) -> None:
        """Begins what may begin, in order; what waits for newer weights holds up nothing but itself."""
        waiting: deque[_Work] = deque()
        for work in self._waiting:
            task = work.task
            if task.ids.group_id in self._decided:
                if work.is_paused:
                    self._abort(work)
                self._done.append(self._finish(work, skipped(task, self._clock.now())))
            elif work.leaves or len(self._active) >= self._places or not self._may_begin(task, behind):
                waiting.append(work)
            else:
                self._active[work.item.number] = work
                self._go(work)
        self._waiting = waiting

    def _may_begin(self, task: Task, behind: bool) -> bool:
        version = self._policy.version
        return not behind and version is not None and version.version >= task.ids.min_version

    def _go(self, work: _Work) -> None:
        task, saved = work.task, work.saved
        if work.is_paused:
            work.is_paused = False
            self._loop.go_on(work.key)
        else:
            goes_on = self._loop.start(
                work.key,
                problem=task.problem,
                sampling=task.sampling,
                seed=task.seed,
                environment=task.environment,
                truncate=task.ids.taskset in self._truncate,
                renderer=self._renderers.get(task.ids.taskset),
                saved=saved,
                name=task.ids.rollout_id,
            )
            if not goes_on and saved is not None:
                self._begun_anew(work, "its environment does not", saved.num_tokens)
            elif saved is not None:
                metrics.PARTIAL_TOKENS.labels("resumed").inc(saved.num_tokens)
                log.info("%s: goes on from %d tokens", task.ids.rollout_id, saved.num_tokens)
            work.saved = None
        work.began_with = self._loop.num_sampled(work.key)

    def _begun_anew(self, work: _Work, why: str, num_tokens: int) -> None:
        """Its pieces stay until it is finished: the numbers of new ones would be theirs."""
        work.saved, work.may_save = None, False
        metrics.PARTIAL_TOKENS.labels("lost").inc(num_tokens)
        log.warning(
            "%s: cannot go on from its %d pieces: %s; begun anew", work.task.ids.rollout_id, len(work.pieces), why
        )

    def _abort(self, work: _Work) -> None:
        metrics.PARTIAL_TOKENS.labels("lost").inc(self._loop.num_unsaved(work.key))
        self._loop.abort(work.key)

    def _look(self, behind: bool) -> None:
        """At what is being sampled: who repeats himself is cut short, who had his share makes room."""
        settings, now = self._settings, self._clock.now()
        if not (settings.yield_after_tokens or settings.repetition_tokens) or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        free = self._places - len(self._active)
        places = sum(self._may_begin(work.task, behind) for work in self._waiting) - free
        for work in list(self._active.values()):
            count = settings.repetition_tokens
            if count and repeats(self._loop.newest_tokens(work.key, count), count, settings.repetition_period):
                self._loop.cut(work.key, "repetition")
            elif settings.yield_after_tokens and places > 0:
                had = self._loop.num_sampled(work.key) - work.began_with
                if had >= settings.yield_after_tokens and self._pause(work):
                    places -= 1

    def _pause(self, work: _Work) -> bool:
        """False if it is about to finish."""
        if not self._loop.pause(work.key):
            return False
        del self._active[work.item.number]
        work.is_paused = work.is_due = True
        self._waiting.append(work)
        return True

    # ------------------------------------------------------------------------------------------ what is saved

    def forget(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            self._partials.clear(partition)

    def restore_partials(self, records: Sequence[Record]) -> None:
        for record in records:
            self._partials.absorb(record)

    def save(self, *, leaving: bool) -> Sequence[Saved]:
        if leaving:
            return self._leave()
        now, every_s = self._clock.now(), self._settings.partial_every_s
        works = [work for work in self._waiting if work.is_due]
        if every_s and now >= self._save_at:
            self._save_at = now + every_s
            works += self._active.values()
        for work in works:
            work.is_due = False
        pieces = [(work, self._piece(work)) for work in works]
        return [Saved(work.item.number, (piece,)) for work, piece in pieces if piece is not None]

    def _leave(self) -> list[Saved]:
        """What can be saved is given back with the next transaction; the rest goes on."""
        for work in [one for one in self._active.values() if one.leaves is None]:
            self._pause(work)
        saved = []
        for work in self._waiting:
            if work.is_paused and work.leaves is None:
                piece = self._piece(work)
                work.leaves = piece is not None or self._loop.num_unsaved(work.key) == 0
                if work.leaves:
                    saved.append(Saved(work.item.number, () if piece is None else (piece,), leaves=True))
        return saved

    def _piece(self, work: _Work) -> Publish | None:
        if not work.may_save or (new := self._loop.save(work.key)) is None:
            return None
        piece = PartialRollout(
            ids=work.task.ids,
            piece=len(work.pieces),
            turns=new.turns,
            segments=new.segments,
            num_tokens=new.num_tokens,
            environment_state=new.environment_state,
            sampler_state=new.sampler_state,
            saved_at=self._clock.now(),
            continues=new.continues,
            kept_messages=new.kept_messages,
            messages=new.messages,
            metrics=new.metrics,
            started_at=new.started_at,
            explorer=self._process,
        )
        try:
            value = codec.encode(piece)
            if len(value) > MAX_BODY_BYTES:
                raise ContractError(f"{len(value)} bytes, expected at most {MAX_BODY_BYTES}")
        except ContractError as error:  # by something that the environment said
            work.may_save = False
            log.warning("%s: cannot be saved: %s", work.task.ids.rollout_id, error)
            return None
        work.pieces.append(piece.piece)
        metrics.PARTIAL_TOKENS.labels("saved").inc(new.num_tokens)
        return Publish(TOPIC, work.partition, piece, value)

    # ------------------------------------------------------------------------------------------ rollouts

    def _stored(self, task: Task) -> Rollout | None:
        """The rollout that the task names, under the task's ids; None if it has to be sampled (again)."""
        if task.stored_rollout is None or task.ids.group_id in self._decided:
            return None
        rollout = self._fetch_rollout(task.stored_rollout)
        if rollout is None or rollout.status not in (RolloutStatus.completed, RolloutStatus.truncated):
            log.info("%s: no rollout at %s; it is sampled again", task.ids.rollout_id, task.stored_rollout)
            return None
        if not _same_task(rollout.ids, task.ids):
            log.warning(
                "%s: %s holds %s; it is sampled again", task.ids.rollout_id, task.stored_rollout, rollout.ids.rollout_id
            )
            return None
        oldest = oldest_version(rollout.segments)
        if oldest is not None and oldest < task.ids.min_version:
            log.info(
                "%s: %s was sampled by version %d, expected at least %d; it is sampled again",
                task.ids.rollout_id,
                task.stored_rollout,
                oldest,
                task.ids.min_version,
            )
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

    def _finish(self, work: _Work, rollout: Rollout, num_sampled: int = 0) -> Done:
        rollout, value = fit_to_record(rollout)
        metrics.ROLLOUTS.labels(str(rollout.status)).inc()
        metrics.SAMPLED_TOKENS.labels(EXPLORER.name).inc(num_sampled)
        pieces = tombstones(rollout.ids.rollout_id, work.partition, work.pieces)
        return Done(work.item.number, (Publish("rollouts", work.partition, rollout, value), *pieces))


def _is_between(name: VersionName, current: VersionName, newest: VersionName) -> bool:
    """Whether a version is of the newest trainer, and newer than the current one."""
    return name.trainer_epoch == newest.trainer_epoch == current.trainer_epoch and name.version > current.version


def _same_task(stored: RolloutIds, ids: RolloutIds) -> bool:
    """Whether they differ in the attempt alone."""
    then, now = stored.group_id.rpartition("/")[0], ids.group_id.rpartition("/")[0]
    return then == now and stored.sibling == ids.sibling


def _num_tokens(piece: Record) -> int:
    text = piece.header("num_tokens") or b""
    return int(text) if text.isdigit() else 0
