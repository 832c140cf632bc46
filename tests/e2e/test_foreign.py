"""Somebody writes into a live run on the topics that one role alone writes: it ends as if nothing had been there."""

from __future__ import annotations

from random import Random

import pytest

from rftstream.testing.foreign import ForeignWriter
from tests.e2e.workplace import FAKE, RunView, Workplace, sets

pytestmark = pytest.mark.slow

STEPS = 60
NUM_STRAYS = 40

SLOW = sets("backends.fake.step_s=0.1")


def strays_into_a_live_run(
    place: Workplace, run_file: str, run_dir: str, *more: str, num_strays: int = NUM_STRAYS
) -> RunView:
    """Writes all kinds of them while the run goes on, and once more when it is over; then it goes on."""
    process = place.start("run", run_file, "--json", *SLOW, *sets(f"run.steps={STEPS}"), *more)
    view = place.view(run_dir)
    place.wait_for(lambda: view.curve().version >= 2, "version 2")
    writer = ForeignWriter(view.transport, view.folder.run_id, Random(5))
    written = set()
    for number in range(num_strays):
        written.add(writer.write().partition(" ")[0])
        if number % 10 == 9:
            version = view.curve().version
            place.wait_for(
                lambda: view.curve().version > version or not process.alive,  # noqa: B023
                f"a version after {version}",
            )
    assert process.alive, "they came while it was at work"
    assert len(written) > 7
    done = process.finish()
    assert done.code == 0, done.err
    assert (done.result["steps"], done.result["reason"]) == (STEPS, "steps")
    report = view.assert_nothing_lost()
    assert report.version == STEPS
    assert "foreign" in {one.reason for one in view.dead()}

    for _ in range(num_strays // 2):
        writer.write()
    again = place.call("resume", run_dir, "--json", *sets(f"run.steps={STEPS + 3}"))
    assert again.code == 0, again.err
    assert view.assert_nothing_lost().version == STEPS + 3
    return view


def test_strays_on_an_embedded_log(place: Workplace) -> None:
    place.write("tiny.toml", FAKE)
    view = strays_into_a_live_run(place, "tiny.toml", "runs/tiny")
    status = place.look("status", "runs/tiny", "--json")
    assert status.code == 0, status.err
    assert status.result["version"] == STEPS + 3
    same = place.look("replay", "runs/tiny")
    assert same.code == 0, same.out + same.err
    assert view.control().finished is not None
