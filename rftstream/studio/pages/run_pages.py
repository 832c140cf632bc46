"""The pages about a run as a whole: overview, flow, groups, problems, versions, evaluations, dead letters."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.queries.catalog.counts import TopicRate, count_fates, count_letters, newest_time, read_rates
from rftstream.queries.catalog.finding import (
    FATES,
    PAGE,
    GroupFilter,
    find_batch,
    find_groups,
    find_letters_page,
    find_put_back,
)
from rftstream.queries.catalog.problems import ORDERS, count_problems, find_problems, list_tasksets
from rftstream.queries.catalog.samples import list_evaluated
from rftstream.queries.curves.evaluations import newest_and_best, without_best
from rftstream.queries.curves.history import History
from rftstream.queries.records.dead import find_letters
from rftstream.queries.records.group_view import read_manifests, read_problem
from rftstream.queries.records.inspect import record_to_text
from rftstream.queries.state.flow_map import flow_of, what_is_wrong
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.studio.charts import run_charts
from rftstream.studio.pages.list_pages import asked_range, asked_text, extremes, versions_beside, with_lines
from rftstream.studio.pages.page import PageOfRun, Values

VERSIONS_PAGE = 25
METRICS = ("reward", "loss", "tokens", "staleness_max", "step_s")
"""Metrics of a step that the list of checkpoints shows, and can be ordered by."""


def glance(page: PageOfRun) -> Values:
    """The run at a glance: problems, main numbers, charts, fates of groups and rollouts, the newest groups."""
    now = time.time()
    counts, moment, snapshot = count_fates(page.catalog, page.moment), page.moment, page.snapshot
    history, status = page.glanced, page.snapshot.status
    newest = find_groups(page.catalog, moment, GroupFilter(decided=True), limit=6)  # pending ones have said little
    return {
        "counts": counts,
        "history": history,
        "wrong": what_is_wrong(status, now=now) if moment.is_now else (),
        "problem_of_looking": snapshot.error,
        "status": status,
        "rates": _rates(page, now),
        "rewards": history.rewards(),
        "letters": sum(kind.count for kind in count_letters(page.catalog, moment)),
        "charts": run_charts(page.charted, only_first=True),
        "fates": ("trained", "pending", "filtered", "expired", "dead"),
        **with_lines(page, newest or find_groups(page.catalog, moment, GroupFilter(), limit=6)),
        "best": newest_and_best(history.evaluations),
        "equal": without_best(history.evaluations),
    }


def _rates(page: PageOfRun, now: float) -> dict[str, TopicRate]:
    status, read_at = page.snapshot.status, page.snapshot.read_at
    is_live = status is not None and status.live
    end = min(now, read_at) if is_live else newest_time(page.catalog)
    return read_rates(page.catalog, page.moment, now=end, at_work_s=page.glanced.at_work_s)


def flow(page: PageOfRun) -> Values:
    """The flow from feeder to trainer: roles with who is in force, and what waits between them."""
    now, moment, status = time.time(), page.moment, page.snapshot.status
    control = None if status is None else status.control
    if not moment.is_now:
        control = page.run.look(lambda run, _: read_control(run.transport, until_s=moment.at_s))
    counts, history, rates = count_fates(page.catalog, moment), page.glanced, _rates(page, now)
    workers = status.workers if status is not None and moment.is_now else ()
    return {
        "flow": flow_of(counts, history, control, rates, workers, now=now),
        "has_evaluator": bool(history.evaluations),
        "counts": counts,
        "is_live": status is not None and status.live,
    }


def groups(page: PageOfRun) -> Values:
    """Groups, newest first, each with its siblings' rewards: all, or those of one fate, reason or taskset."""
    wanted = GroupFilter(
        fate=page.asked("fate") if page.asked("fate") in FATES else "",
        reason=page.asked("reason")[:100],
        taskset=page.asked("taskset")[:100],
    )
    found = find_groups(page.catalog, page.moment, wanted, before=page.number("before"))
    counts = count_fates(page.catalog, page.moment)
    reasons: dict[str, int] = defaultdict(int)
    for (result, reason), count in counts.reasons.items():
        if not wanted.fate or result == wanted.fate or (wanted.fate in ("trained", "batched") and result == "batched"):
            reasons[reason] += count
    return {
        **with_lines(page, found),
        "wanted": wanted,
        "counts": counts,
        "fates": FATES,
        "reasons": sorted(reasons.items(), key=lambda pair: -pair[1]),
        "tasksets": list_tasksets(page.catalog),
        "older": found[-1].sequence if len(found) == PAGE else None,
    }


def problems(page: PageOfRun) -> Values:
    """Problems with their prompt, the results of their groups from the first to the newest, and what the best and the
    worst of their newest rollouts said."""
    taskset, order = page.asked("taskset")[:100], page.asked("order", "problem")
    skip, text, reward = page.number("skip") or 0, asked_text(page), asked_range(page, "reward")
    version_from, doubtful = page.number("version_from"), bool(page.asked("doubtful"))
    found = find_problems(
        page.catalog, page.moment, taskset=taskset, text=text, reward=reward, version_from=version_from,
        doubtful=doubtful, order=order, skip=skip, limit=PAGE + 1,
    )  # fmt: skip
    shown, num_found = found[:PAGE], None
    if doubtful or (reward != (None, None) and not text):  # a text alone would be looked for in all prompts
        num_found = len(found)
        if skip or num_found > PAGE:
            num_found = count_problems(
                page.catalog, page.moment, taskset=taskset, text=text, reward=reward, version_from=version_from,
                doubtful=doubtful,
            )  # fmt: skip
    which = [GroupFilter(taskset=one.taskset, problem=one.problem) for one in shown]
    return {
        "problems": list(zip(shown, extremes(page, which), strict=True)),
        "num_problems": count_problems(page.catalog, page.moment, taskset=taskset),
        "num_found": num_found,
        "taskset": taskset,
        "text": text,
        "reward": reward,
        "version_from": version_from,
        "doubtful": doubtful,
        "tasksets": list_tasksets(page.catalog),
        "order": order if order in ORDERS else "problem",
        "skip": skip,
        "page_size": PAGE,
        "more": skip + PAGE if len(found) > PAGE else None,
    }


def problem(page: PageOfRun) -> Values:
    """One problem over versions: its text and its groups."""
    taskset, index = page.request.path_params["taskset"], page.request.path_params["problem"]
    wanted = GroupFilter(taskset=taskset, problem=index)
    found = find_groups(page.catalog, page.moment, wanted, before=page.number("before"), limit=2 * PAGE)
    if not found and page.number("before") is None:
        raise HTTPException(404, f"no group of problem {index} of {taskset!r} in this run at this moment")
    shown = page.run.look(
        lambda run, _: read_problem(run.transport, found[0], num_partitions=page.num_partitions) if found else None
    )
    return {
        "title": f"Problem {taskset} {index}",
        "taskset": taskset,
        "index": index,
        "problem": shown,
        **with_lines(page, found),
        **versions_beside(page, taskset, index),
        "older": found[-1].sequence if len(found) == 2 * PAGE else None,
    }


def versions(page: PageOfRun) -> Values:
    """Versions with their training data, the results, and what the best and the worst rollout of their batch said."""
    history, skip, order = page.history, page.number("skip") or 0, page.asked("order", "-version")
    name, end = order.removeprefix("-"), skip + VERSIONS_PAGE
    ordered: Sequence[StepRecord]
    if name in METRICS:
        sign = -1.0 if order.startswith("-") else 1.0
        ordered = sorted(history.steps, key=lambda one: sign * one.metrics.get(name, sign * math.inf))
    else:
        ordered = history.steps if order == "version" else history.steps[::-1]
    steps = ordered[skip:end]
    evaluated = {step.name.version: _results_of(history, step.name.version) for step in steps}
    batches = [GroupFilter(batch=-1 if step.batch_sequence is None else step.batch_sequence) for step in steps]
    return {
        "steps": list(zip(steps, extremes(page, batches), strict=True)),
        "order": order,
        "metrics": METRICS,
        "announced": {} if page.run.history is None else page.run.history.announced,
        "evaluated": evaluated,
        "compared": _compared(page, evaluated),
        "more": end if end < len(ordered) else None,
    }


def _compared(page: PageOfRun, evaluated: Mapping[int, Sequence[EvalResult]]) -> dict[tuple[str, int], int | None]:
    """Return the version to compare each evaluation of a version with: the one before it, for the first the newest."""
    found: dict[tuple[str, int], int | None] = {}
    for name in {result.evaluation for results in evaluated.values() for result in results}:
        known = list_evaluated(page.catalog, name)
        for place, number in enumerate(known):
            other = known[place + 1] if place + 1 < len(known) else known[0]
            found[name, number] = other if other != number else None
    return found


def version(page: PageOfRun) -> Values:
    """One version: back to its batch and groups, and on to its weights and evaluations."""
    number, history = page.request.path_params["version"], page.history
    place = bisect_left(history.steps, number, key=_version_of)
    step = history.steps[place] if place < len(history.steps) else None
    if step is None or step.name.version != number:
        raise HTTPException(404, f"no version {number} in force at this moment; the newest is {history.version}")
    batch = step.batch_sequence if step.batch_sequence is not None else -1
    shares = find_batch(page.catalog, page.moment, batch)
    manifests: list[BatchManifest] = page.run.look(lambda run, _: read_manifests(run.transport, shares))
    found = find_groups(
        page.catalog, page.moment, GroupFilter(batch=batch), before=page.number("before"), limit=2 * PAGE
    )
    reader = page.run.history
    return {
        "title": f"Version {number}",
        "step": step,
        "sections": _sections(step),
        "batch": batch,
        "shares": shares,
        "manifests": manifests,
        **with_lines(page, found),
        "older": found[-1].sequence if len(found) == 2 * PAGE else None,
        "weights": None if reader is None else reader.announced.get(step.name),
        "evaluations": _results_of(history, number),
        "versions": [step.name.version for step in history.steps[max(0, place - 1) : place + 2]],
    }


def _version_of(made: StepRecord | EvalResult) -> int:
    return made.name.version


def _results_of(history: History, version: int) -> Sequence[EvalResult]:
    """Return the evaluations of a version."""
    begin = bisect_left(history.evaluations, version, key=_version_of)
    return history.evaluations[begin : bisect_right(history.evaluations, version, key=_version_of)]


def _sections(step: StepRecord) -> dict[str, list[tuple[str, float]]]:
    """Return the metrics of a step, grouped by the part before the slash in their names."""
    found: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for name, value in sorted(step.metrics.items()):
        section, slash, rest = name.partition("/")
        found[section if slash else ""].append((rest if slash else name, value))
    return dict(sorted(found.items()))


def dead(page: PageOfRun) -> Values:
    """Dead letters by reason and error, newest first, and the groups that died."""
    reason = page.asked("reason")[:100]
    letters = find_letters_page(page.catalog, page.moment, reason=reason, before=page.number("before"))
    groups = find_groups(page.catalog, page.moment, GroupFilter(fate="dead"), with_siblings=True)
    kinds = count_letters(page.catalog, page.moment)
    put_back = find_put_back(page.catalog, page.moment, [group.group_id for group in groups])
    return {
        "letters": letters,
        "kinds": kinds,
        "reason": reason,
        **with_lines(page, groups),
        "put_back": put_back,
        "older": letters[-1].offset if len(letters) == PAGE else None,
    }


def letter(page: PageOfRun) -> Values:
    """One dead letter: the reason, the number of tries, and the record as far as it can be decoded."""
    name = page.request.path_params["letter"]
    rows = find_letters_page(page.catalog, page.moment, ids=[name])
    if not rows:
        raise HTTPException(404, f"no dead letter {name!r} at this moment")
    found = page.run.look(
        lambda run, _: find_letters(Log(run.transport), name, place=(TopicPartition("dead", 0), rows[0].offset))
    )
    text = page.run.look(lambda _, reader: record_to_text(found[0][1], reader)) if found else ""
    return {
        "row": rows[0],
        "letter": found[0][0] if found else None,
        "group_id": "" if not found else _header(found[0][1], "group_id"),
        "rollout_id": "" if not found else _header(found[0][1], "rollout_id"),
        "text": text[:MAX_TEXT],
        "num_left_out": max(0, len(text) - MAX_TEXT),
    }


MAX_TEXT = 20_000
"""Most characters of a dead record that are shown."""


def _header(record: Any, name: str) -> str:
    return (record.header(name) or b"").decode("ascii", "replace")
