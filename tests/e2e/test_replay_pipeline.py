"""Recorded groups under other operators, by the command: a run of its own beside the first, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.workplace import Workplace

pytestmark = pytest.mark.slow

OTHERS = """
[[pipeline]]
op = "zero_variance"
"""
EVERYTHING = """
[[pipeline]]
op = "my_operators:Never"
"""
NEVER = """
from rftstream.data.operators.base import Reject


class Never:
    side = "experience"

    def decide(self, group, facts, seed):
        return Reject("never")
"""


@pytest.mark.law("derived")
def test_other_operators_over_recorded_groups(place: Workplace, finished_run: Path) -> None:
    place.write("others.toml", OTHERS)
    place.write("everything.toml", EVERYTHING)
    place.write("my_operators.py", NEVER)
    command = ("replay", "runs/tiny", "--pipeline", "others.toml", "--into", "runs/others")

    looked = place.look("pipeline", "preview", "others.toml", "--run", "runs/tiny", "--json").result
    expected = looked["groups"]["sums"]
    assert expected["in"] == 12
    planned = place.look(*command, "--dry-run", "--json")
    assert (planned.code, planned.result["operators"]) == (0, ["pipeline.0: zero_variance"])
    assert not (place.folder / "runs" / "others").exists()

    done = place.call(*command, "--json")
    assert done.code == 0, done.err
    before, after = done.result["comparison"]["before"], done.result["comparison"]["after"]
    assert before["groups"]["batched"] == 12
    assert (after["groups"]["batched"], after["groups"]["filtered"]) == (expected["out"], 12 - expected["out"])
    rejected = {(one["operator"], one["action"]): one["groups"] for one in after["operators"]}
    assert rejected == ({("zero_variance", "reject"): 12 - expected["out"]} if expected["out"] < 12 else {})
    assert done.result["version"] == after["version"] == after["batches"]
    view = place.view("runs/others")
    view.assert_nothing_lost()
    records = view.records("control")
    again = place.look(*command, "--json")
    assert (again.code, again.result["comparison"]) == (0, done.result["comparison"])
    assert view.records("control") == records, "done again it changes nothing"
    other = place.look(*command, "--scorer", "newest")
    assert other.code == 2 and "was begun with all records, and this command has verdicts all -> of" in other.err
    assert "or go on by `rftstream resume runs/others`" in other.err

    nothing = place.call("replay", "runs/tiny", "--pipeline", "everything.toml", "--into", "runs/nothing", "--json")
    assert nothing.code == 1
    assert "no group is left of 12 and nothing was trained: my_operators:Never: never 12" in nothing.err
    place.assert_nobody_left()


def test_what_cannot_be_done_is_refused(place: Workplace, finished_run: Path) -> None:
    place.write("others.toml", OTHERS)
    place.write("typo.toml", '[[pipeline]]\nop = "zero_varianze"\n')
    place.write("more.toml", "[trainer]\nlr = 1.0\n")
    new = ("--into", "runs/new")
    for more, said in {
        ("--pipeline", "others.toml"): "name the folder of a new run by --into",
        ("--pipeline", "nowhere.toml", *new): "nowhere.toml: no such file",
        ("--pipeline", "typo.toml", *new): "did you mean 'zero_variance'",
        ("--pipeline", "more.toml", *new): "trainer: found beside the operators",
        ("--pipeline", "others.toml", "--from", "1", *new): "leave out --from and --to",
        ("--pipeline", "others.toml", "--into", "runs/tiny"): "is the run itself",
        ("--pipeline", "others.toml", "--scorer", "9", *new): "got '9', expected newest or the beginning of one of: ",
        ("--scorer", "newest", *new): "hold nothing that is to be left out",
        ("--pipeline", "others.toml", *new, "--set", "feeder.group_size=2"): "feeder.group_size",
    }.items():
        refused = place.look("replay", "runs/tiny", *more)
        assert (refused.code, said in refused.err) == (2, True), (more, refused.err)
    assert not (place.folder / "runs" / "new").exists()
