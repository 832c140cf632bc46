"""Compares two runs over the same recorded groups: batches, rewards, and rejections by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rftstream.algorithms.reward_changes import Scorers, changes_to_text, find_reward_changes
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, OperatorAction
from rftstream.contracts.versions import StepRecord
from rftstream.queries.formatting import columns, number
from rftstream.queries.plain import Report
from rftstream.runs.observer import num_averaged
from rftstream.service.role import Log
from rftstream.transport.base import Transport

Key = tuple[str, str, str]
"""Operator, action and reason."""


@dataclass(slots=True)
class RunSide(Report):
    """One run's side of a comparison of groups. `read_side` makes it."""

    JSON = (
        "run version batches=num_batches rollouts=num_rollouts trained_s tokens_per_s mean_reward "
        "batch_rewards=rewards reward_changes groups=groups_to_json filtered=reasons operators=operators_to_json"
    )

    run: str
    version: int = 0
    """The newest version, which is also the number of trained batches."""
    num_batches: int = 0
    num_rollouts: int = 0
    """Rollouts in trained batches."""
    trained_s: float = 0.0
    """Seconds of the trained batches: waiting, training and publishing, without the time that the run stood still."""
    num_tokens: float = 0.0
    """Tokens in trained batches."""
    reward_sum: float = 0.0
    rewards: list[float] = field(default_factory=list)
    """Mean reward of the rollouts of each trained batch, with the operators' additions."""
    scored: list[tuple[int, Scorers]] = field(default_factory=list)
    """Versions in force, and which rewards scored what they were trained on."""
    results: Counter[str] = field(default_factory=Counter)
    """Result -> groups."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reason -> filtered groups."""
    groups: Counter[Key] = field(default_factory=Counter)
    """Action of operators -> groups."""
    siblings: Counter[Key] = field(default_factory=Counter)
    """Action of operators on only some siblings of a group -> siblings."""
    batched: set[str] = field(default_factory=set)
    """Ids of the groups in batches."""

    @property
    def mean_reward(self) -> float | None:
        """Return the mean reward over all trained rollouts, with the operators' additions."""
        return self.reward_sum / self.num_rollouts if self.num_rollouts else None

    @property
    def reward_changes(self) -> tuple[str, ...]:
        """Return since which versions other rewards scored, whose values do not compare."""
        return changes_to_text(find_reward_changes(self.scored))

    @property
    def last_tenth(self) -> float | None:
        """Return the mean of the last rewards, of as many steps as the end of a run and the studio average."""
        return _mean(self.rewards[-num_averaged(self.version) :])

    @property
    def tokens_per_s(self) -> float | None:
        """Return the trained tokens per second; None where steps have no times."""
        return self.num_tokens / self.trained_s if self.trained_s else None

    def groups_to_json(self) -> dict[str, int]:
        """Return the number of groups with each result."""
        return {str(result): self.results[str(result)] for result in GroupResult}

    def operators_to_json(self) -> list[dict[str, Any]]:
        """Return the number of groups, and of siblings, for each action of operators."""
        names = ("operator", "action", "reason")
        return [
            {**dict(zip(names, key, strict=True)), "groups": count, "siblings": self.siblings[key]}
            for key, count in self.groups.items()
        ]


@dataclass(frozen=True, slots=True)
class SideBySide(Report):
    """Two runs over the same groups. `compare_runs` makes it; a command prints it."""

    JSON = "* batched_in_both=num_in_both batched_only_before=num_only_before batched_only_after=num_only_after"

    before: RunSide
    after: RunSide

    @property
    def num_in_both(self) -> int:
        """Return how many groups are in batches of both runs."""
        return len(self.before.batched & self.after.batched)

    @property
    def num_only_before(self) -> int:
        """Groups in batches of the first run alone."""
        return len(self.before.batched) - self.num_in_both

    @property
    def num_only_after(self) -> int:
        """Groups in batches of the second run alone."""
        return len(self.after.batched) - self.num_in_both

    def why_nothing_is_left(self) -> str | None:
        """Return why no group is in a batch of the second run, or None if some are."""
        if self.after.batched:
            return None
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.after.reasons.most_common(5))
        return (
            f"{self.after.run}: no group is left of {self.after.results.total():,} and nothing was trained: {reasons}; "
            "let the operators keep more"
        )

    def to_text(self) -> str:
        """Return the comparison as text for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        sides = (self.before, self.after)
        rows: list[tuple[object, ...]] = [
            ("", *(side.run for side in sides)),
            ("batches made", *(f"{side.num_batches:,}" for side in sides)),
            ("batches trained", *(f"{side.version:,}" for side in sides)),
            ("rollouts trained", *(f"{side.num_rollouts:,}" for side in sides)),
            ("reward of these", *(number(side.mean_reward) for side in sides)),
            ("  first tenth", *(number(_mean(side.rewards[: num_averaged(side.version)])) for side in sides)),
            ("  last tenth", *(number(side.last_tenth) for side in sides)),
            *((f"groups {result}", *(f"{side.results[str(result)]:,}" for side in sides)) for result in GroupResult),
        ]
        for key in sorted({key for side in sides for key in side.groups}):
            operator, action, reason = key
            rows.append((f"{operator} {action} {reason}".rstrip(), *(f"{side.groups[key]:,}" for side in sides)))
            if any(side.siblings[key] for side in sides):
                rows.append(("  siblings", *(f"{side.siblings[key]:,}" for side in sides)))
        yield from columns(rows)
        yield from (f"{side.run}: the reward changed: {line}" for side in sides for line in side.reward_changes)
        both = f"groups, by their ids, in batches of both {self.num_in_both:,}"
        yield f"{both}, of the first alone {self.num_only_before:,}, of the second {self.num_only_after:,}"


def compare_runs(before: tuple[str, Transport], after: tuple[str, Transport]) -> SideBySide:
    """Read two runs, each given by its name and its log. Memory grows by about 100 bytes for each group."""
    return SideBySide(read_side(*before), read_side(*after))


def read_side(name: str, transport: Transport) -> RunSide:
    """Read one run's side: its batches, rewards and rejections."""
    side, log = RunSide(name), Log(transport)
    for _, message in log.in_force("outcomes"):
        if isinstance(message, GroupOutcome) and not message.late:
            _add_outcome(side, message)
    for _, message in log.in_force("steps"):
        if isinstance(message, StepRecord):
            side.version = message.name.version
            side.scored.append((side.version, message.scorers))
            side.trained_s += sum(message.metrics.get(name, 0.0) for name in ("wait_s", "step_s", "publish_s"))
            side.num_tokens += message.metrics.get("tokens", 0.0)
    sums: dict[int, tuple[float, int]] = {}
    sequences: set[int] = set()
    for _, message in log.in_force("batches"):
        if isinstance(message, BatchManifest):
            sequences.add(message.batch_sequence)
        elif isinstance(message, Experience) and message.reward is not None and message.batch_sequence < side.version:
            total, count = sums.get(message.batch_sequence, (0.0, 0))
            sums[message.batch_sequence] = total + message.reward, count + 1
    side.num_batches = len(sequences)
    side.num_rollouts = sum(count for _, count in sums.values())
    side.reward_sum = sum(total for total, _ in sums.values())
    side.rewards = [total / count for _, (total, count) in sorted(sums.items())]
    return side


def _add_outcome(side: RunSide, outcome: GroupOutcome) -> None:
    side.results[str(outcome.result)] += 1
    if outcome.result is GroupResult.batched:
        side.batched.add(outcome.group_id)
    elif outcome.result is GroupResult.filtered:
        side.reasons[outcome.reason] += 1
    for decision in outcome.decisions:
        key = (decision.operator, str(decision.action), decision.reason)
        side.groups[key] += 1
        if decision.action is OperatorAction.reject:
            side.siblings[key] += len(decision.siblings)
    if outcome.result is GroupResult.filtered and not outcome.decisions:  # a run without operators
        side.groups["(none)", str(OperatorAction.reject), outcome.reason] += 1


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
