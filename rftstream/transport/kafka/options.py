"""Checks of the settings of a Kafka transport. Settings that can never work are refused before any request."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from rftstream.errors import ConfigError

MIN_SESSION_S = 6.0
"""Shortest session time-out that brokers accept, in seconds.

A member that is alive, but neither polls nor works, is removed by its own client after any time-out."""

FETCH_WAIT_MS = 200
"""Longest time in milliseconds that a broker waits for records before it answers."""

_RECORD_BYTES = 9 << 20
"""More bytes than the largest record has."""

REQUEST_MS = 8000
"""Milliseconds after which a request without an answer has failed."""

_OURS = frozenset(
    {
        "acks",
        "auto_offset_reset",
        "bootstrap_servers",
        "enable_auto_commit",
        "enable_idempotence",
        "group_id",
        "isolation_level",
        "kafka_client",
        "key_deserializer",
        "key_serializer",
        "max_poll_interval_ms",
        "max_poll_records",
        "partition_assignment_strategy",
        "partitioner",
        "session_timeout_ms",
        "transaction_timeout_ms",
        "transactional_id",
        "value_deserializer",
        "value_serializer",
    }
)
"""Settings on which exactly-once depends. Users cannot set them."""

_OWN = frozenset({"replication_factor"})

_LEAST: dict[str, int] = {
    "bootstrap_timeout_ms": 1000,
    "connections_max_idle_ms": 10_000,
    "delivery_timeout_ms": 1000,
    "fetch_max_bytes": 1,
    "heartbeat_interval_ms": 1,
    "max_block_ms": 1000,
    "max_in_flight_requests_per_connection": 1,
    "max_partition_fetch_bytes": 1,
    "max_request_size": _RECORD_BYTES,
    "receive_message_max_bytes": _RECORD_BYTES,
    "request_timeout_ms": 500,
}
"""Setting -> the least value that can work; 0 for all other numbers."""

_ONE_OF = {
    "security_protocol": ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"),
    "sasl_mechanism": ("AWS_MSK_IAM", "GSSAPI", "OAUTHBEARER", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
}
"""Setting -> its values. kafka-python takes any other protocol for PLAINTEXT, and says nothing."""

FILES = ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_crlfile")
"""Settings that name a file of this host."""


def check_options(options: Mapping[str, Any], *, session_s: float) -> None:
    """Raise ConfigError for a setting of `transport.options` that kafka-python does not have, that is rftstream's own,
    or that can never work."""
    clients = (KafkaConsumer, KafkaProducer, KafkaAdminClient)
    known: dict[str, Any] = {name: value for client in clients for name, value in client.DEFAULT_CONFIG.items()}
    for name in options:
        if name in _OURS:
            raise ConfigError(f"transport.options.{name}: is set by rftstream itself; leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known.keys() - _OURS | _OWN), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"transport.options.{name}: kafka-python has no such setting{hint}")
        if name in _ONE_OF and options[name] not in _ONE_OF[name]:
            raise ConfigError(
                f"transport.options.{name}: got {options[name]!r}, expected one of {', '.join(_ONE_OF[name])}"
            )
        if isinstance(known[name], int | float) and not isinstance(known[name], bool):
            _check_number(name, options[name])
    session_ms = max(session_s, MIN_SESSION_S) * 1000
    if not session_ms < 2**31:
        raise ConfigError(f"transport.session_timeout_s: got {session_s:g}, expected less than {2**31 // 1000:,}")
    request_ms = options.get("request_timeout_ms", REQUEST_MS)
    for name, value, most, of in (
        ("heartbeat_interval_ms", 0, session_ms, "transport.session_timeout_s, in ms"),
        ("fetch_max_wait_ms", FETCH_WAIT_MS, request_ms, "request_timeout_ms"),
        ("request_timeout_ms", REQUEST_MS, options.get("connections_max_idle_ms", math.inf), "connections_max_idle_ms"),
    ):
        if (found := options.get(name, value)) >= most:
            raise ConfigError(f"transport.options.{name}: got {found}, expected less than {most:g}, the {of}")


def _check_number(name: str, value: Any) -> None:
    least = _LEAST.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise ConfigError(f"transport.options.{name}: got {value!r}, expected a number of at least {least}")
