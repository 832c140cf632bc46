"""A run that deletes from its log what nobody needs, with real processes: it balances, and what is left is of use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rftstream.contracts.versions import WeightsAnnounced
from tests.e2e.workplace import FAKE, Workplace, sets

pytestmark = pytest.mark.law("bounded")

STEPS = 24
RUN_FILE = FAKE.replace("steps = 6", f"steps = {STEPS}") + "\n[retention]\n"


@pytest.mark.sampled(1, "retention")
@pytest.mark.law("conservation")
def test_a_run_with_retention(place: Workplace) -> None:
    """Its trainer dies once between saying what goes and deleting it, and once in the middle."""
    place.write("tiny.toml", RUN_FILE)
    faults = {"RFTSTREAM_FAULTS": "trainer:trim_said:2,trainer:trim_log_done:2"}
    done = place.call("run", "tiny.toml", "--json", env=faults)
    assert done.code == 0, done.err
    run = place.view("runs/tiny")
    assert len(list((run.folder.logs / "faults").iterdir())) == 2

    said = run.control().deleted
    assert said.version == STEPS - 2
    assert said.sequence >= 2 * (STEPS - 8)
    admin = run.transport.admin
    for topic in ("tasks", "rollouts", "verified", "batches"):
        assert tuple(offset for _, offset in sorted(admin.begin_offsets(topic).items())) == said.offsets[topic]
        assert sum(said.offsets[topic]) > 0
    report = run.assert_nothing_lost()
    assert report.groups.trained == 2 * STEPS
    assert report.deleted_groups == said.sequence
    assert report.lengths["trained"].count == report.rollouts.trained

    audited = [place.look("audit", "runs/tiny", "--json") for _ in range(2)]  # makes an index, then uses it
    assert [one.result["balanced"] for one in audited] == [True, True]
    assert f"deleted by retention: {said.sequence} groups" in place.look("audit", "runs/tiny").out
    assert place.look("status", "runs/tiny", "--json").result["deleted"]["earliest_version"] == said.version

    gone, kept = place.look("replay", "runs/tiny"), place.look("replay", "runs/tiny", "--from", str(said.version))
    assert gone.code == 2
    assert f"--from {said.version}" in gone.err
    assert kept.code == 0, kept.err
    first = run.outcomes()[0]
    traced = place.look("trace", "runs/tiny", first.group_id)
    assert traced.code == 0, traced.err
    assert "deleted by retention" in traced.out
    assert place.look("trace", "runs/tiny", "batch:0").code == 2
    assert f"batches batch:{said.version} to" in place.look("trace", "runs/tiny", "batch:0").err
    assert place.look("trace", "runs/tiny", f"batch:{said.version}").code == 0
    refused = place.look("rescore", "runs/tiny", "--reward", "exact", "--into", "again")
    assert refused.code == 2
    assert "were deleted by retention" in refused.err

    more = place.call("resume", "runs/tiny", "--json", *sets(f"run.steps={STEPS + 8}"))
    assert more.code == 0, more.err
    assert run.assert_nothing_lost().groups.trained == 2 * (STEPS + 8)
    assert run.control().deleted.version == STEPS + 6
    assert place.look("audit", "runs/tiny", "--json").result["balanced"], "with the index of before"
    back = place.look("run", "tiny.toml", "--json", *sets(f"run.steps={STEPS + 8}", f"run.resume={STEPS}"))
    assert back.code == 2
    assert f"expected one of {STEPS + 6}, {STEPS + 8}" in back.err
    announced = [one for one in run.messages("weights") if isinstance(one, WeightsAnnounced)]
    assert {name for one in announced for name in one.gone}


def test_resume_deletes_what_the_trainer_of_an_ended_run_has_left(place: Workplace) -> None:
    """As when the machine died between the last word of what goes and its deletion."""
    place.write("tiny.toml", RUN_FILE.replace(f"steps = {STEPS}", "steps = 8"))
    assert place.call("run", "tiny.toml", "--json").code == 0
    run = place.view("runs/tiny")
    said = run.control().deleted
    step = next(one for one in run.steps() if one.name.version == said.version + 1)
    more = replace(said, version=step.name.version, offsets={**said.offsets, "batches": step.positions})
    run.put_message("control", more, writer_epoch=1)
    before = place.look("audit", "runs/tiny", "--json")
    assert before.result["balanced"]
    assert list(before.result["undeleted"]) == ["batches"]

    again = place.look("resume", "runs/tiny")
    assert (again.code, "is finished with 8 of 8 steps" in again.err) == (2, True), again.err
    assert "deleted what the last trainer had given up and left: offsets" in again.err
    begins = run.transport.admin.begin_offsets("batches")
    assert tuple(offset for _, offset in sorted(begins.items())) == step.positions
    after = place.look("audit", "runs/tiny", "--json")
    assert after.result["balanced"]
    assert after.result["undeleted"] == {}
    assert "given up" not in place.look("resume", "runs/tiny").err
