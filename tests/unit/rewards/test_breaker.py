"""The breaker of a reward: what it makes of the order in which tries end."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.rewards.breaker import Breaker
from tests.suite.each import each


@dataclass
class Tried:
    number: int
    group_id: str


def test_tries_that_were_under_way_together_count_as_one() -> None:
    """Else a reward that hangs once, while many rollouts are scored, would be given up at once."""
    breaker = Breaker()
    tries = [Tried(number, f"sums/0/{number}/0") for number in range(20)]
    for tried in tries:
        breaker.hung([tried], "hung", "")
    assert (breaker.num_hung, breaker.closed, breaker.given_up) == (1, False, False)
    breaker.probe = 20
    breaker.hung([Tried(20, "sums/0/20/0")], "hung", "")
    assert (breaker.num_hung, breaker.probe) == (2, None)
    breaker.came_back()
    assert breaker.closed


@each("num_groups, after", [(1, 16), (2, 16), (3, 6), (9, 6)])
def test_it_gives_up_after_six_probes_of_three_groups_or_sixteen_of_any(num_groups: int, after: int) -> None:
    breaker, given_up = Breaker(), []
    for number in range(after):
        breaker.probe = number
        breaker.hung([Tried(number, f"sums/0/{number % num_groups}/0")], "timeout", "")
        given_up.append(breaker.given_up)
    assert given_up == [False] * (after - 1) + [True]
