"""The updates of the trainer, one at a time, and their consequences for the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rftstream import metrics
from rftstream.algorithms.base import spread_needed
from rftstream.algorithms.learning_signal import STEPS_WITHOUT_SIGNAL, WARN_AFTER_STEPS, is_without_signal, likely_cause
from rftstream.backends.stopping import UpdateStopped
from rftstream.clock import Clock
from rftstream.config.parts import registry
from rftstream.config.parts.part_names import server_update
from rftstream.config.parts.part_specs import PolicySpec
from rftstream.config.sampling_ranges import inexact_settings
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import Experience
from rftstream.contracts.token_values import EXPERTS
from rftstream.contracts.versions import StepRecord, VersionName, WeightsAnnounced
from rftstream.errors import StopRule
from rftstream.roles.trainer.assembly import Batch
from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.pending_update import PendingUpdate
from rftstream.roles.trainer.progress import TrainerProgress, too_many_skips
from rftstream.roles.trainer.run_end import RunEnd
from rftstream.roles.trainer.schedule import rate_at
from rftstream.roles.trainer.training import TrainedStaleness, Training, check_made_for
from rftstream.roles.trainer.watches.hacked import HackedRewardWatch
from rftstream.roles.trainer.watches.held_out import HeldOut
from rftstream.roles.trainer.watches.turns import TurnsWatch


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A batch whose update has ended."""

    update: PendingUpdate
    """The update, with its batch."""
    training: Training
    """Backend and algorithm that trained the batch."""
    progress: TrainerProgress
    """Progress of the trainer after this batch."""
    skipped: bool
    """Whether the weights were left unchanged."""
    values: dict[str, float]
    """Metrics of the step, without its times."""
    staleness: TrainedStaleness
    """Staleness of the trained rows; empty if the versions of rollouts belong to another run."""
    step_s: float
    """Seconds that the update took."""
    ended_at: float
    """Time when the update ended, by the clock."""
    end_reason: str | None
    """Why the run ends with this batch; None if it goes on."""
    stop: StopRule | None
    """The rule by which the run is to end; None if it goes on."""

    def record(
        self, name: VersionName, announced: WeightsAnnounced | None, *, held_up_until: float, stamp: float
    ) -> StepRecord:
        """Return the step of the batch. `announced` is None if the weights are not published. `held_up_until` is the
        time from which training waited at most for a batch, and no longer for the publication, `stamp` that of the
        machine's clock."""
        times = self.update.speeds(self.values, step_s=self.step_s, publish_s=held_up_until - self.ended_at)
        return StepRecord(
            name=name,
            batch_sequence=self.update.batch.sequence,
            positions=self.update.batch.positions,
            trained_groups=self.progress.trained_groups,
            trained_rollouts=self.progress.trained_rollouts,
            weights_digest=announced.weights_digest if announced else None,
            metrics=self.values | times | self.training.speeds(self.values, self.step_s),
            skipped=self.skipped,
            announced=announced is not None,
            last=self.end_reason is not None,
            recorded_at=stamp,
            token_staleness=self.staleness.tokens,
            group_staleness=self.staleness.groups,
            totals=self.progress.totals,
            scorers=self.update.batch.manifest.scorers,
        )


@dataclass(eq=False, kw_only=True)
class UpdateCycle:
    """The updates of the backend, one at a time, in a thread of its own. The step makes it once and calls `abandon` at
    each recovery. For each batch it calls `begin`, then `ends_within` until that is true, then `finish`, and `stop`
    if the update should end sooner. It calls `rest` whenever the backend becomes idle."""

    config: RunConfig
    training: Training
    backend: BackendThread
    end: RunEnd
    held_out: HeldOut | None
    clock: Clock
    pending: PendingUpdate | None = field(default=None, init=False)
    """The running update; None if there is none."""

    def __post_init__(self) -> None:
        self.mismatch = MismatchWatch(self.config)
        self.signal = SignalWatch(self.config)
        self.hacked = HackedRewardWatch(self.config)
        self.turns = TurnsWatch()
        self.resting_since = self.clock.now()

    @property
    def idle_s(self) -> float:
        """Seconds for which the backend has been idle."""
        return self.clock.now() - self.resting_since

    def rest(self) -> float:
        """Record that the backend is idle from now on. Return the time, by the clock."""
        self.resting_since = self.clock.now()
        return self.resting_since

    def begin(self, batch: Batch, progress: TrainerProgress) -> None:
        """Begin the update that makes a version from `batch` and `progress`. ConfigError if the batch was made for
        another stage."""
        self.backend.is_touched = True
        stages = self.end.stages
        stage, lr = stages.at(progress.version), rate_at(stages, progress.version)
        if stages.named:
            check_made_for(batch, stage)
        self.pending = PendingUpdate(
            batch,
            progress,
            lambda: self.training.at(stage).update(batch, lr),
            compute=self.backend.executor,
            clock=self.clock,
            waited_s=self.idle_s,
        )

    def stop(self) -> None:
        """Let the running update end soon, by leaving its batch half trained if the backend can do so."""
        if self.pending is not None:
            self.backend.stop_update()

    def finish(self, pending: PendingUpdate) -> TrainedBatch | None:
        """Return the result of the update, and wait for it if necessary. None if its batch was left half trained, which
        a successor trains again. Errors of the update are raised."""
        try:
            update, values, staleness, step_s = pending.result()
        except UpdateStopped:
            self.pending = None
            log.warning("step %d is left half done; it is trained again on resume", pending.progress.version + 1)
            return None
        self.pending = None
        batch, before = pending.batch, pending.progress
        self.mismatch.look(values, batch.experiences)
        ended_at = self.clock.now()
        stage = self.end.stages.at(before.version)
        training = self.training.at(stage)
        progress = before.after(
            batch,
            skipped=update.skipped,
            rewards_kept=self.config.run.stop_reward_over,
            without_signal=stage.takes_rollouts and is_without_signal(values, spread_needed(training.algorithm)),
        )
        staleness = TrainedStaleness() if self.config.run.imported_from else staleness
        progress.add(values, staleness.tokens, staleness.groups)
        if not self.config.without_tasks:
            values[STEPS_WITHOUT_SIGNAL] = float(progress.steps_without_signal)
        end_reason = self.end.reason(progress)
        if self.end.stages.named:
            values["stage"] = stage.number + 1.0
        if self.held_out is not None and self.held_out.due(stage, progress.version, last=end_reason is not None):
            values |= self.backend.asked(self.held_out.look)(stage)
        self.turns.look(progress.version, batch.manifest.scorers)
        ruled = self.signal.look(values) or self.hacked.look(progress.version, values, batch.manifest.scorers)
        return TrainedBatch(
            update=pending,
            training=training,
            progress=progress,
            skipped=update.skipped,
            values=values,
            staleness=staleness,
            step_s=step_s,
            ended_at=ended_at,
            end_reason=end_reason,
            stop=too_many_skips(self.config.trainer, progress, batch) or (ruled if end_reason is None else None),
        )

    def abandon(self) -> None:
        """Cancel the update, if there is one, and wait until its thread has stopped computing."""
        if self.pending is not None:
            self.pending.abandon()
            self.pending = None


def show_in_metrics(step: StepRecord, progress: TrainerProgress) -> None:
    """Set the metrics from a step that is on the log."""
    if not step.resumed:
        metrics.STEPS.labels("skipped" if step.skipped else "trained").inc()
        metrics.WITHOUT_SIGNAL.set(progress.steps_without_signal)
        for staleness, num_tokens in enumerate(step.token_staleness):
            metrics.TRAINED_TOKENS.labels(str(staleness)).inc(num_tokens)
        for staleness, num_groups in enumerate(step.group_staleness):
            for _ in range(num_groups):
                metrics.GROUP_STALENESS.observe(staleness)
    for metric, value in step.metrics.items():
        metrics.set_named(metrics.TRAIN, value, metric)


# ------------------------------------------------------------------------------------------
#
# The warning when steps have no learning signal, and the end of a run that has had none for too long.


log = logging.getLogger(__name__)


class SignalWatch:
    """Warns when steps have no learning signal, and again each time that their number has doubled. It ends the run by
    `trainer.max_steps_without_signal`. The trainer's UpdateCycle makes it and calls `look` once for each trained
    batch."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._most = config.trainer.max_steps_without_signal
        self._warns_at = WARN_AFTER_STEPS

    def look(self, values: Mapping[str, float]) -> StopRule | None:
        """Check a step by its metrics `values`. Return the rule if the run must end. This happens at each multiple of
        the setting, so that a resumed run gets as many steps again before it ends for the second time."""
        steps = int(values.get(STEPS_WITHOUT_SIGNAL, 0))
        if steps and self._most and steps % self._most == 0:
            return StopRule(
                "no_signal",
                f"trainer: {steps:,} steps in a row without a learning signal, expected fewer than {self._most:,} "
                f"(trainer.max_steps_without_signal): {likely_cause(values, self._config)}. Look at some by "
                "`rftstream inspect RUN verified --last 5`; mend it and `rftstream resume RUN`, or take the weights as "
                "they are by `rftstream weights export RUN`",
            )
        if steps < WARN_AFTER_STEPS:
            self._warns_at = WARN_AFTER_STEPS
        elif steps >= self._warns_at:
            self._warns_at = 2 * steps
            log.warning("no signal for %d steps: %s", steps, likely_cause(values, self._config))
        return None


# ------------------------------------------------------------------------------------------
#
# The warning when sampler and trainer disagree about the probabilities of tokens, with the likely cause.


class MismatchWatch:
    """Warns at the first step above `trainer.warn_mismatch`, and again when the mismatch is twice that of the last
    warning. The trainer's UpdateCycle makes it and calls `look` once for each trained batch."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._warns_above = config.trainer.warn_mismatch

    def look(self, values: Mapping[str, float], batch: Sequence[Experience]) -> None:
        """Warn if necessary. `values` are the metrics of the step."""
        found = values.get("mismatch_k3", 0.0)
        if not self._warns_above or not found > self._warns_above:
            return
        log.warning(
            "mismatch_k3 is %.3g nats per token, expected at most %.3g (trainer.warn_mismatch): sampler and trainer "
            "disagree about the tokens' probabilities; %s",
            found,
            self._config.trainer.warn_mismatch,
            cause_of_mismatch(self._config, values, batch),
        )
        self._warns_above = max(2 * found, self._warns_above)


FOR_OLD_ROLLOUTS = ("topr", "asymre")
"""Algorithms that learn from what another policy sampled."""


def cause_of_mismatch(config: RunConfig, values: Mapping[str, float], batch: Sequence[Experience]) -> str:
    """Return the likeliest cause. Certain causes come before possible ones."""
    if config.run.imported_from is not None:
        if (name := config.trainer.algorithm) in FOR_OLD_ROLLOUTS:
            return f"the rollouts are another run's, which {name} is made for: all is as it should be"
        return f"the rollouts are another run's; of the algorithms {' and '.join(FOR_OLD_ROLLOUTS)} are made for that"
    policy = config.explorer.policy
    if not registry.find_spec(PolicySpec, policy).takes_weights and server_update(config, policy) is None:
        return f"explorer.policy {policy!r} samples by the server's own weights, not by those that are trained"
    samplings = [experience.sampling for experience in batch if not experience.expert]
    changed = sorted({name for sampling in samplings for name in inexact_settings(sampling, config)})
    if changed:
        names = ", ".join(f"sampling.{name}" for name in changed)
        return (
            f"{names} change the probabilities that are sampled from, which the trainer does not redo; switch them off"
        )
    old = f"the rollouts are {(staleness := values.get('staleness_mean', 0.0)):.2g} versions old on average, and the "
    if staleness >= 1:
        return f"{old}policy moves fast: lower trainer.lr or feeder.max_staleness"
    if "router_entropy" in values and EXPERTS not in config.trainer.replayed:
        return (
            "where scores of experts are close, the routers of sampler and trainer choose others: set "
            "trainer.routing = 'replay'"
        )
    maybe_old = f"{old}policy moves fast (lower trainer.lr or feeder.max_staleness), or "
    return (
        (maybe_old if staleness else "nothing here is old or truncated, so ")
        + "the two compute otherwise: the sampler in model.dtype = "
        f"'{config.model.dtype}', the trainer in float32. Try model.dtype = 'float32', and another explorer.policy; an "
        "engine that loaded other weights or positions looks the same"
    )
