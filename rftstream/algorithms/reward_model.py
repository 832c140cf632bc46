"""A reward model learned from preference pairs: the better answer should score higher than the worse one.

    loss = - w log sigmoid(r_chosen - r_rejected - m) + centring (r_chosen + r_rejected)^2

Bradley-Terry as in InstructGPT (Ouyang et al. 2022, arXiv 2203.02155), with the margin of Llama 2 (arXiv 2307.09288)
and the centring of Eisenstein et al. (arXiv 2312.09244). The trained model is not a policy but a classifier with one
output. It starts as the run's model with a head that gives 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, Spread, TrainingRow, stratum_of
from rftstream.algorithms.dpo import means_over_pairs, of_whole_pairs
from rftstream.contracts.batches import Experience, LossKind

if TYPE_CHECKING:
    import torch

SIGN, PAIR = "sign", "pair"


class RewardModel:
    """Bradley-Terry on pairs. Each side is a row with a single unmasked token, after its last token. The backend's
    output there is the score of all text before it."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[algorithms.reward_model]`."""

        margin: Annotated[float, Meta(ge=0)] = 0.0
        """Difference in score from which the loss is small. 0: InstructGPT; Llama 2 uses up to 1 or 3, by the
        annotators' certainty."""
        weight_as: Literal["weight", "margin"] = "weight"
        """Meaning of a pair's column `weight`: the weight of the pair, or the factor of its margin."""
        centring: Annotated[float, Meta(ge=0)] = 0.0
        """Weight of the squared sum of both scores, which keeps scores around 0; usual value: 0.01. 0: scores may shift
        by any constant."""

    needs: frozenset[str] = frozenset({"scores", "whole_groups", "no_proximal_logprobs"})
    needs_spread: Spread = "none"
    loss_kinds = frozenset({LossKind.dpo})

    def __init__(self, config: Config) -> None:
        self.config = config

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return a row for each side of each pair: its last segment, which contains the whole conversation. The pair's
        weight takes the place of an advantage."""
        numbers: dict[str, int] = {}
        rows = []
        for one in batch:
            if one.loss_kind is not LossKind.dpo:
                continue
            pair = numbers.setdefault(one.ids.group_id, len(numbers))
            token_ids_T = one.segments[-1].token_ids.numpy()
            whole_T = np.append(token_ids_T, token_ids_T[-1:]).astype(np.int32)  # the last position is never read
            size, sign = len(whole_T), 1.0 if one.pair == "chosen" else -1.0
            mask_T = np.zeros(size, np.float32)
            mask_T[-1:] = float(len(token_ids_T) > 0 and one.segments[-1].loss_mask.numpy().any())
            rows.append(
                TrainingRow(
                    token_ids=whole_T,
                    loss_mask=mask_T,
                    behavior_logprobs=np.zeros(size, np.float32),
                    advantages=np.full(size, one.weight, np.float32),
                    group=pair,
                    stratum=stratum_of(one),
                    additions={PAIR: np.full(size, pair, np.float32), SIGN: np.full(size, sign, np.float32)},
                )
            )
        return of_whole_pairs(rows, len(numbers))

    def loss(
        self, policy_logprobs_BT: torch.Tensor, rows: MicroBatch, denominators: Denominators
    ) -> tuple[Any, dict[str, Any]]:
        """Return the micro-batch's share of the loss over pairs, and its metrics as sums over pairs. The scores take
        the place of logprobs."""
        from rftstream.core.imitation import bradley_terry_loss
        from rftstream.core.masks import apply_mask

        given_B = rows.advantages_BT[:, 0]
        as_margin = self.config.weight_as == "margin"
        return bradley_terry_loss(
            apply_mask(policy_logprobs_BT, rows.loss_mask_BT).sum(dim=1),
            rows.additions[PAIR][:, 0].long(),
            rows.additions[SIGN][:, 0],
            given_B.new_ones(len(given_B)) if as_margin else given_B,
            self.config.margin * (given_B if as_margin else given_B.new_ones(len(given_B))),
            centring=self.config.centring,
            num_pairs=denominators.num_groups,
        )

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return means over pairs, from sums that were divided by the number of tokens. A classifier has no entropy."""
        return {name: value for name, value in means_over_pairs(means).items() if name != "entropy"}

    def held_out(
        self, rows: Sequence[TrainingRow], logprobs: Sequence[np.ndarray], reference: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        """Return loss, accuracy and margin over pairs that are not trained on. `logprobs` are the scores, each at one
        position of its row. A pair with equal scores counts as a half."""
        gaps: dict[int, float] = {}
        given: dict[int, float] = {}
        for row, scores_T in zip(rows, logprobs, strict=True):
            if row.loss_mask.any():
                score = float(row.additions[SIGN][0]) * float(scores_T.sum(dtype=np.float64))
                gaps[row.group] = gaps.get(row.group, 0.0) + score
                given[row.group] = float(row.advantages[0])
        if not gaps:
            return {}
        gaps_P, given_P = (np.asarray([one[pair] for pair in sorted(gaps)]) for one in (gaps, given))
        as_margin = self.config.weight_as == "margin"
        losses_P = np.logaddexp(0, self.config.margin * (given_P if as_margin else 1.0) - gaps_P)
        return {
            "held_out_loss": float((losses_P if as_margin else given_P * losses_P).mean()),
            "held_out_accuracy": float(((gaps_P > 0) + 0.5 * (gaps_P == 0)).mean()),
            "held_out_margin": float(gaps_P.mean()),
        }
