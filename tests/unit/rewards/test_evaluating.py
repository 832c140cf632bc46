"""Whose fault a limit is: what a reward says of it while it works."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rftstream.errors import RewardError
from rftstream.rewards import evaluating
from rftstream.rewards.base import RewardInput
from rftstream.rewards.frames import At
from rftstream.rewards.math import MathReward
from rftstream.rewards.process import is_overdue
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """The parts that were noted, in order; 0: none."""
    found: list[int] = []
    evaluating.begin_part(1)
    evaluating.watch_evaluations(found.append)
    yield found
    evaluating.watch_evaluations(None)


def math_item(answer: str, completion: str) -> RewardInput:
    return reward_input(completion, answer, prompt="", data_source="")


def test_what_stands_apart_is_not_the_answers_fault(noted: list[int]) -> None:
    with evaluating.apart_from_answer():
        assert noted == []
    with evaluating.evaluating_answer():
        assert noted == [1]
        with evaluating.apart_from_answer():
            assert noted == [1, 0]
        assert noted == [1, 0, 1]
    assert noted == [1, 0, 1, 0]


def test_a_part_that_another_thread_begins_is_not_the_one_to_blame(noted: list[int]) -> None:
    def begin(number: int) -> None:
        (other := threading.Thread(target=evaluating.begin_part, args=(number,))).start()
        other.join()

    begin(2)
    with evaluating.evaluating_answer():
        begin(3)
        with evaluating.apart_from_answer():
            pass
    assert noted == [1, 0, 1, 0], "a served judge begins beside it, in a thread"


@pytest.mark.slow
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


@each(
    ("lasts_s", "waited_s", "overdue"),
    [
        (9, 0, False),
        (11, 0, True),
        (11, 2, False),
        (45, 43.4, False),
        (60, 49, True),
        (599, 595, False),
        (601, 600, True),
    ],
)
def test_time_that_others_had_the_processor_does_not_count(lasts_s: float, waited_s: float, overdue: bool) -> None:
    at = At(3, 1, since=100.0, delay_s=7.0)
    assert is_overdue(at, 100.0 + lasts_s, lambda: 7.0 + waited_s, timeout_s=10.0) == overdue
