"""Which groups a batch reuses: a fold over `outcomes`, and a choice that depends only on it and on seeds.

An outcome records what operators offer of a group, where its rollouts are on `verified`, and the last batch that may
use it. The record of each batch names the groups that it reused. So after a kill, everything is known again from
`outcomes`. Bodies are read when a batch uses them. Retention keeps the bodies until no batch may use them any more
(`ReuseOffer.until`)."""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rftstream.config.stages import Stage, Stages
from rftstream.contracts import codec
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.beside import columns_of, cut_columns, join_columns, wire_columns
from rftstream.contracts.ids import derive_seed, unit_interval
from rftstream.contracts.outcomes import (
    BatchReuse,
    GroupOutcome,
    GroupUse,
    MaskedSpan,
    OperatorAction,
    ReuseKind,
    ReuseOffer,
)
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.rollouts import Segment
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.data.operators.base import ReuseLimits, TokenSpan
from rftstream.data.operators.pipeline import ExperienceResult
from rftstream.errors import ConfigError, ContractError, PositionMissing
from rftstream.models.rendering import Renderer
from rftstream.roles.buffer.experiences import encoded, experience_of
from rftstream.roles.buffer.groups import Group
from rftstream.service.reading import PlaceReader
from rftstream.service.role import Publish
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

ANY = 1 << 62
"""A number above every sequence."""


def offers_of(group: Group, result: ExperienceResult, oldest: int | None, next_batch: int) -> dict[str, Any]:
    """Return the fields of an outcome about reuse; none without offers. `oldest` is the version from which the group's
    age counts; None if the group's versions belong to another run."""
    if not result.offers:
        return {}
    since = next_batch if oldest is None else oldest
    return {
        "offers": tuple(
            ReuseOffer(
                kind=offer.limits.kind,
                operator=offer.operator,
                since=since,
                until=since + offer.limits.max_staleness,
                siblings=offer.siblings,
            )
            for offer in result.offers
        ),
        "offsets": tuple(group.siblings[number].offset for number in sorted(group.siblings)),
        "masks": tuple(
            MaskedSpan(sibling=sibling, segment=span.segment, start=span.start, stop=span.stop)
            for sibling, spans in sorted(result.masks.items())
            for span in spans
        ),
    }


def result_of(outcome: GroupOutcome) -> ExperienceResult:
    """Return the operators' decision on a group, in the parts that its experiences depend on."""
    terms: dict[int, dict[str, float]] = {}
    for decision in outcome.decisions:
        if decision.action is OperatorAction.shape:
            for sibling, term in zip(decision.siblings, decision.terms, strict=True):
                own = terms.setdefault(sibling, {})
                own[decision.reason] = own.get(decision.reason, 0.0) + term
    masks: dict[int, tuple[TokenSpan, ...]] = {}
    for span in outcome.masks:
        masks[span.sibling] = (*masks.get(span.sibling, ()), TokenSpan(span.segment, span.start, span.stop))
    return ExperienceResult(outcome.seen or 0, terms=terms, masks=masks)


# --------------------------------------------------------------------------------------------- which ones


@dataclass(slots=True)
class _Held:
    """An offer that later batches may use."""

    outcome: GroupOutcome
    offer: ReuseOffer
    num_uses: int = 0
    last: int | None = None
    """The last batch with the group, at first its own batch (for `replay`); None if the group was in no batch."""


@dataclass(frozen=True, slots=True)
class ChosenUse:
    """The next batch's use of a group."""

    use: GroupUse
    outcome: GroupOutcome


@dataclass(slots=True)
class ReusePool:
    """The offers that batches may use. Its owner calls `learn` for each outcome and `learn_uses` for each BatchReuse on
    the log, in order, and `choose` for a batch. The buffer makes one, and so does the recomputation of recorded
    choices."""

    reusing: Mapping[int, ReuseLimits]
    """Place of an operator in the pipeline -> limits on the use of its offers, in order of the places."""
    run_seed: int
    in_order: bool
    """Whether batches take groups in order of sequence. Then a group that was in no batch counts only from the first
    batch whose groups all have higher sequences, since the time of its decision is not deterministic."""
    _held: dict[int, dict[int, _Held]] = field(default_factory=dict)
    """Place of the operator -> sequence of the group -> the offer."""

    def __bool__(self) -> bool:
        """Whether any operator offers groups for reuse."""
        return bool(self.reusing)

    @property
    def num_held(self) -> int:
        """Number of offers."""
        return sum(map(len, self._held.values()))

    @property
    def waits_for_outcomes(self) -> bool:
        """Whether all decisions must be on the log before a batch is made."""
        return self.in_order and any(limits.kind is ReuseKind.hindsight for limits in self.reusing.values())

    def learn(self, outcome: GroupOutcome) -> None:
        """Apply an outcome from the log."""
        for offer in outcome.offers:
            limits = self.reusing.get(offer.operator)
            if limits is None or outcome.late:
                continue
            own = self._held.setdefault(offer.operator, {})
            last = outcome.batch_sequence if offer.kind is ReuseKind.replay else None
            own[outcome.sequence] = _Held(outcome, offer, last=last)
            while len(own) > limits.max_held:
                del own[next(iter(own))]

    def learn_uses(self, reuse: BatchReuse) -> None:
        """Apply the uses of a batch on the log."""
        for use in reuse.uses:
            held = self._held.get(use.operator, {}).get(use.sequence)
            if held is not None:
                held.num_uses, held.last = use.use, reuse.batch_sequence
                if use.use >= self.reusing[use.operator].max_uses:
                    del self._held[use.operator][use.sequence]
        self._forget_too_old(reuse.batch_sequence)

    def _forget_too_old(self, batch: int) -> None:
        """Forget the offers that no batch after this one may use. This happens when the log is read, not when a batch
        is made, so that a successor knows the same offers."""
        for own in self._held.values():
            for sequence in [sequence for sequence, held in own.items() if held.offer.until <= batch]:
                del own[sequence]

    def choose(self, batch: int, sequences: Collection[int], *, takes_demonstrations: bool) -> list[ChosenUse]:
        """Return the groups that the batch reuses. `sequences` are those of its new groups; a batch without new groups
        reuses none. `takes_demonstrations` tells whether the batch's algorithm learns from demonstrations beside
        rollouts."""
        if not sequences:
            return []
        before = min(sequences) if self.in_order else ANY
        chosen: dict[str, ChosenUse] = {}
        for place, limits in self.reusing.items():
            if limits.kind is ReuseKind.hindsight and not takes_demonstrations:
                continue
            ready = (held for held in self._held.get(place, {}).values() if _is_due(held, limits, batch, before))
            for held in heapq.nlargest(limits.per_batch + len(chosen), ready, key=lambda one: self._luck(one, batch)):
                own_uses = sum(one.use.operator == place for one in chosen.values())
                if own_uses < limits.per_batch and held.outcome.group_id not in chosen:
                    chosen[held.outcome.group_id] = ChosenUse(_use_of(held, limits, batch), held.outcome)
        return list(chosen.values())

    def _luck(self, held: _Held, batch: int) -> float:
        """Return a random number. The groups with the largest numbers are a sample without replacement, weighted by
        priority (Efraimidis and Spirakis, 2006)."""
        seed = derive_seed(self.run_seed, "reuse", held.offer.operator, batch, held.outcome.group_id)
        return math.log1p(-unit_interval(seed)) / held.outcome.priority


def _is_due(held: _Held, limits: ReuseLimits, batch: int, before: int) -> bool:
    if held.outcome.priority <= 0 or held.offer.until < batch:
        return False
    if held.last is not None:
        return held.last < batch - limits.cool_down
    return held.outcome.sequence < before


def _use_of(held: _Held, limits: ReuseLimits, batch: int) -> GroupUse:
    outcome, offer = held.outcome, held.offer
    return GroupUse(
        group_id=outcome.group_id,
        taskset=outcome.taskset,
        sequence=outcome.sequence,
        kind=offer.kind,
        operator=offer.operator,
        use=held.num_uses + 1,
        weight=limits.weight * limits.decay**held.num_uses,
        staleness=max(0, batch - offer.since),
        rollouts=tuple(
            rollout.rollout_id
            for rollout in outcome.rollouts
            if rollout.reward is not None
            and rollout.rejected is None
            and (not offer.siblings or _sibling(rollout.rollout_id) in offer.siblings)
        ),
    )


def _sibling(rollout_id: str) -> int:
    return int(rollout_id.rpartition("/")[2])


def uses_of(chosen: Sequence[ChosenUse]) -> tuple[GroupUse, ...]:
    """Return the uses in the form of the batch's record."""
    return tuple(one.use for one in chosen)


def metrics_of(chosen: Sequence[ChosenUse]) -> dict[str, float]:
    """Return the metrics of a batch about its reused groups."""
    values = {"reused_groups": float(len(chosen))}
    if chosen:
        values["reused_staleness_mean"] = sum(one.use.staleness for one in chosen) / len(chosen)
    return values


# --------------------------------------------------------------------------------------------- what the trainer gets


class ReusedBodies:
    """Makes the experiences of reused groups from the records of `verified`. The buffer's step makes one at each
    recovery and asks `experiences` for each use in a batch."""

    def __init__(self, transport: Transport, renderer: Renderer | None) -> None:
        """`renderer` writes the prompts of demonstrations; None if there are no demonstrations."""
        self._transport = transport
        self._reader = PlaceReader(transport, "verified")
        self._renderer = renderer

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def read(self, chosen: Sequence[ChosenUse]) -> dict[str, VerifiedRollout]:
        """Return the rollouts of these uses by id. PositionMissing if a record is gone from the log, ContractError if
        another rollout is in its place."""
        if not chosen:
            return {}
        num_partitions = len(self._transport.admin.end_offsets("verified"))
        wanted: dict[tuple[TopicPartition, int], str] = {}
        for one in chosen:
            place = TopicPartition("verified", one.outcome.sequence % num_partitions)
            for offset, rollout in zip(one.outcome.offsets, one.outcome.rollouts, strict=True):
                if rollout.rollout_id in one.use.rollouts:
                    wanted[place, offset] = rollout.rollout_id
        found: dict[str, VerifiedRollout] = {}
        for record in self._reader.read(wanted):
            name = wanted.pop((record.place, record.offset))
            found[name] = _verified(record, name)
        for (place, offset), name in wanted.items():
            raise PositionMissing(
                f"{place}@{offset}: {name}: gone from the log, expected it to stay while a batch may use it once "
                "more; somebody deleted what was still needed"
            )
        return found

    def add_to(
        self,
        experiences_of: Mapping[int, list[Publish]],
        chosen: Sequence[ChosenUse],
        bodies: Mapping[str, VerifiedRollout],
        batch: int,
    ) -> dict[int, tuple[str, ...]]:
        """Spread the experiences of all uses over the shares, as evenly as possible. Return the groups that each share
        received."""
        reused: dict[int, tuple[str, ...]] = {}
        for index, one in enumerate(chosen):
            share = index * len(experiences_of) // len(chosen)
            own = experiences_of[share]
            own.extend(map(encoded, self.experiences(one, bodies, batch, share, len(own))))
            reused[share] = (*reused.get(share, ()), one.use.group_id)
        return reused

    def experiences(
        self, one: ChosenUse, bodies: Mapping[str, VerifiedRollout], batch: int, share: int, first: int
    ) -> Iterator[Experience]:
        """Yield the experiences of a use. `first` is the place of the first experience in the share."""
        use, result = one.use, result_of(one.outcome)
        for position, name in enumerate(use.rollouts, first):
            made = experience_of(
                bodies[name], batch, share, position=position, result=result, use=use.use, weight=use.weight
            )
            yield made if use.kind is ReuseKind.replay else self._as_demonstration(made, bodies[name])

    def _as_demonstration(self, experience: Experience, verified: VerifiedRollout) -> Experience:
        """Return the attempt as a demonstration, with the problem that it solves as the prompt and the policy's turns
        as the answer. If its prompt cannot be rendered or is too long, no token of it is trained on."""
        rollout, renderer = verified.rollout, self._renderer
        assert rollout is not None
        assert rollout.posted is not None
        assert renderer is not None, "the run makes demonstrations"
        assert rollout.problem is not None
        ((sampled,), (segment,)) = rollout.segments, experience.segments
        try:
            prompt = renderer.render(rollout.posted.reached, rollout.problem.tools)
            made = with_prompt(segment, prompt, bytes(sampled.loss_mask.data).index(1))
            if renderer.context is not None and made.token_ids.shape[0] > renderer.context:
                raise ConfigError(f"{made.token_ids.shape[0]:,} tokens, expected at most {renderer.context:,}")
        except (ConfigError, ValueError) as error:
            log.warning("%s: what it reached cannot be a demonstration: %s", rollout.ids.rollout_id, error)
            mask = segment.loss_mask
            made = replace(segment, loss_mask=replace(mask, data=bytes(len(mask.data))))
        return replace(
            experience,
            loss_kind=LossKind.sft,
            segments=(made,),
            reward=None,
            parts={},
            additions={},
            terms={},
            verified_reward=None,
        )


def _verified(record: Record, name: str) -> VerifiedRollout:
    message = codec.from_record(record)
    if not isinstance(message, VerifiedRollout) or message.ids.rollout_id != name:
        raise ContractError(f"is not {name}, expected the rollout that its group's outcome names", where=str(record))
    return message


def with_prompt(segment: Segment, prompt: Sequence[int], first: int) -> Segment:
    """Return the segment with its first `first` tokens replaced by another prompt."""
    moved = len(prompt) - first
    ids_T, logprobs_T, mask_T = (
        one.numpy()[first:] for one in (segment.token_ids, segment.behavior_logprobs, segment.loss_mask)
    )
    kept = cut_columns(columns_of(segment.beside), first)
    return replace(
        segment,
        token_ids=Array.of(np.concatenate([np.asarray(prompt, np.int32), ids_T]), "int32"),
        behavior_logprobs=Array.of(np.concatenate([np.zeros(len(prompt), np.float32), logprobs_T]), "float32"),
        loss_mask=Array.of(np.concatenate([np.zeros(len(prompt), np.uint8), mask_T]), "uint8"),
        versions=tuple(replace(span, start=span.start + moved) for span in segment.versions),
        beside=wire_columns(join_columns([(len(prompt), {}), (len(ids_T), kept)])),
    )


def takes_demonstrations(stages: Stages, stage: Stage) -> bool:
    """Return whether batches of the stage may contain demonstrations that operators make of attempts. For runs without
    stages `check_reuse` has checked this already."""
    return not stages.named or stage.kind is LossKind.sft
