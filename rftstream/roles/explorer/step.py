"""The explorer: tasks -> rollouts, with the newest weights that the trainer announced.

A task waits while the policy is older than its `min_version`. Weights are fetched while sampling continues, and the
policy loads them between two decoding steps. With the policy's `in_flight` "keep" or "recompute" running requests
continue with the new weights; with "finish" they end with the old weights first. After a rollback of the trainer, a
rollout that needs a newer version than the current one is paused, even in the middle. The others continue.

Unfinished rollouts are saved to `partials` at intervals, and when the worker leaves. The next worker that gets the task
continues from there. A rollout that has sampled its share of tokens is also saved, and gives its place to a waiting
rollout (the partial rollouts of Kimi k1.5, arXiv:2501.12599, section 2.6.2)."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.config.role_sections import ExplorerSection
from rftstream.contracts.outcomes import DecidedSequences, GroupOutcome
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.summaries import OutcomesSummary, Summary, WeightsSummary
from rftstream.contracts.tasks import RolloutIds, Task
from rftstream.contracts.versions import WeightsAnnounced
from rftstream.core.repetition import repeats
from rftstream.errors import ContractError
from rftstream.models.rendering import Renderer
from rftstream.policies.base import LOOK_S, EngineLoad, Policy
from rftstream.policies.colocated import EngineShare
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.explorer.concurrency import ConcurrencyController, SamplingPlaces
from rftstream.roles.explorer.fit_to_record import fit_to_record, rollout_of, skipped, undecodable_rollout
from rftstream.roles.explorer.in_hand import RolloutsInHand
from rftstream.roles.explorer.saved.partials import Partials, numbers_of, tombstones
from rftstream.roles.explorer.saved.pieces import CannotGoOnError
from rftstream.roles.explorer.saved.saved_states import SavedStates
from rftstream.roles.explorer.saved.stored import stored_rollout
from rftstream.roles.explorer.turn_loop import TurnLoop
from rftstream.roles.explorer.weights_update import WeightsUpdate
from rftstream.roles.explorer.work import RolloutInHand
from rftstream.service.loops.self_pipe import SelfPipe
from rftstream.service.role import FOREVER, ConcurrentStep, Done, Item, Publish, Received, Saved, Wakeup
from rftstream.weights.follower import WeightsFollower

log = logging.getLogger(__name__)


LOOK_EVERY_S = 0.25
"""Seconds between two checks of the rollouts being sampled for a used-up share of tokens and for repetition."""


class ExplorerStep(ConcurrentStep):
    """The step of an explorer: it samples many rollouts at once with one policy. `workers/explorer.py` makes it, and
    ConcurrentService calls it in this order:

    - `forget` and `restore_partials` bring the saved work of a partition's former owners, before its tasks come.
    - `follow` applies announcements of weights, and outcomes of groups, whose tasks are then skipped.
    - `start` adds a task to the waiting ones. A rollout is waiting, then active; it may be paused and wait again.
    - `advance` loads newer weights, begins rollouts, samples a slice, and returns the finished rollouts.
    - `save` returns pieces of unfinished rollouts. With `leaving`, rollouts that can be saved are given back.
    - `drop` aborts rollouts of lost partitions. `close` ends the fetching and closes the policy.
    """

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
        states: SavedStates,
        process: str,
        clock: Clock,
        fetching: Executor,
        pipe: SelfPipe | None = None,
        share: EngineShare | None = None,
        controller: ConcurrencyController | None = None,
        engine_load: Callable[[], EngineLoad] | None = None,
    ) -> None:
        """`renderers` are those of tasksets with their own chat template. `truncate` names tasksets whose long prompts
        are cut. `fetch_rollout` returns the rollout at a place of the log, if there is one. `fetching` has one thread,
        which fetches weights. `pipe` rings when an environment has answered. `share` is the part of the device, if the
        policy shares it with a trainer. `controller` decides how many rollouts are sampled at once, by `engine_load`;
        with None the settings do."""
        self._pipe = pipe
        self._share = share
        self._policy = policy
        self._loop = loop
        self._follower = follower
        self._settings = settings
        self._places = SamplingPlaces(settings, policy, controller, engine_load)
        self._fetch_rollout = fetch_rollout
        self._partials, self._states = partials, states
        self._process = process
        self._clock = clock
        self._in_hand = RolloutsInHand(loop, renderers=renderers, truncate=truncate, states=states)
        self._done: list[Done] = []
        self._decided = DecidedSequences()
        """Groups with an outcome."""
        self._weights = WeightsUpdate(policy, follower, fetching, clock)
        self._look_at = 0.0
        self._num_elsewhere: Callable[[], int] = lambda: 0
        """Returns the number of rollouts that others than the turn loop sample."""
        self._leaving = False
        """Whether the worker is to leave. Paused rollouts then wait to be saved, not to be sampled."""
        self._save_at = clock.now() + settings.partial_every_s

    # ------------------------------------------------------------------------------------------ the loop's side

    @property
    def room(self) -> int:
        """Number of further rollouts that the explorer accepts."""
        return (2 if self._settings.yield_after_tokens else 1) * self._places.limit - len(self._in_hand)

    def follow(self, received: Received) -> None:
        """Apply an announcement of weights or the outcome of a group."""
        match received.message:
            case WeightsAnnounced() as announced:
                self._follower.announced(announced)
            case GroupOutcome() as outcome if not outcome.late:
                self._decided.add(outcome.sequence)
            case Summary(weights=WeightsSummary() as summary):
                self._follower.begin(summary)
            case Summary(outcomes=OutcomesSummary() as summary):
                self._decided = DecidedSequences(summary.below, summary.above)

    def may_join(self) -> bool:
        """Load the first weights. Return False while some are announced and none can be loaded, as where
        `weights.store` names another place than that of the trainer: tasks would wait here that others can sample."""
        if self._policy.version is None and (self._share is None or self._share.poll()):
            self._take_over_weights()
        return self._policy.version is not None or self._weights.newer() is None

    def start(self, item: Item, stored: Rollout | None = None) -> None:
        """Take a task in hand. It waits to be sampled, unless its rollout is on the log already. `stored` is that
        rollout, if it was read."""
        work = RolloutInHand(item)
        task, records = work.task, self._partials.of(work.partition, work.task.ids.rollout_id)
        self._states.begins(
            item.number, work.partition, task.ids.rollout_id, lambda: self._partials.rollout_ids(work.partition)
        )
        work.pieces = numbers_of(records)
        if stored is None and task.ids.sequence not in self._decided:
            stored = stored_rollout(task, self._fetch_rollout)
        if records and stored is None and task.ids.sequence not in self._decided:
            try:
                work.saved = self._partials.saved(task, records)
            except CannotGoOnError as error:
                work.begin_anew(str(error), sum(map(_num_tokens, records)))
        self._partials.forget(work.partition, task.ids.rollout_id)
        if stored is None:
            self._in_hand.waiting.append(work)
        else:
            self._done.append(finish_work(work, stored))

    def drop(self, numbers: Collection[int]) -> None:
        """Abort and forget rollouts."""
        self._in_hand.drop(numbers)
        self._states.dropped(numbers)

    def not_begun(self) -> Collection[int]:
        """Return the waiting items that were never sampled."""
        return [work.item.number for work in self._in_hand.waiting if not work.is_paused]

    def advance(self) -> Sequence[Done]:
        """Load newer weights, begin rollouts, and sample a slice. Return the finished rollouts."""
        if self._pipe is not None:
            self._pipe.clear()
        self._states.poll()
        may_sample = self._share is None or self._share.poll()
        if may_sample:
            behind = self._take_over_weights()
            self._look(behind)
            self._begin(behind)
            self._places.look(len(self._in_hand.active) + self._num_elsewhere())
        for attempt in self._loop.step():  # environments also answer while the policy is asleep
            work = self._in_hand.ended(int(attempt.key))
            if work is not None:
                task = work.task
                rollout = rollout_of(attempt, task.ids, task.problem, task.sampling, self._clock.now())
                self._done.append(finish_work(work, rollout, attempt.num_tokens))
        done, self._done = self._done, []
        self._states.finishing(one.number for one in done)
        return done

    def committed(self, saved: Collection[int], finished: Collection[int]) -> None:
        """Record which pieces and rollouts are on the log, so that old states of environments can be deleted."""
        self._states.committed(saved, finished)

    def idle_s(self) -> float:
        """Return the seconds until there may be tokens, or until weights are fetched again."""
        if self._done:
            return 0.0
        until_share = FOREVER if self._share is None else self._share.idle_s
        if self._share is not None and not self._share.is_awake:
            return until_share
        until_weights = self._weights.retry_in_s
        until_tokens = min(self._policy.idle_s(), LOOK_S) if self._policy.num_active else FOREVER
        return min(until_share, until_tokens, self._loop.idle_s(), until_weights if until_weights > 0 else FOREVER)

    def wakeups(self) -> Sequence[Wakeup]:
        """Return the pipe that rings when an environment has answered, if a call is running."""
        return () if self._pipe is None or not self._loop.calls.num_running else (self._pipe,)

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        """Return a rollout with the status undecodable, and tombstones for its pieces."""
        pieces = self._partials.of(record.partition, ids.rollout_id)
        self._partials.forget(record.partition, ids.rollout_id)
        rollout = undecodable_rollout(ids, error, self._clock.now())
        return (
            Publish("rollouts", record.partition, rollout),
            *tombstones(ids.rollout_id, record.partition, numbers_of(pieces)),
        )

    def health(self) -> Mapping[str, object]:
        """Return the version, and the number of waiting and of sampled rollouts."""
        version = self._policy.version
        return {
            "version": version.version if version else None,
            "waiting": len(self._in_hand.waiting),
            "sampling": len(self._in_hand.active),
            **({"max_concurrent": self._places.limit} if self._places.is_adaptive else {}),
            "paused": sum(work.is_paused for work in self._in_hand.waiting),
            "weights_refused": self._follower.num_refused,
            **({} if self._share is None else self._share.health()),
        }

    def close(self) -> None:
        """End the fetching, and close the environments and the policy."""
        self._weights.close()
        self._loop.close()
        self._states.close()
        if self._pipe is not None:
            self._pipe.close()
        self._policy.close()

    # ------------------------------------------------------------------------------------------ weights

    def _take_over_weights(self) -> bool:
        """Load the newest version once it is fetched. Return True if the load has to wait: the trainer went back to an
        older version, and a rollout that needs a newer one is about to finish."""
        while True:
            began = time.perf_counter()
            newest = self._weights.newer()
            if newest is None:
                return False
            too_old_for = [
                work for work in self._in_hand.active.values() if work.task.ids.min_version > newest.name.version
            ]
            if not all(self._in_hand.pause(work) for work in too_old_for):
                return True
            is_sampling = bool(self._in_hand.active) or self._policy.num_active > 0
            if self._weights.take_over(newest, is_sampling=is_sampling, began=began):
                return False

    # ------------------------------------------------------------------------------------------ rollouts

    def _begin(self, behind: bool) -> None:
        """Begin the rollouts that may begin, in order. A rollout that waits for newer weights does not block the
        others."""
        waiting: deque[RolloutInHand] = deque()
        places = self._places.limit
        for work in self._in_hand.waiting:
            task = work.task
            if work.leaves:
                waiting.append(work)
            elif task.ids.sequence in self._decided:
                if work.is_paused:
                    self._in_hand.abort(work)
                self._done.append(finish_work(work, skipped(task, self._clock.now())))
            elif (
                (self._leaving and work.leaves is None)
                or len(self._in_hand.active) >= places
                or not may_begin(task, self._policy, behind)
            ):
                waiting.append(work)
            else:
                self._in_hand.begin(work)
        self._in_hand.waiting = waiting

    def _look(self, behind: bool) -> None:
        """Check the rollouts being sampled. One that repeats itself is cut short, and one that has used its share of
        tokens gives its place to another."""
        settings, now = self._settings, self._clock.now()
        if not (settings.yield_after_tokens or settings.repetition_tokens) or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        free = self._places.limit - len(self._in_hand.active)
        places = sum(may_begin(work.task, self._policy, behind) for work in self._in_hand.waiting) - free
        for work in list(self._in_hand.active.values()):
            count = settings.repetition_tokens
            if count and repeats(self._loop.view(work.key).newest_tokens(count), count, settings.repetition_period):
                self._loop.cut(work.key, "repetition")
            elif settings.yield_after_tokens and places > 0:
                had = self._loop.view(work.key).num_sampled - work.began_with
                if had >= settings.yield_after_tokens and self._in_hand.pause(work):
                    places -= 1

    # ------------------------------------------------------------------------------------------ what is saved

    def forget(self, partitions: Collection[int]) -> None:
        """Forget the saved pieces of these partitions."""
        for partition in partitions:
            self._partials.clear(partition)
        self._states.forget(partitions)

    def restore_partials(self, records: Sequence[Record]) -> None:
        """Add saved pieces from the log."""
        for record in records:
            self._partials.absorb(record)

    def save(self, *, leaving: bool) -> Sequence[Saved]:
        """Return pieces of paused rollouts, and at intervals of all rollouts being sampled."""
        if leaving:
            self._leaving = True
            return self._in_hand.leave(now=self._clock.now(), explorer=self._process)
        now, every_s = self._clock.now(), self._settings.partial_every_s
        works = [work for work in (*self._in_hand.waiting, *self._in_hand.active.values()) if work.is_due]
        if every_s and now >= self._save_at:
            self._save_at = now + every_s
            works += [work for work in self._in_hand.active.values() if not work.is_due]
        pieces = [
            (work, self._in_hand.next_piece(work, now=self._clock.now(), explorer=self._process)) for work in works
        ]
        for work, piece in pieces:
            work.is_due = piece is None and work.may_save and self._loop.view(work.key).is_calling
        return [Saved(work.item.number, (piece,)) for work, piece in pieces if piece is not None]


# Looking up a labelled metric costs more than counting.
_rollouts = functools.cache(metrics.ROLLOUTS.labels)
_sampled_tokens = functools.cache(metrics.SAMPLED_TOKENS.labels)


def finish_work(work: RolloutInHand, rollout: Rollout, num_sampled: int = 0) -> Done:
    rollout, value = fit_to_record(rollout)
    _rollouts(str(rollout.status)).inc()
    _sampled_tokens(EXPLORER.name).inc(num_sampled)
    if num_sampled:  # nothing for a stored rollout that is published again unchanged
        metrics.ROLLOUT_SECONDS.observe(max(0.0, rollout.finished_at - rollout.started_at))
    pieces = tombstones(rollout.ids.rollout_id, work.partition, work.pieces)
    return Done(work.item.number, (Publish("rollouts", work.partition, rollout, value), *pieces))


def _num_tokens(piece: Record) -> int:
    return piece.number("num_tokens") or 0


def may_begin(task: Task, policy: Policy, behind: bool) -> bool:
    """Return whether the policy's weights are new enough for a task. `behind` means that newer weights must be loaded
    first."""
    return not behind and policy.version is not None and policy.version.version >= task.ids.min_version
