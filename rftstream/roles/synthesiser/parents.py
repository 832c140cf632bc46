"""Finds the problem of a consumed record, and decides whether new problems are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rftstream.config.role_sections import SynthesiserSection
from rftstream.contracts.ids import derive_seed, group_id, split_group_id, unit_interval
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.problems import NewProblem, ProblemMaker
from rftstream.contracts.tasks import Problem, RolloutIds, Task
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.growing import GrowingTaskset


class NotYetKnown(Exception):
    """The record refers to a problem that this worker has not read yet."""


@dataclass(frozen=True, slots=True)
class Parent:
    """A problem from which new ones are made."""

    name: str
    """`taskset/index`."""
    group: str
    """The group whose record led to this choice."""
    problem: Problem


class ParentChooser:
    """Chooses parents. The step makes it, and asks `parent_of` for each consumed record."""

    def __init__(
        self, section: SynthesiserSection, tasksets: Mapping[str, Taskset], *, into: str, run_seed: int
    ) -> None:
        """`tasksets` are all of the run's. `into` is the growing one."""
        self._section, self._tasksets, self._run_seed = section, tasksets, run_seed
        if section.read == "problems":
            default = {name for name, taskset in tasksets.items() if isinstance(taskset, GrowingTaskset)}
        else:
            default = set(tasksets) - {into}
        self._names = set(section.tasksets) or default

    def parent_of(self, message: Message | None, offset: int) -> Parent | None:
        """Return the problem of the record; None if no new problem is to be made from it. NotYetKnown if the caller
        must ask again later."""
        match message:
            case GroupOutcome() as outcome if not outcome.late and self._takes(outcome.group_id):
                rewards = [rollout.reward for rollout in outcome.rollouts if rollout.reward is not None]
                return self._of_group(outcome.group_id) if self._is_solved_as_wished(rewards) else None
            case VerifiedRollout(verdict=verdict, rollout=rollout) if verdict is not None and rollout is not None:
                ids, problem = rollout.ids, rollout.problem
                chosen = problem is not None and self._is_first(ids) and self._is_solved_as_wished([verdict.reward])
                return Parent(_name(ids.group_id), ids.group_id, problem) if chosen and problem is not None else None
            case Task() as task if self._is_first(task.ids):
                return Parent(_name(task.ids.group_id), task.ids.group_id, task.problem)
            case NewProblem() as new if new.taskset in self._names:
                return self._of_new(new, offset)
        return None

    def _takes(self, group: str) -> bool:
        """Return whether new problems are to be made from this group's problem, whatever its result."""
        place = split_group_id(group)
        if place is None or place[0] not in self._names:
            return False
        chance = unit_interval(derive_seed(self._run_seed, "synthesis", group))
        return chance < self._section.share

    def _is_first(self, ids: RolloutIds) -> bool:
        return ids.sibling == 0 and self._takes(ids.group_id)

    def _is_solved_as_wished(self, rewards: list[float]) -> bool:
        if not rewards:
            return False
        least, most = self._section.solved
        return least <= sum(reward >= self._section.pass_reward for reward in rewards) / len(rewards) <= most

    def _of_group(self, group: str) -> Parent | None:
        name, _, index, _ = split_group_id(group) or ("", 0, 0, 0)
        taskset = self._tasksets[name]
        if index >= len(taskset):
            if isinstance(taskset, GrowingTaskset):
                raise NotYetKnown(group)
            return None
        return Parent(_name(group), group, taskset.problem(index))

    def _of_new(self, new: NewProblem, offset: int) -> Parent | None:
        """Return a problem that a person or program added. A problem that a model made is no parent; otherwise the
        process would never end."""
        if new.maker is ProblemMaker.model:
            return None
        taskset = self._tasksets[new.taskset]
        assert isinstance(taskset, GrowingTaskset), "its name was among those"
        index = taskset.index_at(offset)
        if index is None:
            return None
        group = group_id(new.taskset, 0, index, 0)
        return Parent(_name(group), group, taskset.problem(index)) if self._takes(group) else None


def _name(group: str) -> str:
    name, _, index, _ = split_group_id(group) or (group, 0, 0, 0)
    return f"{name}/{index}"
