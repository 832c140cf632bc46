"""Questions to the brokers that are asked again while brokers come and go."""

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
"""Seconds for which a question is asked again, unless the asker is `patient`."""

T = TypeVar("T")


class AdminConnection:
    """An admin client that is made when the first question comes, and made anew when it knows nothing useful any more.

    `KafkaAdmin` makes it, asks through it together with its parts, and closes it.
    """

    def __init__(self, clients: KafkaClientFactory) -> None:
        self._clients = clients
        self._made: StableAdminClient | None = None
        self._patience_s = PATIENCE_S

    @contextlib.contextmanager
    def patient(self, patience_s: float) -> Iterator[None]:
        """Retry requests inside of this context for a number of seconds, since busy brokers may not answer for long."""
        before, self._patience_s = self._patience_s, patience_s
        try:
            yield
        finally:
            self._patience_s = before

    def ask(self, what: str, question: Callable[[KafkaAdminClient], T], *, but: type[Exception] | None = None) -> T:
        """Return the answer to `question`. It is asked again while brokers come and go. Errors of type `but` come out.

        A client that got no answer in all that time is closed: what it knows of the cluster may date from a time when a
        broker was away, and it does not look again (3.0.12, measured). `what` names the question in errors."""
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
