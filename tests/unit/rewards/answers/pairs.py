"""Reads the labelled answer pairs of tests/data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WORK = 3 * (
    "First we set up the equations and let n = 3, so that the sum of 4 and 5 is 9. Then we check the case k = 2, where "
    "the value is 6. "
)
"""What stands before the answer in a long completion."""
DATA = Path(__file__).parents[3] / "data"


@dataclass(frozen=True)
class Pair:
    category: str
    gold: str
    completion: str
    equal: bool


def school_pairs() -> list[Pair]:
    pairs = []
    category = ""
    for line in (DATA / "k12_pairs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            category = line[3:]
        elif line.startswith(("= ", "! ")):
            gold, _, answer = line[2:].partition(" || ")
            pairs.append(Pair(category, gold, answer.replace("⏎", "\n"), line.startswith("= ")))
    return pairs


def math_pairs() -> list[Pair]:
    pairs = []
    category = ""
    for line in (DATA / "math_pairs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            category = line[3:]
        elif line.startswith(("= ", "! ")):
            gold, _, answer = line[2:].partition(" || ")
            whole = answer.startswith("> ")
            completion = (
                answer[2:].replace("⏎", "\n").replace("⋯", WORK) if whole else f"so it is $\\boxed{{{answer}}}$."
            )
            pairs.append(Pair(category, gold, completion, line.startswith("= ")))
    return pairs
