"""The choice of a group's rollouts about which people are asked: rules about scores, and shares by the run's seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts.feedback import FeedbackKind, question_id_of
from rftstream.contracts.ids import derive_seed, unit_interval
from rftstream.contracts.outcomes import RolloutSummary
from rftstream.contracts.questions import Question, QuestionReason
from rftstream.contracts.rollouts import RolloutStatus

Scored = tuple[RolloutSummary, Mapping[str, float]]
"""A rollout and the parts of its reward."""

FINISHED = (RolloutStatus.completed, RolloutStatus.truncated)
"""Statuses of rollouts that a person can judge: others have nothing to show."""


def choose_questions(
    settings: FeedbackSection, seed: int, group_id: str, sequence: int, siblings: Sequence[Scored], now: float
) -> list[Question]:
    """Return the questions about a group. They depend only on the settings, the run's seed and the group; only their
    times depend on `now`."""
    finished = [sibling for sibling in siblings if sibling[0].status in FINISHED]
    expires_at = now + settings.expires_s if settings.expires_s is not None else None
    held_until = now + settings.hold_s if settings.hold_s else None

    def question(kind: FeedbackKind, rollouts: tuple[str, ...], reason: QuestionReason) -> Question:
        question_id = question_id_of(kind, rollouts)
        return Question(
            question_id=question_id,
            kind=kind,
            rollouts=rollouts,
            group_id=group_id,
            sequence=sequence,
            reason=reason,
            quorum=settings.quorum,
            asked_at=now,
            expires_at=expires_at,
            held_until=held_until,
            order=choose_order(seed, question_id, len(rollouts)),
        )

    found = [
        question(FeedbackKind(settings.ask), (summary.rollout_id,), reason)
        for summary, parts in finished
        if (reason := _why(settings, seed, summary, parts)) is not None
    ]
    found += [question(FeedbackKind.pair, pair, QuestionReason.share) for pair in _pairs(settings, seed, finished)]
    return found


def choose_order(seed: int, question_id: str, num_rollouts: int) -> tuple[int, ...]:
    """Return the order in which the rollouts of a question are shown, by the run's seed."""
    swapped = num_rollouts == 2 and derive_seed(seed, "order", question_id) % 2
    return (1, 0) if swapped else tuple(range(num_rollouts))


def _why(
    settings: FeedbackSection, seed: int, summary: RolloutSummary, parts: Mapping[str, float]
) -> QuestionReason | None:
    """Return the reason to ask people about this rollout; None if there is none."""
    if settings.unscorable and summary.reward is None:
        return QuestionReason.unscorable
    numbers = [part for part in parts.values() if math.isfinite(part)]
    if settings.disagreement is not None and numbers and max(numbers) - min(numbers) >= settings.disagreement:
        return QuestionReason.disagreement
    if unit_interval(derive_seed(seed, "feedback", summary.rollout_id)) < settings.share:
        return QuestionReason.share
    return None


def _pairs(settings: FeedbackSection, seed: int, finished: Sequence[Scored]) -> Iterator[tuple[str, str]]:
    """Yield at most one pair of siblings, with different rewards if possible."""
    pairs = list(itertools.combinations([summary for summary, _ in finished], 2))
    if not pairs:
        return
    group_id = pairs[0][0].rollout_id.rpartition("/")[0]
    if unit_interval(derive_seed(seed, "feedback pair", group_id)) >= settings.pairs:
        return
    different = [pair for pair in pairs if pair[0].reward != pair[1].reward] or pairs
    first, second = different[derive_seed(seed, "feedback siblings", group_id) % len(different)]
    yield first.rollout_id, second.rollout_id
