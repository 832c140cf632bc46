"""The reward `math` on labelled pairs of answers, category by category."""

from __future__ import annotations

from collections import Counter

import pytest

from rftstream.errors import RewardError
from rftstream.rewards.base import RewardInput
from rftstream.rewards.math import MathReward
from tests.unit.reward_inputs import reward_input
from tests.unit.rewards.answers.pairs import Pair, math_pairs

PAIRS = math_pairs()


def item(completion: str, answer: str | None) -> RewardInput:
    return reward_input(completion, answer)


@pytest.fixture(scope="module")
def reward() -> MathReward:
    return MathReward(MathReward.Config(second_share=0.0))


@pytest.mark.slow
@pytest.mark.parametrize("category", list(Counter(pair.category for pair in PAIRS)))
def test_a_category_is_judged_as_labelled(category: str, reward: MathReward) -> None:
    wrong: list[tuple[Pair, float]] = []
    for pair in PAIRS:
        if pair.category == category:
            given = reward(item(pair.completion, pair.gold)).reward
            if given != float(pair.equal):
                wrong.append((pair, given))
    assert not wrong


def test_there_are_many_pairs_of_both_kinds() -> None:
    assert sum(pair.equal for pair in PAIRS) > 400
    assert sum(not pair.equal for pair in PAIRS) > 300


def test_an_answer_that_is_too_costly_says_so(reward: MathReward) -> None:
    score = reward(item(r"\boxed{9^{9^{9^9}}}", "5"))
    assert score.reward == 0.0
    assert score.metrics["over_limit"] == 1.0


def test_a_problem_that_is_too_costly_is_unscorable_but_for_its_own_words(reward: MathReward) -> None:
    assert reward(item(r"\boxed{9^{9^{9^9}}}", "9^{9^{9^9}}")).reward == 1.0
    with pytest.raises(RewardError, match="cannot be evaluated"):
        reward(item(r"\boxed{5}", "9^{9^{9^9}}"))
    with pytest.raises(RewardError, match="cannot be evaluated"):
        reward.check(item("", "9^{9^{9^9}}"))


def test_a_problem_that_nobody_reads_is_unscorable(reward: MathReward) -> None:
    for answer in ("", "  ", r"\frac{", "$"):
        with pytest.raises(RewardError, match="math: the problem"):
            reward.check(item("", answer))


def test_disagreement_is_a_metric() -> None:
    reward = MathReward(MathReward.Config(second_share=1.0))
    assert reward(item(r"\boxed{\frac12}", "0.5")).metrics["disagree"] == 0.0
    assert reward(item(r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}")).metrics["disagree"] == 1.0
