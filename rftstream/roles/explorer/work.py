"""A task that an explorer has in hand, with its saved pieces."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rftstream import metrics
from rftstream.contracts import codec
from rftstream.contracts.rollouts import PartialRollout, StoredState
from rftstream.contracts.tasks import Task
from rftstream.errors import ContractError
from rftstream.roles.explorer.open_rollout import Increment
from rftstream.roles.explorer.saved.partials import TOPIC
from rftstream.roles.explorer.saved.pieces import SavedRollout
from rftstream.service.role import Item, Publish

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RolloutInHand:
    """A task from `start` until its rollout is returned or dropped. The explorer's step makes and owns it. It is
    waiting (perhaps paused in the middle) or being sampled."""

    item: Item
    """The record of the task."""
    saved: SavedRollout | None = None
    """Saved rollout to be continued; None once this one has begun."""
    pieces: list[int] = field(default_factory=list)
    """Numbers of the rollout's pieces that are on the log or being committed."""
    is_paused: bool = False
    """Whether the rollout was begun and then paused."""
    is_due: bool = False
    """Whether the rollout must be saved because it was paused."""
    leaves: bool | None = None
    """Whether the rollout is given back when the worker leaves. False for a rollout that cannot be saved; None if this
    is not decided."""
    began_with: int = 0
    """Number of tokens that the rollout had when it got its place."""
    may_save: bool = True
    """Whether pieces of the rollout can be saved."""

    @property
    def key(self) -> str:
        """Name of the rollout in the turn loop."""
        return str(self.item.number)

    @property
    def task(self) -> Task:
        """The task that is attempted."""
        assert isinstance(self.item.received.message, Task)
        return self.item.received.message

    @property
    def partition(self) -> int:
        """Partition of the task on `tasks`, and of all records published for it."""
        return self.item.received.record.partition

    def begin_anew(self, why: str, num_tokens: int) -> None:
        """Give up the saved pieces. They stay on the log until the rollout is finished. No new pieces are saved, since
        they would have the same numbers."""
        self.saved, self.may_save = None, False
        metrics.PARTIAL_TOKENS.labels("lost").inc(num_tokens)
        log.warning(
            "%s: cannot go on from its %d pieces: %s; begun anew", self.task.ids.rollout_id, len(self.pieces), why
        )

    def next_piece(self, new: Increment, *, now: float, explorer: str) -> Publish | None:
        """Return the record of the next piece with the rollout's new part; None if no record can hold it."""
        state = new.environment_state
        piece = PartialRollout(
            ids=self.task.ids,
            piece=len(self.pieces),
            turns=new.turns,
            segments=new.segments,
            num_tokens=new.num_tokens,
            environment_state=state if isinstance(state, bytes) else None,
            stored_state=state if isinstance(state, StoredState) else None,
            sampler_state=new.sampler_state,
            saved_at=now,
            continues=new.continues,
            beside_before=new.beside_before,
            kept_messages=new.kept_messages,
            messages=new.messages,
            metrics=new.metrics,
            started_at=new.started_at,
            explorer=explorer,
            posted=new.posted,
        )
        try:
            value = codec.encode(piece)
        except ContractError as error:  # caused by a message of the environment
            self.may_save = False
            log.warning("%s: cannot be saved: %s", self.task.ids.rollout_id, error)
            return None
        self.pieces.append(piece.piece)
        metrics.PARTIAL_TOKENS.labels("saved").inc(new.num_tokens)
        return Publish(TOPIC, self.partition, piece, value)
