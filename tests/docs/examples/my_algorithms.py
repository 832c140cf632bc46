"""RLOO (arXiv 2402.14740): REINFORCE, with the mean of the other siblings as the baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow, training_row
from rftstream.messages import Experience


class LeaveOneOut:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        tis_cap: Annotated[float, Meta(gt=0)] = 2.0
        """Largest weight of a token that another version sampled."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs: frozenset[str] = frozenset()

    def prepare(self, batch: Sequence[Experience]) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        groups: dict[str, list[float]] = defaultdict(list)
        scored = [(one, one.reward) for one in batch if one.reward is not None]
        for one, reward in scored:
            groups[one.ids.group_id].append(reward)
        numbers = {group: number for number, group in enumerate(groups)}
        rows = []
        for one, reward in scored:
            siblings = groups[one.ids.group_id]
            others = (sum(siblings) - reward) / (len(siblings) - 1) if len(siblings) > 1 else reward
            temperature = one.sampling.temperature
            for segment in one.segments:
                rows.append(training_row(segment, reward - others, temperature, numbers[one.ids.group_id]))
        return tuple(rows), {"num_groups": float(len(groups)), "num_rollouts": float(len(scored))}

    def loss(
        self,
        policy_logprobs_BT: Any,
        rows: MicroBatch,
        denominators: Denominators,
        *,
        entropy_BT: Any | None = None,
        proximal_logprobs_BT: Any | None = None,
        reference_logprobs_BT: Any | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """-w A logp, w = min(pi_old / pi_behavior, cap), as a mean over all tokens of the optimizer step."""
        from rftstream.core.corrections import importance_weights
        from rftstream.core.masks import keep, weigh

        mask_BT = rows.loss_mask_BT
        old_BT = policy_logprobs_BT.detach() if proximal_logprobs_BT is None else proximal_logprobs_BT
        weights_BT, metrics = importance_weights(
            old_BT, rows.behavior_logprobs_BT, mask_BT, outside="clamp", low=0.0, high=self.config.tis_cap
        )
        losses_BT = -weights_BT * keep(rows.advantages_BT, mask_BT) * keep(policy_logprobs_BT, mask_BT)
        shares = {"num_tokens": denominators.num_tokens, "num_rows": denominators.num_rows}
        return weigh(losses_BT, mask_BT, "token", **shares), metrics

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        return dict(means)
