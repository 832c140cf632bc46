"""The rollouts that an explorer has in hand: waiting ones, and ones that are being sampled."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping

from rftstream import metrics
from rftstream.contracts.rollouts import StoredState
from rftstream.models.rendering import Renderer
from rftstream.roles.explorer.saved.pieces import SavedRollout
from rftstream.roles.explorer.saved.saved_states import SavedStates
from rftstream.roles.explorer.turn_loop import TurnLoop
from rftstream.roles.explorer.work import RolloutInHand
from rftstream.service.role import Publish, Saved

log = logging.getLogger(__name__)


class RolloutsInHand:
    """All tasks of an explorer from `start` until their rollouts are returned or dropped. The step makes it once, adds
    new rollouts to `waiting`, and decides which of them `begin`. An active rollout may be paused and then waits again.
    It leaves when it ends, is aborted or is dropped."""

    def __init__(
        self, loop: TurnLoop, *, renderers: Mapping[str, Renderer], truncate: Collection[str], states: SavedStates
    ) -> None:
        """`renderers` are those of tasksets with their own chat template. `truncate` names tasksets whose long prompts
        are cut. `states` stores large states of environments."""
        self._states = states
        self._loop = loop
        self._renderers = renderers
        self._truncate = frozenset(truncate)
        self.waiting: deque[RolloutInHand] = deque()
        """Rollouts that wait for weights or for a free place, in order. Some of them are paused."""
        self.active: dict[int, RolloutInHand] = {}
        """Item number -> rollout that is being sampled."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.active)

    def begin(self, work: RolloutInHand) -> None:
        """Start to sample the rollout: from the beginning, from its saved pieces, or from where it was paused."""
        task, saved = work.task, work.saved
        self.active[work.item.number] = work
        if work.is_paused:
            work.is_paused = False
            self._loop.go_on(work.key)
            work.began_with = self._loop.view(work.key).num_sampled
        else:
            work.began_with = 0
            self._loop.start(
                work.key,
                problem=task.problem,
                sampling=task.sampling,
                seed=task.seed,
                environment=task.environment,
                where=f"tasksets.{task.ids.taskset}.environment",
                truncate=task.ids.taskset in self._truncate,
                renderer=self._renderers.get(task.ids.taskset),
                saved=saved,
                on_resumed=lambda goes_on: self._resumed(work, saved, goes_on=goes_on),
                name=task.ids.rollout_id,
                group=task.ids.group_id,
                min_version=task.ids.min_version,
                states=self._states.of(work.partition, task.ids.rollout_id),
            )
            work.saved = None

    def _resumed(self, work: RolloutInHand, saved: SavedRollout | None, *, goes_on: bool) -> None:
        assert saved is not None
        if goes_on:
            work.began_with = saved.num_tokens
            metrics.PARTIAL_TOKENS.labels("resumed").inc(saved.num_tokens)
            log.info("%s: goes on from %d tokens", work.task.ids.rollout_id, saved.num_tokens)
        else:
            work.begin_anew("its environment does not", saved.num_tokens)

    def pause(self, work: RolloutInHand) -> bool:
        """Pause an active rollout. Return False if it is about to finish and therefore continues."""
        if not self._loop.pause(work.key):
            return False
        del self.active[work.item.number]
        work.is_paused = work.is_due = True
        self.waiting.append(work)
        return True

    def ended(self, number: int) -> RolloutInHand | None:
        """Return the ended rollout of this item, which is no longer in hand; None if it was dropped."""
        if (work := self.active.pop(number, None)) is None:
            work = next((work for work in self.waiting if work.item.number == number and work.is_paused), None)
            if work is not None:
                self.waiting.remove(work)  # its environment ended it while it was paused
        return work

    def abort(self, work: RolloutInHand) -> None:
        """Abort the rollout. Its unsaved part is lost."""
        metrics.PARTIAL_TOKENS.labels("lost").inc(self._loop.view(work.key).num_unsaved)
        self._loop.abort(work.key)

    def drop(self, numbers: Collection[int]) -> None:
        """Forget the rollouts of these items."""
        gone = set(numbers)
        for work in self.waiting:
            if work.is_paused and work.item.number in gone:
                self.abort(work)
        self.waiting = deque(work for work in self.waiting if work.item.number not in gone)
        for number in gone & set(self.active):
            self.abort(self.active.pop(number))

    def next_piece(self, work: RolloutInHand, *, now: float, explorer: str) -> Publish | None:
        """Return the record of the rollout's new part since the last save; None if nothing can be saved."""
        if not work.may_save or (new := self._loop.save(work.key)) is None:
            return None
        piece = work.next_piece(new, now=now, explorer=explorer)
        if piece is not None and isinstance(new.environment_state, StoredState):
            self._states.saving(work.item.number, new.environment_state)
        return piece

    def leave(self, *, now: float, explorer: str) -> list[Saved]:
        """Pause all. Return the rollouts that can be saved, which are given back with the next transaction. The other
        rollouts continue."""
        for work in [work for work in self.active.values() if work.leaves is None]:
            self.pause(work)
        saved = []
        for work in self.waiting:
            if work.is_paused and work.leaves is None:
                piece = self.next_piece(work, now=now, explorer=explorer)
                view = self._loop.view(work.key)
                if piece is None and view.num_unsaved and view.is_calling and work.may_save:
                    continue  # the answer of its environment is still awaited
                work.leaves = piece is not None or view.num_unsaved == 0
                if work.leaves:
                    self.abort(work)  # it continues in another worker, so this one must not end it
                    saved.append(Saved(work.item.number, () if piece is None else (piece,), leaves=True))
        return saved
