"""M2PO: second-moment trust policy optimisation (arXiv 2510.01161): for data that is hundreds of versions old.

Of a batch only the tokens with the most extreme ratios are left out, until the mean square of the others' log-ratios to
who sampled is small; what stays is weighted by its ratio, without a clip. Which ones is decided once, before the first
step of a batch, for which their logprobs are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import MicroBatch, TrainingRow
from rftstream.algorithms.policy_gradient import GroupRelative, PolicyGradient
from rftstream.algorithms.settings import GroupRelativeConfig, PolicyGradientConfig
from rftstream.core.corrections import second_moment_mask

if TYPE_CHECKING:
    from torch import Tensor

KEPT = "second_moment_kept"
"""Addition of a row: 1 where a token stays."""


class M2po(GroupRelative, PolicyGradient):
    """A policy gradient that leaves out the tokens with the most extreme ratios of a batch."""

    name = "m2po"

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyGradientConfig, GroupRelativeConfig):
        """The settings in `[algorithms.m2po]`."""

        threshold: Annotated[float, Meta(gt=0)] = 0.04
        """Largest mean square of the log-ratios of the tokens that stay. 0.04: the paper, for all of its models."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs |= {"row_logprobs"}

    def refine(
        self, rows: Sequence[TrainingRow], row_logprobs: Sequence[np.ndarray]
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Mark the tokens that stay, as the addition KEPT."""
        trained_R = [row.loss_mask > 0 for row in rows]
        ratios_R = [
            (logprobs.astype(np.float64) - row.behavior_logprobs)[trained]
            for row, logprobs, trained in zip(rows, row_logprobs, trained_R, strict=True)
        ]
        kept_N = second_moment_mask(np.concatenate(ratios_R), self.config.threshold)
        parts_R = np.split(kept_N, np.cumsum([len(one) for one in ratios_R])[:-1])
        refined = []
        for row, trained, part in zip(rows, trained_R, parts_R, strict=True):
            kept_T = np.zeros(len(row.token_ids), dtype=np.float32)
            kept_T[trained] = part
            refined.append(replace(row, additions={**row.additions, KEPT: kept_T}))
        return tuple(refined), {"second_moment_dropped": 1.0 - float(kept_N.mean()) if len(kept_N) else 0.0}

    def token_losses(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return the losses of `core.losses.ratio_losses`, by the ratio to who sampled."""
        from rftstream.core.losses import ratio_losses

        return ratio_losses(policy_BT, rows.behavior_logprobs_BT, rows.advantages_BT, rows.loss_mask_BT)

    def weights(self, policy_BT: Tensor, old_BT: Tensor, rows: MicroBatch) -> tuple[Tensor | None, dict[str, Any]]:
        """Return 1 for each token that stays, and 0 for the others."""
        return rows.additions[KEPT], {}
