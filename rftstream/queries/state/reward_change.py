"""Since which version a changed reward scores: rewards and evaluations before and after it do not compare."""

from __future__ import annotations

from collections.abc import Iterator

from rftstream.contracts import codec
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import ContractError
from rftstream.service.reading import read_between
from rftstream.transport.base import Transport

LOOKED_AT = 8
"""Records that are read at each place where a verdict is looked for."""


def reward_changes(transport: Transport) -> tuple[str, ...]:
    """Return a line for each taskset whose newest scorer is not its oldest one, as far as the log goes back: since
    which version it scores. Few records are read: the first and the newest, and those where a search by halves looks.
    """
    found: dict[str, tuple[int, str]] = {}
    begins, ends = transport.admin.begin_offsets("verified"), transport.admin.end_offsets("verified")
    for place, end in ends.items():
        begin = begins[place]
        oldest = {one.ids.taskset: scorer_of(one) for _, one in reversed(_scored(transport, place, begin, end))}
        newest = _scored(transport, place, max(begin, end - LOOKED_AT), end)
        for taskset, scorer in {one.ids.taskset: scorer_of(one) for _, one in newest}.items():
            if taskset in oldest and oldest[taskset] != scorer:
                version, before = _changed_at(transport, place, range(begin, end), taskset, scorer)
                line = f"{taskset}: {before} -> {scorer} since version {version:,}; older rewards do not compare"
                if taskset not in found or version < found[taskset][0]:
                    found[taskset] = version, line
    return tuple(line for _, line in found.values())


def scorer_of(verified: VerifiedRollout) -> str:
    """Return name and version of the scorer of a rollout with a verdict."""
    assert verified.verdict is not None, "only those with a verdict are looked at"
    return f"{verified.verdict.scorer} {verified.verdict.scorer_version}"


def _changed_at(
    transport: Transport, place: TopicPartition, offsets: range, taskset: str, newest: str
) -> tuple[int, str]:
    """Return the version that sampled the first rollout of the newest scorer, and the scorer before it."""
    low, high, before, version = offsets.start, offsets.stop, "", 0
    while low < high:
        middle = (low + high) // 2
        own = _next_of(transport, place, range(middle, high), taskset)
        if own is not None and scorer_of(own[1]) != newest:
            before, low = scorer_of(own[1]), own[0] + 1
        else:
            version, high = (version if own is None else _version_of(own[1])), middle
    return version, before


def _next_of(
    transport: Transport, place: TopicPartition, offsets: range, taskset: str
) -> tuple[int, VerifiedRollout] | None:
    """Return the first rollout of a taskset with a verdict among these offsets; None if there is none."""
    for begin in offsets[::LOOKED_AT]:
        for offset, one in _scored(transport, place, begin, offsets.stop):
            if one.ids.taskset == taskset:
                return offset, one
    return None


def _version_of(verified: VerifiedRollout) -> int:
    segments = () if verified.rollout is None else verified.rollout.segments
    return max((span.version for segment in segments for span in segment.versions), default=0)


def _scored(transport: Transport, place: TopicPartition, begin: int, end: int) -> list[tuple[int, VerifiedRollout]]:
    """Return the next rollouts with a verdict, at most LOOKED_AT, with their offsets."""
    return list(_verdicts(read_between(transport, {place: begin}, {place: min(end, begin + LOOKED_AT)})))


def _verdicts(records: Iterator[Record]) -> Iterator[tuple[int, VerifiedRollout]]:
    for record in records:
        try:
            message = codec.from_record(record)
        except ContractError:
            continue
        if isinstance(message, VerifiedRollout) and message.verdict is not None:
            yield record.offset, message
