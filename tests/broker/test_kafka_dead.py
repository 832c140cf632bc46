"""Dead groups are put back and rollouts scored again on a real broker."""

from __future__ import annotations

import pytest

from rftstream.contracts.rollouts import Rollout
from tests.e2e.test_dead_and_rescore import BROKEN
from tests.e2e.workplace import FAKE, Workplace, sets

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.law("lost", "twice", "unscorable")]


def test_the_dead_are_put_back_after_the_mend_and_scored_once_more(
    place: Workplace, servers: str, run_id: object
) -> None:
    name: str = run_id()  # type: ignore[operator]
    place.write("checks.py", BROKEN)
    place.write("tiny.toml", FAKE.replace('"tiny"', f'"{name}"') + f'kind = "kafka"\nservers = "{servers}"\n')
    run = f"runs/{name}"
    more = sets("tasksets.sums.reward=checks:score", "verifier.tries=1", "feeder.groups_per_batch=4")
    stopped = place.call("run", "tiny.toml", "--json", *more)
    assert stopped.code == 6, stopped.err
    view = place.view(run)
    before = view.assert_nothing_lost()
    assert before.groups.dead > 40

    place.write("mended", "")
    asked = place.call("dead", "retry", run, "--all", "--json")
    assert asked.code == 0, asked.err
    assert len(asked.result["groups"]) == before.groups.dead
    assert asked.result["num_stored"] == before.rollouts.dead
    done = place.call("resume", run, "--json", *sets("run.steps=25"))
    assert done.code == 0, done.err
    after = view.assert_nothing_lost()
    assert after.version == 25
    assert after.groups.dead >= before.groups.dead, "a few may have had no outcome yet when the run stopped"
    listed = place.call("dead", "list", run, "--json")
    assert listed.result["num_groups"]["put_back"] == before.groups.dead

    scored = place.call("rescore", run, "--reward", "exact", "--into", f"{run}-again", "--json")
    assert scored.code == 0, scored.err
    table = scored.result
    assert table["num_rollouts"] == after.rollouts.admitted
    assert (table["agreement"], table["unscorable_new"]) == (1.0, {})
    again = place.view(f"{run}-again")
    trained = place.call("resume", f"{run}-again", "--json", *sets("run.steps=5"))
    assert trained.code == 0, trained.err
    assert again.assert_nothing_lost().version == 5
    names = {one.ids.rollout_id for one in view.rollouts() if isinstance(one, Rollout)}
    assert {one.ids.rollout_id for one in again.rollouts()} == names
