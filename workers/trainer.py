"""trainer: batches -> weights, steps."""

from __future__ import annotations

from rftstream.backends.base import OptimizerSettings
from rftstream.roles.trainer import TrainerStep
from rftstream.runtime.role import Role, RoleContext
from workers.parts import model_spec


def build(context: RoleContext) -> Role:
    config, settings = context.config, context.config.trainer
    spec = model_spec(context, device=settings.device, threads=settings.threads)
    backend_class, backend_options = config.build_part("backend", settings.backend)
    algorithm_class, algorithm_options = config.build_part("algorithm", settings.algorithm)
    optimizer = OptimizerSettings(weight_decay=settings.weight_decay, betas=settings.adam_betas, eps=settings.adam_eps)
    step = TrainerStep(
        config=config,
        model=spec,
        backend=backend_class(backend_options, model=spec, optimizer=optimizer, seed=config.run.seed),
        algorithm=algorithm_class(algorithm_options),
        store=context.open_store(),
        final=context.folder.final,
        clock=context.clock,
    )
    return Role(
        name="trainer",
        consumes=("batches",),
        follows=("evals", "control"),
        produces=("weights", "steps", "control"),
        step=step,
    )
