"""From the rows of a file to votes: people's answers with their names, before they are compared with the log.

rollout, label                a number: what the reward should be
rollout, rating               a number on the scale of the run file
rollouts, choice              two siblings: first, second (of those named here), tie, both_bad or cannot_judge
rollout, correction           what the answer should have been
rollout, flag                 why it must not be trained on, or true
rollout(s), retract           the kind of what is taken back

Each row names its annotator by `by`, and may have `comment`, `order`, `lead_time_s`, `at`, `source` and `revision`.
The right answer to a gold question is a row without `by`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.config.parts import registry
from rftstream.contracts.feedback import FeedbackKind, PairChoice, group_of_rollouts, question_id_of
from rftstream.errors import ConfigError

MAX_TEXT = 1_000_000
"""Largest number of characters of a correction or a comment."""
ANSWERS = ("label", "rating", "choice", "correction", "flag", "retract")
OTHERS = ("rollout", "rollouts", "by", "comment", "order", "lead_time_s", "at", "source", "revision")
KINDS = [str(kind) for kind in FeedbackKind if kind is not FeedbackKind.retract]

GOLD_ANSWERS = ("label", "rating", "choice", "retract")
"""Answers that can be right or wrong, and the way to retract one."""

SWAPPED: dict[PairChoice | None, PairChoice] = {
    PairChoice.first: PairChoice.second,
    PairChoice.second: PairChoice.first,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A person's vote, read from a row. `vote_of` makes it; `runs/writes/feedback.py` writes it."""

    where: str
    """The place of the row, for error messages."""
    by: str
    """The annotator's name. It does not leave this process."""
    kind: FeedbackKind
    question_id: str
    rollouts: tuple[str, ...]
    reward: float | None = None
    choice: PairChoice | None = None
    correction: str | None = None
    comment: str | None = None
    order: tuple[int, ...] = ()
    lead_time_s: float | None = None
    given_at: float | None = None
    """Time of the vote; None: now."""
    source: str = "file"
    revision: int | None = None
    """Number of the vote's revision. None: one more than the annotator's previous one, unless the vote is the same."""


def read_votes(path: Path) -> Iterator[Vote]:
    """Yield the votes in a file of JSON lines. ConfigError names the line of the first invalid row."""
    return (vote_of(row, where) for where, row in _rows(path))


def read_gold(path: Path) -> Iterator[Vote]:
    """Yield the right answers in a file of JSON lines. ConfigError names the line of the first invalid row."""
    return (gold_of(row, where) for where, row in _rows(path))


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _parsed(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; expected a file of JSON lines") from None


def gold_of(row: Any, where: str) -> Vote:
    """Return the right answer in a row. ConfigError if the row is invalid."""
    if isinstance(row, dict) and "by" in row:
        raise ConfigError(f"{where}: by: a right answer is nobody's vote, expected a row without `by`")
    answers = [name for name in ANSWERS if isinstance(row, dict) and row.get(name) is not None]
    if any(name not in GOLD_ANSWERS for name in answers):
        raise ConfigError(f"{where}: {answers[0]}: cannot be right or wrong, expected one of {', '.join(GOLD_ANSWERS)}")
    vote = vote_of({**row, "by": "gold"} if isinstance(row, dict) else row, where)
    if vote.choice is PairChoice.cannot_judge:
        raise ConfigError(f"{where}: choice: cannot_judge is no answer, expected what is right")
    return vote


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON ({error}); expected an object on each line") from None


def vote_of(row: Any, where: str) -> Vote:
    """Return the vote in a row. ConfigError if the row is invalid."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: got {type(row).__name__}, expected an object")
    for name in row:
        if name not in (*ANSWERS, *OTHERS):
            raise ConfigError(f"{where}: {name}: unknown; {registry.suggest(name, [*ANSWERS, *OTHERS])}")
    answers = [name for name in ANSWERS if row.get(name) is not None]
    if len(answers) != 1:
        raise ConfigError(f"{where}: found {', '.join(answers) or 'no answer'}, expected one of {', '.join(ANSWERS)}")
    answer, value = answers[0], row[answers[0]]
    kind = FeedbackKind.pair if answer == "choice" else FeedbackKind(answer)
    asked = kind if kind is not FeedbackKind.retract else FeedbackKind(_one_of(value, KINDS, where, "retract"))
    given = _rollouts(row, asked, where)
    rollouts = tuple(sorted(given, key=_sibling))
    choice = PairChoice(_one_of(value, list(PairChoice), where, "choice")) if answer == "choice" else None
    order = _order(row.get("order"), len(rollouts), where)
    if given != rollouts:  # a pair is the same question in either order
        choice, order = SWAPPED.get(choice, choice), tuple(1 - index for index in order)
    comment = row.get("comment")
    if kind is FeedbackKind.flag and isinstance(value, str):
        comment = value
    return Vote(
        where=where,
        by=_text(row.get("by"), where, "by", "the annotator's name"),
        kind=kind,
        question_id=question_id_of(asked, rollouts),
        rollouts=rollouts,
        reward=_number(value, where, answer) if answer in ("label", "rating") else None,
        choice=choice,
        correction=_text(value, where, "correction", "a text") if answer == "correction" else None,
        comment=None if comment is None else _text(comment, where, "comment", "a text"),
        order=order,
        lead_time_s=None if row.get("lead_time_s") is None else _number(row["lead_time_s"], where, "lead_time_s"),
        given_at=None if row.get("at") is None else _number(row["at"], where, "at"),
        source=_text(row.get("source", "file"), where, "source", "a text"),
        revision=_revision(row.get("revision"), where),
    )


def _rollouts(row: Mapping[str, Any], asked: FeedbackKind, where: str) -> tuple[str, ...]:
    given = row.get("rollouts", row.get("rollout"))
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: rollout: got {given!r}, expected the id of a rollout, or rollouts of a pair")
    wanted = 2 if asked is FeedbackKind.pair else 1
    if len(names) != wanted or len(set(names)) != wanted or group_of_rollouts(names) is None:
        expected = "two siblings of one group" if wanted == 2 else "one rollout, taskset/pass/index/attempt/sibling"
        raise ConfigError(f"{where}: rollouts: got {', '.join(names)}, expected {expected}")
    return tuple(names)


def _sibling(rollout_id: str) -> int:
    return int(rollout_id.rpartition("/")[2])


def _one_of(value: Any, known: list[Any], where: str, name: str) -> str:
    if value not in known:
        raise ConfigError(f"{where}: {name}: got {value!r}, expected one of {', '.join(map(str, known))}")
    return str(value)


def _text(value: Any, where: str, name: str, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: {name}: got {value!r}, expected {what}")
    if len(value) > MAX_TEXT:
        raise ConfigError(f"{where}: {name}: {len(value):,} characters, expected at most {MAX_TEXT:,}")
    return value


def _number(value: Any, where: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{where}: {name}: got {value!r}, expected a finite number")
    return float(value)


def _order(value: Any, count: int, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or sorted(value, key=repr) != list(range(count)):
        raise ConfigError(f"{where}: order: got {value!r}, expected each of {list(range(count))} once")
    return tuple(value)


def _revision(value: Any, where: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"{where}: revision: got {value!r}, expected a count from 0 on")
    return value
