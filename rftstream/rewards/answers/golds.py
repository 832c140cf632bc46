"""Problems with several right answers."""

from __future__ import annotations

import json

from rftstream.errors import RewardError
from rftstream.rewards.base import RewardInput, needed_answer


def right_answers(item: RewardInput, reward: str) -> list[str]:
    """Return the right answers of a problem: its answer, or the items of a JSON list. There is at least one, and none
    is empty.

    RewardError, which names `reward`, if there is none."""
    text = needed_answer(item, reward).strip()
    answers = [text]
    if text.startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, list) and all(isinstance(value, str | int | float) for value in values):
            answers = [str(value).strip() for value in values]
    if not answers or not all(answers):
        raise RewardError(f"{reward}: the problem's answer {text[:200]!r} is empty, expected at least one; correct it")
    return answers
