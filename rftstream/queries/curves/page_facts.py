"""The facts beside the curves on a run's page: its non-default settings, and early and late completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rftstream.config.sections import RunConfig
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.models.rendering import Pieces
from rftstream.queries.formatting import number
from rftstream.queries.records.inspect import select
from rftstream.queries.records.shown import CompletionReader, cut
from rftstream.service.role import Log

NUM_SAMPLES = 6
"""Number of samples from the beginning, and as many from the end."""
SHOWN_CHARACTERS = 1_000
"""Most characters of a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    rollout_id: str
    version: int
    """The oldest version that sampled a token of it."""
    reward: str
    turns: tuple[tuple[str, Pieces], ...]
    """Speaker and text of each turn."""


def own_settings(config: RunConfig) -> list[tuple[str, str]]:
    """Return dotted names and values of all settings that are not at their default."""
    return [(name, str(value)) for name, value in _changed(config, "") if name != "base"]


def _changed(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(section):
        value, default = getattr(section, field.name), field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default:
            yield from _leaves(value, f"{prefix}{field.name}")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        yield from _changed(value, f"{name}.")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)) and any(map(dataclasses.is_dataclass, value)):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{place}")
    else:
        yield name, value


def read_samples(log: Log, reader: CompletionReader) -> list[ShownSample]:
    """Return the first and the last scored rollouts on the log, by version."""
    first: list[Record] = []
    for place in log.ends("verified"):
        first += islice(log.read("verified", partitions=[place.partition]), NUM_SAMPLES)
    first.sort(key=lambda record: (record.timestamp_s, record.partition, record.offset))
    records = {str(record): record for record in first[:NUM_SAMPLES]}
    records |= {str(record): record for record in select(log, "verified", last=NUM_SAMPLES)}
    found = [
        _shown(message.rollout, message.verdict, reader)
        for _, message in log.rule.messages(records.values())
        if isinstance(message, VerifiedRollout) and message.verdict is not None and message.rollout is not None
    ]
    return sorted(found, key=lambda sample: sample.version)


def _shown(rollout: Rollout, verdict: Verdict, reader: CompletionReader) -> ShownSample:
    versions = [span.version for segment in rollout.segments for span in segment.versions]
    asked = rollout.problem.messages if rollout.problem is not None else ()
    said = zip(rollout.turns, reader.turns(rollout.turns, rollout.segments, rollout.calls), strict=True)
    turns = [
        *((message.role, [(message.content, False)]) for message in asked),
        *((turn.role, pieces) for turn, pieces in said),
    ]
    return ShownSample(
        rollout_id=rollout.ids.rollout_id,
        version=min(versions, default=0),
        reward=f"reward {number(verdict.reward)}",
        turns=tuple((who, cut(pieces, SHOWN_CHARACTERS)) for who, pieces in turns),
    )
