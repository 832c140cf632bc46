"""Going back to a checkpoint: the run is taken for a moment as a trainer takes it, and a start is recorded there.

So versions beyond it are not in force any more, by the same rule by which a newer trainer leaves an older one's behind;
nothing is deleted, and whoever trains next begins with this checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from rftstream import codec
from rftstream.errors import ConfigError
from rftstream.messages import Claim, StepRecord, VersionName
from rftstream.runtime.observer import read_control
from rftstream.runtime.role import Log
from rftstream.transport.base import Transport
from rftstream.weights.checkpoints import CheckpointStore
from rftstream.weights.lineage import Lineage
from rftstream.weights.store import ObjectStore


def roll_back(transport: Transport, store: ObjectStore, run_id: str, version: int) -> None:
    """Makes `version` the newest in force. ConfigError, naming those there are, if it has no good checkpoint."""
    checkpoints = CheckpointStore(store)
    lineage, recorded = Lineage(), set()
    for received in Log(transport).messages("steps"):
        step = received.message
        if isinstance(step, StepRecord) and lineage.accepts(step.name.trainer_epoch):
            if step.resumed and step.name.trainer_epoch > lineage.epoch:
                lineage.start(step.name)
            recorded.add(step.name)

    def usable(name: VersionName) -> bool:
        return name.version == version and name in recorded and lineage.in_force(name)

    found = checkpoints.newest(usable) if version else None
    if found is None and version:
        there = sorted({one.version for one in checkpoints.names() if one in recorded and lineage.in_force(one)})
        raise ConfigError(
            f"run.resume: version {version} has no good checkpoint, expected one of {', '.join(map(str, [0, *there]))}"
        )
    begins = sorted(transport.admin.begin_offsets("batches").items())
    if found is None and any(offset for _, offset in begins):
        raise ConfigError("run.resume: version 0: its batches are deleted, expected all; name a checkpoint's version")
    state: dict[str, Any] = found[1] if found is not None else {"positions": [0] * len(begins), "trained_groups": 0,
                                                "trained_rollouts": 0}  # fmt: skip
    producer = transport.producer(f"{run_id}.trainer", timeout_s=60.0)
    producer.start()
    before = read_control(transport).claims.get("trainer")
    epoch = max(before.epoch if before else 0, lineage.epoch) + 1
    claim = Claim(role="trainer", epoch=epoch, host=socket.gethostname(), pid=os.getpid(), process="resume",
                  claimed_at=time.time())  # fmt: skip
    anchor = StepRecord(
        name=VersionName(trainer_epoch=epoch, version=version),
        batch_sequence=None,
        positions=tuple(state["positions"]),
        trained_groups=state["trained_groups"],
        trained_rollouts=state["trained_rollouts"],
        weights_digest=None,
        metrics={},
        resumed=True,
        announced=False,
        recorded_at=time.time(),
    )
    for message, topic in ((claim, "control"), (anchor, "steps")):
        producer.commit([codec.to_record(message, topic, 0, run=run_id, writer_epoch=epoch)])
    producer.close()
