"""The wait for topics that were just made. A broker opens a log for each partition, which takes minutes for
thousands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from rftstream.errors import LogRefused, TransportError
from rftstream.transport.kafka.admin_connection import AdminConnection

log = logging.getLogger(__name__)

MAKING_S = 60.0
"""Seconds for which brokers that open the logs of a new run may show no progress."""

LOOK_S, SAY_S = 0.2, 10.0
"""Seconds between two looks at topics that are being made, and between two lines that say how far they are."""


def wait_for_leaders(
    num_led: Callable[[], int],
    wanted: int,
    *,
    what: str,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until this number of partitions have leaders, as long as more get one. TransportError if none got one for
    MAKING_S: topics may then be made again, which goes on from there."""
    best, since = -1, now()
    said_at = since
    while (led := num_led()) < wanted:
        if led > best:
            best, since = led, now()
        elif now() - since > MAKING_S:
            raise TransportError(
                f"{what}: {max(0, best):,} of {wanted:,} partitions have a leader, and for {MAKING_S:g} s no more;"
                " expected all. The brokers may still be opening logs: start again, which goes on from there, or look"
                " at what they log"
            )
        if now() - said_at > SAY_S:
            said_at = now()
            log.info("%s: waiting for the brokers to open logs; %d of %d partitions have a leader", what, best, wanted)
        sleep(LOOK_S)


def num_led(connection: AdminConnection, names: Collection[str]) -> int:
    """Return how many partitions of these topics have a leader. None counts while the brokers do not answer."""
    try:
        described = connection.ask("wait for topics", lambda client: client.describe_topics(list(names)))
    except LogRefused:
        raise
    except TransportError as error:
        log.debug("waiting for topics: %s", error)
        return 0
    partitions = [one for topic in described if not topic.get("error_code") for one in topic["partitions"]]
    return sum(not partition.get("error_code") and partition.get("leader_id", -1) >= 0 for partition in partitions)
