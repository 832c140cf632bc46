"""feeder: taskset -> tasks."""

from __future__ import annotations

from rftstream import __version__
from rftstream.config import sampling_for, to_toml
from rftstream.messages import RunManifest
from rftstream.modelfolder import model_digests
from rftstream.rendering import open_renderer
from rftstream.roles.feeder import FeederStep, Source
from rftstream.runtime.role import Role, RoleContext
from rftstream.tasksets.open import open_taskset
from workers.parts import context_length, model_spec


def build(context: RoleContext) -> Role:
    config = context.config
    spec = model_spec(context)
    renderer = open_renderer(spec)
    sources = {
        name: Source(
            taskset=open_taskset(name, section, config),
            weight=section.weight,
            sampling=sampling_for(config, section.sampling, where=f"tasksets.{name}.sampling"),
            environment=section.environment,
            too_long=section.too_long,
            shuffle=section.shuffle,
            passes=section.passes,
        )
        for name, section in config.tasksets.items()
    }

    def manifest() -> RunManifest:
        digests = model_digests(spec)
        digests |= {f"taskset.{name}": source.taskset.digest for name, source in sources.items()}
        return RunManifest(
            run=context.folder.run_id, created_at=context.clock.now(), config=to_toml(config), digests=digests,
            partitions=config.transport.partitions, shares=config.trainer.shares, seed=config.run.seed,
            rftstream_version=__version__,
        )

    step = FeederStep(config=config, run_id=context.folder.run_id, sources=sources, renderer=renderer,
                      context=context_length(spec, renderer), manifest=manifest, clock=context.clock)
    return Role(name="feeder", consumes=(), follows=("steps", "outcomes", "control"), produces=("tasks", "control"),
                step=step)
