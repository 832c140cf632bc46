"""Whose fault a limit is: what a reward says of it while it works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rftstream.errors import RewardError
from rftstream.rewards import evaluating
from rftstream.rewards.base import RewardInput
from rftstream.rewards.math import MathReward


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """The parts that were noted, in order; 0: none."""
    found: list[int] = []
    evaluating.begin_part(1)
    evaluating.watch_evaluations(found.append)
    yield found
    evaluating.watch_evaluations(None)


def math_item(answer: str, completion: str) -> RewardInput:
    return RewardInput(
        completion=completion,
        answer=answer,
        prompt="",
        messages=(),
        info={},
        data_source="",
        num_tokens=1,
        truncated=False,
    )


def test_what_stands_apart_is_not_the_answers_fault(noted: list[int]) -> None:
    with evaluating.apart_from_answer():
        assert noted == []
    with evaluating.evaluating_answer():
        assert noted == [1]
        with evaluating.apart_from_answer():
            assert noted == [1, 0]
        assert noted == [1, 0, 1]
    assert noted == [1, 0, 1, 0]


def test_the_problems_answer_is_read_by_math_verify_apart(noted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    reward = MathReward(MathReward.Config())
    item = math_item(r"\int_0^1 x dx", r"\boxed{\int_0^1 2x dx}")
    assert reward(item).metrics["second"] == 1.0
    reading = []

    def out_of_memory(text: str) -> list[object]:
        reading.append(noted[-1])
        raise MemoryError

    fresh = MathReward(MathReward.Config())
    monkeypatch.setattr(fresh._second, "read_gold", out_of_memory)
    with pytest.raises(RewardError, match="math-verify cannot read the problem's answer"):
        fresh(math_item(r"\frac{2}{3} + \int_0^1 x dx", r"\boxed{\int_0^1 2x dx}"))
    assert set(reading) <= {0}
    assert noted[-1] == 0
