"""A rollout that stands on the log already, by its place."""

from __future__ import annotations

import logging
import re

from rftstream.contracts import codec
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import Rollout
from rftstream.errors import ContractError
from rftstream.service.role import read_records
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

_PLACE = re.compile(r"rollouts\[(\d{1,9})\]@(\d{1,18})")


class StoredRollouts:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, where: str) -> Rollout | None:
        """The rollout at `rollouts[partition]@offset`; None if none is there (any more), or it cannot be decoded."""
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
