"""Since which version a changed reward scores: rewards and evaluations before and after it do not compare."""

from __future__ import annotations

from rftstream.contracts.records import TopicPartition
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.queries.decoding import decoded
from rftstream.service.reading import read_between
from rftstream.transport.base import Transport

LOOKED_AT = 4
"""Records that are read at each place where verdicts are looked for: a rollout may be large."""

Scored = dict[str, tuple[str, int]]
"""Taskset -> name and version of its scorer, and the version of the weights that sampled."""


def reward_changes(transport: Transport) -> tuple[str, ...]:
    """Return a line for each taskset whose newest scorer is not its oldest one, as far as the log goes back: since
    which version of the weights it scores.

    A change is seen by all partitions, so the fullest is looked at alone, and few of its records are read: the first
    and the newest, and where a scorer changed, those at which a search by halves looks."""
    begins, ends = transport.admin.begin_offsets("verified"), transport.admin.end_offsets("verified")
    place = max(ends, key=lambda one: ends[one] - begins[one], default=None)
    if place is None:
        return ()
    begin, end = begins[place], ends[place]
    oldest = _scored_at(transport, place, begin, end)
    newest = _scored_at(transport, place, max(begin, end - LOOKED_AT), end)
    lines = []
    for taskset, (scorer, version) in newest.items():
        if taskset in oldest and oldest[taskset][0] != scorer:
            before, version = _change_of(transport, place, range(begin, end), taskset, (scorer, version))
            text = f"{before or oldest[taskset][0]} -> {scorer} since version {version:,}"
            lines.append(f"{taskset}: {text}; older rewards do not compare")
    return tuple(lines)


def _change_of(
    transport: Transport, place: TopicPartition, offsets: range, taskset: str, newest: tuple[str, int]
) -> tuple[str, int]:
    """Return the scorer before the newest one, and the version of the first rollouts of the newest one that are
    found. Places without the taskset count as the newest one's."""
    low, high, before, version = offsets.start, offsets.stop, "", newest[1]
    while low < high:
        middle = (low + high) // 2
        scorer, sampled = _scored_at(transport, place, middle, high).get(taskset, (newest[0], version))
        if scorer == newest[0]:
            high, version = middle, sampled
        else:
            low, before = middle + 1, scorer
    return before, version


def _scored_at(transport: Transport, place: TopicPartition, begin: int, end: int) -> Scored:
    """Return who scored the first rollout of each taskset, among the next LOOKED_AT records."""
    found: Scored = {}
    for record in read_between(transport, {place: begin}, {place: min(end, begin + LOOKED_AT)}):
        one = decoded(record, VerifiedRollout)
        if one is not None and one.verdict is not None and one.ids.taskset not in found:
            segments = () if one.rollout is None else one.rollout.segments
            version = max((span.version for segment in segments for span in segment.versions), default=0)
            found[one.ids.taskset] = one.verdict.scored_by, version
    return found
