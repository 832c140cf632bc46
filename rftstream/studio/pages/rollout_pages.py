"""The pages about one group and about one rollout."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from rftstream.contracts.ids import split_group_id
from rftstream.contracts.rollouts import Segment
from rftstream.errors import ConfigError
from rftstream.queries.catalog.finding import (
    GroupRow,
    RolloutRow,
    find_batch,
    find_batches,
    find_group,
    find_letters_page,
)
from rftstream.queries.catalog.listing import RolloutFilter, find_rollouts
from rftstream.queries.catalog.problems import list_tasksets
from rftstream.queries.people.feedback import judged_text
from rftstream.queries.records.group_view import NO_ADVANTAGES, GroupAdvantages, compute_advantages, read_group
from rftstream.queries.records.rollout_view import MAX_TOKENS, ShownRollout, TokenRow, list_tokens, read_rollout
from rftstream.queries.records.shown import CompletionReader
from rftstream.queries.traces.lineage import parse_target
from rftstream.runs.folder import OpenRun
from rftstream.studio.pages.list_pages import asked_text, reward_limits
from rftstream.studio.pages.page import PageOfRun, Values
from rftstream.studio.token_colors import COLORINGS, color_tokens
from rftstream.studio.voting import judgements_of


def group(page: PageOfRun) -> Values:
    """A group: its problem, and all siblings side by side with rewards, parts and fates."""
    row = asked_group(page)
    view = page.run.look(lambda run, reader: read_group(run.transport, row, reader, num_partitions=page.num_partitions))
    advantages = _advantages(page, row)
    siblings = list(view.siblings)
    if page.asked("sort") == "reward":
        siblings.sort(key=lambda sibling: (sibling.reward is None, -(sibling.reward or 0.0)))
    return {
        "title": f"Group {row.group_id}",
        "group": row,
        "view": view,
        "siblings": siblings,
        "limits": reward_limits([row]),
        "advantages": {name: _of_rollout(found) for name, found in advantages.by_rollout.items()},
        "how": advantages.how,
        "sort": page.asked("sort"),
        "before": split_group_id(row.group_id),
    }


def _of_rollout(segments: Sequence[object]) -> float | None:
    """Return the advantage of a rollout if all its tokens have the same one, else None."""
    import numpy as np

    values = np.concatenate([np.asarray(segment) for segment in segments]) if segments else np.empty(0)
    return float(values[0]) if len(values) and (values == values[0]).all() else None


def rollout(page: PageOfRun) -> Values:
    """A rollout: its messages, each token with its numbers, the verdict with its parts, and the places of the
    records."""
    group_row, row = asked_rollout(page)
    coloring = page.asked("color", "logprob")
    coloring = coloring if coloring in COLORINGS else "logprob"
    segment, start = page.number("segment") or 0, page.number("from") or 0
    advantages = _advantages(page, group_row)

    def question(run: OpenRun, reader: CompletionReader) -> tuple[ShownRollout, list[TokenRow], int, int]:
        view = read_rollout(run.transport, group_row, row, reader, num_partitions=page.num_partitions)
        segments: Sequence[Segment] = view.rollout.segments if view.rollout is not None else ()
        if segment >= len(segments):
            return view, [], len(segments), 0
        own = advantages.by_rollout.get(row.rollout_id)
        fits = own is not None and segment < len(own) and len(own[segment]) == segments[segment].token_ids.shape[0]
        found = list_tokens(
            segments[segment], reader, own[segment].tolist() if own is not None and fits else None, start=start
        )
        return view, found, len(segments), int(segments[segment].token_ids.shape[0])

    view, tokens, num_segments, num_tokens = page.run.look(question)
    experience = advantages.experiences.get(row.rollout_id)
    return {
        "title": f"Rollout {row.rollout_id}",
        "group": group_row,
        "row": row,
        "view": view,
        "tokens": color_tokens(tokens, coloring),
        "coloring": coloring,
        "colorings": COLORINGS,
        "segment": segment,
        "num_segments": num_segments,
        "num_tokens": num_tokens,
        "start": start,
        "page_size": MAX_TOKENS,
        "versions": sorted({token.version for token in tokens if token.version is not None}),
        "experience": experience,
        "advantages": advantages,
        "advantage": _of_rollout(advantages.by_rollout.get(row.rollout_id, ())),
        "num_siblings": len(group_row.siblings),
        "judgements": judgements_of(page, row.rollout_id) if page.moment.is_now else [],
        "judged_text": judged_text,
    }


def rollout_text(page: PageOfRun) -> Response:
    """The whole text of a rollout, as a file: pages cut long messages."""
    group_row, row = asked_rollout(page)

    def question(run: OpenRun, reader: CompletionReader) -> str:
        found = read_rollout(run.transport, group_row, row, reader, num_partitions=page.num_partitions).rollout
        if found is None:
            return ""
        asked = [] if found.problem is None else [(message.role, message.content) for message in found.problem.messages]
        said = [(turn.role, turn.content) for turn in found.turns]
        return "\n\n".join(f"--- {role}\n{text}" for role, text in (*asked, *said))

    name = row.rollout_id.replace("/", "-")
    return PlainTextResponse(
        page.run.look(question),
        headers={
            "content-disposition": f'attachment; filename="{name}.txt"',
            "content-security-policy": "default-src 'none'; sandbox",
        },
    )


def find(page: PageOfRun) -> Response:
    """Open the page of the id in the search field: that of a rollout, a group, a problem, a batch, a version, a dead
    letter or a taskset. What is none of them is looked for in answers."""
    text = asked_text(page, "id")
    try:
        target = parse_target(text)
    except ConfigError as error:
        return _found_text(page, text, str(error).removeprefix("trace: "))
    if target.kind == "batch":
        return open_batch(page, target.batch)
    pages: dict[str, tuple[object, ...]] = {
        "rollout": ("rollouts", target.group_id, target.sibling),
        "group": ("groups", target.group_id),
        "version": ("versions", target.version),
    }
    if target.problem.count("/") == 1:  # its taskset and number
        pages["problem"] = ("problems", target.problem)
    if target.kind == "record" and find_letters_page(page.catalog, page.moment, ids=[text], limit=1):
        pages["record"] = ("dead", text)
    if target.kind not in pages:
        return _found_text(page, text, f"{text}: {target.kind}s have no page; `rftstream trace` shows it")
    return RedirectResponse(page.href(*pages[target.kind]), 303)


def _found_text(page: PageOfRun, text: str, problem: str) -> Response:
    """Show the problems of the taskset with this name, or the answers that have the text. HTTPException with the
    problem for what looks like an id, unless an answer has it."""
    if text in list_tasksets(page.catalog):
        return RedirectResponse(page.href("problems", taskset=text), 303)
    looks_like_id = set(text) & set("/:@") or text.isdecimal()
    if looks_like_id and not find_rollouts(page.catalog, page.moment, RolloutFilter(text=text), limit=1).rollouts:
        raise HTTPException(404, problem)
    return RedirectResponse(page.href("rollouts", text=text), 303)


def open_batch(page: PageOfRun, number: int) -> Response:
    """Open the version that a batch made, or the rollouts of a batch that is not trained yet. HTTPException if there is
    no such batch."""
    if number < page.history.version:
        return RedirectResponse(page.href("versions", number + 1), 303)
    if find_batch(page.catalog, page.moment, number):
        return RedirectResponse(page.href("rollouts", batch=number), 303)
    newest = find_batches(page.catalog, page.moment, limit=1)
    known = f"the newest is batch {newest[0].batch}" if newest else "there is none yet"
    raise HTTPException(404, f"no batch {number} in this run at this moment; {known}")


def batch(page: PageOfRun) -> Response:
    """Open the page of the batch in the address."""
    return open_batch(page, page.request.path_params["batch"])


def asked_group(page: PageOfRun) -> GroupRow:
    """Return the group in an address. HTTPException if there is none."""
    found = find_group(page.catalog, page.moment, page.group_id)
    if found is None:
        raise HTTPException(404, f"no group {page.group_id!r} in this run at this moment")
    return found


def asked_rollout(page: PageOfRun) -> tuple[GroupRow, RolloutRow]:
    """Return the rollout in an address, and its group. HTTPException if there is none."""
    group_row, sibling = asked_group(page), page.request.path_params["sibling"]
    if sibling >= len(group_row.siblings):
        last = len(group_row.siblings) - 1
        raise HTTPException(404, f"the group {group_row.group_id} has the rollouts 0 to {last}, not {sibling}")
    return group_row, group_row.siblings[sibling]


def _advantages(page: PageOfRun, group_row: GroupRow) -> GroupAdvantages:
    if group_row.batch is None:
        return NO_ADVANTAGES
    shares = find_batch(page.catalog, page.moment, group_row.batch)
    return page.run.look(lambda run, _: compute_advantages(run.transport, run.config, group_row, shares))
