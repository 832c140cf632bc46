"""Newcomers take single roles over on a real broker, each from the one before, whatever else the machine has to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.workplace import FAKE, Process, Workplace
from tests.moments import goes_on

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.slow, pytest.mark.law("fencing", "twice", "lost")]

ROLES = ("buffer", "trainer", "feeder", "evaluator")
NUM = 10


def test_ten_newcomers_of_ten_win(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:
    name = run_id()
    kafka = f'kind = "kafka"\nservers = "{servers}"\noptions = {{ replication_factor = 1 }}\n'
    text = FAKE.replace("steps = 6", "steps = 100000").replace('"tiny"', f'"{name}"')
    text += f'{kafka}[backends.fake]\nstep_s = 0.1\n[evaluations.held-out]\nsource = "arithmetic"\nevery = 5\n'
    place.write("tiny.toml", text)
    assert place.call("run", "tiny.toml", "--no-workers").code == 0
    view = place.view(f"runs/{name}")

    def start(role: str, process: str) -> Process:
        return place.start("worker", "tiny.toml", "--role", role, "--process", process)

    others = [start(role, f"{role}-0") for role in ("explorer", "verifier")]
    holders = {role: start(role, f"{role}-0") for role in ROLES}
    place.wait_for(lambda: view.control().claims.keys() >= set(ROLES), "all claims")
    for number in range(NUM):
        goes_on(view, place.wait_for)
        role, process = ROLES[number % len(ROLES)], f"newcomer-{number}"
        newcomer = start(role, process)
        ended = holders[role].finish()
        assert (ended.code, "this process ends" in ended.err) == (5, True), ended.err
        assert view.control().claims[role].process == process
        assert newcomer.alive, newcomer.err
        holders[role] = newcomer
    goes_on(view, place.wait_for)
    assert place.look("drain", f"runs/{name}").code == 0
    for left in (*others, *holders.values()):
        assert left.finish().code == 0, left.err
    view.assert_nothing_lost()
