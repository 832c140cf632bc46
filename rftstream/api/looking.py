"""The tables of a run, with the filters of the studio under the studio's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Never

from rftstream.api.rollouts import COLUMNS as ROLLOUT_COLUMNS
from rftstream.api.rollouts import PAGE, RolloutTable, RunRollout, rollout_of_row, rollout_table
from rftstream.api.tables import T, Table, check_word, pages
from rftstream.config.parts.registry import suggest
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import ConfigError
from rftstream.models.rendering import joined
from rftstream.queries.catalog.finding import (
    FATES,
    BatchRow,
    GroupFilter,
    GroupRow,
    Letter,
    find_batches,
    find_group,
    find_groups,
    find_letters_page,
)
from rftstream.queries.catalog.listing import FATES as ROLLOUT_FATES
from rftstream.queries.catalog.listing import ORDERS as ROLLOUT_ORDERS
from rftstream.queries.catalog.listing import RolloutFilter
from rftstream.queries.catalog.problems import ORDERS, ProblemRow, find_problems, list_tasksets
from rftstream.queries.catalog.run_index import Page, RunIndex
from rftstream.queries.catalog.samples import ORDERS as SAMPLE_ORDERS
from rftstream.queries.catalog.samples import EvaluationSample, find_samples, list_evaluated
from rftstream.queries.people.feedback import VoteLine, read_feedback
from rftstream.queries.plain import pick
from rftstream.queries.records.group_view import read_problem
from rftstream.queries.records.weights import VersionLine, list_versions
from rftstream.runs.published import read_published
from rftstream.service.role import Log

STEP = "version=name.version trainer_epoch=name.trainer_epoch batch=batch_sequence recorded_at"
EVALUATION = "evaluation version=name.version num_tasks num_samples num_unscored evaluated_at scored_by"
SAMPLE = "version problem sample prompt answer completion reward reason num_tokens"
VOTE = "question=question_id rollout_id kind reward choice correction annotator"
JUDGED = "effect=judgement.effect at=record.timestamp_s recorded"
INTERNAL = ("siblings", "task_offset", "outcome_offset")
"""Fields of a group that are no columns."""


def _columns(of: str | type) -> tuple[str, ...]:
    if isinstance(of, str):
        return tuple(one.partition("=")[0] for one in of.split())
    return tuple(one.name for one in fields(of) if one.name not in INTERNAL)


COLUMNS: Mapping[str, tuple[str, ...]] = {
    "rollouts": ROLLOUT_COLUMNS,
    "groups": _columns(GroupRow),
    "batches": _columns(BatchRow),
    "dead_letters": _columns(Letter),
    "problems": _columns(ProblemRow),
    "steps": _columns(STEP),
    "evaluations": _columns(EVALUATION),
    "samples": _columns(SAMPLE),
    "versions": _columns(VersionLine),
    "feedback": _columns(f"{VOTE} {JUDGED}"),
}
"""Table -> the columns that its frames have, also without a row; metrics of steps and evaluations come to these."""


class RunTables:
    """The tables of a run, which are read when they are used. `Run` is one."""

    _index: RunIndex

    def rollouts(
        self,
        *,
        text: str = "",
        fate: str = "",
        status: str = "",
        tool: str = "",
        reward_from: float | None = None,
        reward_to: float | None = None,
        tokens_from: float | None = None,
        tokens_to: float | None = None,
        version_from: float | None = None,
        version_to: float | None = None,
        taskset: str = "",
        problem: int | None = None,
        batch: int | None = None,
        order: str = "newest",
        **unknown: Never,
    ) -> RolloutTable:
        """Return the rollouts that meet all these conditions; order: newest, oldest, best, worst, longest or
        shortest."""
        _check_filters(self.rollouts, unknown)
        self._check_taskset("rollouts", taskset)
        check_word("rollouts: order", order, ROLLOUT_ORDERS)
        if fate:
            check_word("rollouts: fate", fate, ROLLOUT_FATES)
        if status:
            check_word("rollouts: status", status, map(str, RolloutStatus))
        wanted = RolloutFilter(
            text=text,
            fate=fate,
            status=status,
            tool=tool,
            reward=(reward_from, reward_to),
            tokens=(tokens_from, tokens_to),
            version=(version_from, version_to),
            groups=GroupFilter(taskset=taskset, problem=problem, batch=batch),
        )
        return rollout_table(self._index, wanted, order)

    def rollout(self, rollout_id: str) -> RunRollout:
        """Return the rollout of this id. ConfigError if the run has none."""
        group_id, _, sibling = rollout_id.rpartition("/")
        group = self.group(group_id)
        found = [one for one in group.siblings if str(one.sibling) == sibling]
        if not found:
            raise ConfigError(
                f"{rollout_id}: no such rollout; its group has the rollouts 0 to {len(group.siblings) - 1}"
            )
        return rollout_of_row(found[0], self._index, group)

    def groups(
        self,
        *,
        fate: str = "",
        reason: str = "",
        taskset: str = "",
        batch: int | None = None,
        problem: int | None = None,
        **unknown: Never,
    ) -> Table[GroupRow]:
        """Return the groups that meet all these conditions, newest first."""
        _check_filters(self.groups, unknown)
        self._check_taskset("groups", taskset)
        if fate:
            check_word("groups: fate", fate, FATES)
        wanted = GroupFilter(fate=fate, reason=reason, taskset=taskset, batch=batch, problem=problem)
        return self._paged(
            "groups",
            lambda page, before, size: find_groups(*page, wanted, before=before, limit=size, with_siblings=False),
            lambda group: group.sequence,
            _row,
        )

    def group(self, group_id: str) -> GroupRow:
        """Return the group of this id with its siblings. ConfigError if the run has none."""
        with self._index.catalog() as opened:
            found = None if opened is None else find_group(*opened, group_id)
        if found is None:
            raise ConfigError(
                f"{group_id}: no such group in {self._index.run.run_id}; expected an id as sums/0/17/0, and one of its "
                "rollouts as sums/0/17/0/3"
            )
        return found

    def batches(self) -> Table[BatchRow]:
        """Return the batches, newest first."""
        return self._paged(
            "batches",
            lambda page, before, size: find_batches(*page, before=before, limit=size),
            lambda batch: batch.batch,
            _row,
        )

    def dead_letters(self, *, reason: str = "", **unknown: Never) -> Table[Letter]:
        """Return the dead letters, newest first; with a reason, only those."""
        _check_filters(self.dead_letters, unknown)
        return self._paged(
            "dead_letters",
            lambda page, before, size: find_letters_page(*page, reason=reason, before=before, limit=size),
            lambda letter: letter.offset,
            _row,
        )

    def problems(
        self,
        *,
        taskset: str = "",
        text: str = "",
        reward_from: float | None = None,
        reward_to: float | None = None,
        version_from: int | None = None,
        doubtful: bool = False,
        order: str = "problem",
        **unknown: Never,
    ) -> Table[ProblemRow]:
        """Return the problems that have a group; order: problem, hardest, easiest, learned, forgotten, seen, rare or
        last. Frames can have the column `prompt`, too. `version_from`: by the groups that only this version or newer
        ones sampled. `doubtful`: only those whose reference answer may be wrong, since no attempt got 0.5 and most gave
        one answer, `agreed`."""
        _check_filters(self.problems, unknown)
        self._check_taskset("problems", taskset)
        check_word("problems: order", order, ORDERS)

        def read(limit: int | None) -> Iterator[ProblemRow]:
            def page(skip: int | None, size: int) -> tuple[Sequence[ProblemRow], int | None]:
                with self._index.catalog(texts=bool(text) or doubtful, fresh=skip is None) as opened:
                    found = (
                        []
                        if opened is None
                        else find_problems(
                            *opened,
                            taskset=taskset,
                            text=text,
                            reward=(reward_from, reward_to),
                            version_from=version_from,
                            doubtful=doubtful,
                            order=order,
                            skip=skip or 0,
                            limit=size,
                        )
                    )
                return found, (skip or 0) + size if len(found) == size else None

            return pages(page, _page_size(limit))

        return replace(_table("problems", read=read, to_row=_row), on_log={"prompt": self._prompt})

    def _check_taskset(self, table: str, name: str) -> None:
        """Raise ConfigError for a taskset that the run file does not have, and of which there is no group."""
        if name and name not in (known := self._index.run.config.tasksets):
            with self._index.catalog(texts=False) as opened:
                check_word(f"{table}: taskset", name, {*known, *(list_tasksets(opened[0]) if opened else ())})

    def _prompt(self, row: ProblemRow) -> str:
        """Return the last user message of a problem, by its newest group."""
        with self._index.catalog(fresh=False) as opened:
            wanted = GroupFilter(taskset=row.taskset, problem=row.problem)
            groups = [] if opened is None else find_groups(*opened, wanted, limit=1)
        run = self._index.run
        views = [read_problem(run.transport, one, num_partitions=run.config.transport.partitions) for one in groups]
        asked = [joined(message.pieces) for view in views for message in view.problem if message.role == "user"]
        return asked[-1] if asked else ""

    def steps(self) -> Table[StepRecord]:
        """Return the trained steps in force, oldest first. A frame has a column for each of their metrics."""
        return _table(
            "steps",
            read=lambda _: iter(self._index.history().history().steps),
            to_row=lambda step: {
                **pick(step, STEP),
                **step.metrics,
            },
        )

    def evaluations(self) -> Table[EvalResult]:
        """Return the results of evaluations in force, by version. A frame has a column for each of their metrics."""
        return _table(
            "evaluations",
            read=lambda _: iter(self._index.history().history().evaluations),
            to_row=lambda result: {
                **pick(result, EVALUATION),
                **result.metrics,
            },
        )

    def samples(
        self, evaluation: str, *, version: int | None = None, text: str = "", order: str = "problem", **unknown: Never
    ) -> Table[EvaluationSample]:
        """Return the samples of an evaluation at one version; None: the newest that has some. `text`: one that the
        prompt or the completion has; order: problem, last, worst or best."""
        _check_filters(self.samples, unknown)
        held = {result.evaluation for result in self._index.history().history().evaluations}
        check_word("samples: evaluation", evaluation, {*self._index.run.config.evaluations, *held})
        check_word("samples: order", order, SAMPLE_ORDERS)

        def read(limit: int | None) -> Iterator[EvaluationSample]:
            wanted = version

            def page(skip: int | None, size: int) -> tuple[Sequence[EvaluationSample], int | None]:
                nonlocal wanted  # who updates the index meanwhile may add a newer version
                with self._index.catalog(texts=True, fresh=skip is None) as opened:
                    known = [] if opened is None else list_evaluated(opened[0], evaluation)
                    wanted = known[0] if wanted is None and known else wanted
                    if wanted is not None and wanted not in known:
                        have = ", ".join(map(str, sorted(known))) or "no version"
                        raise ConfigError(f"samples: {evaluation} has none of version {wanted}; it has those of {have}")
                    if opened is None or wanted is None:
                        return [], None
                    found = find_samples(
                        opened[0], evaluation, wanted, text=text, order=order, skip=skip or 0, limit=size
                    )
                return found, (skip or 0) + size if len(found) == size else None

            return pages(page, _page_size(limit))

        return _table("samples", read=read, to_row=lambda sample: pick(sample, SAMPLE))

    def versions(self) -> Table[VersionLine]:
        """Return the published versions in force, oldest first, each with whether its weights are still held."""
        return _table("versions", read=lambda _: iter(list_versions(read_published(self._index.run))), to_row=_row)

    def feedback(self) -> Table[VoteLine]:
        """Return what people said of rollouts, oldest first, each with how it was judged."""

        def read(_: int | None) -> Iterator[VoteLine]:
            run = self._index.run
            return iter(read_feedback(Log(run.transport), run.config).votes)

        return _table("feedback", read=read, to_row=_vote_row)

    def _paged(
        self,
        name: str,
        find: Callable[[Page, int | None, int], Sequence[Any]],
        place: Callable[[Any], int],
        to_row: Callable[[Any], Mapping[str, Any]],
    ) -> Table[Any]:
        """Return a table that is read downwards by a number of its rows, `place`."""

        def read(limit: int | None) -> Iterator[Any]:
            def page(before: int | None, size: int) -> tuple[Sequence[Any], int | None]:
                with self._index.catalog(fresh=before is None) as opened:
                    found = [] if opened is None else find(opened, before, size)
                return found, place(found[-1]) if len(found) == size else None

            return pages(page, _page_size(limit))

        return _table(name, read=read, to_row=to_row)


def _table(name: str, read: Callable[[int | None], Iterator[T]], to_row: Callable[[T], Mapping[str, Any]]) -> Table[T]:
    return Table(name=name, read=read, to_row=to_row, columns=COLUMNS[name])


def _page_size(limit: int | None) -> int:
    return PAGE if limit is None else max(1, min(limit, PAGE))


def _row(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in _columns(type(item))}


def _vote_row(line: VoteLine) -> dict[str, Any]:
    said = pick(line.vote, VOTE) if line.vote is not None else {}
    return {**said, **pick(line, JUDGED)}


def _check_filters(table: Callable[..., Any], unknown: Mapping[str, object]) -> None:
    """Raise ConfigError for a filter that a table does not have."""
    for name in unknown:
        known = [one for one in inspect.signature(table).parameters if one != "unknown"]
        raise ConfigError(f"{table.__name__}: unknown filter {name!r}; {suggest(name, known)}")
