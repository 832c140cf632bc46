"""Whether the summaries of a run say what its log says. The audit asks it.

The audit counts by the headers in its tables, while who writes a summary goes by the rule that readers have
(service/in_force.py): so each is checked by the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import Record
from rftstream.contracts.summaries import OutcomesSummary, StepsSummary, Summary, WeightsSummary
from rftstream.queries.rows import LATE, OUTCOME, RESULT_MASK, RESULTS, RowArray, TopicTable
from rftstream.service.newest_summaries import SUMMARIES
from rftstream.service.role import Log

Said = Sequence[tuple[Record, Summary]]
Find = Callable[[Summary], str | None]


def read_summaries(log: Log) -> list[tuple[Record, Summary]]:
    """Return the summaries in force. Read before the topics that they are about, they speak of what is there."""
    if SUMMARIES.topic not in log.transport.admin.topics():
        return []
    return [(record, one) for record, one in log.in_force(SUMMARIES.topic) if isinstance(one, Summary)]


def summary_problems(log: Log, said: Said, outcomes: TopicTable, announced: TopicTable, steps: Steps) -> list[str]:
    """Return a sentence for each summary that says something else than the topic that it is about. `outcomes` holds
    what is in force, `announced` perhaps more."""
    find: dict[str, Find] = {
        "outcomes": _outcomes_finder(outcomes),
        "weights": _weights_finder(log, announced),
        "steps": steps.find,
    }
    return [
        f"{record}: {found}; whoever begins with it would go wrong"
        for record, summary in said
        if (found := find[summary.topic](summary)) is not None
    ]


def _outcomes_finder(table: TopicTable) -> Find:
    rows = table.rows[(table.rows["kind"] == OUTCOME) & (table.rows["code"] & LATE == 0)]
    rows = rows[np.argsort(rows["offset"], kind="stable")]
    results = rows["code"] & RESULT_MASK
    sums_G = np.concatenate([[0], np.cumsum(rows["sequence"])])
    counts_G = {
        result: np.concatenate([[0], np.cumsum(results == RESULTS.index(result))]).astype(np.int64)
        for result in GroupResult
    }

    batched = results == RESULTS.index(GroupResult.batched)
    next_G = np.concatenate([[0], np.maximum.accumulate(np.where(batched, rows["number"] + 1, 0))])

    def find(summary: Summary) -> str | None:
        said = summary.outcomes
        assert isinstance(said, OutcomesSummary)
        end = int(np.searchsorted(rows["offset"], summary.through))
        for result, counts in counts_G.items():
            if (found := int(counts[end])) != (told := said.groups.get(result, 0)):
                return f"{told:,} groups {result} below offset {summary.through} of outcomes, expected {found:,}"
        named = said.below * (said.below - 1) // 2
        if said.below + len(said.above) != end or named + sum(said.above) != int(sums_G[end]):
            return f"other groups decided below offset {summary.through} of outcomes than are"
        if said.next_batch != next_G[end]:
            return f"batch {said.next_batch} next at offset {summary.through} of outcomes, expected {next_G[end]}"
        return None

    return find


def _weights_finder(log: Log, table: TopicTable) -> Find:
    rows = table.rows[np.argsort(table.rows["offset"], kind="stable")]

    def newest_below(offset: int, rows: RowArray) -> tuple[int, int]:
        below = rows[: int(np.searchsorted(rows["offset"], offset))]
        epoch = int(below["share"].max(initial=0))
        return epoch, int(below["number"][below["share"] == epoch].max(initial=0))

    def find(summary: Summary) -> str | None:
        assert isinstance(summary.weights, WeightsSummary)
        run = max(summary.weights.versions, key=lambda run: run.trainer_epoch)
        said, found = (run.trainer_epoch, run.last), newest_below(summary.through, rows)
        if said != found:  # something that is not in force may be among them
            offsets = np.array([record.offset for record, _ in log.in_force("weights")], np.int64)
            found = newest_below(summary.through, rows[np.isin(rows["offset"], offsets)])
        if said == found:
            return None
        return (
            f"version {said[1]} of epoch {said[0]} is the newest below offset {summary.through} of weights, expected "
            f"version {found[1]} of epoch {found[0]}"
        )

    return find


class Steps:
    """Where training stood at the offsets that summaries name. The audit makes it with the summaries and calls `pass_`
    for each step in force, in order, and `find` at last."""

    def __init__(self, said: Said) -> None:
        self._wanted = sorted({one.through for _, one in said if one.topic == "steps"})
        self._newest = (0, 0, 0)
        self._found: dict[int, tuple[int, int, int]] = {}

    def pass_(self, offset: int, newest: tuple[int, int, int]) -> None:
        """Take trainer epoch, version and trained groups as of the step at this offset."""
        self._settle(offset)
        self._newest = newest

    def _settle(self, offset: int) -> None:
        while self._wanted and self._wanted[0] <= offset:
            self._found[self._wanted.pop(0)] = self._newest

    def find(self, summary: Summary) -> str | None:
        """Return what is wrong with a summary, or None."""
        assert isinstance(summary.steps, StepsSummary)
        self._settle(summary.through)
        said = (summary.steps.name.trainer_epoch, summary.steps.name.version, summary.steps.trained_groups)
        found = self._found[summary.through]
        if said == found:
            return None
        return (
            f"version {said[1]} of epoch {said[0]} with {said[2]:,} groups below offset {summary.through} of steps, "
            f"expected version {found[1]} of epoch {found[0]} with {found[2]:,}"
        )
