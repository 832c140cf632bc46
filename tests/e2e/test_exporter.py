"""The exporter beside a run on the embedded log, and what it says of a log that is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rftstream.integrations.exporter import FollowedRun
from rftstream.launch.health import Health
from rftstream.queries.curves.exported import MAX_NAMES, OTHERS, figures_of
from rftstream.queries.people.feedback import FeedbackView
from rftstream.queries.state.following import RunFollower
from rftstream.runs.folder import open_run
from tests.e2e.workplace import Workplace
from tests.exporters import check_exporter


@pytest.mark.sampled(1, "exporter")
@pytest.mark.law("conservation")
@pytest.mark.slow
def test_its_backlog_is_that_of_the_audit(place: Workplace) -> None:
    check_exporter(place, "tiny", {})


def test_a_log_that_is_gone_is_said_and_the_rest_stays(finished_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = finished_run
    run = FollowedRun("tiny", lambda: open_run(folder), every_s=1.0, health=Health())
    assert run.figures == {}, "the first look at a long log takes minutes, which is no trouble"
    run.follow_once()
    assert run.figures["rftstream_run_up"] == [((), 1.0)]
    version = run.figures["rftstream_run_version"]
    run._close()
    away = shutil.move(folder, folder.with_name("away"))
    run.follow_once()
    run.follow_once()
    assert run.figures["rftstream_run_up"] == [((), 0.0)]
    assert run.figures["rftstream_run_version"] == version == [((), 6.0)]
    assert [one.levelname for one in caplog.records] == ["WARNING"], "it is said once"
    shutil.move(away, folder)
    run.follow_once()
    assert run.figures["rftstream_run_up"] == [((), 1.0)]
    run._close()


def test_names_that_people_choose_are_not_series_without_end(finished_run: Path) -> None:
    follower = RunFollower(open_run(finished_run))
    look = follower.look()
    assert look.counts is not None
    reasons = {("filtered", f"reason {number}"): number + 1 for number in range(3 * MAX_NAMES)}
    object.__setattr__(look.counts, "reasons", reasons)
    found = figures_of(follower.run.config, look, FeedbackView(), 0.0)["rftstream_run_groups_total"]
    follower.close()
    assert len(found) == MAX_NAMES + 1
    assert sum(value for _, value in found) == sum(reasons.values())
    assert dict(found)["filtered", OTHERS] == sum(range(1, 2 * MAX_NAMES + 1))
