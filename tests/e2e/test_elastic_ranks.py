"""A run whose trainer has ranks that may die: it goes on in another world, and no batch is trained twice or lost."""

from __future__ import annotations

import pytest

from tests.e2e.test_kills import check_the_laws, drain, reach
from tests.e2e.workplace import FAKE, Workplace

pytestmark = [pytest.mark.slow, pytest.mark.law("lost", "twice", "conservation")]

RUN = (
    FAKE.replace('path = "fake"', 'make = { characters = "0123456789+-*/= ?.", width = 16, context = 256 }')
    .replace('backend = "fake"', 'backend = "deepspeed"')
    .replace('policy = "fake"', 'policy = "hf"')
    .replace("groups_per_batch = 2\ngroup_size = 3", "groups_per_batch = 4\ngroup_size = 4")
    .replace("steps = 6", "steps = 100000")
    + """
[backends.deepspeed]
processes = 2
min_ranks = 1
last_call_s = 240
timeout_s = 240
stage = 1
"""
)
RANK = "rftstream.backends.deepspeed.rank"


@pytest.mark.heavy("a trainer of two processes, and a third in the place of one")
def test_a_rank_is_killed_and_the_trainer_goes_on_as_it_was(place: Workplace) -> None:
    place.write("tiny.toml", RUN)
    run = place.start("run", "tiny.toml", "--json")
    view = place.view("runs/tiny")
    reach(place, view, 3)
    (before,) = place.processes(RANK)
    before.kill()
    reach(place, view, view.curve().version + 4)
    (after,) = place.processes(RANK)
    assert after.pid != before.pid
    steps = drain(place, run)
    check_the_laws(view, steps)
    assert view.control().claims["trainer"].epoch == 1, "the trainer was not started again"
    worlds = [
        (int(one.metrics["rank_world"]), int(one.metrics["ranks"])) for one in view.steps() if "ranks" in one.metrics
    ]
    assert worlds == sorted(worlds)
    assert {world for world, _ in worlds} == {1, 2}
    assert [one.name.version for one in view.steps()] == list(range(1, steps + 1)), "each batch is trained once"
    place.assert_nobody_left()
