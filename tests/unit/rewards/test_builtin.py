"""The built-in rewards by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import RewardInput
from rftstream.rewards.simple import ExactMatch
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input


def item(completion: str, answer: str | None = "7", **info: Any) -> RewardInput:
    return reward_input(completion, answer, info=info)


def exact(**settings: Any) -> ExactMatch:
    return ExactMatch(ExactMatch.Config(**settings))


@each(
    ("settings", "completion", "answer", "reward"),
    [
        ({}, "7", "7", 1.0),
        ({}, " 7\n", "7", 1.0),
        ({}, "8", "7", 0.0),
        ({}, "", "7", 0.0),
        ({"strip": False}, "7 ", "7", 0.0),
        ({}, "Paris", "paris", 0.0),
        ({"casefold": True}, "PARIS", "paris", 1.0),
        ({"extract": r"####\s*(.+)"}, "3+4 is\n#### 6\n#### 7", "7", 1.0),
        ({"extract": r"\d+"}, "it is 5, no, 7.", "7", 1.0),
        ({"extract": r"\d+"}, "seven", "7", 0.0),
        ({"extract": r"answer:? ?(\d+)?"}, "answer", "7", 0.0),
    ],
)
def test_exact(settings: dict[str, Any], completion: str, answer: str, reward: float) -> None:
    assert exact(**settings)(item(completion, answer)) == reward


def test_exact_needs_an_answer_and_a_sound_pattern() -> None:
    with pytest.raises(RewardError, match="the problem has no answer"):
        exact()(item("7", None))
    with pytest.raises(ConfigError, match=r"rewards\.exact\.extract: '\(' is no regular expression"):
        exact(extract="(")


def test_versions_change_with_the_config() -> None:
    assert exact().version == exact().version
    assert len({exact().version, exact(casefold=True).version, exact(extract="x").version}) == 3


@pytest.fixture(scope="module")
def math() -> Any:
    pytest.importorskip("math_verify")
    from rftstream.rewards.math import MathReward

    return MathReward(MathReward.Config())


@each(
    ("completion", "answer", "reward"),
    [
        ("The answer is 7.", "7", 1.0),
        (r"so $\boxed{\frac{1}{2}}$", "0.5", 1.0),
        (r"so $\boxed{\frac{1}{2}}$", r"\frac{2}{4}", 1.0),
        (r"first 3, but \boxed{8}", "7", 0.0),
        ("3+4=7 so 7", "Natalia sold 3+4 = <<3+4=7>>7 clips.\n#### 7", 1.0),
        (r"$x = 2\sqrt{3}$", r"$\sqrt{12}$", 1.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
        ("1,000", "1000", 1.0),
    ],
)
def test_math(math: Any, completion: str, answer: str, reward: float) -> None:
    assert math(item(completion, answer)).reward == reward


def test_math_says_whether_it_found_an_answer(math: Any) -> None:
    assert math(item("nothing here")).metrics["parsed"] == 0.0
    assert math(item("it is 9")).metrics["parsed"] == 1.0


def test_math_boxed_only(math: Any) -> None:
    boxed = type(math)(type(math).Config(boxed_only=True))
    assert boxed(item("it is 7")).reward == 0.0
    assert boxed(item(r"it is \boxed{7}")).reward == 1.0


def test_math_without_a_readable_answer_is_unscorable(math: Any) -> None:
    for answer in (None, "", "   "):
        with pytest.raises(RewardError, match="math: the problem"):
            math(item("7", answer))


def test_math_uses_no_alarm(math: Any) -> None:
    """math-verify's own time limit would turn what took too long into a reward of 0."""
    import signal

    handler = signal.getsignal(signal.SIGALRM)

    def ring(*_: object) -> None:
        raise AssertionError("the alarm rang")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        math(item("it is 7"))
        assert signal.getsignal(signal.SIGALRM) is ring
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
    assert "math-verify-" in math.version
