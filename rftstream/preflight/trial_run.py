"""Runs a few tasks through feeder, explorer and verifier in this process: the real roles, with a log in memory.

Nothing is trained and nothing is saved. The weights are version 0, published as by a trainer. Rewards run in child
processes, as in a verifier.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack

from rftstream.clock import SystemClock
from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, TasksEnded
from rftstream.contracts.messages import Message
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import StepRecord, VersionName, WeightsAnnounced
from rftstream.data.tasksets.open import grows
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import prepare_model
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.feeder import FEEDER
from rftstream.roles.trainer import TRAINER
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.folder import RunFolder, create_log
from rftstream.runs.services import build_service, role_context
from rftstream.service.reading import begin_positions
from rftstream.service.role_claim import new_claim
from rftstream.service.service import Service
from rftstream.transport.base import Transport
from rftstream.transport.memory.transport import MemoryLog
from rftstream.weights.publisher import publish
from rftstream.weights.stores.store import ObjectStore

ROLES = (FEEDER.name, EXPLORER.name, VERIFIER.name)

VERSION_0 = VersionName(trainer_epoch=1, version=0)


def trial_config(
    config: RunConfig, *, num_tasks: int, samples: int, taskset: str | None = None, seed: int | None = None
) -> RunConfig:
    """Return the config for one batch of this size, in a log of one partition. `taskset`: use only this one. `seed`
    replaces run.seed."""
    tasksets = config.tasksets
    if not tasksets:
        raise ConfigError("try: there are no tasksets to sample from; `rftstream check` shows what the run learns from")
    if taskset is not None:
        if taskset not in tasksets:
            raise ConfigError(f"--taskset: unknown {taskset!r}; {registry.suggest(taskset, tasksets)}")
        tasksets = {taskset: dataclasses.replace(tasksets[taskset], weight=1.0)}
    if not (tasksets := {name: one for name, one in tasksets.items() if not grows(one.source)}):
        raise ConfigError("try: found only tasksets that grow, expected one that has problems before a run")
    changed = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, steps=1, seed=config.run.seed if seed is None else seed),
        tasksets=tasksets,
        stages=(),
        evaluations={},
        feedback=None,
        feeder=dataclasses.replace(config.feeder, groups_per_batch=num_tasks, group_size=samples, max_staleness=0),
        buffer=dataclasses.replace(config.buffer, zero_variance="keep"),
        trainer=dataclasses.replace(config.trainer, publish_every=1, shares=1, keep_best=None),
        transport=dataclasses.replace(config.transport, kind="memory", partitions=1, servers=None, options={}),
    )
    return loader.from_dict(loader.to_dict(changed))


def try_tasks(config: RunConfig, folder: RunFolder, *, num_tasks: int, samples: int) -> Generator[VerifiedRollout]:
    """Yield the first tasks of a run, `samples` of each, as the verifier finishes them. There are fewer if tasksets
    end.

    `config` comes from `trial_config`. `folder` is scratch, for a made model and the weights. Own modules must be
    importable by now (preflight.plan). Close the iterator to end the processes of the rewards.
    """
    clock = SystemClock()
    log = MemoryLog(clock.now)
    with ExitStack() as stack:
        store = ObjectStore("file://weights", base=folder.path)
        setup = log.connect("try")
        create_log(setup, config)
        announced = publish_version_0(config, folder, store, clock.now())
        _put_version_0(setup, config, folder, announced)
        services = []
        for role in ROLES:
            transport = log.connect(role)
            context = role_context(
                config=config,
                folder=folder,
                transport=transport,
                clock=clock,
                process=f"try-{role}",
                own_store=store,
            )
            service = build_service(role, context)
            stack.callback(service.close)
            services.append((service, transport))
        yield from _drive(services, setup, num_tasks, samples)


def publish_version_0(config: RunConfig, folder: RunFolder, store: ObjectStore, now: float) -> WeightsAnnounced:
    """Publish version 0, as the trainer of a run does first. The backend is closed again before anything is sampled."""
    from rftstream.backends.base import OptimizerSettings

    settings = config.trainer
    model = prepare_model(config.model, folder.model, config.run.seed, device=settings.device, threads=settings.threads)
    backend_class, options = config.build_part("backend", settings.backend)
    optimizer = OptimizerSettings(weight_decay=settings.weight_decay, betas=settings.adam_betas, eps=settings.adam_eps)
    backend = backend_class(options, model=model, optimizer=optimizer, seed=config.run.seed)
    try:
        backend.open()
        tensors = backend.served_tensors()
        return publish(store, tensors, VERSION_0, model.name, model.dtype, resumed=True, announced_at=now)
    finally:
        backend.close()


def claim_of_version_0() -> Claim:
    """Return the claim that puts version 0 in force, though no trainer takes the role."""
    return new_claim(TRAINER.name, VERSION_0.trainer_epoch, process="rftstream", now=time.time())


def _put_version_0(transport: Transport, config: RunConfig, folder: RunFolder, announced: WeightsAnnounced) -> None:
    record = StepRecord(
        name=VERSION_0,
        batch_sequence=None,
        positions=(0,) * config.trainer.shares,
        trained_groups=0,
        trained_rollouts=0,
        weights_digest=announced.weights_digest,
        metrics={},
        resumed=True,
        recorded_at=announced.announced_at,
    )
    messages: dict[str, Message] = {"control": claim_of_version_0(), "weights": announced, "steps": record}
    producer = transport.producer("try")
    producer.start()
    producer.commit(
        [
            codec.to_record(one, topic, 0, run=folder.run_id, writer_epoch=VERSION_0.trainer_epoch)
            for topic, one in messages.items()
        ]
    )
    producer.close()


def _drive(
    services: Sequence[tuple[Service, Transport]], transport: Transport, num_tasks: int, samples: int
) -> Iterator[VerifiedRollout]:
    """Tick all roles in turn, and yield rollouts until every admitted one has been scored."""
    reader = transport.reader(begin_positions(transport, ("verified", "control")))
    wanted, found = num_tasks * samples, 0
    while found < wanted:
        idle_s = min(service.tick() for service, _ in services)
        records = reader.poll()
        for record in records:
            message = None if record.value is None else codec.from_record(record)
            if isinstance(message, TasksEnded):
                wanted = message.admitted * samples
            elif isinstance(message, VerifiedRollout):
                found += 1
                yield message
        if idle_s > 0 and not records:
            explorer, its_transport = services[1]
            its_transport.wait(explorer.sources(), min(idle_s, 0.05))
    reader.close()
