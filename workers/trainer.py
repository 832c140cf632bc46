"""trainer: batches -> weights, steps."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from rftstream.config.colocation import check_colocation
from rftstream.models.vision.image_tokens import image_cache
from rftstream.queries.curves.model_card import write_model_card
from rftstream.roles.trainer import TRAINER
from rftstream.roles.trainer.pending_update import DeferredExecutor, Inline
from rftstream.roles.trainer.retention.trimmed_deletions import TrimmedDeletions
from rftstream.roles.trainer.step import TrainerStep
from rftstream.roles.trainer.training import build_training
from rftstream.service.control_view import read_control
from rftstream.service.role import Log, Role, RoleContext
from rftstream.weights.stores.media import MediaStore
from workers.parts import device_lock, held_out, model_spec


def build(context: RoleContext) -> Role:
    config, settings = context.config, context.config.trainer
    check_colocation(config)
    spec = model_spec(context, device=settings.device, threads=settings.threads)
    store = context.open_store()
    training = build_training(config, spec, images=image_cache(spec.folder, MediaStore(store).get), desk=context.desk)
    deletions = TrimmedDeletions(context.transport, store, context.clock, compacts=config.retention is not None)
    step = TrainerStep(
        config=config,
        model=spec,
        training=training,
        held_out=held_out(context, training),
        store=store,
        deletions=deletions,
        log_=Log(context.transport),
        final=context.folder.final,
        clock=context.clock,
        describe=partial(write_model_card, Log(context.transport), config, spec),
        newest_epoch=partial(_newest_epoch, context),
        lock=device_lock(context, spec),
        compute=Inline() if context.simulated else ThreadPoolExecutor(1, thread_name_prefix="training"),
        writing=_beside_training(context, "writing"),
        checkpointing=_beside_training(context, "checkpoint"),
    )
    return Role(spec=TRAINER, step=step, after_the_end=deletions.after_the_end)


def _beside_training(context: RoleContext, name: str) -> Executor:
    """Return an executor of one thread."""
    return DeferredExecutor() if context.simulated else ThreadPoolExecutor(1, thread_name_prefix=name)


def _newest_epoch(context: RoleContext) -> int:
    claim = read_control(context.transport).claims.get(TRAINER.name)  # what is hidden stops no trainer at its end
    return 0 if claim is None else claim.epoch
