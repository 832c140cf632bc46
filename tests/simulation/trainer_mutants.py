"""Rules of the trainer's checkpoints, of its versions and of what it deletes, left out one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
from tests.simulation.changes import changed


def checkpoint_without_positions() -> Iterator[None]:
    """The trainer goes on reading where the newest step had read, whatever weights it begins with."""
    load = Checkpoints._load_newest

    def mutated(self: Checkpoints, *arguments: Any) -> TrainerProgress | None:
        found = load(self, *arguments)
        if found is not None:
            *_, last = [one.message for one in self.log_.messages("steps")]
            assert isinstance(last, StepRecord)
            found.positions = last.positions
        return found

    with changed(Checkpoints, "_load_newest", mutated):
        yield


def any_checkpoint() -> Iterator[None]:
    load = Checkpoints._load_newest

    def mutated(self: Checkpoints, in_force: Any, *arguments: Any) -> TrainerProgress | None:
        return load(self, lambda name: True, *arguments)

    with changed(Checkpoints, "_load_newest", mutated):
        yield


def checkpoint_of_the_next() -> Iterator[None]:
    """The state is saved when the step is on the log, and the next update has begun."""
    stage, begin_write = Checkpoints.stage, Checkpoints.begin_write

    def mutated(self: Checkpoints, epoch: int, progress: TrainerProgress) -> None:
        if self.is_due(progress.version):
            stage(self)
        begin_write(self, epoch, progress)

    with changed(Checkpoints, "stage", lambda self: None), changed(Checkpoints, "begin_write", mutated):
        yield


def zombie_with_a_checkpoint() -> FaultScript:
    """A trainer stands still in the middle of a checkpoint; its successor begins with an older one and stands still;
    the first one completes its checkpoint, dies, and is started again."""
    return FaultScript(
        ("before_checkpoints", "trainer", "pauses", 5),
        *[(BETWEEN, None, "takeovers", 0)] * 6,
        (AFTER_COMMIT, "trainer", "pauses", 1),
        (BEFORE_COMMIT, "trainer", "kills", 0),
    )


def chains_broken() -> Iterator[None]:
    def to_delete(objects: Any, *, parents: Any = None, **needs: Any) -> list[VersionName]:
        return retention.to_delete(objects, parents=dict.fromkeys(parents or (), None), **needs)

    with changed(versions_module, "to_delete", to_delete):
        yield


def power_after_steps() -> FaultScript:
    """Again and again, when a trainer has just published a few versions."""
    return FaultScript(*[(AFTER_COMMIT, "trainer", "power_losses", number) for number in (4, 3, 5, 4, 3, 5)])


def nothing_durable() -> Iterator[None]:
    with changed(MemoryAdmin, "make_durable", lambda self: None):
        yield


def claims_volatile() -> Iterator[None]:
    take = RoleClaim.take

    def mutated(self: RoleClaim, write: Callable[[Claim], None]) -> Claim:
        with changed(MemoryAdmin, "make_durable", lambda self: None):
            return take(self, write)

    with changed(RoleClaim, "take", mutated):
        yield


def deletions_unanswered() -> FaultScript:
    """What a trainer deletes stays there, until it was tried a few times. Seeds of runs with [retention] lead there."""
    return FaultScript(*[("before_delete", "trainer", "silences", 0)] * 10)


def deletions_given_up() -> Iterator[None]:
    """What cannot be deleted at once waits for the next checkpoint, which may never come."""
    with (
        changed(TrimmedDeletions, "owes", False),
        changed(TrimmedDeletions, "delete_owed", lambda self: None),
        changed(TrimmedDeletions, "after_the_end", lambda self, log_: True),
    ):
        yield
