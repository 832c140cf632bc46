"""Checks the summaries of a run against its log. The audit calls it.

The audit counts by the headers in its facts. The writers of summaries use the rule of readers instead
(service/records/in_force.py). So each method checks the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.summaries import OutcomesSummary, StepsSummary, Summary, WeightsSummary
from rftstream.contracts.versions import StepRecord
from rftstream.queries.audits.rows import RESULTS, headers_of, twin_key
from rftstream.queries.facts.database import Index
from rftstream.service.reading import read_between
from rftstream.service.records.in_force import RecordsInForce
from rftstream.service.records.newest_summaries import SUMMARIES
from rftstream.service.role import Log


@dataclass(frozen=True, slots=True)
class TrainingInForce:
    """The state of training: the last record of the newest trainer."""

    trainer_epoch: int = 0
    version: int = 0
    trained_groups: int = 0


def follow_training(log: Log) -> Iterator[tuple[Record, TrainingInForce]]:
    """Yield each step in force with the state of training at it. A newer trainer that starts from version b takes the
    records of older ones beyond b out of force."""
    newest = TrainingInForce()
    for record, step in log.in_force("steps"):
        if twin_key("steps", headers_of(record)) is None or not isinstance(step, StepRecord):
            continue
        if step.name.trainer_epoch >= newest.trainer_epoch:
            newest = TrainingInForce(step.name.trainer_epoch, step.name.version, step.trained_groups)
        yield record, newest


Said = Sequence[tuple[Record, Summary]]


def read_summaries(log: Log) -> list[tuple[Record, Summary]]:
    """Return the summaries in force. They are read before the topics that they summarise, so that every record in them
    exists."""
    if SUMMARIES.topic not in log.transport.admin.topics():
        return []
    return [(record, one) for record, one in log.in_force(SUMMARIES.topic) if isinstance(one, Summary)]


def summary_problems(index: Index, log: Log, said: Said, steps: Steps) -> list[str]:
    """Return a sentence for each summary that differs from its topic."""
    outcomes = OutcomesUpTo(index)
    by_offset = sorted(said, key=lambda pair: pair[1].through)
    control = _of_control(log, [pair for pair in by_offset if pair[1].topic == "control"])
    found = {
        record.offset: control[record.offset]
        if summary.topic == "control"
        else outcomes.find(summary)
        if summary.topic == "outcomes"
        else _of_weights(index, log, summary)
        if summary.topic == "weights"
        else steps.find(summary)
        for record, summary in by_offset
    }
    return [
        f"{record}: {why}; whoever begins with it would go wrong" for record, _ in said if (why := found[record.offset])
    ]


class OutcomesUpTo:
    """Running totals of the outcomes. The caller passes summaries to `find` in the order of their offsets."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._through = 0
        self._groups: Counter[int] = Counter()
        """Result -> groups."""
        self._sum_of_sequences = 0
        self._next_batch = 0

    def find(self, summary: Summary) -> str | None:
        """Return what is wrong with a summary, or None."""
        said = summary.outcomes
        assert isinstance(said, OutcomesSummary)
        for result, count, sum_of_sequences, last in self._index.rows(
            "SELECT result, count(*), sum(sequence), max(batch) FROM decided WHERE offset >= ? AND offset < ?"
            " GROUP BY result",
            (self._through, summary.through),
        ):
            self._groups[result] += count
            self._sum_of_sequences += sum_of_sequences
            if RESULTS[result] is GroupResult.batched:
                self._next_batch = max(self._next_batch, last + 1)
        self._through = max(self._through, summary.through)
        for result in GroupResult:
            if (found := self._groups[RESULTS.index(result)]) != (told := said.groups.get(result, 0)):
                return f"{told:,} groups {result} below offset {summary.through} of outcomes, expected {found:,}"
        named = said.below * (said.below - 1) // 2
        num_groups, num_said = self._groups.total(), said.below + len(said.above)
        if num_said != num_groups or named + sum(said.above) != self._sum_of_sequences:
            return f"other groups decided below offset {summary.through} of outcomes than are"
        if said.next_batch != self._next_batch:
            return f"batch {said.next_batch} next at offset {summary.through} of outcomes, expected {self._next_batch}"
        return None


def _of_control(log: Log, said: Said) -> dict[int, str | None]:
    """Return what is wrong with each summary of `control`, or None, by the offset of the summary. They are given in
    order of what they cover."""
    found: dict[int, str | None] = {}
    rule, place = RecordsInForce(log.transport), TopicPartition("control", 0)
    read = log.transport.admin.begin_offsets(place.topic)[place] if said else 0
    for record, summary in said:
        for _ in rule.messages(read_between(log.transport, {place: read}, {place: summary.through})):
            pass  # the records need only be judged
        read = max(read, summary.through)
        is_true = rule.summary(place.topic, summary.through) == summary
        found[record.offset] = None if is_true else f"other records of control below offset {summary.through} than hold"
    return found


def _of_weights(index: Index, log: Log, summary: Summary) -> str | None:
    assert isinstance(summary.weights, WeightsSummary)

    def newest(of: str) -> tuple[int, int]:
        below = f"FROM {of} WHERE offset < ?"
        epoch = max(0, index.number(f"SELECT max(epoch) {below}", (summary.through,)))
        of_epoch = f"SELECT max(number) {below} AND epoch = ?"
        return epoch, max(0, index.number(of_epoch, (summary.through, epoch)))

    run = max(summary.weights.versions, key=lambda run: run.trainer_epoch)
    said, found = (run.trainer_epoch, run.last), newest("announced")
    if said != found:  # a record that is not in force may be among them
        index.execute("DELETE FROM temp.in_force")
        index.insert("in_force", 1, ((record.offset,) for record, _ in log.in_force("weights")))
        found = newest("(SELECT * FROM announced WHERE offset IN (SELECT offset FROM in_force))")
    if said == found:
        return None
    return (
        f"version {said[1]} of epoch {said[0]} is the newest below offset {summary.through} of weights, expected "
        f"version {found[1]} of epoch {found[0]}"
    )


class Steps:
    """The state of training at the offsets that summaries name. The audit makes it with the summaries, calls `pass_`
    for each step in force, in order, and `find` last."""

    def __init__(self, said: Said) -> None:
        self._wanted = sorted({one.through for _, one in said if one.topic == "steps"})
        self._newest = TrainingInForce()
        self._found: dict[int, TrainingInForce] = {}

    def pass_(self, offset: int, newest: TrainingInForce) -> None:
        """Record the state of training after the step at this offset."""
        self._settle(offset)
        self._newest = newest

    def _settle(self, offset: int) -> None:
        while self._wanted and self._wanted[0] <= offset:
            self._found[self._wanted.pop(0)] = self._newest

    def find(self, summary: Summary) -> str | None:
        """Return what is wrong with a summary, or None."""
        assert isinstance(summary.steps, StepsSummary)
        self._settle(summary.through)
        name = summary.steps.name
        said = TrainingInForce(name.trainer_epoch, name.version, summary.steps.trained_groups)
        found = self._found[summary.through]
        if said == found:
            return None
        return (
            f"version {said.version} of epoch {said.trainer_epoch} with {said.trained_groups:,} groups below offset "
            f"{summary.through} of steps, expected version {found.version} of epoch {found.trainer_epoch} with "
            f"{found.trained_groups:,}"
        )
