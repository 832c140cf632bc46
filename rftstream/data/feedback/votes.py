"""The state of one question: the newest opinion of each annotator, and their joint result."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from rftstream.contracts.feedback import Feedback, FeedbackKind, PairChoice
from rftstream.contracts.questions import VoteEffect

CORRECTION_QUORUM = 1
"""Quorum of corrections: one person's is enough, since two people seldom write the same."""


class Opinion(NamedTuple):
    """An annotator's answer to a question."""

    answer: float | str
    """The number of a label or rating, the choice of a pair, a digest of a corrected answer, or an empty text for a
    flag."""
    feedback_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The joint result of the votes on a question."""

    num_votes: int
    """Number of annotators with a valid vote."""
    agreement: float | None = None
    """Share of the votes that agree with the result; for ratings, 1 minus their spread divided by the scale."""
    reward: float | None = None
    """Judged reward of a label or rating."""
    choice: PairChoice | None = None
    """Judged choice of a pair."""
    correction: str | None = None
    """The feedback_id of the corrected answer."""
    flagged: bool = False
    """Whether a flag is confirmed: the rollout must not be trained on."""
    reason: str = ""
    """Why the question is not judged; empty if it is."""

    @property
    def decided(self) -> bool:
        """Whether the question is judged."""
        return not self.reason


class QuestionVotes:
    """The opinions on one question. `FeedbackFold` makes it, calls `effect_of` for each vote, `take` for valid ones,
    and then `judge`."""

    def __init__(self, kind: FeedbackKind) -> None:
        self._kind = kind
        self._newest: dict[str, tuple[int, Opinion | None]] = {}
        """Annotator -> newest revision and opinion; None if the vote was retracted. The newest vote comes last."""

    def effect_of(self, vote: Feedback) -> VoteEffect:
        """Return the effect of a vote, given the earlier ones."""
        known = self._newest.get(vote.annotator)
        if known is None or vote.revision > known[0]:
            return VoteEffect.counted
        return VoteEffect.duplicate if vote.revision == known[0] else VoteEffect.outdated

    def take(self, vote: Feedback) -> None:
        """Replace the annotator's previous vote with this one."""
        self._newest.pop(vote.annotator, None)
        self._newest[vote.annotator] = (vote.revision, _opinion_of(vote))

    def judge(self, quorum: int, scale: tuple[float, float]) -> Judged:
        """Return the joint result of the votes."""
        opinions = [opinion for _, opinion in self._newest.values() if opinion is not None]
        if not opinions:
            return Judged(num_votes=0, reason="no votes")
        if self._kind is FeedbackKind.rating:
            judged = _judge_ratings(opinions, scale)
        elif self._kind is FeedbackKind.flag:
            judged = Judged(num_votes=len(opinions), agreement=1.0, flagged=True)
        else:
            judged = _judge_by_most(self._kind, opinions)
        needed = CORRECTION_QUORUM if self._kind is FeedbackKind.correction else quorum
        if judged.num_votes < needed:
            return Judged(num_votes=judged.num_votes, agreement=judged.agreement, reason="quorum")
        return judged


def _opinion_of(vote: Feedback) -> Opinion | None:
    if vote.kind is FeedbackKind.retract or vote.choice is PairChoice.cannot_judge:
        return None
    answer: float | str = ""
    if vote.kind in (FeedbackKind.label, FeedbackKind.rating):
        answer = vote.reward if vote.reward is not None else ""
    elif vote.kind is FeedbackKind.pair:
        answer = str(vote.choice)
    elif vote.kind is FeedbackKind.correction:
        answer = blake2b((vote.correction or "").strip().encode(), digest_size=16).hexdigest()
    return Opinion(answer, vote.feedback_id)


def _judge_ratings(opinions: Sequence[Opinion], scale: tuple[float, float]) -> Judged:
    numbers = [float(opinion.answer) for opinion in opinions]
    low, high = scale
    return Judged(
        num_votes=len(numbers),
        agreement=1.0 - (max(numbers) - min(numbers)) / (high - low),
        reward=(statistics.median(numbers) - low) / (high - low),
    )


def _judge_by_most(kind: FeedbackKind, opinions: Sequence[Opinion]) -> Judged:
    """Judge by the most frequent answer. If two answers have equally many votes, it is a tie; for corrected answers,
    the newest wins."""
    counts = Counter(opinion.answer for opinion in opinions)
    most = max(counts.values())
    num_votes, agreement = len(opinions), most / len(opinions)
    if kind is FeedbackKind.correction:
        newest = next(opinion for opinion in reversed(opinions) if counts[opinion.answer] == most)
        return Judged(num_votes=num_votes, agreement=agreement, correction=newest.feedback_id)
    winners = [answer for answer, count in counts.items() if count == most]
    if len(winners) > 1:
        return Judged(num_votes=num_votes, agreement=agreement, reason="tie")
    if kind is FeedbackKind.pair:
        return Judged(num_votes=num_votes, agreement=agreement, choice=PairChoice(str(winners[0])))
    return Judged(num_votes=num_votes, agreement=agreement, reward=float(winners[0]))
