"""The operators of the experience side, as the buffer asks them: what they see of a group, and by which facts."""

from __future__ import annotations

from functools import partial

from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.data.operators.base import ScoredGroup, ScoredRollout
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.pipeline import ExperiencePipeline
from rftstream.roles.buffer.bodies import Bodies
from rftstream.roles.buffer.groups import Group


class GroupOperators:
    """The pipeline with the facts of this run. The step makes it at each recovery, calls `learn` for each outcome on
    the log, in order, and `judge` for each group that may be batched."""

    def __init__(self, pipeline: ExperiencePipeline, bodies: Bodies) -> None:
        self._pipeline = pipeline
        self._bodies = bodies
        self._facts = Facts()
        """Empty where the run file declares no operators."""

    def learn(self, outcome: GroupOutcome) -> None:
        """Add an outcome that stands on the log to the facts."""
        if self._pipeline.is_declared:
            self._facts.absorb(outcome)

    def judge(self, group: Group, min_siblings: int) -> str | None:
        """Note in the group what operators make of it. Return why it is filtered, or None if it is not."""
        if not self._pipeline:
            return None
        group.result = self._pipeline.decide(self._seen(group), self._facts, min_siblings)
        return group.result.filtered

    def _seen(self, group: Group) -> ScoredGroup:
        rollouts = (
            ScoredRollout(
                sibling=one.sibling,
                reward=one.summary.reward,
                num_tokens=one.summary.num_tokens,
                truncated=one.summary.status is RolloutStatus.truncated,
                load=partial(self._bodies.get, *one.place_offset),
            )
            for one in group.scored
            if one.summary.reward is not None
        )
        return ScoredGroup(
            group_id=group.group_id,
            taskset=group.taskset,
            sequence=group.sequence,
            size=group.size,
            rollouts=tuple(rollouts),
        )
