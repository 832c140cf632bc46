"""Checks that the topics of a run have the settings that the run needs. Others may have made, changed or deleted them.

A danger is a setting that deletes unread records, gives a topic another shape, or prevents writing. A run does not
start with a danger, and a live run is paused. Other differences only cost speed or safety, and `topics list` shows
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from rftstream.config.sections import RunConfig
from rftstream.contracts.topics import TOPICS, Width
from rftstream.errors import RUN_LOST, ConfigError, PositionMissing, RecordsDeleted, RftError, TransportError
from rftstream.runs.folder import wanted_topics
from rftstream.transport.base import TopicSettings, Transport
from rftstream.transport.findings import ServerLook

WHERE = {Width.partitions: "transport.partitions", Width.shares: "trainer.shares"}
"""Topic -> the setting that decides its number of partitions."""

COMPACTED_BEFORE = "control"
"""Topics that are compacted in runs of earlier releases, from before their history decided which records are in force.
These runs continue so."""

DELETES = ("retention.ms", "retention.bytes")
"""Settings that make brokers delete records by age or size, read or not."""


UNWRITABLE = "min.insync.replicas"
"""A setting that prevents writes to a topic with fewer replicas."""

GONE, ANEW = "is gone, expected the topic", "was deleted and made anew"
"""Descriptions of topics whose records are lost."""

NEVER_MISSING = ("control", "tasks", "rollouts", "verified", "batches", "outcomes", "weights", "steps")
"""Topics that every run has from its start. Others may have come with a later release."""


def shape_differences(name: str, found: TopicSettings, wanted: TopicSettings) -> list[str]:
    """Return the differences between a topic's shape and the required one, a sentence each."""
    texts = []
    if found.partitions != wanted.partitions:
        where = WHERE.get(TOPICS[name].width)
        found_text = "1 partition" if found.partitions == 1 else f"{found.partitions:,} partitions"
        texts.append(f"has {found_text}, expected {wanted.partitions}{f' ({where})' if where else ''}")
    if found.compacted != wanted.compacted and not (found.compacted and name == COMPACTED_BEFORE):
        is_, expected = ("compacted", "not") if found.compacted else ("not compacted", "compacted")
        texts.append(f"is {is_}, expected {expected}")
    if found.max_record_bytes != wanted.max_record_bytes:
        texts.append(f"takes records of {max(0, found.max_record_bytes)} bytes, expected {wanted.max_record_bytes}")
    return texts


def dangers(
    transport: Transport, config: RunConfig, *, begun: bool, topics: Collection[str] | None = None
) -> list[str]:
    """Return the dangers, which would lose records or end the run, as `topic: sentence`. `begun`: the run exists, so
    that a missing topic was deleted. `topics`: the topics that this user may see; by default all."""
    wanted, there = wanted_topics(config), transport.admin.topics()
    wanted = {name: one for name, one in wanted.items() if topics is None or name in topics}
    look: ServerLook | None = getattr(transport.admin, "look", None)
    more = {} if look is None else look.topic_differences(wanted)
    missing = [name for name in NEVER_MISSING if name in wanted and name not in there] if begun else []
    found = [f"{name}: {GONE}" for name in missing]
    for name, settings in wanted.items():
        if name in there:
            grave = [text for text in more.get(name, ()) if text.startswith((*DELETES, UNWRITABLE, ANEW))]
            found += [f"{name}: {text}" for text in (*shape_differences(name, there[name], settings), *grave)]
    return found


def is_lost(found: list[str]) -> bool:
    """Return whether one of the dangers has already lost records, so that a pause saves nothing."""
    return any(text.endswith((GONE, ANEW)) for text in found)


def check_log(transport: Transport, config: RunConfig, run: str, *, begun: bool) -> None:
    """Raise ConfigError if a topic has settings that would lose records or end the run."""
    if found := dangers(transport, config, begun=begun):
        raise ConfigError(in_words(run, found))


def explained(
    error: PositionMissing, transport: Transport, config: RunConfig, run: str, topics: Collection[str] | None = None
) -> TransportError:
    """Return the error for a missing position. If the state of the topics is the cause, the error explains it. `topics`
    as for `dangers`."""
    with contextlib.suppress(RftError):
        if found := dangers(transport, config, begun=True, topics=topics):
            kind = RecordsDeleted if is_lost(found) or error.exit_code == RUN_LOST else PositionMissing
            return kind(f"{error}; {in_words(run, found)}")
    return error


def in_words(run: str, found: list[str]) -> str:
    """Return the dangers, with advice, as a sentence."""
    shown = "; ".join(found[:6]) + (f"; and {len(found) - 6} more (`rftstream topics list`)" if len(found) > 6 else "")
    todo = []
    if any("retention." in text for text in found):
        todo.append(
            "brokers would delete records that nobody has read: set retention.ms=-1 and retention.bytes=-1 on these "
            "topics (kafka-configs.sh --alter --entity-type topics --add-config ...)"
        )
    if any("is compacted" in text for text in found):
        todo.append("compaction would delete records that nobody has read: set cleanup.policy=delete")
    if any(" partition" in text for text in found):
        todo.append(
            "partitions are fixed for a run, and nobody can take some away: begin a new run under another name, from "
            f'what was trained, with model.init_from = "{run}"'
        )
    if any(f": {UNWRITABLE}" in text for text in found):
        todo.append("nobody can write to these topics: set min.insync.replicas to no more than their replicas")
    if is_lost(found):
        todo.append(f'what it held is lost: begin a new run under another name, with model.init_from = "{run}"')
    if any("takes records" in text for text in found):
        todo.append("set max.message.bytes to 1048576 more than the largest record")
    return f"{run}: {shown}; {'; '.join(todo)}"
