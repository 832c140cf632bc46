"""MIX: GRPO on the policy's own rollouts and cross entropy on an expert's demonstrations, in each batch (Trinity-RFT,
arXiv 2505.17826). It also has all settings of `grpo`.

    L = (1 - mu) GRPO(usual) + mu SFT(expert)

Each term is a mean over its own tokens or rows, so that neither depends on the amount of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, Spread, TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.sft import demonstration_rows, token_mean_loss
from rftstream.contracts.batches import Experience, LossKind

if TYPE_CHECKING:
    import torch


class Mix:
    """GRPO on rollouts and cross entropy on demonstrations, as one loss."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Grpo.Config):
        """The settings in `[algorithms.mix]`, in addition to those of `grpo`."""

        mu: Annotated[float, Meta(ge=0, le=1)] = 0.1
        """Weight of imitation. GRPO has the remaining weight."""

    loss_kinds = frozenset({LossKind.rl, LossKind.sft})
    needs_spread: Spread = "group"
    phi = False
    """Whether a token is weighted by p (1 - p)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._grpo = Grpo(config)
        self.needs: frozenset[str] = self._grpo.needs

    def mu(self, version: int) -> float:
        """Return the weight of imitation for the batch that is trained at `version`."""
        return self.config.mu

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return GRPO's rows, then those of the demonstrations, whose weights take the place of advantages."""
        demonstrations = demonstration_rows(batch)
        if reference_logprobs is not None:  # metrics of GRPO's rows, which come first
            reference_logprobs = reference_logprobs[: len(reference_logprobs) - len(demonstrations)]
        usual, metrics = self._grpo.prepare([one for one in batch if one.loss_kind is LossKind.rl], reference_logprobs)
        num_groups = 1 + max((row.group for row in usual), default=-1)
        added = sorted({name for row in usual for name in row.additions} | self._grpo.added)
        mu = self.mu(batch[0].batch_sequence) if batch else 0.0
        # no version sampled a demonstration, but its rows need the same additions as the others of their micro-batch
        rows = tuple(
            replace(
                row,
                group=row.group + first_group,
                additions={
                    **{name: _all(row, 0.0) for name in added},
                    **row.additions,
                    "expert": _all(row, flag),
                    "mu": _all(row, mu),
                },
            )
            for flag, first_group, some in ((0.0, 0, usual), (1.0, num_groups, demonstrations))
            for row in some
        )
        return rows, {**metrics, "num_demonstrations": float(len({row.group for row in demonstrations})), "mu": mu}

    def loss(
        self, policy_logprobs_BT: torch.Tensor, rows: MicroBatch, denominators: Denominators
    ) -> tuple[Any, dict[str, Any]]:
        """Return the micro-batch's share of both terms, with the metrics of each."""
        from rftstream.core.imitation import imitation_loss, phi_weights

        demonstration_BT, mu = rows.additions["expert"], rows.additions["mu"].max()
        usual_BT, own_BT = rows.loss_mask_BT * (1 - demonstration_BT), rows.loss_mask_BT * demonstration_BT
        num_tokens, num_rows = denominators.num_demonstration_tokens, denominators.num_demonstration_rows
        explored, metrics = self._grpo.loss(
            policy_logprobs_BT,
            replace(rows, loss_mask_BT=usual_BT),
            replace(
                denominators, num_tokens=denominators.num_tokens - num_tokens, num_rows=denominators.num_rows - num_rows
            ),
        )
        weights_BT = rows.advantages_BT
        if self.phi:
            weights_BT = weights_BT * phi_weights(policy_logprobs_BT, own_BT)
        imitated, more = imitation_loss(
            policy_logprobs_BT,
            weights_BT,
            own_BT,
            normalise=self.config.normalise,
            num_tokens=num_tokens,
            num_rows=num_rows,
        )
        metrics |= {
            "usual_tokens": usual_BT.sum(),
            "expert_nll": more["nll"],
            "expert_probability": more["probability"],
        }
        return (1 - mu) * explored + mu * imitated, metrics

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        """Turn means over all tokens into means over the tokens of each term."""
        share = means.get("usual_tokens", 0.0)
        explored, imitated = {}, {}
        for name, value in means.items():
            if name.startswith("expert_"):
                imitated[name] = value / (1 - share) if share < 1 else 0.0
            elif name == "entropy" or name.startswith("max_"):  # the backend's value, over all tokens
                explored[name] = value
            elif name != "usual_tokens":
                explored[name] = value / share if share else 0.0
        return {**self._grpo.summarise(explored), **imitated}

    def held_out(
        self, rows: Sequence[TrainingRow], logprobs: Sequence[np.ndarray], reference: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        """Return the token mean of the loss over demonstrations that are not trained on."""
        return {"held_out_loss": token_mean_loss(rows, logprobs)}


def _all(row: TrainingRow, value: float) -> np.ndarray:
    return np.full(len(row.token_ids), value, np.float32)
