"""Workers of two releases at once: the run goes on, whoever is replaced first, and what one cannot read waits."""

from __future__ import annotations

import re

import pytest

from rftstream.contracts.versions import StepRecord
from tests.e2e.workplace import Workplace
from tests.releases import NOTE
from tests.upgrades import RollingUpgrade

pytestmark = [pytest.mark.slow, pytest.mark.law("lost", "twice")]

THERE = (("trainer", "verifier", "feeder"), ("buffer", "explorer"))
"""Between the steps each role is next to another release."""
BACK = (("trainer", "buffer"), ("verifier", "feeder"), ("explorer",))
"""Against the flow: so all that the later release wrote is read by the release before."""


@pytest.mark.sampled(1, "upgrade")
def test_a_run_goes_to_a_later_release_and_back(place: Workplace) -> None:
    upgrade = RollingUpgrade(place, "rolling")
    upgrade.play((True, THERE), (False, BACK))
    upgrade.assert_whole()
    upgrade.assert_field_is_kept()
    assert {NOTE, None} <= {note for _, note in upgrade.notes("steps")}
    began = [step.name for step in upgrade.view.messages("steps") if isinstance(step, StepRecord) and step.resumed]
    assert [name.trainer_epoch for name in began] == [1, 2, 3]
    assert all(name.version > 0 for name in began[1:]), "each trainer took the checkpoint of the other release"

    folder = upgrade.view.folder.path
    later = upgrade.call_later("audit", folder, "--json")  # makes an index
    assert (later.code, later.result["balanced"]) == (0, True), later.err
    assert place.look("audit", folder, "--json").result == later.result, "this release uses the same index, or its own"


@pytest.mark.sampled(1, "upgrade")
def test_what_may_not_be_skipped_ends_the_verifiers_of_the_release_before(place: Workplace) -> None:
    """The wrong order: the explorer is the later one first, although its rollouts have a field to be understood."""
    upgrade = RollingUpgrade(place, "refused", skippable=False)
    for role in ("trainer", "buffer", "verifier", "feeder"):
        upgrade.start(role, later=False)
    upgrade.start("explorer", later=True)
    refused = upgrade.workers["verifier"].finish()
    assert refused.code == 6, refused.err
    assert re.search(r"got rollout\.v\d+, expected at most v\d+; a later release of rftstream wrote it", refused.err)
    assert upgrade.view.records("dead"), "from where they are put back"
    report = upgrade.call_later("audit", upgrade.view.folder.path, "--json").result
    assert (report["balanced"], any(report["twins"].values())) == (True, False)
