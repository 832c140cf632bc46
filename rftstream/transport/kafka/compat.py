"""Everything of ours that reaches into private parts of kafka-python stands here, and nowhere else.

kafka-python 3.0.12 is the version that all of this was measured with. Each part below says what it is for and what the
client does without it. `tests/unit/transport/test_kafka_compat.py` fails when the client's own code behind a part
changes: look at the change then, and either drop the part or confirm it for the new version.

Importing this module changes three classes of kafka-python (`_sock_recv`, `handshake`, `_build_transport`) and the
levels of two of its loggers.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import errors as kafka_errors
from kafka.net.compat import KafkaNetClient
from kafka.net.manager import KafkaConnectionManager
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport
from kafka.structs import TopicPartition as KafkaPartition

VERSION = "3.0.12"
"""The version of kafka-python that every part was measured with."""

HANDSHAKE_S = 30.0
"""Seconds for a TLS handshake; so long the client gives a whole connection."""

_NOT_READY_S = 0.05
"""Seconds before a coordinator that could not be connected is tried again."""

# ---------------------------------------------------------------------------------------------- logging

# For 3.0.12: when debugging, the client's logger prints its whole configuration, passwords included.
logging.getLogger("kafka").setLevel(logging.WARNING)
# For 3.0.12: the selector warns of every step of its own that takes 0.1 s, as steps do on a busy machine.
logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)

connection_log = logging.getLogger("kafka.net.manager")
"""The logger that says why a connection failed. The error that the client raises in the end does not say it."""

CONNECTION_FAILED = "Connection failed: %s"
"""The message, without its argument, that `connection_log` gets for each connection that failed."""


# ---------------------------------------------------------------------------------------------- connections


class NetClient(KafkaNetClient):  # type: ignore[misc]
    """A client's network that tries again when a transaction's coordinator cannot be connected.

    For 3.0.12: there the client's own network raises, upon which the producer forgets the request of the transaction
    and waits for its answer for ever."""

    def await_ready(self, node_id: Any, timeout_ms: float = 30000) -> bool:
        """Return whether the node can take requests; False, after a short wait, where the client's own raises."""
        try:
            return bool(super().await_ready(node_id, timeout_ms=timeout_ms))
        except kafka_errors.KafkaConnectionError:
            time.sleep(_NOT_READY_S)
            return False

    def stop(self) -> None:
        """Close all connections and end the thread.

        For 3.0.12: a client whose constructor raises leaves its thread and its sockets behind."""
        self.close()
        self._manager._net.stop()


def _receive_before_end(transport: Any, receive: Callable[[Any], tuple[bytes, Any]]) -> tuple[bytes, Any]:
    """Return the data that came before the end of a connection first, and the end with the next call.

    For 3.0.12: a broker that refuses a password says so and closes at once, and the client throws the answer away."""
    data, error = receive(transport)
    return data, None if data else error


for _kind in (KafkaTCPTransport, KafkaSSLTransport):
    _kind._sock_recv = functools.partialmethod(_receive_before_end, _kind._sock_recv)


async def _handshake_in_time(transport: Any, handshake: Callable[[Any], Any]) -> None:
    """Give up a TLS handshake after HANDSHAKE_S. KafkaTimeoutError then.

    For 3.0.12: the client waits for ever for a broker that takes a connection and says nothing, as one does that was
    stopped. What it wants to ask that broker has no time limit either until the handshake is done."""
    until = time.monotonic() + HANDSHAKE_S
    net = transport._net
    waits = (functools.partial(wait, timeout_at=until) for wait in (net.wait_read, net.wait_write))
    transport._net = SimpleNamespace(**dict(zip(("wait_read", "wait_write"), waits, strict=True)))
    try:
        await handshake(transport)
    finally:
        transport._net = net


async def _build_or_tell(
    manager: Any, build: Callable[..., Any], node: Any, timeout_at: float | None = None
) -> KafkaTCPTransport:
    """Return the transport of a new connection. KafkaConnectionError where the client's own raises an OSError.

    For 3.0.12: a TLS connection that is reset before its handshake is told as a bare ConnectionResetError or SSLError,
    certificates that are just being replaced as FileNotFoundError. If it was to bring metadata, this ends the client's
    loop that asks for it, for good: the client goes on with what it knew of leaders, and never again reads a partition
    that has another one now."""
    try:
        return await build(manager, node, timeout_at=timeout_at)
    except OSError as error:
        raise kafka_errors.KafkaConnectionError(str(error)) from error


KafkaSSLTransport.handshake = functools.partialmethod(_handshake_in_time, KafkaSSLTransport.handshake)
KafkaConnectionManager._build_transport = functools.partialmethod(
    _build_or_tell, KafkaConnectionManager._build_transport
)


def broker_version(client: KafkaAdminClient) -> tuple[int, ...]:
    """Return the version of the broker that a client is connected to.

    For 3.0.12: the client finds it out when it connects, and has no public way to ask for it."""
    return tuple(client._manager.broker_version)


# ---------------------------------------------------------------------------------------------- admin


class StableAdminClient(KafkaAdminClient):  # type: ignore[misc]
    """An admin client that gives only stable positions, and that can forget who coordinates a group."""

    def forget_coordinators(self) -> None:
        """Let the client ask anew who coordinates groups.

        For 3.0.12: it remembers a coordinator for ever, also that of a broker that is gone."""
        self._manager.cluster._coordinators.clear()

    def _list_group_offsets_requests(self, group_specs: Any) -> Iterator[Any]:
        """Ask for positions of which no commit is pending.

        For 3.0.12: the client has no setting for that (KIP-447)."""
        for group_id, request in super()._list_group_offsets_requests(group_specs):
            request.require_stable = True
            yield group_id, request


# ---------------------------------------------------------------------------------------------- consumers


class BackgroundJoin:
    """Joins a consumer's group in the client's own thread; takes the place of the coordinator's `poll`.

    For 3.0.12: the client by itself joins only while somebody stays inside its `poll`. What is finished between two
    short polls it forgets, and begins again or, worse, takes for done."""

    def __init__(self, consumer: KafkaConsumer) -> None:
        self._manager = consumer._manager
        self._coordinator = consumer._coordinator
        self._under_way: Any = None
        self._coordinator.poll = self.poll

    def poll(self, timeout_ms: float | None = None) -> bool:
        """Return whether records can be fetched now; the consumer's `poll` asks this first."""
        if self._under_way is not None:
            if not self._under_way.is_done:
                return False
            done, self._under_way = self._under_way, None
            if done.failed():
                raise done.exception
        if self._coordinator.need_rejoin():
            self._under_way = self._manager.call_soon(self._coordinator.ensure_active_group_async)
            return False
        self._coordinator.poll_heartbeat()
        return True


def position(consumer: KafkaConsumer, partition: KafkaPartition) -> int | None:
    """Return the next offset that the consumer delivers, or None for a partition that it does not own.

    For 3.0.12: the client's own `position` asks the broker, and blocks, where a partition has none yet; and raises
    where the partition went to another member just now."""
    state = consumer._subscription.assignment.get(partition)
    return None if state is None else int(state.position.offset)


def fetches_under_way(consumer: KafkaConsumer) -> list[Any]:
    """Return the futures of the fetches that brokers have not answered yet.

    For 3.0.12: the client has no way to be woken when something arrives, other than to block inside `poll`."""
    return list(consumer._fetcher._fetch_futures)


def wake_on_answer(fetch: Any, answered: threading.Event) -> None:
    """Set the event when a fetch of `fetches_under_way` is answered or has failed."""
    fetch.add_both(lambda *_: answered.set())


def drop_used_up_fetch(consumer: KafkaConsumer) -> None:
    """Let the client take back what it set aside for partitions that were paused.

    For 3.0.12: it does so only when it has no part of a fetch in hand, and does not see that the one in hand is used
    up."""
    fetcher = consumer._fetcher
    if fetcher._next_partition_records is not None and not fetcher._next_partition_records:
        fetcher._next_partition_records = None


# ---------------------------------------------------------------------------------------------- producers


def forget_refused_positions(producer: KafkaProducer) -> None:
    """Drop the positions that a broker refused in an earlier transaction.

    For 3.0.12: the client keeps them and commits them with whatever comes next. The refused work would be passed over
    and lost."""
    producer._transaction_manager._pending_txn_offset_commits.clear()


def last_error(producer: KafkaProducer) -> BaseException | None:
    """Return what put the producer's transaction into its error state, or None.

    For 3.0.12: the client often raises only that the transaction has failed, and an abort forgets why."""
    error: BaseException | None = producer._transaction_manager._last_error
    return error
