"""What the buffer saw since the batch before: rewards of all decided rollouts, filtered or not, and their lengths."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from rftstream.messages import GroupResult, RolloutStatus, RolloutSummary, Verdict


class Tally:
    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._squares = 0.0
        self._groups: dict[str, int] = defaultdict(int)

    def group(self, taskset: str, result: GroupResult, rollouts: Sequence[RolloutSummary]) -> None:
        """From nothing but its outcome, so that a successor counts the same."""
        self._groups[str(result)] += 1
        if result in (GroupResult.batched, GroupResult.filtered):
            rewards = {rollout.reward for rollout in rollouts if rollout.reward is not None}
            self._add("zero_variance_share", len(rewards) <= 1)
        for rollout in rollouts:
            if rollout.reward is not None:
                self._add("reward", rollout.reward)
                self._squares += rollout.reward**2
                self._add(f"reward/{taskset}", rollout.reward)
            if rollout.status in (RolloutStatus.completed, RolloutStatus.truncated):
                self._add("length_mean", rollout.num_tokens)
                self._add("truncated_share", rollout.status is RolloutStatus.truncated)
            self._add("unscored_share", rollout.reward is None)

    def verdict(self, verdict: Verdict, environment_metrics: dict[str, float]) -> None:
        for name, value in verdict.parts.items():
            self._add(f"part/{name}", value)
        for name, value in {**environment_metrics, **verdict.metrics}.items():
            self._add(f"metric/{name}", value)

    def _add(self, name: str, value: float) -> None:
        if math.isfinite(value):
            self._sums[name] += value
            self._counts[name] += 1

    def metrics(self) -> dict[str, float]:
        """Means; counts of groups by result; `rollouts` that were scored."""
        values = {name: self._sums[name] / self._counts[name] for name in sorted(self._sums)}
        if scored := self._counts["reward"]:
            values["reward_std"] = math.sqrt(max(0.0, self._squares / scored - values["reward"] ** 2))
        values["rollouts"] = float(self._counts["unscored_share"])
        decided = sum(self._groups.values())
        for result in GroupResult:
            values[f"{result}_share"] = self._groups[str(result)] / decided if decided else 0.0
        return values
