"""A question asks people about rollouts; a judgement says what became of one thing that they said. Topics `questions`
and `judgements`: the buffer writes both.
"""

from __future__ import annotations

from enum import StrEnum

from rftstream.contracts.feedback import FeedbackKind, PairChoice
from rftstream.contracts.message_spec import Facts, Message, message
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.ranges import NonNegativeInt, PositiveInt


class QuestionReason(StrEnum):
    """Which rule of `[feedback]` chose the rollouts."""

    unscorable = "unscorable"
    """The rollout has no reward."""
    disagreement = "disagreement"
    """The parts of its reward are far apart."""
    share = "share"
    """The rollout belongs to the seeded share of rollouts, or its group to the seeded share of groups."""


@message(
    "question",
    topic="questions",
    key=lambda question: question.question_id,
    headers=lambda question: {"group_id": question.group_id, "sequence": question.sequence},
)
class Question(Message):
    """A question to people about rollouts. `questions`: buffer -> studio, Label Studio, buffer."""

    question_id: str
    """`kind/group_id/siblings`."""
    kind: FeedbackKind
    """Kind of answer that is asked for."""
    rollouts: tuple[str, ...]
    """Ids of the rollouts in question: the two siblings of a pair, in order, else one."""
    group_id: str
    """`taskset/pass/index/attempt`."""
    sequence: NonNegativeInt
    """The feeder's count of the group; `sequence mod partitions` is the partition of the answers."""
    reason: QuestionReason
    """Why it is asked."""
    quorum: PositiveInt
    """Distinct annotators whose votes it takes."""
    asked_at: float
    """When the buffer asked."""
    expires_at: float | None = None
    """Answers that reach the log later change nothing; None: it never expires."""
    held_until: float | None = None
    """The group is in no batch before that, unless all its questions are judged; None: it does not wait."""
    order: tuple[NonNegativeInt, ...] = ()
    """Order in which to show the rollouts, as indexes into `rollouts`; derived from the run's seed."""


class VoteEffect(StrEnum):
    """The effects that a record of `feedback` can have on its question."""

    counted = "counted"
    """The record is its annotator's newest on the question."""
    duplicate = "duplicate"
    """A record with the same revision was there before."""
    outdated = "outdated"
    """A newer revision was there before."""
    unknown = "unknown"
    """No such rollout was scored in this run."""
    expired = "expired"
    """The record came after the question had expired."""
    invalid = "invalid"
    """The record cannot be read, answers no question, or has a number that is not on the scale."""
    gold = "gold"
    """The record answers a gold question, or gives the right answer to one: it measures its annotator, and changes
    nothing."""


class Applied(StrEnum):
    """The effects that a judgement can have on the run."""

    verdict = "verdict"
    """The group is still open: its batch gets the judged reward, or is made without a flagged rollout."""
    pair = "pair"
    """There is a preference pair."""
    correction = "correction"
    """The judgement stands beside history: the rollout was in a batch before, or the judgement is a corrected
    answer."""
    none = "none"
    """Nothing; `reason` says why."""


def _judgement_headers(judgement: Judgement) -> Facts:
    return {
        "question_id": judgement.question_id or None,
        "effect": judgement.effect,
        "applied": judgement.applied,
        "batch_sequence": judgement.batch_sequence,
    }


@message("judgement", topic="judgements", key=lambda judgement: judgement.judgement_id, headers=_judgement_headers)
class Judgement(Message):
    """The effect of one record of `feedback`, and the state of its question afterwards. `judgements`: buffer -> buffer,
    audit, consumers of corrections and pairs.

    Each record of `feedback` gets exactly one. The newest judgement that counts for a question is in force."""

    judgement_id: str
    """`partition/offset` of the record of `feedback`."""
    feedback_id: str
    """Id of that record; empty if the record could not be read."""
    effect: VoteEffect
    """Effect of the record on its question. The fields below are meaningful where this is `counted`."""
    question_id: str = ""
    """Question that the record answers; empty if the record names none."""
    kind: FeedbackKind | None = None
    """Kind of the question; None if the record names no question."""
    rollouts: tuple[str, ...] = ()
    """Ids of the rollouts that are judged."""
    quorum: NonNegativeInt = 0
    """Distinct annotators whose votes it takes."""
    num_votes: NonNegativeInt = 0
    """Distinct annotators whose votes stand."""
    agreement: float | None = None
    """Share of the votes that say what is judged; of ratings 1 minus their spread over the scale. None: no votes."""
    reward: float | None = None
    """The judged reward of a label or rating; None: it is not judged."""
    choice: PairChoice | None = None
    """The judged choice of a pair; None: it is not judged."""
    correction: str | None = None
    """The feedback_id of the corrected answer that stands."""
    flagged: bool = False
    """Whether enough annotators say that the rollout must not be trained on."""
    applied: Applied = Applied.none
    """Effect of the judgement on the run."""
    reason: str = ""
    """Why the judgement changes nothing: quorum, tie, retracted, ..."""
    result: GroupResult | None = None
    """Result of the group at the time when the vote was read; None: the group was open."""
    batch_sequence: NonNegativeInt | None = None
    """The batch that the group had come into by then, trained at this version."""
    decided_at: float = 0.0
    """When the buffer read it."""
