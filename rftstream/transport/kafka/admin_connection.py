"""Requests to the brokers, repeated while brokers come and go."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from kafka import KafkaAdminClient
from kafka import errors as kafka_errors

from rftstream.transport.kafka.client.compat import StableAdminClient
from rftstream.transport.kafka.connection import KafkaClientFactory, is_passing

PATIENCE_S = 8.0
"""Seconds for which a request is repeated, except inside of `patient`."""

T = TypeVar("T")


class AdminConnection:
    """An admin client, made for the first request and made anew when its view of the cluster is outdated.

    `KafkaAdmin` makes it, shares it with its parts, and closes it."""

    def __init__(self, clients: KafkaClientFactory) -> None:
        self._clients = clients
        self._made: StableAdminClient | None = None
        self._patience_s = PATIENCE_S

    @contextlib.contextmanager
    def patient(self, patience_s: float) -> Iterator[None]:
        """Repeat requests inside of this context for this number of seconds, since busy brokers may not answer for
        long."""
        before, self._patience_s = self._patience_s, patience_s
        try:
            yield
        finally:
            self._patience_s = before

    def ask(self, what: str, question: Callable[[KafkaAdminClient], T], *, but: type[Exception] | None = None) -> T:
        """Return the answer to `question`, which is repeated while brokers come and go. Errors of type `but` are raised
        at once.

        A client that got no answer in all that time is closed: its view of the cluster may date from a time when a
        broker was away, and it does not refresh the view (3.0.12, measured). `what` names the request in errors."""
        until = time.monotonic() + self._patience_s
        while True:
            if self._made is None:
                self._made = self._clients.admin(StableAdminClient)
            try:
                return question(self._made)
            except (kafka_errors.KafkaError, OSError) as error:
                if but is not None and isinstance(error, but):
                    raise
                is_outdated = isinstance(error, kafka_errors.UnknownBrokerIdError)
                if is_outdated or time.monotonic() > until:
                    # Closing waits for the client's own thread, without a limit.
                    threading.Thread(target=self._made.close, name="end of an admin client", daemon=True).start()
                    self._made = None
                if not (is_outdated or is_passing(error)) or time.monotonic() > until:
                    raise self._clients.reworded(error, what) from None
            if self._made is not None:
                self._made.forget_coordinators()
            time.sleep(0.05)

    def close(self) -> None:
        """Close the client, if there is one."""
        if self._made is not None:
            self._made.close()
            self._made = None
