"""The clients of a Kafka transport: their settings, the names on the broker, and the translation of their errors.

Only the modules of this folder import kafka-python. Options of the run file may contain passwords: they are passed to
the clients and nowhere else."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import errors as kafka_errors
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.contracts.records import TopicPartition
from rftstream.errors import ConfigError, LogRefused, RftError, TransportError
from rftstream.transport.base import Jump
from rftstream.transport.kafka.client import compat, selector
from rftstream.transport.kafka.options import FETCH_WAIT_MS, FILES, REQUEST_MS, check_options

OLDEST_BROKER = (3, 0)
"""The first version that returns stable positions of a whole group in one request, and that fences by generation."""

CONNECT_S = 6.0
"""Seconds to wait for the first answer of a broker."""

BACKOFF_MS = 5
"""Milliseconds of back-off while a transaction waits for the previous one. This decides the rate of transactions.

Measured: 13 transactions a second with 100 ms, 177 with 5 ms."""

_UNKNOWN_USER = (
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.IllegalSaslStateError,
)
_REFUSED = (*_UNKNOWN_USER, kafka_errors.AuthorizationError)

_RESOURCES: dict[type[BaseException], tuple[str, str, str]] = {
    kafka_errors.TopicAuthorizationFailedError: (
        "topics",
        "--topic",
        "Read, Write, Create, Describe, DescribeConfigs and Delete",
    ),
    kafka_errors.GroupAuthorizationFailedError: ("consumer groups", "--group", "Read, Describe and Delete"),
    kafka_errors.TransactionalIdAuthorizationFailedError: (
        "transactional ids",
        "--transactional-id",
        "Write and Describe",
    ),
}
"""Refusal -> kind of resource, the option of kafka-acls for it, and the operations that a run needs."""

CAUSES = {
    "imestamp": (
        "the clock of this host and those of the brokers are apart, or message.timestamp.before.max.ms or "
        "message.timestamp.after.max.ms of the topic is too small: set the clocks, or the setting"
    ),
    "InvalidTransactionTimeoutError": "set transaction.max.timeout.ms in the brokers' properties to 60000 or more",
    "Future not done": (
        "the brokers took a batch in parts or not at all, as where max.message.bytes of its topic was set to less: "
        "`rftstream topics list` shows it"
    ),
    "NotEnoughReplicas": (
        "its topic has fewer replicas in step than min.insync.replicas asks for: bring brokers back, or set it to less"
    ),
}
"""Part of a broker's error text that names no cause -> likely cause, and advice."""

MAX_SAID = 300
"""Longest text of a client's error, in characters, since some errors contain the whole request."""

_TLS_FAILED = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "certificate verify failed")
_CLOSED = ("socket disconnected", "InvalidReceiveError", "Handshake failed", "Connection reset")
"""Parts of the client's log messages about a failed connection."""

THROTTLED_AGAIN_S = 60.0
"""Least seconds between two warnings about throttling."""

AWAY_AGAIN_S = 30.0
"""Least seconds between two warnings that a broker is away."""

log = logging.getLogger(__name__)


class Section(Protocol):
    """The part of config.TransportSection that this folder uses."""

    @property
    def servers(self) -> str | None:
        """Addresses of brokers, HOST:PORT with commas between them."""

    @property
    def options(self) -> dict[str, Any]:
        """Settings of kafka-python, and `replication_factor`."""

    @property
    def session_timeout_s(self) -> float:
        """Seconds without a heartbeat after which a member is removed."""


class KafkaClientFactory:
    """Makes the clients of one run, with its settings and names.

    KafkaTransport makes it and shares it with its parts. A client is made when it is first needed, since a process may
    fork until then. ConfigError for settings that cannot be right."""

    def __init__(self, run_id: str, section: Section, *, connect_s: float = CONNECT_S) -> None:
        if not section.servers:
            raise ConfigError(
                "transport.servers: missing, expected where the brokers of kind 'kafka' listen, host:port,...; give it "
                "below [transport], or by --set transport.servers=HOST:9092"
            )
        self.run_id = run_id
        self.servers = section.servers
        self.jumps: list[Jump] = []
        """Unreported jumps of this transport's readers and members."""
        self._connect_s = connect_s
        self._pid: int | None = None
        options = dict(section.options)
        replicas = options.pop("replication_factor", -1)
        if isinstance(replicas, bool) or not isinstance(replicas, int) or (replicas != -1 and replicas < 1):
            raise ConfigError(
                f"transport.options.replication_factor: got {replicas!r}, expected a number of brokers, or -1 for what "
                "they have as their default"
            )
        self.replication_factor = replicas
        check_options(options, session_s=section.session_timeout_s)
        self.session_timeout_s = section.session_timeout_s
        self._options = options

    # ------------------------------------------------------------------------------------------ names

    def name(self, bare: str) -> str:
        """Return the name of a topic, group or transactional id on the broker."""
        return bare if bare.startswith(f"{self.run_id}.") else f"{self.run_id}.{bare}"

    def bare(self, name: str) -> str:
        """Return the bare name for a name on the broker."""
        return name.removeprefix(f"{self.run_id}.")

    def is_ours(self, name: str) -> bool:
        """Return whether a name on the broker belongs to this run."""
        return name.startswith(f"{self.run_id}.")

    def partition(self, place: TopicPartition) -> KafkaPartition:
        """Return a partition in Kafka's form."""
        return KafkaPartition(self.name(place.topic), place.partition)

    def place(self, partition: KafkaPartition) -> TopicPartition:
        """Return the partition for one in Kafka's form."""
        return TopicPartition(self.bare(partition.topic), partition.partition)

    # ------------------------------------------------------------------------------------------ clients

    def consumer(self, **settings: Any) -> KafkaConsumer:
        """Make a consumer that sees only committed records. `settings` are added to the usual ones."""
        return self._made(
            KafkaConsumer,
            {
                "isolation_level": "read_committed",
                "enable_auto_commit": False,
                "auto_offset_reset": "none",
                "fetch_max_wait_ms": FETCH_WAIT_MS,
                "fetch_max_bytes": 16 << 20,
                "max_partition_fetch_bytes": 2 << 20,
                "retry_backoff_ms": 20,
                **settings,
            },
        )

    def producer(self, **settings: Any) -> KafkaProducer:
        """Make a producer. `settings` are added to the usual ones."""
        return self._made(KafkaProducer, {"retry_backoff_ms": BACKOFF_MS, **settings})

    def admin(self, kind: Callable[..., KafkaAdminClient]) -> KafkaAdminClient:
        """Make an admin client of this kind. ConfigError if the broker is older than OLDEST_BROKER."""
        client = self._made(kind, {"retry_backoff_ms": 20})
        version = compat.broker_version(client)
        if version < OLDEST_BROKER:
            client.close()
            raise ConfigError(
                f"transport.servers: {self.servers} is Kafka {'.'.join(map(str, version))}, expected"
                f" {'.'.join(map(str, OLDEST_BROKER))} or newer; update the broker"
            )
        return client

    def _made(self, kind: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
        if self._pid is None:
            self._pid = os.getpid()
        assert self._pid == os.getpid(), "a transport was used across a fork; make it afterwards"
        known = getattr(kind, "DEFAULT_CONFIG", {})
        nets: list[compat.NetClient] = []

        def make_net(**settings: Any) -> compat.NetClient:
            nets.append(compat.NetClient(**settings))
            return nets[-1]

        given = {
            "kafka_client": make_net,
            "bootstrap_servers": [server.strip() for server in self.servers.split(",")],
            "bootstrap_timeout_ms": int(self._connect_s * 1000),
            "request_timeout_ms": REQUEST_MS,
            "reconnect_backoff_max_ms": 1000,
            "metrics_enabled": False,
            "selector": selector.CONFIGURED,
            **settings,
            **self._options,
        }
        with _Reasons() as reasons:
            try:
                made = kind(**{key: value for key, value in given.items() if key in known})
                _away.servers = self.servers
                compat.connection_log.addFilter(_away)
                return made
            except BaseException as error:
                # A client that could not be made leaves its thread and its sockets behind.
                for net in nets:
                    net.stop()
                raise self._not_made(error, reasons) from None

    def _not_made(self, error: BaseException, reasons: _Reasons) -> BaseException:
        if isinstance(error, kafka_errors.KafkaConfigurationError | ValueError | TypeError):
            return ConfigError(f"transport: kafka-python refuses the settings: {shorten(error)}")
        if not isinstance(error, kafka_errors.KafkaTimeoutError | kafka_errors.KafkaConnectionError | OSError):
            return self.reworded(error, "the connection") if isinstance(error, kafka_errors.KafkaError) else error
        for name in FILES:
            if (file := self._options.get(name)) and not Path(file).is_file():
                return ConfigError(f"transport.options.{name}: {file}: no such file on this host")
        if reasons.refusal is not None:
            return self.reworded(reasons.refusal, "the connection")
        secured = self._options.get("security_protocol", "PLAINTEXT")
        if text := reasons.text(*_TLS_FAILED):
            return ConfigError(
                f"transport.options: TLS with {self.servers} failed, the broker's certificate and a TLS port were"
                f" expected ({text}); give the CA's certificate as ssl_cafile, or mend security_protocol"
            )
        if reasons.text(*_CLOSED):
            return TransportError(
                f"transport.servers: {self.servers} took the connection and closed it, a Kafka port with {secured} was"
                f" expected; mend transport.options.security_protocol (PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL) or the"
                f" address"
            )
        return TransportError(
            f"transport.servers: no Kafka broker answered at {self.servers} within {self._connect_s:g} s over"
            f" {secured}{_unknown_names(self.servers)}; start one (make kafka), or mend the address"
        )

    # ------------------------------------------------------------------------------------------ errors

    def reworded(self, error: BaseException, where: str) -> RftError:
        """Return one of our errors with the content of a client's error. `where` names the action that failed."""
        if isinstance(error, RftError):
            return error
        if isinstance(error, kafka_errors.IllegalSaslStateError):
            return LogRefused(
                f"transport.servers: {self.servers} knows no users at this port, and"
                f" {self._options.get('security_protocol')} was expected; mend"
                " transport.options.security_protocol, or the address"
            )
        if isinstance(error, _UNKNOWN_USER):
            return LogRefused(
                f"transport.options: {self.servers} refused the credentials for {where}"
                f" ({shorten(error) or type(error).__name__}); mend sasl_* or ssl_*"
            )
        if isinstance(error, kafka_errors.AuthorizationError):
            return self._not_allowed(error, where)
        if isinstance(error, kafka_errors.InvalidSessionTimeoutError):
            return ConfigError(
                f"transport.session_timeout_s: got {self.session_timeout_s:g}, which {self.servers} does not take;"
                " its group.min.session.timeout.ms and group.max.session.timeout.ms say what it does (6 to 1,800 s)"
            )
        if "InvalidTransactionTimeoutError" in (said := named(error)):
            return ConfigError(f"{where}: {self.servers} does not take transactions for so long: {said}")
        if isinstance(error, kafka_errors.NodeNotReadyError | kafka_errors.KafkaConnectionError):
            return TransportError(f"{where}: no Kafka broker answers at {self.servers}; look whether it runs")
        text = shorten(error) or type(error).__name__
        return TransportError(f"{where}: {type(error).__name__} from {self.servers}: {text}")

    def _not_allowed(self, error: BaseException, where: str) -> LogRefused:
        """Return the error for a known user who lacks an ACL."""
        user = self._options.get("sasl_plain_username")
        who = f"the user {user!r}" if user is not None else "this client"
        head = f"{where}: {self.servers} does not allow it to {who} ({type(error).__name__}); grant "
        if type(error) not in _RESOURCES:
            return LogRefused(f"{head}Describe, DescribeConfigs and IdempotentWrite on the cluster")
        things, option, operations = _RESOURCES[type(error)]
        principal = f"User:{user or 'NAME'}"
        asked = " ".join(f"--operation {part}" for part in operations.replace(" and ", ", ").split(", "))
        return LogRefused(
            f"{head}{operations} on the {things} whose names begin with '{self.run_id}.' (`rftstream topics acls` "
            f"shows what each role needs of that): kafka-acls --add "
            f"--allow-principal {principal} {asked} {option} {self.run_id}. --resource-pattern-type prefixed"
        )


def named(error: BaseException) -> str:
    """Return the text of a client's error, with its type and its likely cause."""
    text, name = shorten(error), type(error).__name__
    said = text if name in text else f"{name}: {text}"
    cause = next((cause for sign, cause in CAUSES.items() if sign in said), "")
    return said + (f" ({cause})" if cause else "")


def in_words(text: str) -> str:
    """Return a reason from the client as text for users. The client also writes to closed connections, whose error is
    Python's."""
    return _NO_CONNECTION.sub("the connection was closed", text)


_NO_CONNECTION = re.compile(r"""(AttributeError\(")?'NoneType' object has no attribute '\w+'("\))?""")


def shorten(error: BaseException) -> str:
    """Return the text of an error on one line, at most about MAX_SAID characters long."""
    text = in_words(" ".join(str(error).split()))
    return text if len(text) <= MAX_SAID else f"{text[: MAX_SAID // 3]} ... {text[-MAX_SAID // 3 :]}"


def _unknown_names(servers: str) -> str:
    """Return which of the hosts have a name that this host does not know, or no port, as the end of a sentence."""
    why = []
    for given in (one.strip() for one in servers.split(",")):
        host = given.rpartition(":")[0] or given
        try:
            socket.getaddrinfo(host.strip("[]"), None)
        except OSError:
            why.append(f"no address for {host}")
        if host == given:
            why.append(f"{given} has no port: 9092 was tried")
    return f" ({', '.join(why)})" if why else ""


class _Reasons(logging.Handler):
    """Collects the causes of failed connections from the client's log messages. The client's final error does not tell
    them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.refusal: BaseException | None = None
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(in_words(record.getMessage()))
        for each in record.args if isinstance(record.args, tuple) else ():
            if isinstance(each, _REFUSED):
                self.refusal = each

    def text(self, *signs: str) -> str | None:
        """Return the last message that contains one of these parts, or None."""
        return next((text for text in reversed(self.texts) if any(sign in text for sign in signs)), None)

    def __enter__(self) -> _Reasons:
        compat.connection_log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        compat.connection_log.removeHandler(self)


class _Away(logging.Filter):
    """Warns at intervals that a known broker is away, and once that one is reached again. The clients themselves only
    retry, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.servers = ""
        """The addresses in the run file: the client does not say which broker it does not reach."""
        self._said_at = -AWAY_AGAIN_S
        self._since: float | None = None
        """When the first connection failed of those that were warned of."""

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if record.msg == compat.CONNECTION_FAILED and now - self._said_at >= AWAY_AGAIN_S:
            self._said_at = now
            self._since = now if self._since is None else self._since
            reason = in_words(record.getMessage().partition(": ")[2])
            log.warning("a Kafka broker of %s cannot be reached (%s); going on trying", self.servers, reason)
        elif record.msg == compat.CONNECTED and self._since is not None:
            since, self._since, self._said_at = self._since, None, -AWAY_AGAIN_S
            log.warning("a Kafka broker of %s is reached again, after %.0f s", self.servers, now - since)
        return record.levelno >= logging.WARNING


class _Throttled(logging.Filter):
    """Counts for how long brokers throttle the clients of this process by their quotas, and warns at intervals. The
    client itself warns at each answer."""

    def __init__(self) -> None:
        super().__init__()
        self.total_s = 0.0
        self._said_at = -THROTTLED_AGAIN_S

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != compat.THROTTLED or not isinstance(record.args, tuple):
            return True
        wait_s = float(record.args[-1]) / 1000  # type: ignore[arg-type]
        self.total_s += wait_s
        now = time.monotonic()
        if now - self._said_at >= THROTTLED_AGAIN_S:
            self._said_at = now
            log.warning(
                "the Kafka brokers throttle this process by their quotas (now for %.1f s, %.1f s in all), so the run "
                "is slower than it could be; raise producer_byte_rate, consumer_byte_rate or request_percentage of "
                "this user or client (kafka-configs.sh --entity-type users or clients)",
                wait_s,
                self.total_s,
            )
        return False


throttled, _away = _Throttled(), _Away()
for _filter in (throttled, _away):
    compat.throttle_log.addFilter(_filter)
compat.throttle_log.setLevel(logging.INFO)  # as CONNECTED has; `_away` lets nothing else of this level through


def is_passing(error: BaseException) -> bool:
    """Return whether the same call may succeed later."""
    return isinstance(error, kafka_errors.RetriableError | OSError)
