"""The environment `attempts`: what counts, what is heard, and who scores."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.config.parts import registry
from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.data.gym_entries import EntryScorer
from rftstream.data.tasksets.reasoning_gym import ReasoningGymTaskset
from rftstream.environments.attempts import Attempts
from rftstream.environments.base import Reply
from rftstream.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))

PROBLEM = Problem(messages=(ChatMessage(role="user", content="6 * 7?"),), answer="42")


def made(problem: Problem = PROBLEM, **settings: Any) -> Attempts:
    config = registry.build_config(Attempts, settings, where="environments.attempts")
    return Attempts(config, problem=problem, seed=0)


def say(environment: Attempts, text: str, finish_reason: str = "stop") -> Reply:
    return asyncio.run(environment.reply(AssistantMessage(content=text, finish_reason=finish_reason)))


def test_wrong_then_right() -> None:
    environment = made(discount=0.5)
    assert environment.start() == PROBLEM.messages
    first = say(environment, "I think <answer> 41 </answer>")
    assert first.messages == (ChatMessage(role="user", content="That is wrong. Try again."),)
    assert (first.done, first.reward) == (False, 0.0)
    second = say(environment, "<answer>42</answer>")
    assert (second.done, second.reward) == (True, 0.5)
    assert second.metrics == {"num_attempts": 2, "first_score": 0, "best_score": 1, "solved": 1}


def test_no_attempt_is_left() -> None:
    environment = made(max_attempts=2, feedback="{score}: wrong ({attempt} made, {left} left) {odd}")
    assert say(environment, "a").messages[0].content == "0: wrong (1 made, 1 left) {odd}"
    last = say(environment, "b")
    assert (last.done, last.messages, last.reward) == (True, (), 0.0)


def test_an_attempt_that_was_cut_short_is_the_last() -> None:
    assert say(made(), "4", "length").done


@pytest.mark.slow
@given(st.lists(st.floats(0, 0.99), min_size=1, max_size=6), st.sampled_from(["best", "last"]), st.floats(0.1, 1))
def test_the_rewards_add_up_to_that_of_the_attempt_that_counts(
    scores: list[float], counts: str, discount: float
) -> None:
    environment = made(
        Problem(messages=PROBLEM.messages, answer="0"), max_attempts=len(scores), counts=counts, discount=discount,
        check="sample_tools:closest",
    )  # fmt: skip
    replies = [say(environment, repr((1 - score) * 10)) for score in scores]
    values = [score * discount**number for number, score in enumerate(scores)]
    for number in range(1, len(scores) + 1):
        wanted = max(values[:number]) if counts == "best" else values[number - 1]
        assert sum(reply.reward or 0.0 for reply in replies[:number]) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("check", ["sample_tools:closest", "sample_tools:closest_later"])
def test_a_check_of_the_users(check: str) -> None:
    environment = made(check=check, solved_at=0.9, discount=1.0)
    assert say(environment, "40").reward == pytest.approx(0.8)
    again = made(check=check, solved_at=0.9, discount=1.0)
    again.load(environment.save() or b"")
    last = say(again, "41.5")
    assert last.done
    assert last.reward == pytest.approx(0.15)


def test_a_check_that_raises_or_gives_no_number_fails_the_rollout() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        say(made(check="sample_tools:closest"), "forty")
    with pytest.raises(ValueError, match="gave nan, expected a finite score"):
        say(made(check="sample_tools:not_finite"), "40")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sample_tools:nothing", "cannot be imported: AttributeError"),
        ("nothing", "write 'module:function'"),
        ("sample_tools:not_callable", "is a int, expected a function"),
    ],
)
def test_a_check_that_is_not_there(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        made(check=name).start()


def test_a_problem_without_an_answer_needs_a_check() -> None:
    with pytest.raises(ConfigError, match="has no answer; set check"):
        made(Problem(messages=PROBLEM.messages)).start()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["chain_sum", "countdown", "basic_arithmetic"])
def test_reasoning_gym_scores_its_own_entries(task: str) -> None:
    config = registry.build_config(ReasoningGymTaskset, {"size": 3}, where="options")
    problem = ReasoningGymTaskset(config, location=task, columns={}, system=None).problem(0)
    environment = made(problem, discount=0.5)
    assert not say(environment, "no idea").done
    scorer = EntryScorer()
    wanted = scorer(problem.info["entry"]["answer"], problem.info)
    assert wanted == 1.0
    last = say(environment, f"<answer>{problem.info['entry']['answer']}</answer>")
    assert last.done
    assert last.metrics["solved"] == 1
