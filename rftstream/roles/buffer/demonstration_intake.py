"""What batches take of demonstrations: how many, and whether a batch has to wait for some."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from rftstream.config.stages import Stage, Stages
from rftstream.contracts.control import TasksEnded
from rftstream.contracts.records import Record, TopicPartition
from rftstream.roles.buffer.demonstrations import Cursor, DemonstrationQueue, TokenizedDemonstration
from rftstream.service.role import Log, Publish

log = logging.getLogger(__name__)


class DemonstrationIntake:
    """The demonstrations that go into batches. The step makes it once, and calls `begin` at each recovery and `absorb`
    for each record of `experts`. Before a batch the step asks `waits`, or `allows_batch` if the batch has no rollouts;
    then it calls `take`. In a run without demonstrations no batch waits for them, and `take` returns none."""

    def __init__(self, queue: DemonstrationQueue | None, stages: Stages, group_size: int) -> None:
        self._queue = queue
        self._stages = stages
        self._group_size = group_size
        self._kept = Cursor()
        """Where the passes stood at the recovery."""
        self._said_waiting = False

    def begin(self, log_: Log, kept: Cursor) -> dict[TopicPartition, int]:
        """Start from a committed cursor; return the offsets from which demonstrations are read."""
        self._kept = kept
        return {} if self._queue is None else self._queue.begin(log_, kept)

    def absorb(self, record: Record) -> None:
        """Take a record of the topic; one that cannot be decoded gets its letter when its turn comes."""
        if self._queue is not None:
            self._queue.absorb(record)

    @property
    def cursor(self) -> Cursor:
        """Cursor of the passes. It is kept in a run that takes no demonstrations any more, since the run may take some
        again."""
        return self._kept if self._queue is None else self._queue.cursor

    def allows_batch(
        self, batch: int, stage: Stage, *, version: int, max_staleness: int, ended: TasksEnded | None
    ) -> bool:
        """Whether this batch of demonstrations alone may be made now: there are as many as the stages say, or else as
        the feeder has counted (`ended`), and none is further ahead of the trainer's `version` than one of rollouts."""
        if batch > version + max_staleness:
            return False
        if self._stages.named:
            return batch < (self._stages.steps or 0) and not self.waits(stage)
        if ended is None or batch >= (ended.batches or 0):
            return False
        return self._queue is not None and self._queue.known >= ended.experts

    def lacks(self, stage: Stage) -> bool:
        """Whether a batch of the stage takes demonstrations and there are none."""
        return self._queue is not None and self._takes(stage) and not self._queue.known

    def waits(self, stage: Stage) -> bool:
        """Whether a batch of the stage has to wait for demonstrations. The first wait is logged."""
        if not self.lacks(stage):
            return False
        if not self._said_waiting:
            log.warning("waits for demonstrations, there are none yet; `rftstream experts load` brings some")
        self._said_waiting = True
        return True

    def take(
        self, stage: Stage, num_groups: int, num_demonstrations: int | None
    ) -> tuple[list[TokenizedDemonstration], list[Publish]]:
        """Return the demonstrations of a batch of the stage, with letters for those that could not be used.
        `num_demonstrations`: how many there are in a run of demonstrations alone, as the feeder has counted them."""
        if self._queue is None or not self._takes(stage):
            return [], []
        size = None
        if stage.takes_rollouts:
            count = math.ceil(stage.demonstration_ratio * num_groups * self._group_size)
        else:
            count = stage.demonstrations_per_batch
            if not self._stages.named:
                size = num_demonstrations
        return self._queue.take(count, size, stage.kind)

    def health(self) -> Mapping[str, object]:
        """Return what the queue reports."""
        return {} if self._queue is None else self._queue.health()

    def _takes(self, stage: Stage) -> bool:
        return not self._stages.named or stage.kind is not None
