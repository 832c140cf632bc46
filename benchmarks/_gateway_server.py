"""An explorer with a gateway over an embedded log, in a process of its own.

    python -m benchmarks._gateway_server FOLDER ROLLOUTS PORT [AT_ONCE]

It prints the keys of its rollouts as one line of JSON, in the order in which it takes them up, and works until its
input ends. It has AT_ONCE rollouts at once, or all."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np

from benchmarks._tasks import one_task
from rftstream import __version__
from rftstream.clock import SystemClock
from rftstream.config import loader
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, RunManifest
from rftstream.contracts.messages import Message
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import VersionName
from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys, run_secret
from rftstream.launch.host import calm_collector
from rftstream.policies import fake_model
from rftstream.roles.build import role_builder, service_of
from rftstream.runs.folder import RunFolder, create_log
from rftstream.runs.services import role_context
from rftstream.transport.embedded.transport import EmbeddedTransport
from rftstream.weights.publisher import publish

PARTITIONS = 4
SECRET = {SECRET_VARIABLE: "of no use to anybody"}


def serve(path: Path, num_rollouts: int, port: int, at_once: int) -> None:
    config = loader.from_dict(
        {
            "run": {"name": "gateway", "steps": 1},
            "model": {"path": "fake", "dtype": "float32"},
            "tasksets": {"sums": {"source": "arithmetic", "environment": "agent", "reward": "environment"}},
            "transport": {"partitions": PARTITIONS},
            "explorer": {
                "policy": "fake",
                "max_concurrent": at_once,
                "max_calls": 1_000_000,
                "gateway_address": f"127.0.0.1:{port}",
            },
            "base": str(path),
        }
    )
    folder, clock = RunFolder(path / "run"), SystemClock()
    folder.path.mkdir()
    transport = EmbeddedTransport(folder.log)
    create_log(transport, config)
    producer = transport.producer("bench")
    producer.start()

    def put(topic: str, partition: int, *messages: Message) -> None:
        producer.commit([codec.to_record(one, topic, partition, run=folder.run_id, writer_epoch=1) for one in messages])

    manifest = RunManifest(
        run=folder.run_id, created_at=clock.now(), config="", digests={"taskset.sums": ""}, seed=0, shares=1,
        partitions=PARTITIONS, rftstream_version=__version__,
    )  # fmt: skip
    claims = (
        Claim(role=role.value, epoch=1, process="bench", host="", pid=0, claimed_at=clock.now())
        for role in (RoleName.feeder, RoleName.trainer)
    )
    put("control", 0, manifest, *claims)
    context = role_context(config=config, folder=folder, clock=clock, transport=transport, process="explorer")
    tensors = {
        fake_model.SKILL: fake_model.serve(np.zeros(1, np.float32), "float32"),
        fake_model.FILLER: fake_model.serve(np.zeros(8, np.float32), "float32"),
    }
    name = VersionName(trainer_epoch=1, version=0)
    put("weights", 0, publish(context.open_store(), tensors, name, "fake", "float32", resumed=True))
    tasks = [one_task(number, Sampling(max_tokens=10_000_000), environment="agent") for number in range(num_rollouts)]
    for task in tasks:
        put("tasks", task.ids.sequence % PARTITIONS, task)
    service = service_of(role_builder("explorer")(context), context)
    keys = GatewayKeys(run_secret(folder.run_id), folder.run_id)
    ended = threading.Event()

    def end_with_input() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=end_with_input, daemon=True).start()
    calm_collector()  # as a worker does
    is_told = False
    while not ended.is_set():
        idle_s = service.tick()
        if not is_told and service.health()["in_hand"] == at_once:
            print(json.dumps([keys.rollout_key(task.ids.rollout_id) for task in tasks]), flush=True)
            is_told = True
        if idle_s > 0:
            service.wait(idle_s)
    service.close()
    transport.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4] if sys.argv[4:] else sys.argv[2]))
