"""examples/text_game.py, an environment and its taskset: every house can be won, in the moves that it says."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_game import RULES, House, Houses, TextGame

from rftstream.config.parts import registry
from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import Problem
from rftstream.environments.base import Reply
from rftstream.errors import ConfigError
from tests.suite.each import each


def houses(**options: Any) -> Houses:
    config = registry.build_config(Houses, options, where="options")
    return Houses(config, location="", columns={}, system=None)


def made(problem: Problem, **settings: Any) -> TextGame:
    return TextGame(registry.build_config(TextGame, settings, where="t"), problem=problem, seed=0)


def say(game: TextGame, text: str, finish_reason: str = "stop") -> Reply:
    return game.reply(AssistantMessage(content=text, finish_reason=finish_reason))


def way(house: House, here: tuple[int, int], there: tuple[int, int]) -> list[str]:
    """Commands of a shortest way."""
    ways: dict[tuple[int, int], list[str]] = {here: []}
    todo = deque([here])
    while todo:
        place = todo.popleft()
        for direction, near in house.exits(place).items():
            if near not in ways:
                ways[near] = [*ways[place], f"go {direction}"]
                todo.append(near)
    return ways[there]


def solution(problem: Problem) -> list[str]:
    house = House(problem.info["seed"], problem.info["rooms"])
    return [*way(house, house.start, house.key), "take", *way(house, house.key, house.door), "open"]


@given(st.integers(0, 999), st.integers(3, 36))
def test_every_house_can_be_won_in_the_least_moves(index: int, rooms: int) -> None:
    problem = houses(rooms=rooms).problem(index)
    game = made(problem, max_moves=200)
    replies = [say(game, command) for command in solution(problem)]
    assert [reply.done for reply in replies] == [False] * (len(replies) - 1) + [True]
    assert sum(reply.reward or 0.0 for reply in replies) == pytest.approx(1.0)
    assert sum(reply.parts["key"] for reply in replies) == pytest.approx(0.2)
    assert replies[-1].metrics["num_moves"] == replies[-1].metrics["least_moves"] == len(replies)
    assert (replies[-1].metrics["won"], replies[-1].metrics["num_refused"]) == (1, 0)


def test_a_game_by_hand() -> None:
    problem = houses(rooms=3, seed=1).problem(0)
    game = made(problem)
    first = game.start()[-1].content
    assert first.startswith(f"{RULES}\n\nYou are in the ")
    *before, last = solution(problem)
    say(game, "open")
    assert say(game, "dance").messages[0].content.startswith("You cannot do that. You are in the ")
    assert say(game, "").metrics["num_refused"] == 3
    again = made(problem)
    again.load(game.save() or b"")
    for command in before:
        say(again, command.upper())
    assert say(again, last).metrics == {
        "num_moves": len(before) + 4, "num_refused": 3, "least_moves": len(before) + 1, "has_key": 1, "won": 1,
    }  # fmt: skip


def test_a_game_that_is_lost_has_a_reward() -> None:
    problem = houses().problem(3)
    game = made(problem, max_moves=2)
    assert not say(game, "wait").done
    last = say(game, "wait")
    assert (last.done, last.reward, last.messages, last.metrics["won"]) == (True, 0.0, (), 0)
    assert say(made(problem), "go", "length").done


@given(st.text(max_size=40))
def test_any_text_is_a_move(text: str) -> None:
    assert say(made(houses().problem(0)), text).reward == 0.0


def test_siblings_play_the_same_game_and_problems_differ() -> None:
    problems = [houses().problem(index) for index in range(20)]
    assert problems == [houses().problem(index) for index in range(20)]
    assert len({made(problem).start()[-1].content for problem in problems}) > 3
    assert houses(seed=1).problem(0) != problems[0]
    assert houses(seed=1).digest != houses().digest


@each("info", [{}, {"seed": "x", "rooms": 4}, {"seed": 1, "rooms": 2}, {"seed": 1, "rooms": 10**9}])
def test_a_problem_of_another_taskset_is_refused(info: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='take source = "text_game:Houses"'):
        made(Problem(messages=houses().problem(0).messages, info=info))


def test_a_taskset_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="expected below size = 2"):
        houses(size=2).problem(2)
    with pytest.raises(ConfigError, match="takes neither a location nor columns"):
        Houses(Houses.Config(), location="x", columns={}, system=None)
