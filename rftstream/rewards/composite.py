"""Several rewards of a taskset as one: sum, minimum, gates, and checks.

`config/parts/reward_uses.py` explains the uses of a reward. The whole is `unscorable` if any called reward has no
result, gates included. Only a check may fail, which is a metric.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rftstream.config.parts.reward_uses import RewardUse
from rftstream.contracts.arrays import Array
from rftstream.core.samples import plain_sum
from rftstream.errors import RewardError
from rftstream.rewards.base import Reward, RewardGroup, RewardInput, Score
from rftstream.rewards.evaluating import begin_part
from rftstream.rewards.event_loop import caught
from rftstream.rewards.functions import BatchFailed, Outcome, to_score

InMain = Callable[[Callable[[], list[Outcome]]], list[Outcome]]
"""Makes a call in the process's main thread and returns its result."""

OVER_LIMIT = Score(reward=0.0, metrics={"over_limit": 1.0})
"""The score of an answer whose evaluation exceeded a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One reward of a taskset, with the name of its part and its use."""

    name: str
    use: RewardUse
    reward: Reward
    is_always_asked: bool = False
    """Whether the reward is called even if a gate is closed, since the algorithm needs its arrays."""
    is_group: bool = False
    """Whether the reward sees whole groups."""
    takes_given: bool = False
    """Whether the reward takes that of the environment."""

    @property
    def version(self) -> str:
        """Return the reward's version, with all settings of its use that change the whole."""
        use, version = self.use, f"{'group*' if self.use.group else ''}{self.reward.version}"
        if use.use == "gate":
            return f"gate({use.at_least!r},{use.otherwise!r})*{version}"
        if use.use == "check":
            return f"check({use.share!r})*{version}"
        weighted = version if use.weight == 1.0 else f"{use.weight!r}*{version}"
        return f"min*{weighted}" if use.use == "minimum" else weighted


class CompositeReward:
    """One or more rewards as one. A reward that does not apply to a rollout is left out.

    `build_reward` makes it, `build_rewards` opens it, and a scorer calls `score_all`.
    """

    def __init__(self, parts: Sequence[RewardPart]) -> None:
        self._parts = tuple(parts)
        self.scorer = "+".join(part.name for part in parts)
        self.version = ",".join(part.version for part in parts)
        self.batched = any(getattr(part.reward, "batched", False) for part in parts)
        """Whether any part scores several rollouts at once."""
        self.reads_tokens = any(getattr(part.reward, "reads_tokens", True) for part in parts)
        """Whether any part gets tokens."""
        self.group = any(part.is_group for part in parts)
        """Whether any part sees whole groups."""
        self.takes_given = any(part.takes_given for part in parts)
        """Whether any part takes the reward of the environment."""
        self.num_concurrent = self._least_concurrent()
        """Number of rollouts that are best scored at the same time, each by itself: some part asks a served model, and
        none scores a list at once. 0: not so."""

    @property
    def rewards(self) -> list[Reward]:
        """Return the rewards of all parts, in order."""
        return [part.reward for part in self._parts]

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights of the parts that are summed, by name."""
        return {part.name: part.use.weight for part in self._parts if part.use.use == "sum"}

    def _least_concurrent(self) -> int:
        served = [part.reward.num_concurrent for part in self._parts if _is_served(part)]  # type: ignore[attr-defined]
        over_lists = any(getattr(part.reward, "batched", False) for part in self._parts if not _is_served(part))
        return min(served, default=0) if not over_lists and not self.group else 0

    def open(self) -> None:
        """Open all rewards that need costly preparation."""
        for part in self._parts:
            if (opens := getattr(part.reward, "open", None)) is not None:
                opens()

    def __call__(self, item: RewardInput) -> Score:
        outcome = self.score_all([item])[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def score_all(
        self,
        items: Sequence[RewardInput],
        *,
        over_limit: Sequence[int] = (),
        group: RewardGroup | None = None,
        in_main: InMain | None = None,
    ) -> list[Score | BaseException]:
        """Return for each item its score or its error. Gates are called first. `group`: the items are its siblings; for
        rewards that see groups, each item is otherwise a group of its own. The parts in `over_limit` are 0
        (ScoreItem.over_limit), since the policy's answer exceeded their limits (evaluating.py). `in_main` makes the
        calls of rewards that ask no served model, if this is not the main thread."""
        if self.group and group is None:
            return [self.score_all([item], over_limit=over_limit, group=RewardGroup.of([item]))[0] for item in items]
        if len(self._parts) == 1:
            part = self._parts[0]
            if part.is_group and group is not None:
                single = self._together(part, group, over_limit)
            else:
                single = self._outcomes(part, items, range(len(items)), over_limit, in_main)
            return [self._weighed(one, item.roles) for one, item in zip(single, items, strict=True)]
        found: list[dict[str, Outcome]] = [{} for _ in items]
        for part in sorted(self._parts, key=lambda part: (part.use.use != "gate", part.is_group)):
            asked = [
                place
                for place, item in enumerate(items)
                if self._is_asked(part, items[0] if part.is_group else item, found[place])
            ]
            if part.is_group and group is not None:
                scores = [_scores_of(found[place]) for place in asked]
                earlier = group.only(asked).after([self._so_far(found[place]) for place in asked], scores)
                outcomes = self._together(part, earlier, over_limit)
            else:
                outcomes = self._outcomes(part, items, asked, over_limit, in_main)
            for place, outcome in zip(asked, outcomes, strict=True):
                found[place][part.name] = outcome
        return [self._whole(outcomes, item.roles) for outcomes, item in zip(found, items, strict=True)]

    def _outcomes(
        self,
        part: RewardPart,
        items: Sequence[RewardInput],
        asked: Sequence[int],
        over_limit: Sequence[int],
        in_main: InMain | None = None,
    ) -> list[Outcome]:
        """Return the result of one reward for the items at the places in `asked`."""
        if in_main is not None and not _is_served(part):
            return in_main(lambda: self._outcomes(part, items, asked, over_limit))
        number = self._parts.index(part) + 1
        begin_part(number)
        numbers = [number + len(self._parts) * place for place in asked]
        if not set(numbers) & set(over_limit) and getattr(part.reward, "batched", False):
            return _outcomes(part, [items[place] for place in asked])
        outcomes: list[Outcome] = []
        for one, place in zip(numbers, asked, strict=True):
            begin_part(one)
            outcomes += [OVER_LIMIT] if one in over_limit else _outcomes(part, [items[place]])
        return outcomes

    def _is_asked(self, part: RewardPart, item: RewardInput, found: dict[str, Outcome]) -> bool:
        if part.use.use == "check":
            return _chance(part.name, item) < part.use.share
        return part.use.use == "gate" or part.is_always_asked or self._closed(found) is None

    def _together(self, part: RewardPart, group: RewardGroup, over_limit: Sequence[int]) -> list[Outcome]:
        """Return the result of one reward that compares siblings."""
        number, count, reward = self._parts.index(part) + 1, len(group.siblings), part.reward
        begin_part(number)
        if not count or number in over_limit:
            return [OVER_LIMIT] * count
        return _listed(part, lambda: reward.score_group(group), count, together=True)  # type: ignore[attr-defined]

    def _so_far(self, found: dict[str, Outcome]) -> float | None:
        """Return the reward by the parts that were called already; None if none counts, or if one has failed."""
        checks = {part.name for part in self._parts if part.use.use == "check"}
        counted = {name: outcome for name, outcome in found.items() if name not in checks}
        failed = any(isinstance(outcome, BaseException) for outcome in counted.values())
        return None if failed else self._total(counted)

    def _closed(self, found: dict[str, Outcome]) -> RewardPart | None:
        """Return the first closed gate. A gate that failed or does not apply is not closed."""
        for part in self._parts:
            outcome = found.get(part.name)
            if part.use.use == "gate" and isinstance(outcome, Score) and outcome.reward < part.use.at_least:
                return part
        return None

    def _weighed(self, outcome: Outcome, roles: Sequence[str]) -> Score | BaseException:
        """Return the weighted score of the only part."""
        if not isinstance(outcome, Score):
            return self._nothing() if outcome is None else outcome
        part = self._parts[0]
        reward = part.use.weight * outcome.reward
        if not math.isfinite(reward):
            return RewardError(f"{self.scorer}: the weighted reward is {reward}, expected a finite number")
        parts = outcome.parts or {part.name: outcome.reward}
        whole = replace(outcome, reward=reward, parts=parts, roles={})
        return self._with_roles(whole, {part.name: outcome}, roles)

    def _nothing(self) -> RewardError:
        return RewardError(f"{self.scorer}: returned None, so no reward applies to this rollout; add one that does")

    def _whole(self, found: dict[str, Outcome], roles: Sequence[str]) -> Score | BaseException:
        """Return the score of a rollout from the scores of its parts, by name."""
        checks = {part.name for part in self._parts if part.use.use == "check"}
        counted = {name: outcome for name, outcome in found.items() if name not in checks}
        errors = [outcome for outcome in counted.values() if isinstance(outcome, BaseException)]
        if errors:
            return next((error for error in errors if isinstance(error, BatchFailed)), errors[0])
        total = self._total(counted)
        if total is None:
            return self._nothing()
        if not math.isfinite(total):
            return RewardError(f"{self.scorer}: the weighted sum is {total}, expected a finite number")
        numbers_of, metrics, additions, details = {}, {}, dict[str, Array](), list[str]()
        for part in self._parts:  # in the order of the run file, independent of the order of the calls
            score = found.get(part.name)
            if isinstance(score, Score) and score.detail:
                details.append(f"{part.name}: {score.detail}")
            if part.name in checks:
                metrics.update(_second_opinion(part.name, score, total) if part.name in found else {})
            elif isinstance(score, Score):
                if twice := additions.keys() & score.additions.keys():
                    return RewardError(f"{self.scorer}: two parts stamp {min(twice)!r}, expected one that does")
                additions.update(score.additions)
                numbers_of[part.name] = score.reward
                numbers_of.update({f"{part.name}.{key}": value for key, value in score.parts.items()})
                metrics.update({f"{part.name}.{key}": value for key, value in score.metrics.items()})
        detail = "\n".join(details)
        whole = Score(reward=total, parts=numbers_of, metrics=metrics, additions=additions, detail=detail)
        return self._with_roles(whole, counted, roles)

    def _with_roles(self, whole: Score, counted: dict[str, Outcome], roles: Sequence[str]) -> Score | BaseException:
        """Return the score with a reward for each role of the rollout, if some reward tells roles apart. The other
        rewards count alike for all of them."""
        given = {name: one.roles for name, one in counted.items() if isinstance(one, Score) and one.roles}
        for name, rewards in given.items():
            said = ", ".join(sorted(rewards))
            if not roles:
                return RewardError(
                    f"{name}: rewarded the roles {said}, but no call of the rollout has a role; let the agent name it "
                    f"as its model, such as policy:{min(rewards)}"
                )
            if missing := [role for role in roles if role not in rewards]:
                return RewardError(
                    f"{name}: rewarded the roles {said}, and not {', '.join(missing)}; expected a reward for each role "
                    "of the rollout, or None for one that is not to be trained"
                )
        totals = {role: self._total(counted, role) for role in roles} if given else {}
        if given and all(total is None for total in totals.values()):
            return RewardError(
                f"{self.scorer}: none of the roles {', '.join(roles)} has a reward, expected at least one"
            )
        if odd := [role for role, total in totals.items() if total is not None and not math.isfinite(total)]:
            return RewardError(f"{self.scorer}: the weighted reward of {odd[0]} is not finite, expected a number")
        return replace(whole, roles=totals) if totals else whole

    def _total(self, counted: dict[str, Outcome], role: str = "") -> float | None:
        """Return the number to train on, of the rollout or of one of its roles. None if no counting reward applies, or
        if the role is not trained."""
        if (gate := self._closed(counted)) is not None:
            return gate.use.otherwise
        terms: dict[str, list[float]] = {"sum": [], "minimum": []}
        for part in self._parts:
            outcome = counted.get(part.name)
            if part.use.use in terms and isinstance(outcome, Score):
                reward = outcome.roles.get(role) if role and outcome.roles else outcome.reward
                if reward is None:
                    return None
                terms[part.use.use].append(part.use.weight * reward)
        if least := terms["minimum"]:
            terms["sum"].append(min(least))
        return plain_sum(terms["sum"]) if terms["sum"] else None


def _is_served(part: RewardPart) -> bool:
    return getattr(part.reward, "num_concurrent", 0) > 0


def _scores_of(found: dict[str, Outcome]) -> dict[str, float]:
    return {name: outcome.reward for name, outcome in found.items() if isinstance(outcome, Score)}


def _second_opinion(name: str, outcome: Outcome, total: float) -> dict[str, float]:
    """Return the metrics of a check: its own, and its distance from the whole, or its failure."""
    if not isinstance(outcome, Score):
        return {f"{name}.failed": 1.0}
    measured = {f"{name}.{key}": value for key, value in outcome.metrics.items()}
    return {**measured, f"{name}.apart": abs(outcome.reward - total), f"{name}.failed": 0.0}


def _chance(name: str, item: RewardInput) -> float:
    """Return a number from 0 to 1 that is the same each time the rollout is scored."""
    digest = hashlib.sha256("\0".join((name, item.prompt, item.completion)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _outcomes(part: RewardPart, items: Sequence[RewardInput]) -> list[Outcome]:
    """Return the result of one reward for each item."""
    reward: Any = part.reward
    if not items:
        return []
    if not getattr(reward, "batched", False):
        return [caught(lambda one: to_score(reward(one), where=part.name), item) for item in items]
    return _listed(part, lambda: reward.score_all(items), len(items))


def _listed(part: RewardPart, call: Callable[[], Any], count: int, *, together: bool = False) -> list[Outcome]:
    """Return the values of a call for `count` rollouts. `together`: they cannot be scored one by one."""
    values = caught(lambda: list(call()))
    if not isinstance(values, BaseException) and len(values) != count:
        values = RewardError(f"{part.name}: returned {len(values)} values for {count} rollouts")
    if isinstance(values, BaseException):
        return [values if together or count == 1 else BatchFailed(f"{part.name}: {values!r}")] * count
    known = (type(None), BaseException)
    return [value if isinstance(value, known) else caught(to_score, value, where=part.name) for value in values]
