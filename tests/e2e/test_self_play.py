"""examples/nim.toml: a policy plays against itself, and each seat has its own reward."""

from __future__ import annotations

import pytest

from rftstream.contracts.rollouts import Rollout, roles_of
from tests.e2e.test_resume import PATIENCE_S
from tests.e2e.workplace import EXAMPLES, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.law("replay")]


@pytest.mark.sampled(3, "examples")
@pytest.mark.timeout(6 * PATIENCE_S)
def test_the_example_made_shorter(place: Workplace) -> None:
    for name in ("nim.toml", "nim.py", "piles.jsonl"):
        place.write(name, (EXAMPLES / name).read_text(encoding="utf-8"))
    shorter = sets(
        "run.steps=3", "feeder.groups_per_batch=3", "feeder.group_size=4", "evaluations.perfect.n=1",
        "model.make.layers=1", "model.make.width=32",
    )  # fmt: skip
    done = place.call("run", "nim.toml", *shorter, "--json", timeout_s=2 * PATIENCE_S)
    assert done.code == 0, done.err
    view = place.view("runs/nim")
    steps = [one.metrics for one in view.steps() if not one.resumed]
    assert len(steps) == 3 and all({"role/first", "role_signal/first"} <= one.keys() for one in steps)
    games = [one for one in view.messages("rollouts") if isinstance(one, Rollout) and one.posted is not None]
    assert games and all(set(roles_of(one.segments)) == set(one.posted.roles) for one in games if one.posted)
    two = next(one for one in games if len(roles_of(one.segments)) == 2)
    assert two.posted is not None and sorted(two.posted.roles.values(), key=float) == [-1.0, 1.0]
    report = view.audit()
    assert report.fine, report.to_text()
    shown = place.look("trace", "runs/nim", two.ids.rollout_id)
    assert shown.code == 0 and "as first" in shown.out and "as second" in shown.out, shown.out
    assert "roles first " in shown.out, shown.out
    again = place.look("replay", "runs/nim", "--json")
    assert again.code == 0 and again.result["equal"], again.out
    place.assert_nobody_left()
