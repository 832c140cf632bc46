"""What batches of a simulated run have once more: told, allowed, later than the group's own batch, with the same
bodies."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.outcomes import BatchReuse, GroupResult, GroupUse, ReuseKind
from rftstream.data.operators.pipeline import ExperiencePipeline

if TYPE_CHECKING:
    from tests.simulation.laws import Laws


class Reused:
    def __init__(self, laws: Laws) -> None:
        self._laws = laws
        self._limits = ExperiencePipeline.of(laws.config).reusing
        self._told: set[int] = set()
        """Batches whose record is there."""
        self._uses: dict[tuple[str, int], list[int]] = defaultdict(list)
        """Group and operator -> the batches that used it, in order."""
        self._firsts: dict[str, Experience] = {}
        """Rollout -> what its group's own batch has of it."""
        self._held: dict[int, dict[str, Experience]] = defaultdict(dict)
        """Batch -> rollout -> what it has of it once more."""
        self.num_uses = 0

    def first(self, experience: Experience) -> None:
        """What a group's own batch has."""
        assert experience.weight == 1
        self._firsts[experience.ids.rollout_id] = experience

    def again(self, experience: Experience) -> None:
        held = self._held[experience.batch_sequence]
        assert experience.ids.rollout_id not in held, "once in a batch"
        held[experience.ids.rollout_id] = experience

    def told(self, reuse: BatchReuse) -> None:
        """All that the batch has once more is told, and nothing else."""
        batch = reuse.batch_sequence
        assert self._limits, "nothing is reused without an operator for it"
        assert batch not in self._told
        self._told.add(batch)
        names = {name for use in reuse.uses for name in use.rollouts}
        assert names == self._held[batch].keys(), f"batch {batch}: {names ^ self._held[batch].keys()}"
        for place, limits in self._limits.items():
            assert sum(use.operator == place for use in reuse.uses) <= limits.per_batch
        for use in reuse.uses:
            self._use(batch, use)

    def _use(self, batch: int, use: GroupUse) -> None:
        limits, outcome = self._limits[use.operator], self._laws.outcomes[use.group_id]
        (offer,) = [one for one in outcome.offers if one.operator == use.operator]
        before = self._uses[use.group_id, use.operator]
        if outcome.batch_sequence is not None and use.kind is ReuseKind.replay:
            assert outcome.result is GroupResult.batched
            assert batch - max([outcome.batch_sequence, *before]) > limits.cool_down, f"{use.group_id}: no rest"
        assert use.use == len(before) + 1 <= limits.max_uses, f"{use.group_id}: use {use.use} after {before}"
        assert not before or before[-1] < batch
        before.append(batch)
        assert use.weight == limits.weight * limits.decay ** (use.use - 1)
        assert batch <= offer.until == offer.since + limits.max_staleness
        self.num_uses += 1
        kept = [one.rollout_id for one in outcome.rollouts if one.reward is not None and one.rejected is None]
        assert use.rollouts
        assert set(use.rollouts) <= set(kept)
        for name in use.rollouts:
            self._same(self._held[batch][name], use)

    def _same(self, experience: Experience, use: GroupUse) -> None:
        assert (experience.use, experience.weight) == (use.use, use.weight)
        name = experience.ids.rollout_id
        if use.kind is ReuseKind.hindsight:
            assert (experience.loss_kind, experience.reward) == (LossKind.sft, None)
            return
        first = self._firsts[name]
        assert first.batch_sequence < experience.batch_sequence
        like = {"batch_sequence": 0, "share": 0, "position": 0, "use": 0, "weight": 1.0}
        assert replace(first, **like) == replace(experience, **like), f"{name}: other tokens, logprobs or rewards"
        versions = [span.version for segment in experience.segments for span in segment.versions]
        if versions:
            assert experience.batch_sequence - min(versions) <= self._limits[use.operator].max_staleness

    def manifest(self, batch: int, num_groups: int) -> None:
        """A batch with new groups has its record in the same transaction."""
        if self._limits and num_groups:
            assert batch in self._told, f"batch {batch}: nothing tells what it has once more"
        assert batch in self._told or not self._held[batch]
