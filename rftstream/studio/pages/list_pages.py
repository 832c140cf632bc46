"""The pages that list what was said: rollouts by text and numbers, and samples of evaluations beside each other.

Everything that a list filters by, and its order, stands in its address, so that it can be shared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from starlette.exceptions import HTTPException

from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.versions import EvalResult
from rftstream.queries.catalog.finding import PAGE, GroupFilter, GroupRow
from rftstream.queries.catalog.listing import (
    FATES,
    ORDERS,
    Cursor,
    Extremes,
    ListedRollout,
    Range,
    RolloutFilter,
    find_extremes,
    find_rollouts,
    list_tools,
    list_versions,
)
from rftstream.queries.catalog.problems import list_tasksets
from rftstream.queries.catalog.samples import count_changes, find_extreme_samples, find_samples, list_evaluated
from rftstream.queries.curves.evaluations import newest_and_best, shown_metrics, without_best
from rftstream.queries.records.listed_texts import lacking_texts, read_texts
from rftstream.studio.charts import evaluation_chart
from rftstream.studio.pages.page import PageOfRun, Values

MAX_EVALUATIONS = 60
"""Most versions of one evaluation that are listed."""
MAX_BESIDE = 8
"""Most rollouts of a problem that are shown of each of two versions."""
STATUSES = tuple(str(status) for status in RolloutStatus if status is not RolloutStatus.undecodable)


def asked_range(page: PageOfRun, name: str) -> Range:
    """Return the range of the query parameters `NAME_from` and `NAME_to`. What is no number is no limit."""
    found: list[float | None] = []
    for end in ("from", "to"):
        try:
            found.append(float(page.asked(f"{name}_{end}")[:30]))
        except ValueError:
            found.append(None)
    return found[0], found[1]


def asked_text(page: PageOfRun, name: str = "text") -> str:
    """Return the text of the query that a list is searched for."""
    return page.asked(name).strip()[:200]


def rollouts(page: PageOfRun) -> Values:
    """Rollouts with what they were asked and what they said, filtered by their text and their numbers."""
    wanted = RolloutFilter(
        text=asked_text(page),
        fate=page.asked("fate")[:20],
        status=page.asked("status")[:20],
        tool=page.asked("tool")[:100],
        reward=asked_range(page, "reward"),
        tokens=asked_range(page, "tokens"),
        version=asked_range(page, "version"),
        groups=GroupFilter(
            taskset=page.asked("taskset")[:100], problem=page.number("problem"), batch=page.number("batch")
        ),
    )
    order = page.asked("order") if page.asked("order") in ORDERS else "newest"
    found = find_rollouts(page.catalog, page.moment, wanted, order=order, after=_cursor(page.asked("after")))
    texts = filled(page, found.rollouts)
    return {
        "found": found,
        "listed": [texts.get(one.row.rollout_id, one) for one in found.rollouts],
        "wanted": wanted,
        "order": order,
        "fates": FATES,
        "statuses": STATUSES,
        "tools": list_tools(page.catalog),
        "is_trained": any(step.batch_sequence == wanted.groups.batch for step in page.history.steps),
        "tasksets": list_tasksets(page.catalog),
        "after": "" if found.after is None else ",".join(map(repr, found.after)),
    }


def filled(page: PageOfRun, listed: Sequence[ListedRollout]) -> dict[str, ListedRollout]:
    """Return those of some rollouts, by id, whose texts the catalog has still to read: with their texts, or as not read
    if it does not know yet where their records are."""
    found = {} if page.snapshot.is_read else {
        one.row.rollout_id: replace(one, is_read=False) for one in listed if one.row.rollout_offset is None
    }  # fmt: skip
    if lacking := lacking_texts(listed):
        found |= page.run.look(lambda run, _: read_texts(run.transport, lacking, num_partitions=page.num_partitions))
    return found


def extremes(page: PageOfRun, wanted: Iterable[GroupFilter | int]) -> list[Extremes]:
    """Return the best and the worst rollout of each of some groups or filters, with their texts."""
    lines = find_extremes(page.catalog, page.moment, wanted)
    found = filled(page, [one for line in lines for one in line.rollouts])
    return [line.filled(found) for line in lines] if found else lines


def _cursor(text: str) -> Cursor | None:
    """Return the end of the page before, as its link tells; None at the beginning."""
    try:
        key, sequence, sibling = text[:80].split(",")
        return float(key), int(sequence[:15]), int(sibling[:15])
    except ValueError:
        return None


def with_lines(page: PageOfRun, groups: Sequence[GroupRow]) -> Values:
    """Return groups for their table, with the prompt and the best and worst rollout of each."""
    sequences = [group.sequence for group in groups]
    lines = dict(zip(sequences, extremes(page, sequences), strict=True))
    return {"groups": groups, "lines": lines, "limits": reward_limits(groups)}


def reward_limits(groups: Sequence[GroupRow]) -> tuple[float, float]:
    """Return the lowest and highest reward of some groups' siblings, at least 0 to 1, as limits for bars."""
    rewards = [sibling.reward for group in groups for sibling in group.siblings if sibling.reward is not None]
    return min([0.0, *rewards]), max([1.0, *rewards])


def versions_beside(page: PageOfRun, taskset: str, problem: int) -> Values:
    """Return the rollouts of a problem at two versions: those that the query names, else the first and the newest."""
    group = GroupFilter(taskset=taskset, problem=problem)
    known = list_versions(page.catalog, page.moment, group)
    sides = []
    for name, default in (("left", known[:1]), ("right", known[-1:])):
        number = page.number(name)
        version = number if number in known else default[0] if default else None
        if version is not None:
            wanted = RolloutFilter(groups=group, version=(version, version))
            shown = find_rollouts(page.catalog, page.moment, wanted, order="longest", limit=64).rollouts
            best = sorted(shown, key=lambda one: (one.row.reward is None, -(one.row.reward or 0.0)))
            sides.append((name, version, best[:MAX_BESIDE], len(best)))
    return {"sides": sides, "known": known}


# --------------------------------------------------------------------------------------------- evaluations


def evaluations(page: PageOfRun) -> Values:
    """Evaluations with their results: versions as rows, metrics as columns, and what the best and the worst said."""
    history = page.history
    order = page.asked("order", "-version")
    found: dict[str, list[EvalResult]] = defaultdict(list)
    for result in reversed(history.evaluations):
        if len(results := found[result.evaluation]) < MAX_EVALUATIONS:
            results.append(result)
    tables = {}
    for name, results in sorted(found.items()):
        known = set(list_evaluated(page.catalog, name))
        lines = {
            result.name.version: find_extreme_samples(page.catalog, name, result.name.version)
            for result in results
            if result.name.version in known
        }
        tables[name] = (shown_metrics([result.metrics for result in results]), _ordered(results, order), lines)
    return {
        "tables": tables,
        "order": order,
        "charts": [evaluation_chart(page.charted)],
        "best": newest_and_best(history.evaluations),
        "equal": without_best(history.evaluations),
    }


def _ordered(results: Sequence[EvalResult], order: str) -> list[EvalResult]:
    """Return results by version or by a metric; a minus sign before its name turns the order round."""
    name, sign = order.removeprefix("-"), -1.0 if order.startswith("-") else 1.0

    def place(result: EvalResult) -> tuple[bool, float]:
        value = result.name.version if name == "version" else result.metrics.get(name)
        return value is None, sign * (value or 0.0)

    return sorted(results, key=place)


def evaluation(page: PageOfRun) -> Values:
    """The samples of one evaluation at one version, or at two beside each other."""
    name = page.request.path_params["evaluation"]
    known = list_evaluated(page.catalog, name)
    if not known:
        raise HTTPException(404, f"no samples of an evaluation {name!r} in the catalog")
    version, beside = page.number("version"), page.number("beside")
    version = version if version in known else known[0]
    beside = beside if beside in known and beside != version else None
    order, skip, text = page.asked("order", "problem"), page.number("skip") or 0, asked_text(page)
    found = find_samples(page.catalog, name, version, beside=beside, text=text, order=order, skip=skip, limit=PAGE + 1)
    changes = None if beside is None else count_changes(page.catalog, name, version, beside)
    values: dict[str, Any] = {
        "changes": changes,
        "samples": found[:PAGE],
        "more": skip + PAGE if len(found) > PAGE else None,
    }
    return values | {
        "title": f"Evaluation {name}",
        "evaluation": name,
        "known": known,
        "version": version,
        "beside": beside,
        "order": order,
        "text": text,
        "skip": skip,
        "page_size": PAGE,
    }
