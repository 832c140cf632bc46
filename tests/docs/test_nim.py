"""examples/nim.py, a game of two roles: who wins, and what each is rewarded with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import nim
import pytest

from tests.suite.each import each


def answers(monkeypatch: pytest.MonkeyPatch, says: Callable[[int], str]) -> list[tuple[int, str]]:
    """Return the questions that are asked from now on: pile and role."""
    asked: list[tuple[int, str]] = []

    async def ask(base_url: str, api_key: str, pile: int, role: str = "") -> str:
        asked.append((pile, role))
        return says(pile)

    monkeypatch.setattr(nim, "ask", ask)
    return asked


def problem(pile: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": str(pile)}]}


def right(pile: int) -> str:
    return str(nim.perfect(pile, Random(pile)))


@each("pile", range(1, 13))
def test_who_makes_no_mistake_wins(monkeypatch: pytest.MonkeyPatch, pile: int) -> None:
    asked = answers(monkeypatch, right)
    game = asyncio.run(nim.play(problem(pile), "", "", 0))
    winner, loser = ("first", "second") if pile % 4 else ("second", "first")
    assert game["roles"] == {winner: 1.0} | ({loser: -1.0} if pile > 3 else {}), "who did not move has no reward"
    assert [role for _, role in asked] == [nim.SEATS[number % 2] for number in range(len(asked))]
    assert game["metrics"] == {"moves": len(asked), "no_move": 0.0}
    for seed in range(5):
        assert asyncio.run(nim.against_perfect(problem(pile), "", "", seed)) == 1.0


def test_a_mistake_loses_and_so_does_what_is_no_move(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda pile: "1")
    assert asyncio.run(nim.against_perfect(problem(7), "", "", 0)) == 0.0
    for said in ("0", "4", "12", "", "one", "-1"):
        answers(monkeypatch, lambda pile, said=said: said)
        assert asyncio.run(nim.play(problem(12), "", "", 0)) == {
            "roles": {"first": -1.0}, "metrics": {"moves": 1, "no_move": 1.0}
        }  # fmt: skip
        assert asyncio.run(nim.against_perfect(problem(5), "", "", 0)) == 0.0
    answers(monkeypatch, lambda pile: "3")
    assert asyncio.run(nim.play(problem(5), "", "", 0))["roles"] == {"first": 1.0, "second": -1.0}, "only 2 are left"
