"""What the benchmarks of policies share: tasks with forced lengths, and an explorer that samples them alone.

Lengths have a long tail, as those of rollouts have, and are forced: both sides of a comparison sample the same number
of tokens of each prompt. The explorer reads its tasks from an embedded log and writes rollouts there, in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rftstream import __version__
from rftstream.clock import SystemClock
from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec, ids
from rftstream.contracts.control import Claim, RunManifest
from rftstream.contracts.messages import Message
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling, Task
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import open_renderer
from rftstream.models.spec import ModelSpec
from rftstream.roles.build import role_builder, service_of
from rftstream.runs.folder import RunFolder, create_log
from rftstream.runs.services import role_context
from rftstream.service.role import Log
from rftstream.transport.embedded.transport import EmbeddedTransport
from rftstream.weights.publisher import publish
from rftstream.weights.snapshot import RawTensor

CACHE = Path(__file__).parent.parent / ".cache" / "models"
NUM_GROUPS, GROUP_SIZE = 8, 8
CONCURRENT = 32
PARTITIONS = 4
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 24, 1.0, 192
"""Sigma of the lognormal distribution of lengths."""
MADE = {"characters": "0123456789+-*/= ", "layers": 30, "width": 576, "heads": 9, "context": 512}
"""In place of SmolLM2 where it is not installed: as deep and wide, with a vocabulary of 19."""


@dataclass(frozen=True, slots=True)
class Load:
    run: RunConfig
    tasks: tuple[Task, ...]
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


def choose_model() -> tuple[dict[str, Any], str]:
    from rftstream.models.folders.convert import convert_smollm2

    try:
        return {"path": str(convert_smollm2(CACHE / "SmolLM2-135M-Instruct"))}, "SmolLM2-135M"
    except ConfigError:
        return {"make": MADE}, "a made model"


def make_load(
    model: dict[str, Any],
    threads: int,
    folder: str,
    policy: str,
    *,
    device: str = "cpu",
    concurrent: int = CONCURRENT,
    groups: int = NUM_GROUPS,
    most_tokens: int = MAX_TOKENS,
    **options: Any,
) -> Load:
    """`options`: of the policy. `most_tokens`: of a completion; the median is an eighth of that."""
    run = loader.from_dict(
        {
            "run": {"name": policy, "steps": 1},
            "model": {**model, "dtype": "bfloat16"},
            "tasksets": {"sums": {"source": "arithmetic"}},
            "transport": {"partitions": PARTITIONS},
            "explorer": {"policy": policy, "devices": [device], "threads": threads, "max_concurrent": concurrent},
            "policies": {policy: {"batch_size": concurrent, **options}},
            "base": folder,
        }
    )
    chance = np.random.default_rng(0)
    lengths = np.exp(
        np.log(most_tokens / MAX_TOKENS * MEDIAN_TOKENS) + SIGMA * chance.standard_normal(groups * GROUP_SIZE)
    )
    lengths = lengths.astype(int).clip(1, most_tokens)
    tasks = []
    for number, length in enumerate(lengths.tolist()):
        group, sibling = divmod(number, GROUP_SIZE)
        group_id = ids.group_id("sums", 0, group, 0)
        question = (
            "".join(f"{one}+" for one in chance.integers(0, 99, size=8 + 2 * (group % NUM_GROUPS)).tolist()) + "1="
        )
        tasks.append(
            Task(
                ids=RolloutIds(
                    rollout_id=ids.rollout_id(group_id, sibling),
                    group_id=group_id,
                    taskset="sums",
                    sibling=sibling,
                    group_size=GROUP_SIZE,
                    sequence=group,
                    min_version=0,
                ),
                problem=Problem(messages=(ChatMessage(role="user", content=question),), answer="0"),
                sampling=Sampling(temperature=1.0, min_tokens=length, max_tokens=length),
                seed=number,
                environment="single_turn",
            )
        )
    renderer = open_renderer(prepare_model(run.model, Path(folder) / "model", 0))
    prompts = tuple(renderer.render(one.problem.messages) for one in tasks)
    return Load(run, tuple(tasks), prompts, tuple(lengths.tolist()))


def explore(load: Load, path: Path) -> float:
    """Seconds from the first task on the log to the last rollout."""
    took_s, rollouts = explored(load, path)
    assert sum(one.num_tokens for one in rollouts) == sum(load.lengths)
    return took_s


def explored(load: Load, path: Path, now: Callable[[], float] = time.perf_counter) -> tuple[float, list[Rollout]]:
    """The same, and the rollouts. `now`: time.process_time for CPU seconds."""
    folder, clock = RunFolder(path), SystemClock()
    folder.path.mkdir()
    transport = EmbeddedTransport(folder.log)
    create_log(transport, load.run)
    producer = transport.producer("bench")
    producer.start()

    def put(topic: str, partition: int, *messages: Message) -> None:
        producer.commit([codec.to_record(one, topic, partition, run=folder.run_id, writer_epoch=1) for one in messages])

    manifest = RunManifest(
        run=folder.run_id,
        created_at=clock.now(),
        config="",
        digests={"taskset.sums": ""},
        seed=0,
        shares=1,
        partitions=PARTITIONS,
        rftstream_version=__version__,
    )
    claims = (
        Claim(role=role.value, epoch=1, process="bench", host="", pid=0, claimed_at=clock.now())
        for role in (RoleName.feeder, RoleName.trainer)
    )
    put("control", 0, manifest, *claims)
    context = role_context(config=load.run, folder=folder, clock=clock, transport=transport, process="explorer")
    spec = prepare_model(load.run.model, folder.model, load.run.run.seed)
    name = VersionName(trainer_epoch=1, version=0)
    announced = publish(context.open_store(), weights(spec), name, spec.name, spec.dtype, resumed=True)
    put("weights", 0, announced)
    service = service_of(role_builder("explorer")(context), context)

    def work_until(num_rollouts: int) -> None:
        while sum(transport.admin.end_offsets("rollouts").values()) < num_rollouts:
            if (idle_s := service.tick()) > 0:
                time.sleep(min(idle_s, 0.01))

    first, *others = load.tasks
    put("tasks", first.ids.sequence % PARTITIONS, first)
    work_until(1)  # it has the weights now
    for partition in range(PARTITIONS):
        put("tasks", partition, *(one for one in others if one.ids.sequence % PARTITIONS == partition))
    began = now()
    work_until(len(load.tasks))
    took_s = now() - began
    rollouts = [one for one in map(codec.from_record, Log(transport).read("rollouts")) if isinstance(one, Rollout)]
    service.close()
    transport.close()
    return took_s, rollouts


def weights(spec: ModelSpec) -> Mapping[str, RawTensor]:
    """The weights of a model as a trainer publishes them first."""
    from rftstream.backends.base import OptimizerSettings
    from rftstream.backends.torch.backend import TorchBackend

    backend = TorchBackend(TorchBackend.Config(), model=spec, optimizer=OptimizerSettings(), seed=0)
    backend.open()
    return backend.served_tensors()
