"""GiGPO: group-in-group policy optimisation (arXiv 2505.10978): credit for single turns, where siblings meet again.

Beside the advantage of its rollout a turn has one of its own: among all turns of the group that were made in the same
state, by what each led to. A state is what was said since the turn before (the prompt, a tool's output, an
observation), to the token. A turn that is alone in its state has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.policy_gradient import BatchAdvantages
from rftstream.algorithms.settings import GrpoConfig
from rftstream.core.advantages import compute_group_advantages


class GiGpo(Grpo):
    """GRPO whose turns have an advantage of their own beside their rollout's."""

    name = "gigpo"
    needs_spread = "batch"

    @dataclass(frozen=True, kw_only=True)
    class Config(GrpoConfig):
        """The settings in `[algorithms.gigpo]`."""

        turn_weight: Annotated[float, Meta(ge=0)] = 1.0
        """Weight of a turn's own advantage, which is added to the rollout's. 1: the paper."""
        discount: Annotated[float, Meta(gt=0, le=1)] = 0.95
        """Factor per turn. The return of a turn is the rollout's reward times this factor for each later turn. 0.95:
        the paper."""

    def token_advantages(self, batch: BatchAdvantages) -> list[np.ndarray]:
        """Add to the rollout's advantage that of each turn among the group's turns from the same state."""
        result = super().token_advantages(batch)
        scored, rows = batch.scored, batch.rows
        turns = [
            (row, start, end)
            for row, segment in enumerate(scored.segments)
            for start, end in sampled_runs(segment.loss_mask.numpy())
        ]
        owners_K = np.asarray([scored.owners_R[row] for row, _, _ in turns], dtype=np.int64)
        returns_K = batch.rewards_N[owners_K] * self.config.discount ** _turns_after(owners_K)
        states: dict[tuple[int, bytes], int] = {}
        states_K = np.empty(len(turns), dtype=np.int64)
        before = {row: 0 for row, _, _ in turns}
        for number, (row, start, end) in enumerate(turns):
            shown = rows[row].token_ids[before[row] : start].tobytes()
            states_K[number] = states.setdefault((rows[row].group, shown), len(states))
            before[row] = end
        own_K = compute_group_advantages(returns_K, states_K, eps=self.config.advantage_eps)
        for (row, start, end), own in zip(turns, own_K, strict=True):
            result[row][start:end] += self.config.turn_weight * own
        return result


def sampled_runs(loss_mask_T: np.ndarray) -> Iterator[tuple[int, int]]:
    """Return start and end of each turn of a segment: tokens that were sampled one after the other."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask_T != 0, [0]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _turns_after(owners_K: np.ndarray) -> np.ndarray:
    """Return how many turns the rollout of each turn has after it. int [K]; turns of a rollout stand together, in
    order."""
    ends = {owner: number for number, owner in enumerate(owners_K.tolist())}
    return np.asarray([ends[owner] - number for number, owner in enumerate(owners_K.tolist())], dtype=np.int64)
