"""A run on a real broker that deletes from its topics what nobody needs."""

from __future__ import annotations

import pytest

from tests.broker.test_kafka_runs import SLOW
from tests.e2e.workplace import Workplace, sets

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.law("conservation", "bounded")]

STEPS = 16


def test_a_run_with_retention_balances_and_goes_on(place: Workplace, servers: str, run_id: object) -> None:
    name: str = run_id()  # type: ignore[operator]
    text = (
        SLOW.format(servers=servers).replace('"tiny"', f'"{name}"').replace("tokens_per_s = 40.0", "tokens_per_s = 0.0")
    )
    place.write("tiny.toml", text + "[retention]\n")
    faults = {"RFTSTREAM_FAULTS": "trainer:trim_said:2"}
    done = place.call("run", "tiny.toml", "--json", *sets(f"run.steps={STEPS}"), env=faults)
    assert done.code == 0, done.err
    run = place.view(f"runs/{name}")
    said = run.control().deleted
    assert said.version == STEPS - 2
    assert said.sequence > 0
    for topic in ("tasks", "rollouts", "verified", "batches"):
        begins = sorted(run.transport.admin.begin_offsets(topic).items())
        assert tuple(offset for _, offset in begins) == said.offsets[topic]
        assert sum(said.offsets[topic]) > 0
    report = run.assert_nothing_lost()
    assert (report.groups.trained, report.deleted_groups) == (4 * STEPS, said.sequence)
    assert report.lengths["trained"].count == report.rollouts.trained
    more = place.call("resume", f"runs/{name}", "--json", *sets(f"run.steps={STEPS + 4}"))
    assert more.code == 0, more.err
    assert run.assert_nothing_lost().groups.trained == 4 * (STEPS + 4)
    assert f"--from {STEPS + 2}" in place.look("replay", f"runs/{name}").err
    assert place.look("replay", f"runs/{name}", "--from", str(STEPS + 2)).code == 0
