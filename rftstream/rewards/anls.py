"""ANLS: the similarity of the answer and the problem's answer by their letters, as DocVQA scores text read from
pictures.

Source: Biten et al., Scene Text Visual Question Answering, 2019. For each right answer the score is 1 - NL if NL < 1 -
threshold, else 0; ANLS is the largest score. NL is Levenshtein's distance divided by the length of the longer text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.errors import RewardError
from rftstream.rewards.answers.boxes import find_answers
from rftstream.rewards.answers.golds import right_answers
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.evaluating import evaluating_answer
from rftstream.rewards.version import config_version

MAX_GOLD_CHARS = 4000
"""Longest right answer that is compared."""


class AnlsReward:
    """The similarity of the answer and the nearest right answer, from 0 to 1; 0 if the similarity is too low.

    Metric: `parsed` (the completion has an answer).
    """

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.anls]`."""

        threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.5
        """The similarity that must be exceeded; below it the reward is 0."""
        casefold: bool = True
        """Ignore the case of letters."""
        boxed_only: bool = False
        r"""Take the answer only from \boxed{}."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.version = config_version("2", config)

    def __call__(self, item: RewardInput) -> Score:
        golds = self._golds(item)
        with evaluating_answer():
            answers = find_answers(item.conclusion, boxed_only=self._config.boxed_only)
            found = next((answer.text for answer in answers if answer.how in ("box", "mark", "whole")), None)
            if found is None:
                return Score(reward=0.0, metrics={"parsed": 0.0})
            answer = self._plain(found)
            best = max(similarity(gold, answer, above=self._config.threshold) for gold in golds)
        return Score(reward=best, metrics={"parsed": 1.0})

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem has no answer, or one that is too long."""
        self._golds(item)

    def _golds(self, item: RewardInput) -> list[str]:
        golds = [self._plain(gold) for gold in right_answers(item, "anls")]
        if (longest := max(map(len, golds))) > MAX_GOLD_CHARS:
            raise RewardError(
                f"anls: the problem's answer has {longest:,} characters, at most {MAX_GOLD_CHARS:,} are read"
            )
        return golds

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self._config.casefold else text


def similarity(one: str, other: str, *, above: float = 0.0) -> float:
    """Return 1 - NL of two texts, from 0 to 1; 0 if it is not larger than `above`."""
    longer = max(len(one), len(other))
    if longer == 0:
        return 1.0
    if min(len(one), len(other)) <= above * longer:
        return 0.0  # the difference in length alone is too large
    found = 1.0 - edit_distance(one, other) / longer
    return found if found > above else 0.0


def edit_distance(one: str, other: str) -> int:
    """Return Levenshtein's distance: the least number of letters to insert, delete or replace.

    The columns of the table are the bits of integers. Source: H. Hyyrö, A bit-vector algorithm for computing
    Levenshtein and Damerau edit distances, 2003."""
    if not one:
        return len(other)
    places: dict[str, int] = {}
    for number, letter in enumerate(one):
        places[letter] = places.get(letter, 0) | 1 << number
    every, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    rises, falls, distance = every, 0, len(one)
    for letter in other:
        equal = places.get(letter, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        up = falls | (~(diagonal | rises) & every)
        down = rises & diagonal
        distance += bool(up & last) - bool(down & last)
        up = (up << 1 | 1) & every
        down = down << 1 & every
        rises = down | (~(diagonal | up) & every)
        falls = up & diagonal
    return distance
