"""The operators of the experience side as the buffer calls them: their view of a group, and the facts that they use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.data.operators.base import ScoredGroup, ScoredRollout
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.pipeline import ExperiencePipeline
from rftstream.roles.buffer.bodies import Bodies
from rftstream.roles.buffer.experiences import VerifiedAt
from rftstream.roles.buffer.groups import Group, OpenGroups
from rftstream.roles.buffer.progress import BufferProgress
from rftstream.roles.buffer.reuse import ReusePool


@dataclass(eq=False)
class GroupOperators:
    """The pipeline with the facts of this run. The step makes it at each recovery, and calls `learn` for each outcome
    on the log, in order, and `judge` for each group that may be batched. Before it chooses a batch it asks `outdated`,
    and judges the returned groups again.

    `progress` gives the version at which the next batch is trained; it is None if the versions of rollouts belong to
    another run. `reuse` learns the operators' offers and the batches' uses."""

    pipeline: ExperiencePipeline
    bodies: Bodies
    progress: BufferProgress | None = None
    reuse: ReusePool | None = None
    _facts: Facts = field(default_factory=Facts, init=False)
    """Facts of the run; empty if the run file declares no operators."""

    @property
    def seen(self) -> int:
        """Number of `outcomes` records in the facts."""
        return self._facts.seen

    def learn(self, message: Message | None) -> None:
        """Apply a record of `outcomes`: an outcome to the facts, offers and uses to the pool for reuse."""
        match message:
            case GroupOutcome():
                if self.pipeline.is_declared:
                    self._facts.absorb(message)
                if self.reuse is not None:
                    self.reuse.learn(message)
            case BatchReuse() if self.reuse is not None:
                self.reuse.learn_uses(message)

    def judge(self, group: Group, min_siblings: int) -> str | None:
        """Apply the operators to the group, and store their decision in it. Return why the group is filtered, or None
        if it is not."""
        return self.judge_at(group, min_siblings, self._version_of(group))

    def judge_at(self, group: Group, min_siblings: int, version: int | None) -> str | None:
        """Judge a group as `judge` does, at a given version of the trainer. The recomputation of recorded decisions
        calls this."""
        if self.pipeline:
            scored = self._seen(group, version)
            group.result = self.pipeline.decide(scored, self._facts, min_siblings)
            if group.result.filtered is not None:
                return group.result.filtered
        return "flagged" if group.left_out and len(group.kept) < min_siblings else None

    def outdated(self, groups: OpenGroups) -> list[Group]:
        """Return the waiting groups that were judged at another version than the next batch's, if their operators
        depend on the version. They are judged again, so that all groups of a batch are judged at the batch's version.
        So a restart changes no decision."""
        if not self.pipeline.by_version:
            return []
        judged = ((group, group.result) for group in groups.ready)
        return [group for group, result in judged if result and result.version != self._version_of(group)]

    def _version_of(self, group: Group) -> int | None:
        """Return the version that is passed to a group's operators; None if none of them uses it."""
        if self.progress is None or group.taskset not in self.pipeline.by_version:
            return None
        return self.progress.next_batch

    def _seen(self, group: Group, version: int | None) -> ScoredGroup:
        # Bodies that are not in memory are read once for the whole group, when the first of them is asked for.
        load = cache(partial(self.bodies.get_all, [one.place_offset for one in group.scored]))
        rollouts = (
            ScoredRollout(
                sibling=one.sibling,
                reward=one.summary.reward,
                roles=one.summary.roles,
                num_tokens=one.summary.num_tokens,
                truncated=one.summary.status is RolloutStatus.truncated,
                load=partial(_body, load, one.place_offset),
                oldest_version=None if version is None else one.oldest_version,
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
            version=version,
        )


def _body(load: Callable[[], VerifiedAt], place: tuple[TopicPartition, int]) -> VerifiedRollout:
    return load()[place]
