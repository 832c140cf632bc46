"""SFT: supervised fine-tuning, cross entropy on demonstrations alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow, stratum_of, training_row
from rftstream.contracts.batches import Experience, LossKind

if TYPE_CHECKING:
    import torch


class Sft:
    """Cross entropy on demonstrations, each with its weight."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[algorithms.sft]`."""

        normalise: Literal["token", "sequence"] = "token"
        """Mean over all tokens of the batch, or mean over demonstrations of their means."""

    needs: frozenset[str] = frozenset()
    loss_kinds = frozenset({LossKind.sft})

    def __init__(self, config: Config) -> None:
        self.config = config

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return a row for each segment. Its weight takes the place of an advantage."""
        rows = demonstration_rows(batch)
        return rows, {"num_demonstrations": float(len({row.group for row in rows}))}

    def loss(
        self, policy_logprobs_BT: torch.Tensor, rows: MicroBatch, denominators: Denominators
    ) -> tuple[Any, dict[str, Any]]:
        """Return the micro-batch's share of the cross entropy, and its metrics."""
        from rftstream.core.imitation import imitation_loss

        return imitation_loss(
            policy_logprobs_BT,
            rows.advantages_BT,
            rows.loss_mask_BT,
            normalise=self.config.normalise,
            num_tokens=denominators.num_tokens,
            num_rows=denominators.num_rows,
        )

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics unchanged, since they are means over tokens already."""
        return dict(means)

    def held_out(
        self, rows: Sequence[TrainingRow], logprobs: Sequence[np.ndarray], reference: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        """Return the token mean of the loss over demonstrations that are not trained on, each with its weight."""
        return {"held_out_loss": token_mean_loss(rows, logprobs)}


def demonstration_rows(batch: Sequence[Experience]) -> tuple[TrainingRow, ...]:
    """Return the rows of all demonstrations in the batch, each demonstration a group of its own."""
    demonstrations = [one for one in batch if one.loss_kind is LossKind.sft]
    return tuple(
        replace(row, behavior_logprobs=np.zeros_like(row.behavior_logprobs))
        for group, demonstration in enumerate(demonstrations)
        for row in (
            training_row(segment, demonstration.weight, 1.0, group, 0, stratum_of(demonstration))
            for segment in demonstration.segments
        )
    )


def token_mean_loss(rows: Sequence[TrainingRow], logprobs: Sequence[np.ndarray]) -> float:
    """Return the mean loss over all unmasked tokens, each row with its weight, computed in float64."""
    total = tokens = 0.0
    for row, logprobs_T in zip(rows, logprobs, strict=True):
        kept_T = row.loss_mask > 0
        total -= float((row.advantages[kept_T].astype(np.float64) * logprobs_T[kept_T]).sum())
        tokens += float(kept_T.sum())
    return total / max(tokens, 1.0)
