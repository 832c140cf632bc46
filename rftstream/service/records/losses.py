"""Records that somebody deleted from the log without a record of it: unread records, and the beginnings of topics.

Before a run deletes records it writes a `trimmed` record to `control`. Anything else that is missing was deleted by
somebody else: by a topic's retention setting that the run did not make, or by a person. The content is lost. If the run
went on, it would wait for the lost records for ever, or take a log without its beginning for complete."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rftstream import metrics
from rftstream.contracts.control import Trimmed
from rftstream.errors import RecordsDeleted
from rftstream.service.control_view import read_control
from rftstream.transport.base import Jump, Transport

WHOLE = ("control", "outcomes", "steps", "weights", "evals", "judgements", "questions")
"""Topics from which a run never deletes. Roles read them from the beginning."""


def deleted_unsaid(transport: Transport, said: Trimmed, topics: Collection[str]) -> dict[str, int]:
    """Return topic -> number of offsets at its beginning that are gone and that `said` does not mention. Complete and
    missing topics are left out."""
    there = transport.admin.topics()
    kept = [topic for topic in topics if topic in there and not there[topic].compacted]
    told = {topic: dict(enumerate(said.offsets.get(topic, ()))) for topic in kept}
    found = dict.fromkeys(kept, 0)
    for place, begin in transport.admin.begin_offsets(*kept).items():
        found[place.topic] += max(0, begin - told[place.topic].get(place.partition, 0))
    return {topic: count for topic, count in found.items() if count}


def check_beginnings(transport: Transport, run: str, topics: Iterable[str]) -> None:
    """Raise RecordsDeleted if one of `topics` must be complete (WHOLE) and has lost its beginning."""
    there = transport.admin.topics()
    whole = [topic for topic in WHOLE if topic in topics and topic in there and not there[topic].compacted]
    gone = {topic: count for topic in whole if (count := sum(transport.admin.begin_offsets(topic).values()))}
    if gone:
        found = ", ".join(f"{count:,} of {topic}" for topic, count in gone.items())
        raise RecordsDeleted(
            f"{run}: the log has lost its beginning (offsets {found}), expected these topics to be whole: the run "
            f"cannot be read any more; {_what_to_do(run)}"
        )


def check_jumps(transport: Transport, run: str, role: str, jumps: Collection[Jump]) -> None:
    """Raise RecordsDeleted if a reader jumped over records and `control` does not say that they were deleted."""
    if not jumps:
        return
    there, said = transport.admin.topics(), read_control(transport).deleted
    lost = [
        (jump, start)
        for jump in jumps
        if jump.place.topic in there
        and not there[jump.place.topic].compacted
        and (start := max(jump.start, _told(said, jump))) < jump.end
    ]
    for jump, start in lost:
        metrics.LOST.labels(role, jump.place.topic).inc(jump.end - start)
    if lost:
        found = ", ".join(f"{jump.place} from {start} to {jump.end - 1}" for jump, start in lost[:4])
        more = f" and {len(lost) - 4} partitions more" if len(lost) > 4 else ""
        raise RecordsDeleted(
            f"{run}: offsets were deleted that the {role} had not read: {found}{more}; what they held is lost, and "
            f"without it the run would wait for ever; {_what_to_do(run)}"
        )


def _told(said: Trimmed, jump: Jump) -> int:
    offsets = said.offsets.get(jump.place.topic, ())
    return offsets[jump.place.partition] if jump.place.partition < len(offsets) else 0


def _what_to_do(run: str) -> str:
    return (
        "look for the retention of the topics (`rftstream topics list`) or for who deleted them, then begin a new run "
        f'from what was trained, with model.init_from = "{run}"'
    )
