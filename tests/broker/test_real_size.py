"""Rollouts of real size on both logs, with engines that cost nothing: 64 groups of 8 rollouts of 32,000 tokens in each
batch, and a kill of each role. About 4 GB of disk."""

from __future__ import annotations

import contextlib
from collections import Counter

import psutil
import pytest

from tests.e2e.workplace import Workplace

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.long]

RUN = """
[run]
name = "real"
steps = 7
[model]
path = "fake"
context = 33000
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = 32768
[feeder]
groups_per_batch = 64
group_size = 8
max_staleness = 2
[explorer]
policy = "fake"
[policies.fake]
mean_tokens = 32000
sigma = 0
[trainer]
backend = "fake"
checkpoint_every = 2
"""
ROLES = ("explorer", "verifier", "buffer", "trainer", "feeder")


@pytest.mark.law("bounded", "lost", "twice", "conservation")
@pytest.mark.parametrize("kind", ["embedded", "kafka"])
def test_memory_stays_within_what_check_said(place: Workplace, kind: str, request: pytest.FixtureRequest) -> None:
    """After each of the first steps another role is killed. What a process shares with the one that it was forked from
    is not its own."""
    log = f'[transport]\nkind = "{kind}"\n'
    log += f'servers = "{request.getfixturevalue("servers")}"\n' if kind == "kafka" else ""
    place.write("real.toml", RUN + log)
    checked = place.look("check", "real.toml", "--json").result["memory"]["roles"]
    said = {one["role"]: sum(one["parts"]["main memory"].values()) for one in checked}
    run, peaks, killed = place.start("run", "real.toml", "--json"), Counter[str](), 0
    place.wait_for(lambda: place.worker("feeder-0"), "the first worker: the topics are there by then")
    view = place.view("runs/real")

    def has_ended() -> bool:
        nonlocal killed
        for role in ROLES:
            with contextlib.suppress(psutil.Error, OSError):
                if (process := place.worker(f"{role}-0")) is not None:
                    peaks[role] = max(peaks[role], process.memory_full_info().uss)
        if killed < len(ROLES) and view.curve().version > killed:
            place.kill_worker(f"{ROLES[killed]}-0")
            killed += 1
        return not run.alive

    place.wait_for(has_ended, "the end of the run", timeout_s=3600.0)
    assert run.finish().code == 0, run.err
    assert killed == len(ROLES)
    assert view.assert_nothing_lost().rollouts.trained == 7 * 64 * 8
    assert {role: (peaks[role], said[role]) for role in ROLES if peaks[role] > said[role]} == {}
    assert sum(peaks.values()) > 1 << 30, "so large are they"
