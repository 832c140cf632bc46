"""Which seeds a test of the simulation plays: in `make test` a few that are other ones each time, in `make test-long`
many that are always the same.

    @seeds(2, range(100))
    def test_it(seed: int) -> None: ...

A seed that was drawn is in the output of the test that fails. `SIMULATION_SEED=17 pytest FILE` plays it again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable
from random import SystemRandom

import pytest

NUM_SEEDS = 1_000_000
"""Seeds are drawn from those below."""


def seeds(
    num_drawn: int,
    swept: Iterable[int],
    *,
    stored: Collection[int] = (),
    fits: Callable[[int], bool] = lambda seed: True,
) -> pytest.MarkDecorator:
    """Give a test the argument `seed`: `num_drawn` seeds are drawn anew among those that fit, the `stored` ones have
    once failed, and the swept ones are left to `make test-long`."""
    drawn = [pytest.param(fits, id=f"drawn{number}") for number in range(num_drawn)]
    long = [pytest.param(seed, marks=pytest.mark.long) for seed in swept if seed not in stored]
    return pytest.mark.parametrize("seed", [*drawn, *stored, *long], indirect=True)


def draw_seed(fits: Callable[[int], bool]) -> int:
    """Return a seed that nobody has chosen, and print it. It is drawn while the test runs, since all processes of
    pytest-xdist have to collect the same tests."""
    given, random = os.environ.get("SIMULATION_SEED"), SystemRandom()
    drawn = (random.randrange(NUM_SEEDS) for _ in itertools.count())
    seed = int(given) if given is not None else next(filter(fits, drawn))
    print(f"again: SIMULATION_SEED={seed}")
    return seed
