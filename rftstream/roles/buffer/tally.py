"""Metrics of the decisions since the previous batch: rewards and lengths of rollouts, both filtered and not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from rftstream import metrics
from rftstream.contracts.outcomes import GroupResult, RolloutSummary
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import PEOPLE, VerifiedRollout, spent_amounts
from rftstream.core.samples import plain_sum


def has_spread(rollouts: Sequence[RolloutSummary]) -> bool:
    """Return whether some rewards of a group differ: those of the rollouts, or in episodes of several agents those of
    one role."""
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    if len({rollout.reward for rollout in scored}) > 1:
        return True
    roles = {role for rollout in scored for role in rollout.roles}
    return any(len({rollout.roles[role] for rollout in scored if role in rollout.roles}) > 1 for role in roles)


class Tally:
    """Sums over the groups that were decided since the last batch. BufferProgress makes one for each batch. It calls
    `group` for each group with an outcome and `rollout` for each rollout of the batch, and then `metrics`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._squares: dict[str, float] = defaultdict(float)
        """Sum of squared rewards, by taskset."""
        self._parts_of_tasksets: set[str] = set()
        """Names of means of parts and roles that only one taskset has."""
        self._groups: dict[str, int] = defaultdict(int)
        self._spent: dict[str, float] = defaultdict(float)
        """Cost of the verdicts of the batch, by kind."""
        self._scorers: dict[str, tuple[float, str]] = {}
        """Taskset -> when the newest of its rollouts of the batch was scored, and by which reward."""

    def group(self, taskset: str, result: GroupResult, rollouts: Sequence[RolloutSummary]) -> None:
        """Count a group by its outcome alone, so that a successor counts the same."""
        self._groups[str(result)] += 1
        if result in (GroupResult.batched, GroupResult.filtered):
            self._add("zero_variance_share", not has_spread(rollouts))
        for rollout in rollouts:
            if rollout.reward is not None:
                self._add("reward", rollout.reward)
                self._squares[taskset] += rollout.reward * rollout.reward  # `**` raises where this is infinite
                self._add(f"reward/{taskset}", rollout.reward)
            if rollout.status in (RolloutStatus.completed, RolloutStatus.truncated):
                self._add("length_mean", rollout.num_tokens)
                self._add("truncated_share", rollout.status is RolloutStatus.truncated)
            self._add("unscored_share", rollout.reward is None)

    def rollout(self, verified: VerifiedRollout, batch: int | None) -> None:
        """Count a rollout of a batch. `batch` is the version at which it is trained; None if the versions of rollouts
        belong to another run."""
        rollout, verdict = verified.rollout, verified.verdict
        assert rollout is not None and verdict is not None, "others are in no batch"
        roles = {role: reward for role, reward in verdict.roles.items() if reward is not None}
        for kind, values in (("part", verdict.parts), ("role", roles)):
            for name, value in values.items():
                self._add(f"{kind}/{name}", value)
                of_taskset = f"{kind}/{verified.ids.taskset}/{name}"
                self._parts_of_tasksets.add(of_taskset)
                self._add(of_taskset, value)
        for name, value in {**rollout.metrics, **verdict.metrics}.items():
            self._add(f"metric/{name}", value)
        scored = verified.verified_at, verdict.scored_by
        if verdict.scorer != PEOPLE:
            self._scorers[verified.ids.taskset] = max(scored, self._scorers.get(verified.ids.taskset, scored))
        for kind, amount in spent_amounts(verdict.metrics).items():
            self._spent[f"spent/{kind}"] += amount
        versions = [span.version for segment in rollout.segments for span in segment.versions if span.count]
        if versions and batch is not None:
            self._add("staleness_in_flight", max(versions) - min(versions))
            self._add("staleness_in_queue", batch - max(versions))

    def scorers(self) -> dict[str, str]:
        """Return taskset -> name and version of the reward that scored the newest of its rollouts."""
        return {taskset: scorer for taskset, (_, scorer) in sorted(self._scorers.items())}

    def _add(self, name: str, value: float) -> None:
        if math.isfinite(value):
            self._sums[name] += value
            self._counts[name] += 1

    def metrics(self) -> dict[str, float]:
        """Return means, shares of groups by result, and the number of rollouts."""
        values = {name: self._sums[name] / self._counts[name] for name in sorted(self._sums)}
        if scored := self._counts["reward"]:
            values["reward_std"] = self._std("reward", plain_sum(self._squares.values()) / scored)
        if len(self._squares) > 1:
            for taskset, squares in sorted(self._squares.items()):
                name = f"reward/{taskset}"
                values[f"reward_std/{taskset}"] = self._std(name, squares / self._counts[name])
        else:  # they would repeat the means over all tasksets
            values = {name: value for name, value in values.items() if name not in self._parts_of_tasksets}
        values |= self._spent
        values["rollouts"] = float(self._counts["unscored_share"])
        decided = sum(self._groups.values())
        for result in GroupResult:
            values[f"{result}_share"] = self._groups[str(result)] / decided if decided else 0.0
        return metrics.fit_names({name: one for name, one in values.items() if math.isfinite(one)}, self._counts)

    def metrics_of_batch(
        self, staleness: Sequence[int] | None, num_demonstrations: int, *, takes_rollouts: bool
    ) -> dict[str, float]:
        """Return the metrics of a batch. `staleness` has the staleness of each group; None if the versions of rollouts
        belong to another run. `takes_rollouts` tells whether batches of the stage have rollouts."""
        values = self.metrics() if takes_rollouts else {}
        if num_demonstrations:
            values["experts"] = float(num_demonstrations)
        if takes_rollouts and staleness is not None:
            values["staleness_max"] = float(max(staleness, default=0))
        if staleness:
            values["staleness_mean"] = sum(staleness) / len(staleness)
        return values

    def _std(self, name: str, mean_square: float) -> float:
        mean = self._sums[name] / self._counts[name]
        return math.sqrt(max(0.0, mean_square - mean * mean))
