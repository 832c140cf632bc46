"""Goes back to a checkpoint: this process claims the trainer's role for a moment, and records a start at the
checkpoint.

So later versions are no longer in force, by the same rule as when a newer trainer takes over. Nothing is deleted, and
the next trainer begins with this checkpoint.
"""

from __future__ import annotations

import time
from contextlib import closing

from rftstream.contracts import codec
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.errors import ConfigError
from rftstream.roles.trainer import TRAINER
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.service.role_claim import new_claim
from rftstream.transport.base import Producer, Transport
from rftstream.weights.checkpoints import CheckpointStore, is_gone
from rftstream.weights.lineage import Lineage
from rftstream.weights.stores.store import ObjectStore


def roll_back(transport: Transport, store: ObjectStore, run_id: str, version: int) -> None:
    """Make `version` the newest in force. ConfigError if it has no good checkpoint; the text lists those that have
    one."""
    with closing(transport.producer(f"{run_id}.trainer", timeout_s=60.0)) as producer:
        producer.start()  # from here on no trainer deletes a checkpoint
        _roll_back(transport, producer, CheckpointStore(store), run_id, version)


def _roll_back(
    transport: Transport, producer: Producer, checkpoints: CheckpointStore, run_id: str, version: int
) -> None:
    control = read_control(transport)
    said = control.deleted
    lineage, recorded = Lineage(), set()
    for received in Log(transport).messages("steps"):
        step = received.message
        if isinstance(step, StepRecord) and lineage.take(step.name, resumed=step.resumed):
            recorded.add(step.name)

    def usable(name: VersionName) -> bool:
        return name.version >= said.version and name in recorded and lineage.in_force(name) and not is_gone(name, said)

    found = checkpoints.newest(lambda name: name.version == version and usable(name)) if version else None
    begins = sorted(transport.admin.begin_offsets("batches").items())
    deleted = said.version > 0 or any(offset for _, offset in begins)
    if found is None and (version or deleted):
        there = sorted({name.version for name in checkpoints.names() if usable(name)} | (set() if deleted else {0}))
        raise ConfigError(
            f"run.resume: version {version} has no good checkpoint, expected one of {', '.join(map(str, there))}"
            + (f"; batches below version {said.version} are deleted" if said.version else "")
            + (_by_its_weights(version) if any(one.version == version for one in checkpoints.names()) else "")
            + (_way_there(version) if not deleted and any(one.version == version for one in recorded) else "")
        )
    progress = TrainerProgress(positions=(0,) * len(begins)) if found is None else TrainerProgress.from_state(found[1])
    before = control.claims.get(TRAINER.name)
    epoch = max(before.epoch if before else 0, lineage.epoch) + 1
    claim = new_claim(TRAINER.name, epoch, process="resume", now=time.time())
    anchor = StepRecord(
        name=VersionName(trainer_epoch=epoch, version=version),
        batch_sequence=None,
        positions=progress.positions,
        trained_groups=progress.trained_groups,
        trained_rollouts=progress.trained_rollouts,
        weights_digest=None,
        metrics={},
        resumed=True,
        announced=False,
        recorded_at=time.time(),
        totals=progress.totals,
    )
    for message, topic in ((claim, "control"), (anchor, "steps")):
        producer.commit([codec.to_record(message, topic, 0, run=run_id, writer_epoch=epoch)])


def _by_its_weights(version: int) -> str:
    return f'; a new run can begin with its weights: model.init_from = "RUN@{version}"'


def _way_there(version: int) -> str:
    return (
        f"; or train its batches again up to there, `rftstream replay RUN --to {version} --into NEWRUN`, and begin a "
        f'run with the result: model.init_from = "NEWRUN@{version}"'
    )
