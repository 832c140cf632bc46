"""Settings of Kafka that can never work are named before anything is asked of a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.config.sections import TransportSection
from rftstream.errors import ConfigError
from rftstream.transport.kafka.connection import in_words, shorten
from rftstream.transport.kafka.transport import KafkaTransport
from tests.suite.each import each


def check(session_timeout_s: float = 10.0, **options: Any) -> None:
    section = TransportSection(
        kind="kafka", servers="127.0.0.1:1", session_timeout_s=session_timeout_s, options=dict(options)
    )
    KafkaTransport.check(section)


@each(
    ("options", "said"),
    [
        ({"request_timeout_ms": 1}, r"options\.request_timeout_ms: got 1, expected a number of at least 500"),
        ({"request_timeout_ms": "8000"}, r"options\.request_timeout_ms: got '8000', expected a number"),
        ({"request_timeout_ms": 540_000, "connections_max_idle_ms": 540_000},
         r"options\.request_timeout_ms: got 540000, expected less than 540000, the connections_max_idle_ms"),
        ({"heartbeat_interval_ms": 20_000}, r"options\.heartbeat_interval_ms: got 20000, expected less than 10000"),
        ({"heartbeat_interval_ms": 10_000}, r"options\.heartbeat_interval_ms: got 10000, expected less than 10000"),
        ({"heartbeat_interval_ms": 0}, r"options\.heartbeat_interval_ms: got 0, expected a number of at least 1"),
        ({"fetch_max_wait_ms": 8000}, r"options\.fetch_max_wait_ms: got 8000, expected less than 8000, the request_ti"),
        ({"max_request_size": 1 << 20}, r"options\.max_request_size: got 1048576, expected a number of at least 9437"),
        ({"retry_backoff_ms": -1}, r"options\.retry_backoff_ms: got -1, expected a number of at least 0"),
        ({"max_in_flight_requests_per_connection": 0}, r"per_connection: got 0, expected a number of at least 1"),
        ({"session_timeout_s": 3e6}, r"transport\.session_timeout_s: got 3e\+06, expected less than 2,147,483"),
        ({"group_id": "x"}, r"options\.group_id: is set by rftstream itself"),
        ({"request_timeout": 1}, r"options\.request_timeout: .* did you mean 'request_timeout_ms'\?"),
        ({"security_protocol": "SASLSSL"}, r"options\.security_protocol: got 'SASLSSL', expected one of PLAINTEXT"),
        ({"sasl_mechanism": "SCRAM-SHA512"}, r"options\.sasl_mechanism: got 'SCRAM-SHA512', expected one of .*PLAIN,"),
        ({"replication_factor": 0}, r"options\.replication_factor: got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_can_never_work_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(**options)


@each(
    "options",
    [{}, {"request_timeout_ms": 500}, {"heartbeat_interval_ms": 9_999}, {"heartbeat_interval_ms": 1},
     {"session_timeout_s": 30.0, "heartbeat_interval_ms": 20_000}, {"linger_ms": 0}, {"replication_factor": -1}],
)  # fmt: skip
def test_what_may_work_is_taken(options: dict[str, Any]) -> None:
    check(**options)


def test_a_certificate_that_is_not_there_is_named_and_not_the_broker(tmp_path: Path) -> None:
    options = {"security_protocol": "SSL", "ssl_cafile": str(tmp_path / "ca.pem"), "bootstrap_timeout_ms": 1000}
    transport = KafkaTransport("r", TransportSection(kind="kafka", servers="127.0.0.1:1", options=options))
    with pytest.raises(ConfigError, match=r"options\.ssl_cafile: .*ca\.pem: no such file on this host"):
        transport.admin.topics()
    transport.close()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("'NoneType' object has no attribute 'write'", "the connection was closed"),
        (
            "broker 1: AttributeError(\"'NoneType' object has no attribute 'write'\")",
            "broker 1: the connection was closed",
        ),
        ("Connection reset by peer", "Connection reset by peer"),
    ],
)
def test_a_lost_connection_is_said_in_words(said: str, expected: str) -> None:
    assert in_words(said) == expected
    assert shorten(OSError(said)) == expected
