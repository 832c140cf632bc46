"""Checks of a Kafka cluster and of a run's topics on it, and questions about its consumer groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kafka.admin import ConfigResource, ConfigResourceType

from rftstream.errors import RftError, TransportError
from rftstream.transport.base import MAX_METADATA_BYTES, TopicSettings
from rftstream.transport.findings import BrokerWish, Finding, Level, TopicWish
from rftstream.transport.kafka.client import compat
from rftstream.transport.kafka.connection import OLDEST_BROKER, KafkaClientFactory
from rftstream.transport.kafka.options import MIN_SESSION_S

TESTED = (4, 0)
"""The oldest tested version. Older ones, from connection.OLDEST_BROKER on, should work."""

TRANSACTION_MS = 60_000
"""Time-out of the longest transactions, those of single roles, in milliseconds."""

OF_SHAPE = ("max.message.bytes", "cleanup.policy", "min.insync.replicas")
"""Topic settings that other checks cover: those of shape and of replicas."""

_Judge = Callable[[int], bool]

_SETTINGS: tuple[tuple[str, _Judge, str, Level, str], ...] = (
    (
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        lambda ms: ms <= 1000,
        "at most 1000",
        Level.warning,
        "after a kill readers stand still for up to a minute with more; set it in the brokers' properties",
    ),
    (
        "offsets.retention.minutes",
        lambda minutes: minutes >= 525_600,
        "at least 525600 (a year)",
        Level.warning,
        "a run that pauses for longer loses its positions; set it in the brokers' properties",
    ),
    (
        "transaction.max.timeout.ms",
        lambda ms: ms >= TRANSACTION_MS,
        f"at least {TRANSACTION_MS}",
        Level.problem,
        "feeder, buffer, trainer and evaluator could not start; set it in the brokers' properties",
    ),
    (
        "offset.metadata.max.bytes",
        lambda size: size >= MAX_METADATA_BYTES,
        f"at least {MAX_METADATA_BYTES}",
        Level.problem,
        "positions could not be committed; set it in the brokers' properties",
    ),
)
"""Broker setting, check of its value, wanted value, severity, and reason."""

_Setting = tuple[str, _Judge, str, Level, str]


def _of_sessions(session_s: float) -> tuple[_Setting, ...]:
    """Return the broker settings that members with this session time-out require."""
    session_ms = max(session_s, MIN_SESSION_S) * 1000
    why = "explorers and verifiers could not join; set it in the brokers' properties, or transport.session_timeout_s"
    return (
        ("group.min.session.timeout.ms", session_ms.__ge__, f"at most {session_ms:.0f}", Level.problem, why),
        ("group.max.session.timeout.ms", session_ms.__le__, f"at least {session_ms:.0f}", Level.problem, why),
    )


REPLICATED = ("offsets.topic.replication.factor", "transaction.state.log.replication.factor")
"""Broker settings that matter where there are three brokers or more."""
_REPLICAS, _LOST = "3 or more", "positions and transactions would be lost with one broker; raise it"


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@dataclass(eq=False)
class KafkaLook:
    """`ServerLook` on Kafka. KafkaAdmin makes it and lends it its connection.

    `ask` sends a request with the client, and repeats it while brokers come and go. `topics` returns the run's topics
    with their settings. `topic_options` returns the broker's options for a topic with given settings. `history` returns
    faults of a topic, given its least number of in-sync replicas, a sentence each: made anew, too few replicas."""

    clients: KafkaClientFactory
    ask: Callable[[str, Callable[[Any], Any]], Any]
    topics: Callable[[], Mapping[str, TopicSettings]]
    topic_options: Callable[[TopicSettings], Mapping[str, Any]]
    history: Callable[[str, int], list[str]]

    # ------------------------------------------------------------------------------------------ what to ask for

    def broker_wishes(self) -> list[BrokerWish]:
        """Return what `broker` will look at, as described for `ServerLook`."""
        oldest = f"{_text(OLDEST_BROKER)} or newer"
        newer = f"they are refused; tried with {_text(TESTED)} and newer"
        lost = _LOST.partition(";")[0]
        settings = (*_SETTINGS, *_of_sessions(self.clients.session_timeout_s))
        return [
            BrokerWish(name="version", wanted=oldest, why=newer, needed=True),
            *(
                BrokerWish(name=name, wanted=wanted, why=why.partition(";")[0], needed=level is Level.problem)
                for name, _, wanted, level, why in settings
            ),
            *(BrokerWish(name=name, wanted=_REPLICAS, why=lost, needed=False) for name in REPLICATED),
        ]

    def topic_wishes(self, wanted: Mapping[str, TopicSettings]) -> list[TopicWish]:
        """Return the run's topics, as described for `ServerLook`."""
        options = {self.clients.name(name): self.topic_options(settings) for name, settings in wanted.items()}
        return [
            TopicWish(
                name=name,
                partitions=one["num_partitions"],
                replicas=one["replication_factor"] if one["replication_factor"] > 0 else None,
                settings=one["configs"],
            )
            for name, one in options.items()
        ]

    # ------------------------------------------------------------------------------------------ brokers

    def broker(self) -> list[Finding]:
        """Return findings about the brokers. Brokers that cannot be reached are a finding, too."""
        try:
            cluster = self.ask("describe cluster", lambda client: client.describe_cluster())
            version = self.ask("version", compat.broker_version)
            nodes = sorted(int(one["broker_id"]) for one in cluster["brokers"])
            settings = {node: self._settings_of(node) for node in nodes}
        except RftError as error:
            return [
                Finding(
                    level=Level.problem,
                    what="broker",
                    found=str(error),
                    wanted="an answer",
                    todo="see the sentence",
                    exit_code=error.exit_code,
                )
            ]
        fine = version >= TESTED
        return [
            Finding(level=Level.ok, what="broker", found=f"{len(nodes)} at {self.clients.servers}"),
            Finding(
                level=Level.ok if fine else Level.warning,
                what="broker version",
                found=f"Kafka {_text(version)}",
                wanted=f"{_text(TESTED)} or newer",
                todo="" if fine else "nobody has tried this one; update the brokers",
            ),
            *self._judge(settings),
            *_replication(settings),
        ]

    def _settings_of(self, node: int) -> dict[str, str]:
        resource = ConfigResource(ConfigResourceType.BROKER, str(node))
        found = self.ask("describe brokers", lambda client: client.describe_configs([resource], config_filter="all"))
        entries: dict[str, Any] = found.get("broker", {}).get(str(node), {})
        return {name: str(entry["value"]) for name, entry in entries.items()}

    def _judge(self, settings: Mapping[int, Mapping[str, str]]) -> list[Finding]:
        findings = []
        for name, will_do, wanted, level, why in (*_SETTINGS, *_of_sessions(self.clients.session_timeout_s)):
            values = {node: found[name] for node, found in settings.items() if found.get(name, "").isdigit()}
            if not values:
                findings.append(
                    Finding(
                        level=Level.warning,
                        what=name,
                        found="not told",
                        wanted=wanted,
                        todo="look it up in the brokers' properties; an ACL may hide it",
                    )
                )
                continue
            wrong = [value for value in values.values() if not will_do(int(value))]
            findings.append(
                Finding(
                    level=level if wrong else Level.ok,
                    what=name,
                    found=", ".join(sorted(set(wrong or values.values()))),
                    wanted=wanted,
                    todo=why if wrong else "",
                )
            )
        return findings

    # ------------------------------------------------------------------------------------------ topics

    def topic_differences(self, wanted: Mapping[str, TopicSettings]) -> dict[str, list[str]]:
        """Return settings of topics that differ, as described for `ServerLook`."""
        there = {name: settings for name, settings in wanted.items() if name in self.topics()}
        if not there:
            return {}
        resources = [ConfigResource(ConfigResourceType.TOPIC, self.clients.name(name)) for name in there]
        configs = self.ask(
            "describe topics", lambda client: client.describe_configs(resources, config_filter="all")
        ).get("topic", {})
        differences: dict[str, list[str]] = {}
        for name, settings in there.items():
            found = configs.get(self.clients.name(name), {})
            expected: dict[str, str] = self.topic_options(settings)["configs"]
            wrong = [
                f"{key} is {found[key]['value']}, expected {value}"
                for key, value in expected.items()
                if key in found and found[key]["value"] != value and key not in OF_SHAPE
            ]
            wrong += self.history(name, int(found.get("min.insync.replicas", {"value": 0})["value"]))
            if wrong:
                differences[name] = wrong
        return differences

    # ------------------------------------------------------------------------------------------ groups

    def members(self, groups: Collection[str]) -> dict[str, list[str]]:
        """Return the members of each group, as client id and host."""
        names = {self.clients.name(group): group for group in groups}
        described = self.ask("describe groups", lambda client: client.describe_groups(sorted(names)))
        found = {
            names[name]: [f"{one['client_id']} at {str(one['client_host']).lstrip('/')}" for one in group["members"]]
            for name, group in described.items()
        }
        return {group: members for group, members in found.items() if members}

    def delete_groups(self, groups: Collection[str]) -> list[str]:
        """Delete groups, as described for `ServerLook`. TransportError if a group still has members."""
        names = [self.clients.name(group) for group in groups]
        results = self.ask("delete groups", lambda client: client.delete_groups(names))
        deleted = []
        for name, said in dict(results).items():
            if said == "OK":
                deleted.append(self.clients.bare(name))
            elif said != "GroupIdNotFoundError":
                raise TransportError(
                    f"delete group {name}: {said} from {self.clients.servers}; is somebody in it still?"
                )
        return deleted


def _replication(settings: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    """Return findings about replication. With several brokers, the loss of one must not lose positions."""
    if len(settings) < 3:
        return [
            Finding(
                level=Level.ok,
                what="replication",
                found=f"{len(settings)} broker: for development",
                wanted="three brokers where a run must survive the loss of one",
            )
        ]
    findings = []
    for name in REPLICATED:
        values = [found[name] for found in settings.values() if found.get(name, "").isdigit()]
        least = min(map(int, values), default=0)
        findings.append(
            Finding(
                level=Level.ok if least >= 3 else Level.warning,
                what=name,
                found=str(least),
                wanted=_REPLICAS,
                todo="" if least >= 3 else _LOST,
            )
        )
    return findings
