"""What those who own the brokers have to be asked for, before a run starts there. No broker is asked."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.queries.formatting import columns, plural
from rftstream.queries.plain import Report
from rftstream.runs.folder import RunFolder, lies_in_folder, open_transport, wanted_topics
from rftstream.transport.findings import BrokerWish, ServerLook, TopicWish


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsPlan(Report):
    """The topics and settings that a run needs of brokers. `plan_topics` makes it."""

    run: str
    servers: str
    brokers: tuple[BrokerWish, ...]
    topics: tuple[TopicWish, ...]

    def to_text(self) -> str:
        """Return the plan as text to send."""
        brokers = [(one.name, one.wanted, f"{'else' if one.needed else 'better:'} {one.why}") for one in self.brokers]
        settings = Counter(setting for one in self.topics for setting in one.settings.items())
        usual = dict(setting for setting, count in settings.items() if 2 * count > len(self.topics))
        topics = [(one.name, one.partitions, one.replicas or "default", _own(one, usual)) for one in self.topics]
        num = f"{plural(len(self.topics), 'topic')}, {plural(sum(one.partitions for one in self.topics), 'partition')}"
        return "\n".join(
            [
                f"what the run {self.run} needs of Kafka at {self.servers}",
                "",
                "brokers:",
                *columns(brokers, left=3, indent="  "),
                "",
                f"{num}, as commands: --format kafka-topics",
                f"  usually {_text(usual)}",
                *columns([("name", "partitions", "replicas", "other settings"), *topics], left=4, indent="  "),
                "",
                "rights: rftstream topics acls FILE --format kafka-acls",
                "room: what `rftstream check FILE` says of the log, times the replicas",
            ]
        )

    def to_commands(self) -> str:
        """Return the `kafka-topics` commands that make the topics."""
        return "\n".join(shlex.join(self._command(topic)) for topic in self.topics)

    def _command(self, topic: TopicWish) -> Iterator[str]:
        yield from ("kafka-topics", "--bootstrap-server", self.servers, "--command-config", "admin.properties")
        yield from ("--create", "--topic", topic.name, "--partitions", str(topic.partitions))
        if topic.replicas is not None:
            yield from ("--replication-factor", str(topic.replicas))
        for key, value in topic.settings.items():
            yield from ("--config", f"{key}={value}")


def _own(topic: TopicWish, usual: Mapping[str, str]) -> str:
    return _text({key: value for key, value in topic.settings.items() if usual.get(key) != value})


def _text(settings: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(settings.items()))


def plan_topics(config: RunConfig, folder: RunFolder) -> TopicsPlan:
    """Return what to ask for. ConfigError for a log without servers."""
    if not lies_in_folder(config):
        with closing(open_transport(config, folder, create=True)) as transport:
            look: ServerLook | None = getattr(transport.admin, "look", None)
            if look is not None:
                return TopicsPlan(
                    run=folder.run_id,
                    servers=config.transport.servers or "HOST:9092",
                    brokers=tuple(look.broker_wishes()),
                    topics=tuple(look.topic_wishes(wanted_topics(config))),
                )
    raise ConfigError(
        f"transport.kind: {config.transport.kind!r} asks nobody for topics, expected a log on servers, kind 'kafka'"
    )
