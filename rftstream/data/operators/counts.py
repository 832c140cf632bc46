"""Counts the actions of each operator in a pipeline, for commands that run operators outside a run.

Each operator has the number of its inputs, the number that it let through, and for each of its reasons a count and some
examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftstream.config.loader import sampling_for
from rftstream.config.sections import RunConfig, TasksetSection
from rftstream.contracts.ids import group_id
from rftstream.contracts.outcomes import OperatorAction
from rftstream.data.operators.base import Draw
from rftstream.data.operators.pipeline import ExperienceResult, PlacedOperator, TaskResult
from rftstream.data.tasksets.base import Taskset

NUM_EXAMPLES = 3
"""Number of examples that are kept for each reason."""
MAX_REASONS = 64
"""Number of an operator's reasons that are counted separately; further ones are counted as OTHER."""
OTHER = "other reasons"
MAX_FAILURES = 20
"""Number of failures whose texts are kept. All failures are counted as reasons."""

SKIP, CHANGE = "skip", "change"


@dataclass(slots=True)
class Effect:
    """The sum of an operator's actions for one reason."""

    count: int = 0
    """Number of problems or groups."""
    num_siblings: int = 0
    """Number of rollouts, if the action is not about the whole group."""
    num_tokens: int = 0
    """Number of masked tokens."""
    examples: list[dict[str, Any]] = field(default_factory=list)
    """The first few examples, as plain values."""


@dataclass(slots=True)
class OperatorCount:
    """The counts of one operator's actions. PipelineCounts makes it."""

    name: str
    where: str
    """Its place in the run file."""
    num_in: int = 0
    num_out: int = 0
    effects: dict[tuple[str, str], Effect] = field(default_factory=dict)
    """Action (skip, change, reject, mask, shape) and reason -> its sum."""

    @property
    def label(self) -> str:
        """Return the name as the run file has it."""
        return self.name.removesuffix(f" ({self.where})")

    def add(self, action: str, reason: str, example: dict[str, Any]) -> Effect:
        """Count an action of the operator, and return the effect that counts it."""
        if (action, reason) not in self.effects and len(self.effects) >= MAX_REASONS:
            reason = OTHER
        effect = self.effects.setdefault((action, reason), Effect())
        effect.count += 1
        if len(effect.examples) < NUM_EXAMPLES:
            effect.examples.append(example)
        return effect

    def to_json(self, *, examples: bool = True) -> dict[str, Any]:
        """Return the counts as a dict for JSON."""
        return {
            "operator": self.label,
            "where": self.where,
            "in": self.num_in,
            "out": self.num_out,
            "reasons": [
                {
                    "action": action,
                    "reason": reason,
                    "count": effect.count,
                    **({"siblings": effect.num_siblings} if effect.num_siblings else {}),
                    **({"tokens": effect.num_tokens} if effect.num_tokens else {}),
                    **({"examples": effect.examples} if examples else {}),
                }
                for (action, reason), effect in self.effects.items()
            ],
        }


class PipelineCounts:
    """The counts of all operators of one side for one taskset. The caller makes it and calls `task` or `experience`
    with each result of the pipeline."""

    def __init__(self, operators: Sequence[PlacedOperator]) -> None:
        """`operators`: those of the taskset, in order, with distinct names (see `name_apart`)."""
        self._operators = operators
        self._complaints = [operator.num_complaints for operator in operators]
        self.counts = [OperatorCount(operator.name, operator.where) for operator in operators]
        self.num_in = 0
        self.num_out = 0
        self.failures: list[str] = []
        """Faults of operators: the place, the problem, and the error."""

    def task(self, result: TaskResult, example: dict[str, Any]) -> None:
        """Count the result of a draw."""
        self._begin()
        for count in self.counts:
            count.num_in += 1
            if result.skipped is not None and result.skipped[0] == count.name:
                count.add(SKIP, result.skipped[1], example)
                return
            if count.name in result.changed:
                count.add(CHANGE, "", example)
            count.num_out += 1
        self.num_out += 1

    def experience(self, result: ExperienceResult, example: dict[str, Any]) -> None:
        """Count the result of a group."""
        self._begin()
        decisions = {decision.operator: decision for decision in result.decisions}
        last = result.decisions[-1] if result.decisions and result.filtered is not None else None
        for count in self.counts:
            count.num_in += 1
            if (decision := decisions.get(count.name)) is not None:
                whole = decision.action is OperatorAction.reject and not decision.siblings
                told = example if whole else {**example, "siblings": list(decision.siblings)}
                effect = count.add(str(decision.action), decision.reason, told)
                effect.num_siblings += len(decision.siblings)
                effect.num_tokens += decision.num_tokens
                if decision is last:
                    return
            count.num_out += 1
        self.num_out += 1

    def _begin(self) -> None:
        self.num_in += 1
        for number, operator in enumerate(self._operators):
            if operator.num_complaints > self._complaints[number]:
                self._complaints[number] = operator.num_complaints
                if len(self.failures) < MAX_FAILURES:
                    self.failures.append(operator.complaint)


def name_apart(operators: Mapping[str, Sequence[PlacedOperator]]) -> None:
    """Give each operator a distinct name, so that its actions are counted separately from those of its namesakes."""
    known: dict[str, PlacedOperator] = {}
    for one in sorted(
        {id(one): one for some in operators.values() for one in some}.values(), key=lambda one: one.number
    ):
        if known.setdefault(one.name, one) is not one:
            one.name = f"{one.name} ({one.where})"


def draws(config: RunConfig, name: str, taskset: Taskset, numbers: Sequence[int]) -> Iterator[Draw]:
    """Yield problems of a taskset as operators see them in its first pass."""
    section: TasksetSection = config.tasksets[name]
    sampling = sampling_for(config, section.sampling, where=f"tasksets.{name}.sampling")
    for index in numbers:
        yield Draw(
            group_id=group_id(name, 0, index, 0),
            taskset=name,
            taskset_pass=0,
            index=index,
            problem=taskset.problem(index),
            sampling=sampling,
            group_size=config.feeder.group_size,
        )
