"""Reads a rollout that is already on the log, by its place."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace

from rftstream.contracts import codec
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import RolloutIds, Task
from rftstream.errors import ContractError
from rftstream.roles.explorer.attempt import oldest_version
from rftstream.service.reading import read_records
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

_PLACE = re.compile(r"rollouts\[(\d{1,9})\]@(\d{1,18})")


class StoredRollouts:
    """Reads single rollouts from the log. The explorer's composition root makes it, and hands `get` to the step."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, where: str) -> Rollout | None:
        """Return the rollout at `rollouts[partition]@offset`; None if there is none or it cannot be decoded."""
        if (match := _PLACE.fullmatch(where)) is None:
            return None
        offset = int(match[2])
        record = read_records(self._transport, TopicPartition("rollouts", int(match[1])), [offset]).get(offset)
        if record is None or record.value is None:
            return None
        try:
            message = codec.from_record(record)
        except ContractError as error:
            log.warning("%s", error)
            return None
        return message if isinstance(message, Rollout) else None


def stored_rollout(task: Task, fetch: Callable[[str], Rollout | None]) -> Rollout | None:
    """Return the rollout that the task names, with the task's ids; None if the task must be sampled."""
    if task.stored_rollout is None:
        return None
    rollout = fetch(task.stored_rollout)
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


def _same_task(stored: RolloutIds, ids: RolloutIds) -> bool:
    """Whether the two tasks differ in the attempt alone."""
    then, now = stored.group_id.rpartition("/")[0], ids.group_id.rpartition("/")[0]
    return then == now and stored.sibling == ids.sibling
