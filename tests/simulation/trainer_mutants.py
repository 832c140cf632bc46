"""Rules of the trainer's checkpoints, of its versions and of what it deletes, left out one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from rftstream.contracts.control import Claim
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.roles.trainer import versions as versions_module
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.retention.checkpoints import Checkpoints
from rftstream.roles.trainer.retention.trimmed_deletions import TrimmedDeletions
from rftstream.service.role_claim import RoleClaim
from rftstream.testing.faults import AFTER_COMMIT, BEFORE_COMMIT, BETWEEN, FaultScript
from rftstream.transport.memory.transport import MemoryAdmin
from rftstream.weights import retention
from tests.simulation.changes import around, instead, together


@around(Checkpoints, "_load_newest")
def checkpoint_without_positions(load: Any, self: Checkpoints, *arguments: Any) -> TrainerProgress | None:
    """The trainer goes on reading where the newest step had read, whatever weights it begins with."""
    found: TrainerProgress | None = load(self, *arguments)
    if found is not None:
        *_, last = [one.message for one in self.log_.messages("steps")]
        assert isinstance(last, StepRecord)
        found.positions = last.positions
    return found


@around(Checkpoints, "_load_newest")
def any_checkpoint(load: Any, self: Checkpoints, in_force: Any, *arguments: Any) -> TrainerProgress | None:
    found: TrainerProgress | None = load(self, lambda name: True, *arguments)
    return found


stage = Checkpoints.stage


@around(Checkpoints, "begin_write")
def stage_late(begin_write: Any, self: Checkpoints, epoch: int, progress: TrainerProgress) -> None:
    """The state is saved when the step is on the log, and the next update has begun."""
    if self.is_due(progress.version):
        stage(self)
    begin_write(self, epoch, progress)


checkpoint_of_the_next = together(stage_late, instead(Checkpoints, stage=lambda self: None))


def zombie_with_a_checkpoint() -> FaultScript:
    """A trainer stands still in the middle of a checkpoint; its successor begins with an older one and stands still;
    the first one completes its checkpoint, dies, and is started again."""
    return FaultScript(
        ("before_checkpoints", "trainer", "pauses", 5),
        *[(BETWEEN, None, "takeovers", 0)] * 6,
        (AFTER_COMMIT, "trainer", "pauses", 1),
        (BEFORE_COMMIT, "trainer", "kills", 0),
    )


def delete_parents(objects: Any, *, parents: Any = None, **needs: Any) -> list[VersionName]:
    return retention.to_delete(objects, parents=dict.fromkeys(parents or (), None), **needs)


chains_broken = instead(versions_module, to_delete=delete_parents)


def power_after_steps() -> FaultScript:
    """Again and again, when a trainer has just published a few versions."""
    return FaultScript(*[(AFTER_COMMIT, "trainer", "power_losses", number) for number in (4, 3, 5, 4, 3, 5)])


def power_after_claims() -> FaultScript:
    """A trainer dies alone, so that nobody else makes the claim of its successor durable; when that one has published
    something, all is lost that may be."""
    die, lose = (AFTER_COMMIT, "trainer", "kills", 1), (AFTER_COMMIT, "trainer", "whole_power_losses", 2)
    return FaultScript(*[die, lose] * 4)


@around(RoleClaim, "take")
def claims_volatile(take: Any, self: RoleClaim, write: Callable[[Claim], None]) -> Claim:
    with patch.object(MemoryAdmin, "make_durable", lambda self: None):
        claim: Claim = take(self, write)
        return claim


def deletions_unanswered() -> FaultScript:
    """What a trainer deletes stays there, until it was tried a few times. Seeds of runs with [retention] lead there."""
    return FaultScript(*[("before_delete", "trainer", "silences", 0)] * 10)


deletions_given_up = instead(
    TrimmedDeletions, owes=False, delete_owed=lambda self: None, after_the_end=lambda self, log_: True
)
"""What cannot be deleted at once waits for the next checkpoint, which may never come."""
