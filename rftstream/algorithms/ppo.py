"""PPO with a critic (arXiv 1707.06347): each token is compared with the critic's expectation.

The critic is a separate network with its own optimizer. Before a batch is trained it estimates a value before each
sampled token. Generalised advantage estimation (arXiv 1506.02438) computes advantages from these values. No groups are
needed. The last token of a rollout has the rollout's reward; with `kl_in = "reward"` the divergence is subtracted at
each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow
from rftstream.algorithms.policy_gradient import BatchAdvantages, Clipped
from rftstream.algorithms.scored import describe_advantages
from rftstream.algorithms.settings import ClippedConfig, CriticConfig
from rftstream.core.advantages import whiten
from rftstream.core.packing import pad_rows
from rftstream.core.values import compute_gae, explained_variance

if TYPE_CHECKING:
    from torch import Tensor

VALUES, RETURNS = "values", "returns"
"""Additions of a row: the critic's values before the batch, and the returns, which are their targets."""


class Ppo(Clipped):
    """PPO's clip on advantages that are estimated with a critic."""

    takes_kl_by_token = True

    @dataclass(frozen=True, kw_only=True)
    class Config(ClippedConfig):
        """The settings in `[algorithms.ppo]`."""

        gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
        """Discount of each sampled token. 1: InstructGPT, TRL, verl."""
        lam: Annotated[float, Meta(ge=0, le=1)] = 1.0
        """Weight of observed rewards against the critic's expectation in advantages. 1: observed rewards to the end
        (verl, OpenRLHF); with less (TRL: 0.95), the reward of a long answer hardly reaches its beginning."""
        whiten_advantages: bool = True
        """Whether advantages are whitened over all trained tokens of the batch, as in TRL, verl and OpenRLHF."""
        critic: CriticConfig = field(default_factory=CriticConfig)
        """Settings of the critic; see the shared settings."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs |= {"values"}
        self.critic = config.critic

    def token_advantages(self, batch: BatchAdvantages) -> list[np.ndarray]:
        """Return the reward of each token. `estimate` computes advantages from them when the values are known."""
        rows, kl_R = batch.rows, batch.kl_R
        result = [
            np.zeros(len(row.token_ids)) if kl_R is None else -self.config.kl_coef * kl_R[number]
            for number, row in enumerate(rows)
        ]
        owners = enumerate(batch.scored.owners_R.tolist())
        last = {owner: number for number, owner in owners if rows[number].loss_mask.any()}
        for owner, number in last.items():
            result[number][np.flatnonzero(rows[number].loss_mask)[-1]] += batch.rewards_N[owner]
        return result

    def estimate(
        self, rows: Sequence[TrainingRow], values: Sequence[np.ndarray]
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return the rows with generalised advantages, and with the values and returns that `value_loss` needs."""
        config = self.config
        advantages_R, returns_R = _by_row(rows, values, gamma=config.gamma, lam=config.lam)
        trained_R = [row.loss_mask > 0 for row in rows]
        advantages, returns, said = (
            np.concatenate([one[trained] for one, trained in zip(arrays, trained_R, strict=True)])
            for arrays in (advantages_R, returns_R, values)
        )
        if config.whiten_advantages:
            advantages = whiten(advantages)
            ends = np.cumsum([int(trained.sum()) for trained in trained_R])[:-1]
            for one_T, trained, part in zip(advantages_R, trained_R, np.split(advantages, ends), strict=True):
                one_T[trained] = part
        metrics = {
            **describe_advantages(advantages),
            "return": float(returns.mean()) if len(returns) else 0.0,
            "value": float(said.mean(dtype=np.float64)) if len(said) else 0.0,
            "value_explained_variance": explained_variance(said, returns),
        }
        return tuple(
            replace(
                row,
                advantages=advantages_T.astype(np.float32),
                additions={**row.additions, VALUES: values_T, RETURNS: returns_T.astype(np.float32)},
            )
            for row, advantages_T, returns_T, values_T in zip(rows, advantages_R, returns_R, values, strict=True)
        ), metrics

    def value_loss(self, values_BT: Tensor, rows: MicroBatch, denominators: Denominators) -> tuple[Any, dict[str, Any]]:
        """Return the critic's loss, a mean over all trained tokens."""
        from rftstream.core.losses import value_losses
        from rftstream.core.masks import reduce_loss

        losses_BT, metrics = value_losses(
            values_BT,
            rows.additions[VALUES],
            rows.additions[RETURNS],
            rows.loss_mask_BT,
            clip=self.critic.value_clip or None,
        )
        return reduce_loss(
            losses_BT, rows.loss_mask_BT, "token", num_tokens=denominators.num_tokens, num_rows=denominators.num_rows
        ), metrics


def _by_row(
    rows: Sequence[TrainingRow], values: Sequence[np.ndarray], *, gamma: float, lam: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return advantages and returns of each row, float64 [T]. A rollout continues from one of its rows to the next."""
    first = [number for number, row in enumerate(rows) if not number or row.rollout != rows[number - 1].rollout]
    spans = list(zip(first, [*first[1:], len(rows)], strict=True))
    rewards_NT, values_NT, mask_NT = (
        pad_rows([np.concatenate(arrays[begin:end]) for begin, end in spans])
        for arrays in ([row.advantages for row in rows], list(values), [row.loss_mask for row in rows])
    )
    found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for side, array_NT in zip(found, compute_gae(rewards_NT, values_NT, mask_NT, gamma=gamma, lam=lam), strict=True):
        for (begin, end), array_T in zip(spans, array_NT, strict=True):
            lengths = [len(row.token_ids) for row in rows[begin:end]]
            side += np.split(array_T[: sum(lengths)], np.cumsum(lengths)[:-1])
    return found
