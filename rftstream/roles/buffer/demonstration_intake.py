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
    """The buffer's side of its demonstrations, if the run takes any. The step makes it once, calls `begin` at each
    recovery, `absorb` for each record, and for each batch `waits` and then `take`."""

    def __init__(self, queue: DemonstrationQueue | None, stages: Stages, group_size: int) -> None:
        self._queue = queue
        self._stages = stages
        self._group_size = group_size
        self._kept = Cursor()
        """Where the passes stood at the recovery."""
        self._said_waiting = False

    def begin(self, log_: Log, kept: Cursor) -> dict[TopicPartition, int]:
        """Start from a cursor that was committed; return from where the demonstrations are read."""
        self._kept = kept
        return {} if self._queue is None else self._queue.begin(log_, kept)

    def absorb(self, record: Record) -> None:
        """Take a record of the topic; one that cannot be decoded gets its letter when its turn comes."""
        assert self._queue is not None, "others do not follow them"
        self._queue.absorb(record)

    @property
    def num_known(self) -> int:
        """Demonstrations that are on the log."""
        assert self._queue is not None, "nobody else asks"
        return self._queue.known

    @property
    def cursor(self) -> Cursor:
        """Where the passes stand. It is kept where the run takes no demonstrations any more: it may do so again."""
        return self._kept if self._queue is None else self._queue.cursor

    def lacks(self, stage: Stage) -> bool:
        """Whether a batch of the stage takes demonstrations and there are none."""
        return self._queue is not None and self._takes(stage) and not self._queue.known

    def waits(self, stage: Stage) -> bool:
        """As `lacks`; says so once."""
        if not self.lacks(stage):
            return False
        if not self._said_waiting:
            log.warning("waits for demonstrations, there are none yet; `rftstream experts load` brings some")
        self._said_waiting = True
        return True

    def take(
        self, stage: Stage, num_groups: int, ended: TasksEnded | None
    ) -> tuple[list[TokenizedDemonstration], list[Publish]]:
        """Return the demonstrations of a batch of the stage, with letters for those that could not be used. `ended`:
        the feeder's word, which says how many there are where there are no stages."""
        if self._queue is None or not self._takes(stage):
            return [], []
        size = None
        if stage.takes_rollouts:
            count = math.ceil(stage.expert_ratio * num_groups * self._group_size)
        else:
            count = stage.experts_per_batch
            if not self._stages.named:
                assert ended is not None, "the batch waits for that"
                size = ended.experts
        return self._queue.take(count, size, stage.kind)

    def health(self) -> Mapping[str, object]:
        """Return what the queue reports."""
        return {} if self._queue is None else self._queue.health()

    def _takes(self, stage: Stage) -> bool:
        return not self._stages.named or stage.kind is not None
