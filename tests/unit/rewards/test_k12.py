"""The reward `k12`: every kind of school problem, in English and Chinese."""

from __future__ import annotations

from typing import Any

import pytest

from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import RewardInput
from rftstream.rewards.k12 import KINDS, SchoolReward
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input
from tests.unit.rewards.answers.pairs import school_pairs

OPTIONS = ["oxygen", "hydrogen", "carbon", "iron"]


def item(completion: str, answer: str | None, prompt: str = "p", **info: Any) -> RewardInput:
    return reward_input(completion, answer, prompt=prompt, info=info)


def school(**settings: Any) -> SchoolReward:
    return SchoolReward(SchoolReward.Config(**settings))


@each(
    ("right", "completion", "answer", "info"),
    [
        (1, "The answer is C.", "C", {}),
        (0, "The answer is carbon.", "C", {}),
        (1, "The answer is carbon.", "C", {"options": OPTIONS}),
        (1, "C. carbon", "C", {"options": OPTIONS}),
        (0, "B. carbon", "C", {"options": OPTIONS}),
        (1, r"\boxed{C}", "carbon", {"options": OPTIONS}),
        (1, "答案是C", "C", {}),
        (1, "故选：C", "C", {}),
        (1, "A, C", "AC", {}),
        (1, "A和C", "A,C", {}),
        (0, "A", "AC", {}),
        (0, "ABC", "AC", {}),
        (1, "(A), (C)", "A, C", {}),
        (1, "The statement is true.", "True", {}),
        (1, "对", "True", {}),
        (1, "错误", "False", {}),
        (0, "正确", "False", {}),
        (1, "√", "对", {}),
        (0, "The statement is not true", "True", {}),
        (1, "9.8 m/s^2", "9.8 m/s^2", {}),
        (1, "980 cm/s^2", "9.8 m/s^2", {}),
        (1, "1.5 hours", "90 min", {}),
        (1, "5 千米", "5000 m", {}),
        (0, "5 km", "5 m", {}),
        (1, "三分之二", "2/3", {}),
        (1, "twenty-one", "21", {}),
        (1, "3.6 kJ", "3600 J", {}),
        (1, "1 atm", "101325 Pa", {}),
        (0, "25 N", "25 J", {}),
        (1, "photosynthesis", "photosynthesis | the photosynthesis process", {}),
        (1, "Paris; London", "Paris;London", {}),
        (1, "Paris, London", "Paris;London", {}),
        (0, "London, Paris", "Paris;London", {}),
        (1, "colour", "color|colour", {}),
        (1, "北京", "北京|北京市", {}),
        (1, r"\boxed{3; 5}", "3;5", {}),
        (1, "B, A, C, D", "B,A,C,D", {}),
        (1, "B→A→C→D", "BACD", {}),
        (0, "A,B,C,D", "BACD", {}),
        (1, "③①②", "③①②", {}),
        (1, "3, 1, 2", "③①②", {}),
        (1, "1-B, 2-A, 3-C", "1-B,2-A,3-C", {}),
        (1, "2-A; 1-B; 3-C", "1-B,2-A,3-C", {}),
        (1, "B-1, A-2, C-3", "1-B,2-A,3-C", {}),
        (0, "1-A,2-B,3-C", "1-B,2-A,3-C", {}),
        (1, "1B 2A 3C", "1-B,2-A,3-C", {}),
        (1, "cat: mammal, frog: amphibian", '{"cat":"mammal","frog":"amphibian"}', {}),
        (1, r"\boxed{C}", "C", {"kind": "multiple_choice"}),
        (1, "two and a half", "2.5", {}),
        (1, "一百二十", "120", {}),
    ],
)
def test_an_answer_is_judged(right: int, completion: str, answer: str, info: dict[str, Any]) -> None:
    assert school()(item(completion, answer, **info)).reward == right


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_judged_as_labelled(kind: str) -> None:
    pairs = [pair for pair in school_pairs() if pair.category == kind]
    assert sum(pair.equal for pair in pairs) > 90 and sum(not pair.equal for pair in pairs) > 10
    reward = school()
    assert [one for one in pairs if reward(item(one.completion, one.gold)).reward != one.equal] == []


def test_the_text_of_an_option_goes_before_letters_in_it() -> None:
    vitamins = {"options": ["vitamin A", "vitamin C", "iron"]}
    assert school()(item("The answer is vitamin C.", "B", **vitamins)).reward == 1.0
    assert school()(item("The answer is C.", "B", **vitamins)).reward == 0.0


def test_options_are_read_off_the_prompt() -> None:
    prompt = "Which is a metal?\nA. oxygen\nB. iron"
    assert school()(item("It is iron.", "B", prompt)).reward == 1.0
    assert school()(item("It is oxygen.", "B", prompt)).reward == 0.0


def test_settings() -> None:
    assert school(partial=True)(item("Paris; Rome", "Paris;London")).reward == 0.5
    assert school(partial=True)(item("A", "AC")).reward == 0.5
    assert school(partial=True)(item("A, B", "AC")).reward == 0.0
    assert school(need_unit=True)(item("9.8", "9.8 m/s^2")).reward == 0.0
    assert school()(item("9.8", "9.8 m/s^2")).reward == 1.0
    assert school(tolerance=0.01)(item("9.81 m/s^2", "9.8 m/s^2")).reward == 1.0
    assert school(tolerance=0.01)(item("9.5 m/s^2", "9.8 m/s^2")).reward == 0.0
    assert school(boxed_only=True)(item("C", "C")).reward == 0.0
    with pytest.raises(ConfigError, match=r"rewards\.k12\.kind: unknown 'essay'"):
        school(kind="essay")
    with pytest.raises(ConfigError, match=r"rewards\.k12\.tolerance"):
        school(tolerance=2.0)


@each(
    ("answer", "info"),
    [
        ("", {}),
        (None, {}),
        ("E", {"options": OPTIONS, "kind": "choice"}),
        ("gold", {"kind": "number"}),
        ("x", {"kind": "nonsense"}),
        ("perhaps", {"kind": "truth"}),
        ("alone", {"kind": "order"}),
        ("1-A", {"kind": "match"}),
    ],
)
def test_check_names_problems_that_nobody_can_score(answer: str | None, info: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="k12: the problem"):
        school().check(item("", answer, **info))
