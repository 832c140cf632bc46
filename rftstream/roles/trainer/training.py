"""One batch, one update. The trainer trains a batch with this code, and a replay does so again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from rftstream import metrics
from rftstream.algorithms.base import Algorithm, CriticAlgorithm, RefiningAlgorithm, TrainingRow
from rftstream.algorithms.by_taskset import build_algorithm
from rftstream.algorithms.requirements import (
    check_demands,
    critic_folder,
    critic_of,
    has_reference,
    the_critic,
    trained_spec,
)
from rftstream.backends.base import (
    Backend,
    CriticBackend,
    OptimizerSettings,
    RenewingBackend,
    Update,
    UpdatePlan,
    on_device,
)
from rftstream.backends.numerics import peak_tflops
from rftstream.backends.stopping import stop_allowed
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import BackendSpec
from rftstream.config.role_sections import TrainerSection
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stage, Stages
from rftstream.contracts.batches import LossKind
from rftstream.contracts.token_values import KINDS
from rftstream.contracts.versions import STALENESS_COUNTS
from rftstream.core.packing import count_by_staleness
from rftstream.desk import Desk
from rftstream.errors import ConfigError, ImageError
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.models.vision.image_tokens import check_takes_images
from rftstream.roles.trainer.assembly import Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainedStaleness:
    """Histograms of the staleness of a batch's trained tokens, for StepRecord. `Training.update` makes it."""

    tokens: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()

    @staticmethod
    def of(rows: Sequence[TrainingRow], version: int) -> TrainedStaleness:
        """Count the unmasked tokens of rows that are trained at `version`, by the versions that sampled them."""
        ages: list[int] = []
        counts: list[int] = []
        oldest: dict[int, int] = {}
        for row in rows:
            for span in row.versions:
                trained = int(np.count_nonzero(row.loss_mask[span.start : span.start + span.count]))
                if trained:
                    ages.append(version - span.version)
                    counts.append(trained)
                    oldest[row.group] = max(ages[-1], oldest.get(row.group, 0))
        return TrainedStaleness(_counted(ages, counts), _counted(list(oldest.values()), [1] * len(oldest)))


def _counted(staleness: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    return count_by_staleness(np.array(staleness, np.int64), np.array(counts, np.int64), STALENESS_COUNTS)


@dataclass(frozen=True, slots=True)
class Training:
    """A backend and its algorithm, according to a run's settings."""

    backend: Backend
    algorithm: Algorithm
    settings: TrainerSection
    algorithms: tuple[Algorithm, ...] = ()
    """Algorithm of each stage, in a run with stages. `algorithm` is then that of the first stage."""
    first: int = 0
    """Number of the stage's first batch."""
    own_reference: bool = False
    """Whether the algorithm's reference, if it has one, becomes the policy before that batch."""
    stratified: bool = True
    """How mini-batches are cut; see `UpdatePlan.stratified`."""
    images: ImageCache | None = None
    """Pixels of the images in rows, shared with the backend; None if the model sees no images."""

    def at(self, stage: Stage) -> Training:
        """Return the training of this stage. It uses the same backend, so masters and optimizer are the same."""
        if not self.algorithms:
            return self
        algorithm = self.algorithms[stage.number]
        own_reference = stage.own_reference and has_reference(algorithm)
        return replace(
            self, algorithm=algorithm, settings=stage.trainer, first=stage.first, own_reference=own_reference
        )

    def update(self, batch: Batch, lr: float) -> tuple[Update, dict[str, float], TrainedStaleness]:
        """Train the batch. Return the backend's result, all metrics that do not depend on time, and the staleness of
        the trained tokens. UpdateStopped if the batch was left half trained, as the backend was asked to."""
        with stop_allowed(self.backend), on_device(self.backend):
            return self._update(batch, lr)

    def _update(self, batch: Batch, lr: float) -> tuple[Update, dict[str, float], TrainedStaleness]:
        settings, every = self.settings, self.settings.reference_every
        if hasattr(self.backend, "begin_batch"):
            self.backend.begin_batch(batch.sequence, batch.experiences)
        due = every is not None and batch.sequence and batch.sequence % every == 0 and has_reference(self.algorithm)
        if due or (self.own_reference and batch.sequence == self.first):
            cast(RenewingBackend, self.backend).renew_reference()
        rows, values = self.algorithm.prepare(batch.experiences)
        rows, lost = self._that_can_be_shown(rows)
        if rows and "reference_rewards" in self.algorithm.needs:
            reference = self.backend.reference_logprobs(rows, settings.tokens_per_microbatch)
            rows, values = self.algorithm.prepare(batch.experiences, reference)
            rows, lost = self._that_can_be_shown(rows)
        if rows and "row_logprobs" in self.algorithm.needs:
            logprobs = self.backend.logprobs(rows, settings.tokens_per_microbatch)
            rows, more = cast(RefiningAlgorithm, self.algorithm).refine(rows, logprobs)
            values = {**values, **more}
        critic = critic_of(self.algorithm)
        if rows and critic is not None:
            said = cast(CriticBackend, self.backend).values(rows, settings.tokens_per_microbatch)
            rows, more = cast(CriticAlgorithm, self.algorithm).estimate(rows, said)
            values = {**values, **more}
        if any(row.num_trained for row in rows):
            plan = UpdatePlan(
                lr=lr,
                minibatches=settings.minibatches,
                updates_per_batch=settings.updates_per_batch,
                max_grad_norm=settings.max_grad_norm,
                tokens_per_microbatch=settings.tokens_per_microbatch,
                router_aux_coef=settings.router_aux_coef,
                stratified=self.stratified,
                trains_policy=critic is None or batch.sequence - self.first >= critic.warmup_batches,
            )
            update = self.backend.update(rows, self.algorithm, plan)
        else:
            update = Update(metrics={})
        tokens = float(sum(row.num_trained for row in rows))
        trained = {"tokens": tokens, "trained_rollouts": float(batch.num_rollouts)} | lost
        # An algorithm computes its mean reward over the batch, which lacks the filtered groups.
        values = {**values, **update.metrics, **trained, "lr": lr, **batch.manifest.metrics}
        staleness = TrainedStaleness() if update.skipped else TrainedStaleness.of(rows, batch.sequence)
        return update, metrics.fit_names({name: float(value) for name, value in values.items()}), staleness

    def _that_can_be_shown(self, rows: Sequence[TrainingRow]) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return the rows, without values beside tokens that are not replayed, and the number of rows whose images are
        gone or damaged. All tokens of these rows are masked. The other rows have the same weight as before."""
        dropped = KINDS - self.settings.replayed
        rows = [
            row
            if dropped.isdisjoint(row.beside)
            else replace(row, beside={kind: column for kind, column in row.beside.items() if kind not in dropped})
            for row in rows
        ]
        kept = []
        for row in rows:
            try:
                for span in row.images:
                    if self.images is None:
                        raise ImageError(f"image {span.image.digest}: the model is not shown images")
                    self.images.inputs(span.image)
                kept.append(row)
            except ImageError as error:
                log.warning("%s; a rollout that shows it is not trained on", error)
                kept.append(replace(row, loss_mask=row.loss_mask * 0, images=()))
        num_lost = sum(one is not row for one, row in zip(kept, rows, strict=True))
        return tuple(kept), {"rows_without_image": float(num_lost)} if num_lost else {}

    def speeds(self, values: Mapping[str, float], step_s: float) -> dict[str, float]:
        """Return the speed of a step of this duration: tokens per second over all rows in the forward pass, and the
        share of the device's peak."""
        if step_s <= 0 or "computed_tokens" not in values:
            return {}
        found = {"computed_tokens_per_s": values["computed_tokens"] / step_s}
        peak = self.settings.peak_tflops or peak_tflops(self.settings.device)
        return found | ({"mfu": values["tflop"] / step_s / peak} if peak and "tflop" in values else {})


def build_training(
    config: RunConfig, spec: ModelSpec, images: ImageCache | None = None, desk: Desk | None = None
) -> Training:
    """Build the parts that the run file names. The backend is not opened. `images` is None if the model sees no
    images. `desk` is that of a joined loop."""
    settings = config.trainer
    backend_class, backend_options = config.build_part("backend", settings.backend)
    optimizer = OptimizerSettings(weight_decay=settings.weight_decay, betas=settings.adam_betas, eps=settings.adam_eps)
    stages = Stages.of(config)
    algorithms = tuple(build_algorithm(config, stage.where) for stage in stages.all)
    check_demands(config, algorithms, backend_class)
    spec = trained_spec(config, spec)
    part = registry.find_spec(BackendSpec, settings.backend)
    takes = part.takes_images
    check_takes_images(spec.folder, f"trainer.backend: {settings.backend!r}", takes, advice="use 'torch'")
    more: dict[str, Any] = {"images": images} if takes else {}
    if part.is_joined:
        more["desk"] = desk
    backend = backend_class(backend_options, model=spec, optimizer=optimizer, seed=config.run.seed, **more)
    if (critic := the_critic(algorithms)) is not None:
        backend.hold_critic(critic, critic_folder(config, critic, spec))
    return Training(backend, algorithms[0], settings, algorithms if stages.named else (), images=images)


def check_made_for(batch: Batch, stage: Stage) -> None:
    """Raise ConfigError if the buffer made the batch for another stage, because the run had other stages then."""
    kinds = {experience.loss_kind for experience in batch.experiences}
    alone = batch.manifest.num_groups == 0 and not batch.manifest.last
    if alone == stage.takes_rollouts or kinds - {LossKind.rl, stage.kind}:
        found = " and ".join(sorted(kinds)) or "nothing"
        raise ConfigError(
            f"stages.{stage.number} ({stage.to_text()}): batch {batch.sequence} was made for another stage and holds "
            f"{found}; stages that batches were made for keep their place: set them as they were"
        )
