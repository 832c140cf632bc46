"""DPO: direct preference optimisation (arXiv 2305.18290), only on preference pairs.

The reference is the model that the run began with, version 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow, stratum_of, training_row
from rftstream.contracts.batches import Experience, LossKind

if TYPE_CHECKING:
    import torch


class Dpo:
    """Direct preference optimisation. Chosen and rejected answer of a pair share a group, and each is a row."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[algorithms.dpo]`."""

        beta: Annotated[float, Meta(gt=0)] = 0.1
        """Weight of a log-ratio to the reference. The larger it is, the closer the policy stays to the reference."""
        label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
        """Probability that the sides of a pair are swapped."""

    needs: frozenset[str] = frozenset({"reference_logprobs", "whole_groups"})
    loss_kinds = frozenset({LossKind.dpo})

    def __init__(self, config: Config) -> None:
        self.config = config

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return a row for each segment of each side. A pair is a group. Its weight takes the place of an advantage.

        If one side of a pair has no token to train on, the pair does not tell which side is better: its masks are
        empty."""
        numbers: dict[str, int] = {}
        rows = []
        for one in batch:
            if one.loss_kind is not LossKind.dpo:
                continue
            pair = numbers.setdefault(one.ids.group_id, len(numbers))
            for segment in one.segments:
                row = training_row(segment, one.weight, 1.0, pair, 0, stratum_of(one))
                sign = 1.0 if one.pair == "chosen" else -1.0
                additions = {
                    "pair": np.full(len(row.token_ids), pair, np.float32),
                    "sign": np.full(len(row.token_ids), sign, np.float32),
                }
                rows.append(replace(row, additions=additions))
        return of_whole_pairs(rows, len(numbers))

    def loss(
        self, policy_logprobs_BT: torch.Tensor, rows: MicroBatch, denominators: Denominators
    ) -> tuple[Any, dict[str, Any]]:
        """Return the micro-batch's share of the loss over pairs, and its metrics as sums over pairs."""
        from rftstream.core.imitation import preference_loss

        if rows.reference_logprobs_BT is None:
            raise ValueError("dpo: got no reference_logprobs_BT, expected some")
        pairs_B, signs_B = rows.additions["pair"][:, 0].long(), rows.additions["sign"][:, 0]
        return preference_loss(
            policy_logprobs_BT,
            rows.reference_logprobs_BT,
            pairs_B,
            signs_B,
            rows.advantages_BT[:, 0],
            rows.loss_mask_BT,
            beta=self.config.beta,
            label_smoothing=self.config.label_smoothing,
            num_pairs=denominators.num_groups,
        )

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return means over pairs, from sums over pairs that were divided by the number of tokens."""
        return means_over_pairs(means)

    def held_out(
        self, rows: Sequence[TrainingRow], logprobs: Sequence[np.ndarray], reference: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        """Return loss and accuracy over pairs that are not trained on."""
        assert reference is not None, "it is asked for"
        margins: dict[int, float] = {}
        weights: dict[int, float] = {}
        for row, policy_T, reference_T in zip(rows, logprobs, reference, strict=True):
            kept_T = row.loss_mask > 0
            if not kept_T.any():
                continue
            difference = float((policy_T[kept_T].astype(np.float64) - reference_T[kept_T]).sum())
            margins[row.group] = margins.get(row.group, 0.0) + float(row.additions["sign"][0]) * difference
            weights[row.group] = float(row.advantages[0])
        margins_P = self.config.beta * np.asarray([margins[pair] for pair in sorted(margins)])
        weights_P = np.asarray([weights[pair] for pair in sorted(margins)])
        smooth = self.config.label_smoothing
        losses_P = (1 - smooth) * np.logaddexp(0, -margins_P) + smooth * np.logaddexp(0, margins_P)
        if not len(losses_P):
            return {}
        return {
            "held_out_loss": float((weights_P * losses_P).mean()),
            "held_out_accuracy": float((margins_P > 0).mean()),
        }


def of_whole_pairs(rows: Sequence[TrainingRow], num_pairs: int) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
    """Return the rows, and the number of complete pairs. If a side of a pair has no token to train on, the pair's masks
    are emptied. The addition `sign` gives the side of a row, `num_pairs` the number of pairs, 0 ... num_pairs - 1."""
    sides = {(row.group, float(row.additions["sign"][0])) for row in rows if row.loss_mask.any()}
    whole = {pair for pair in range(num_pairs) if {(pair, 1.0), (pair, -1.0)} <= sides}
    metrics = {"num_pairs": float(len(whole))}
    if len(whole) < num_pairs:
        metrics["pairs_one_sided"] = float(num_pairs - len(whole))
    return tuple(
        row if row.group in whole else replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in rows
    ), metrics


def means_over_pairs(means: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of pairs as means over pairs, from sums that were divided by the number of tokens."""
    pairs = means.get("pairs", 0.0)
    own = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    ratios = {name: means[name] / pairs if pairs else 0.0 for name in own if name in means}
    return {**{name: value for name, value in means.items() if name not in (*own, "pairs")}, **ratios}
