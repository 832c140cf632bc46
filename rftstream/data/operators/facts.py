"""Facts: what the outcomes of a run so far show about its problems. Operators read them.

Facts are a fold over the records of `outcomes`, in order. `seen` is the number of these records, so that the facts at
any moment can be made again from the log. Each record costs the same, however many problems there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rftstream.contracts.ids import split_group_id
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.core.samples import plain_sum

RECENT_GROUPS = 64
"""Number of a taskset's newest groups that `PastGroups.recent` uses."""


class PastGroups:
    """The outcomes of the groups of a problem, or of a taskset. Facts makes it; operators read it."""

    __slots__ = ("_last", "_parts", "_reward", "_rollouts", "num_groups", "num_scored")

    def __init__(self, recent: int = 1) -> None:
        self.num_groups = 0
        """Number of groups with an outcome."""
        self.num_scored = 0
        """Number of their rollouts with a reward."""
        self._reward = 0.0
        self._parts: dict[str, tuple[float, int]] = {}
        """Name -> sum over scored rollouts, and their number."""
        self._last: deque[tuple[float, dict[str, float]]] = deque(maxlen=recent)
        """Mean reward and mean parts of the newest groups."""
        self._rollouts: deque[tuple[tuple[float, int], ...]] = deque(maxlen=recent if recent > 1 else 0)
        """Reward and number of tokens of each scored rollout in the newest groups. Problems keep none, since there may
        be many problems."""

    def mean(self, on: str = "") -> float | None:
        """Return the mean of a named part over all scored rollouts; without a name, the mean reward. None if no rollout
        has it."""
        if on:
            total, count = self._parts.get(on, (0.0, 0))
            return total / count if count else None
        return self._reward / self.num_scored if self.num_scored else None

    def recent(self, on: str = "") -> float | None:
        """Return the mean of the newest groups' means: for a taskset up to RECENT_GROUPS groups, for a problem the last
        one."""
        means = [reward for reward, _ in self._last] if not on else [one[on] for _, one in self._last if on in one]
        return sum(means) / len(means) if means else None

    def recent_rewards(self) -> list[float]:
        """Return the rewards of the scored rollouts of a taskset's newest groups."""
        return [reward for group in self._rollouts for reward, _ in group]

    def recent_lengths(self) -> list[int]:
        """Return the numbers of sampled tokens of the scored rollouts of a taskset's newest groups."""
        return [length for group in self._rollouts for _, length in group]

    def absorb(self, scored: Sequence[tuple[float, int]], parts: dict[str, float]) -> None:
        """Add a group: reward and number of tokens of each scored rollout, and the means of their parts."""
        self.num_groups += 1
        if not scored:
            return
        total = plain_sum(reward for reward, _ in scored)
        self.num_scored += len(scored)
        self._reward += total
        for name, value in parts.items():
            before, count = self._parts.get(name, (0.0, 0))
            self._parts[name] = before + value * len(scored), count + len(scored)
        self._last.append((total / len(scored), parts))
        self._rollouts.append(tuple(scored))


_NOTHING = PastGroups()


class Fold(Protocol):
    """An operator's own summary of the outcomes, besides the common facts. An operator of the task side with a method
    `fold` returns a new summary from it, and reads it from the facts with `facts.fold(self)`.

    Worked example: `draws.Progress`."""

    def absorb(self, outcome: GroupOutcome) -> None:
        """Process the next outcome of a group. The summary may depend only on the outcomes so far."""


class Facts:
    """The facts about the problems of a run. Feeder and buffer each make one at every recovery, call `absorb` for each
    record of `outcomes` in order, and pass it to the operators."""

    def __init__(self, folds: Mapping[Any, Fold] | None = None) -> None:
        """`folds`: operator -> its own fold; see `TaskPipeline.new_facts`."""
        self._folds = dict(folds or {})
        self.seen = 0
        """Number of records of `outcomes` in these facts."""
        self.num_groups = 0
        """Number of groups with an outcome."""
        self._problems: dict[tuple[str, int], PastGroups] = {}
        self._tasksets: dict[str, PastGroups] = {}

    def problem(self, taskset: str, index: int) -> PastGroups:
        """Return the outcomes of a problem's groups, in all passes."""
        return self._problems.get((taskset, index), _NOTHING)

    def taskset(self, name: str) -> PastGroups:
        """Return the outcomes of a taskset's groups."""
        return self._tasksets.get(name, _NOTHING)

    def fold(self, operator: Any) -> Any:
        """Return the operator's own fold."""
        return self._folds[operator]

    def absorb(self, outcome: GroupOutcome) -> None:
        """Process the next record of `outcomes`. Late siblings count in `seen`, but change nothing else."""
        self.seen += 1
        if outcome.late:
            return
        for fold in self._folds.values():
            fold.absorb(outcome)
        self.num_groups += 1
        scored = [(rollout.reward, rollout.num_tokens) for rollout in outcome.rollouts if rollout.reward is not None]
        taskset = self._tasksets.setdefault(outcome.taskset, PastGroups(RECENT_GROUPS))
        taskset.absorb(scored, outcome.parts)
        if (place := split_group_id(outcome.group_id)) is not None:
            self._problems.setdefault((place[0], place[2]), PastGroups()).absorb(scored, outcome.parts)
