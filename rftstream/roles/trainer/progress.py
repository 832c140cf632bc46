"""The trainer's state beside the weights, which is part of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rftstream.algorithms.reward_changes import is_changed
from rftstream.config.role_sections import TrainerSection
from rftstream.contracts.versions import StepTotals, VersionName
from rftstream.errors import StopRule
from rftstream.roles.trainer.assembly import Batch


@dataclass(slots=True)
class TrainerProgress:
    """The progress of a trainer. The step holds the progress of the last transaction. `after` makes the next one, and a
    checkpoint holds all of it."""

    version: int = 0
    positions: tuple[int, ...] = ()
    trained_groups: int = 0
    trained_rollouts: int = 0
    skips_in_a_row: int = 0
    steps_without_signal: int = 0
    """Number of consecutive steps without a learning signal."""
    rewards: tuple[float, ...] = ()
    """Mean rewards of the latest steps, for stop_reward. Those before a change of the reward are not among them."""
    scorers: dict[str, str] = field(default_factory=dict)
    """Taskset -> name and version of the reward that scored it last."""
    last_admitted: int | None = None
    """Total number of groups, if the last batch was marked as the run's last; otherwise None."""
    totals: StepTotals | None = field(default_factory=StepTotals)
    """Totals of all steps so far; None if a release without totals has trained some of the steps."""

    def name(self, epoch: int) -> VersionName:
        """Return the full name of the version in this epoch of the trainer."""
        return VersionName(trainer_epoch=epoch, version=self.version)

    def add(self, values: Mapping[str, float], token_staleness: Sequence[int], group_staleness: Sequence[int]) -> None:
        """Add the step that led to this progress to the totals, with its metrics and its histograms."""
        if self.totals is not None:
            self.totals = self.totals.plus(values, token_staleness, group_staleness)

    def after(self, batch: Batch, *, skipped: bool, without_signal: bool, rewards_kept: int) -> TrainerProgress:
        """Return the progress after the batch is trained."""
        manifest = batch.manifest
        rewards = () if is_changed(self.scorers, manifest.scorers) else self.rewards
        if "reward" in manifest.metrics:
            rewards = (*rewards, manifest.metrics["reward"])
        return TrainerProgress(
            version=self.version + 1,
            positions=batch.positions,
            trained_groups=manifest.total_groups,
            trained_rollouts=self.trained_rollouts + batch.num_rollouts,
            skips_in_a_row=self.skips_in_a_row + 1 if skipped else 0,
            steps_without_signal=self.steps_without_signal + 1 if without_signal else 0,
            rewards=rewards[-rewards_kept:],
            last_admitted=manifest.admitted if manifest.last else None,
            totals=self.totals,
            scorers={**self.scorers, **manifest.scorers},
        )

    def to_state(self) -> dict[str, Any]:
        """Return the progress in the form that a checkpoint stores."""
        state: dict[str, Any] = msgspec.to_builtins(self)
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> TrainerProgress:
        """Return the progress from a checkpoint. Checkpoints of releases without totals have none."""
        return msgspec.convert({"totals": None, **state}, TrainerProgress)


def too_many_skips(settings: TrainerSection, progress: TrainerProgress, batch: Batch) -> StopRule | None:
    """Return the rule that ends a run when too many consecutive batches, with `batch` as the last, could not be trained
    on."""
    if progress.skips_in_a_row < settings.max_skips_in_a_row:
        return None
    ids = ", ".join(sorted({experience.ids.group_id for experience in batch.experiences})[:8])
    return StopRule(
        "nan",
        f"trainer: {progress.skips_in_a_row} batches in a row gave a NaN or infinite loss or gradient, the "
        f"last one batch {batch.sequence} with the groups {ids}; lower trainer.lr or look at these rollouts",
    )
