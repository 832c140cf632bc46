"""The texts of listed rollouts that the catalog has not read yet: they are read from the log, at their places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import Rollout
from rftstream.queries.catalog.listing import ListedRollout
from rftstream.queries.catalog.texts import TOPIC, asked_in, said_in
from rftstream.queries.decoding import decoded
from rftstream.service.reading import read_places
from rftstream.transport.base import Transport

MOST = 64
"""Most records that are read at once, since bodies may be large."""


def lacking_texts(listed: Iterable[ListedRollout]) -> list[ListedRollout]:
    """Return the rollouts, each once, whose texts are to be read."""
    return list({one.row.rollout_id: one for one in listed if not one.is_read}.values())[:MOST]


def read_texts(
    transport: Transport, lacking: Iterable[ListedRollout], *, num_partitions: int
) -> dict[str, ListedRollout]:
    """Return these rollouts, by id, with the texts of their records. One whose record was deleted or cannot be decoded
    has none."""
    places = {
        one: (TopicPartition(TOPIC, one.sequence % num_partitions), one.row.rollout_offset)
        for one in lacking
        if one.row.rollout_offset is not None
    }
    records, found = read_places(transport, places.values()), {}
    for one, place in places.items():
        rollout = decoded(records.get(place), Rollout)
        if rollout is None or rollout.ids.rollout_id != one.row.rollout_id:
            found[one.row.rollout_id] = replace(one, is_read=True)
        else:
            found[one.row.rollout_id] = replace(one, is_read=True, said=said_in(rollout), prompt=asked_in(rollout))
    return found
