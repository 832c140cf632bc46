"""The pages for annotators: questions that wait for answers, a question with its rollouts, and the handling of answers.

Scores of a rollout, and votes of others, are not shown before the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import RedirectResponse, Response

from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts.feedback import Feedback, FeedbackKind, PairChoice
from rftstream.contracts.questions import VoteEffect
from rftstream.data.feedback.rows import MAX_TEXT
from rftstream.errors import ConfigError
from rftstream.queries.people.feedback import FeedbackView, VoteLine, judged_text, question_state, vote_text
from rftstream.queries.records.rollout_view import ShownRollout, last_answer, read_rollout
from rftstream.queries.records.shown import CompletionReader
from rftstream.runs.folder import OpenRun
from rftstream.studio.access import StudioRole
from rftstream.studio.pages.page import Form, PageOfRun, Values, check_role
from rftstream.studio.text_diff import diff_texts
from rftstream.studio.voting import (
    MAX_LEAD_S,
    STATES,
    ShownQuestion,
    annotators_shown_to,
    find_question,
    own_opinions,
    questions_in,
    say,
)

PAGE = 50
MAX_PREFILLED = 200_000
"""Most characters of an answer that the field for its correction is filled with."""
MAX_COMPARED = 2 * MAX_PREFILLED
"""Most characters of an answer and its correction together that are compared; a page shows no more."""
MAX_BUTTONS = 11
"""Most ratings that have a button each. A finer scale has a field."""
LETTERS = ("A", "B")
TITLES = {
    FeedbackKind.pair: "Which one is better?",
    FeedbackKind.label: "What should the reward be?",
    FeedbackKind.rating: "How good is it?",
    FeedbackKind.correction: "What should the answer have been?",
    FeedbackKind.flag: "Must it not be trained on?",
}


# --------------------------------------------------------------------------------------------- what waits


def questions(page: PageOfRun) -> Values:
    """Show the questions that wait, most urgent first, or those that are judged or expired."""
    view, now = page.run.people(), time.time()
    mine = own_opinions(page, view)
    state = page.asked("state") if page.asked("state") in STATES else "open"
    found = {name: questions_in(page, view, mine, name, now) for name in STATES}
    chosen = found[state]
    skip = page.number("skip") or 0
    return {
        "shown": [(one, view.judgements.get(one.question_id)) for one in chosen[skip : skip + PAGE]],
        "state": state,
        "states": STATES,
        "counts": {name: len(questions) for name, questions in found.items()},
        "num_mine": sum(one.question_id in mine for one in found["open"]),
        "mine": mine,
        "skip": skip,
        "page_size": PAGE,
        "num_chosen": len(chosen),
        "said": _said(page, view, mine),
        "judged_text": judged_text,
        "effects": _effects(page, view),
    }


def _effects(page: PageOfRun, view: FeedbackView) -> list[tuple[str, int]]:
    """Return the number of votes by effect. Votes on gold questions are counted for operators only."""
    hidden = () if page.viewer.role >= StudioRole.operator else (VoteEffect.gold,)
    return sorted((name, count) for name, count in view.effects.items() if name not in hidden)


def next_question(page: PageOfRun) -> Response:
    """Go to the viewer's next waiting question: the one after the named question, else the most urgent."""
    view = page.run.people()
    mine = own_opinions(page, view)
    asked = questions_in(page, view, mine, "open", time.time())
    waiting = [one.question_id for one in asked if one.question_id not in mine]
    said, after = page.asked("said")[:300], page.asked("after")[:300]
    place = waiting.index(after) + 1 if after in waiting else 0
    waiting = [name for name in (*waiting[place:], *waiting[:place]) if name != after]
    return RedirectResponse(page.href("questions", *waiting[:1], said=said), 303)


def _said(page: PageOfRun, view: FeedbackView, mine: dict[str, VoteLine]) -> tuple[str, str] | None:
    """Return the last answered question and its answer, for a line that offers to take it back."""
    name = page.asked("said")[:300]
    line = mine.get(name)
    if line is None or line.vote is None:
        return None
    return name, words_of(line.vote)


def words_of(vote: Feedback) -> str:
    """Return the answer of a vote, with the letters that its rollouts had on the page."""
    if vote.choice in (PairChoice.first, PairChoice.second):
        index = 0 if vote.choice is PairChoice.first else 1
        order = vote.order or (0, 1)
        return f"{LETTERS[order.index(index)]} is better ({vote.rollouts[index]})"
    return vote_text(vote).replace("_", " ")


def annotators(page: PageOfRun) -> Values:
    """Figures of annotators: operators see all, an annotator sees only their own."""
    check_role(page.request, StudioRole.annotator)
    return {"found": annotators_shown_to(page)}


# --------------------------------------------------------------------------------------------- a question


def question(page: PageOfRun) -> Values:
    """A question with its rollouts, and the ways to answer it."""
    return _question_page(page, _asked(page))


def answer(page: PageOfRun, form: Form) -> Values | Response:
    """Write an answer, or take one back, and go to the next question. `show` writes nothing, and shows the changes of a
    correction."""
    asked = _asked(page)
    if "show" in form:
        return _question_page(page, asked, draft=_text(form, "correction"))
    say(page, _row(asked, form), source="studio")
    if "retract" in form:
        return RedirectResponse(page.href("questions", asked.question_id), 303)
    return RedirectResponse(page.href("questions", "next", said=asked.question_id), 303)


def _asked(page: PageOfRun) -> ShownQuestion:
    params = page.request.path_params
    return find_question(page, params["kind"], page.group_id, params["siblings"])


def _row(asked: ShownQuestion, form: Form) -> dict[str, Any]:
    """Return the row of a form, in the form that `rftstream feedback add` reads."""
    row: dict[str, Any] = {"rollouts": list(asked.rollouts)}
    if "retract" in form:
        return {**row, "retract": str(asked.kind)}
    if asked.kind is FeedbackKind.pair:
        row |= {"choice": _text(form, "choice"), "order": list(asked.order)}
    elif asked.kind is FeedbackKind.correction:
        row["correction"] = _text(form, "correction")
    elif asked.kind is FeedbackKind.flag:
        row["flag"] = _text(form, "flag").strip() or True
    else:
        row[str(asked.kind)] = _number(_text(form, "number"), str(asked.kind))
    comment = _text(form, "comment").strip()
    if comment:
        row["comment"] = comment
    lead_time_s = _lead_time(_text(form, "shown_at"))
    return row if lead_time_s is None else {**row, "lead_time_s": lead_time_s}


def _text(form: Form, name: str) -> str:
    return form.get(name, ("",))[0].replace("\r\n", "\n")


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}: got {text[:40]!r}, expected a number") from None


def _lead_time(shown_at: str) -> float | None:
    """Return the seconds since a page was made; None if that cannot be the time of an answer."""
    try:
        passed = time.time() - float(shown_at)
    except ValueError:
        return None
    return round(passed, 2) if 0 <= passed <= MAX_LEAD_S else None


def _question_page(page: PageOfRun, asked: ShownQuestion, *, draft: str | None = None) -> Values:
    def read(run: OpenRun, reader: CompletionReader) -> tuple[list[ShownRollout], FeedbackSection | None]:
        views = [
            read_rollout(run.transport, asked.group, row, reader, num_partitions=page.num_partitions)
            for row in asked.rows
        ]
        return views, run.config.feedback

    views, settings = page.run.look(read)
    mine = None if asked.mine is None else asked.mine.vote
    said = last_answer(views[0].rollout)
    corrected = draft if draft is not None else None if mine is None else mine.correction
    is_long = corrected is not None and len(said) + len(corrected) > MAX_COMPARED
    view = page.run.people()
    return {
        "title": TITLES[asked.kind],
        "asked": asked,
        "question": asked.question,
        "views": views,
        "problem": next((view.problem for view in views if view.problem), ()),
        "reference": next((view.answer for view in views if view.answer is not None), None),
        "letters": LETTERS,
        "mine": mine,
        "words": None if mine is None else words_of(mine),
        "effect": None if asked.mine is None else _shown_effect(asked.mine),
        "state": None if asked.question is None else question_state(view, asked.question, time.time()),
        "judged_text": judged_text,
        "is_read": settings is not None,
        "is_reward": settings is not None and str(asked.kind) in (settings.ask, FeedbackKind.flag),
        "ratings": _ratings((settings or FeedbackSection()).scale),
        "scale": (settings or FeedbackSection()).scale,
        "field": corrected if corrected is not None else said if len(said) <= MAX_PREFILLED else "",
        "diff": None if corrected is None or is_long else diff_texts(said, corrected),
        "is_long": is_long,
        "is_draft": draft is not None,
        "max_text": MAX_TEXT,
        "shown_at": f"{time.time():.3f}",
        "others": _others(asked),
        "said": _said(page, view, own_opinions(page, view)),
    }


def _shown_effect(line: VoteLine) -> str:
    """Return the effect of a vote for display. A vote on a gold question looks as if it counted."""
    effect = line.judgement.effect
    return str(VoteEffect.counted if effect is VoteEffect.gold else effect)


def _ratings(scale: tuple[float, float]) -> Sequence[int]:
    """Return the ratings that have a button each; none if the scale is too fine."""
    low, high = scale
    is_whole = low.is_integer() and high.is_integer() and high - low < MAX_BUTTONS
    return range(int(low), int(high) + 1) if is_whole else ()


def _others(asked: ShownQuestion) -> list[tuple[FeedbackKind, str]]:
    """Return other questions on the same rollout."""
    if asked.kind is FeedbackKind.pair:
        return []
    kinds = (FeedbackKind.label, FeedbackKind.rating, FeedbackKind.correction, FeedbackKind.flag)
    return [(kind, f"{kind}/{asked.rollouts[0]}") for kind in kinds if kind is not asked.kind]
