"""Labelling configs for Label Studio, and the answers in annotations.

Each kind of question has its own project, since a project has one labelling config and a config cannot hide a part for
some tasks: it would offer "A is better" for a single rollout. So a run has at most two projects: one for pairs, and one
for single rollouts with their rating or label. Beside the rating there is a field for a corrected answer, which is
filled with the original answer, and a flag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rftstream.contracts.feedback import FeedbackKind
from rftstream.data.feedback.rows import MAX_TEXT

CONFIG = Path(__file__).with_suffix(".xml")
"""Template of the labelling config."""
MAX_BUTTONS = 11
"""Most ratings that have a button each. A finer scale has a number field."""
SIDES = ("A", "B")
FLAG = "must not be trained on"
CHOICES = {
    "A": "A is better",
    "B": "B is better",
    "tie": "as good",
    "both_bad": "both bad",
    "cannot_judge": "cannot judge",
}
"""Choice of an annotation of a pair -> the text that annotators read."""
HOTKEYS = {"A": "a", "B": "b", "tie": "t", "both_bad": "x", "cannot_judge": "c"}
TITLES = {
    FeedbackKind.pair: "which answer is better",
    FeedbackKind.rating: "how good is an answer",
    FeedbackKind.label: "what should the reward be",
}

Row = dict[str, Any]
"""An answer in the form that `rftstream feedback add` reads, without rollouts and annotator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationAnswers:
    """The answers in an annotation. `read_results` makes it."""

    answers: Mapping[FeedbackKind, Row]
    """Kind of question -> the answer. An answer `cannot_judge` is kept, too."""
    unread: tuple[str, ...]
    """Descriptions of the answers that could not be read."""


def make_config(kind: FeedbackKind, scale: tuple[float, float]) -> str:
    """Return the labelling config of a project."""
    template = jinja2.Template(CONFIG.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True)
    low, high = (f"{end:g}" for end in scale)
    text = template.render(
        kind=str(kind),
        low=low,
        high=high,
        numbers=_ratings(scale),
        sides=SIDES,
        choices=CHOICES,
        hotkeys=HOTKEYS,
        flag=FLAG,
    )
    return "".join(line.strip() for line in text.splitlines())


def _ratings(scale: tuple[float, float]) -> Sequence[int]:
    low, high = scale
    if low != int(low) or high != int(high) or high - low >= MAX_BUTTONS:
        return ()
    return range(int(low), int(high) + 1)


# --------------------------------------------------------------------------------------------- reading


def read_results(results: Any, kind: FeedbackKind, *, original: str, order: Sequence[int]) -> AnnotationAnswers:
    """Return the answers in the results of an annotation. `original`: the answer that filled the field of the
    correction; an unchanged field is no correction. `order`: the order in which the rollouts of a pair are shown."""
    answers: dict[FeedbackKind, Row] = {}
    unread: list[str] = []
    comment = ""
    for result in results if isinstance(results, list) else ():
        name, value = _named(result)
        if name == "comment":
            comment = _joined(value.get("text"))
        elif name == "choice" and kind is FeedbackKind.pair:
            _put(answers, unread, kind, name, _choice_row(value, order))
        elif name == str(kind) and kind is not FeedbackKind.pair:
            _put(answers, unread, kind, name, _number_row(name, value))
        elif name == "correction" and kind is not FeedbackKind.pair:
            text = _joined(value.get("text"))
            if text.strip() and text.strip() != original.strip():
                row = {"correction": text} if len(text) <= MAX_TEXT else None
                _put(answers, unread, FeedbackKind.correction, name, row)
        elif name == "flag" and kind is not FeedbackKind.pair and value.get("choices"):
            answers[FeedbackKind.flag] = {"flag": True}
    if comment.strip():
        for asked in (kind, FeedbackKind.flag, FeedbackKind.correction):
            if asked in answers:
                answers[asked]["comment"] = comment[:MAX_TEXT]
                break
    return AnnotationAnswers(answers=answers, unread=tuple(unread))


def _put(answers: dict[FeedbackKind, Row], unread: list[str], kind: FeedbackKind, name: str, row: Row | None) -> None:
    if row is None:
        unread.append(name)
    else:
        answers[kind] = row


def _named(result: Any) -> tuple[str, Mapping[str, Any]]:
    value = result.get("value") if isinstance(result, dict) else None
    if not isinstance(value, dict):
        return "", {}
    return str(result.get("from_name")), value


def _choice_row(value: Mapping[str, Any], order: Sequence[int]) -> Row | None:
    """Return the answer to a pair, in the order of its rollouts."""
    chosen = _first(value.get("choices"))
    by_text = {text: name for name, text in CHOICES.items()}
    name = chosen if chosen in CHOICES else by_text.get(chosen)
    if name in SIDES:
        shown = tuple(order) if len(order) == len(SIDES) else (0, 1)
        name = ("first", "second")[shown[SIDES.index(name)]]
    return None if name is None else {"choice": name}


def _number_row(name: str, value: Mapping[str, Any]) -> Row | None:
    """Return a rating or label that was given as a number, as stars, or by a button."""
    found = next((value[key] for key in ("number", "rating") if key in value), _first(value.get("choices")))
    try:
        number = float(found)
    except (TypeError, ValueError):
        return None
    return {name: number} if math.isfinite(number) and not isinstance(found, bool) else None


def _first(value: Any) -> str:
    found = value[0] if isinstance(value, list) and value else value
    return found if isinstance(found, str) else ""


def _joined(value: Any) -> str:
    """Return the text of a text area, which Label Studio returns as a list."""
    parts = value if isinstance(value, list) else [value]
    return "\n".join(part for part in parts if isinstance(part, str))
