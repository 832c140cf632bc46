"""The judgement on each record of `feedback`: a fold over a partition, which gives one judgement per record.

The buffer folds during the run and writes the judgements. Queries fold records without a judgement on the log. Both get
the same result: the effect of a vote depends on the earlier votes on its question in the partition, and on the group's
state at that time.

The right answer to a gold question is in the same partition. From that record on the question stays gold: votes on it
measure their annotators, and are not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts.feedback import GOLD_ANNOTATOR, Feedback, FeedbackKind, PairChoice
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.questions import Applied, Judgement, Question, VoteEffect
from rftstream.contracts.records import Record
from rftstream.data.feedback.votes import Judged, QuestionVotes


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The state of a group when a vote on it was read."""

    result: GroupResult | None = None
    """The group's result; None if the group was open."""
    batch_sequence: int | None = None
    """The group's batch, if it was batched."""


OPEN = GroupStatus()


def judgement_id_of(record: Record) -> str:
    """Return the id of the judgement of a record of `feedback`."""
    return f"{record.partition}/{record.offset}"


def kind_of_question(question_id: str) -> FeedbackKind:
    """Return the kind of a question."""
    return FeedbackKind(question_id.partition("/")[0])


class FeedbackFold:
    """All questions with their votes. The buffer and the readers of feedback each make one. They call `ask` for each
    question. Then, in the order of each partition, they call `restore` for votes whose judgement is on the log, and
    `judge` for the others."""

    def __init__(self, settings: FeedbackSection) -> None:
        self._settings = settings
        self._votes: dict[str, QuestionVotes] = {}
        """Votes by question, whether it was asked or not."""
        self._asked: dict[str, Question] = {}
        self._newest: dict[str, Judgement] = {}
        """The newest valid judgement, by question."""
        self._gold: set[str] = set()
        """Questions whose right answer is known."""

    @property
    def judgements(self) -> Mapping[str, Judgement]:
        """The current judgement of each question: question_id -> the newest valid judgement."""
        return self._newest

    def ask(self, question: Question) -> None:
        """Add a question that was asked."""
        self._asked[question.question_id] = question

    def is_asked(self, question_id: str) -> bool:
        """Return whether the question was asked."""
        return question_id in self._asked

    def is_judged(self, question_id: str) -> bool:
        """Return whether enough people have answered the question, or it is gold and needs no answers."""
        judgement = self._newest.get(question_id)
        return question_id in self._gold or (judgement is not None and is_decided(judgement))

    def is_gold(self, question_id: str) -> bool:
        """Return whether the right answer to the question is known."""
        return question_id in self._gold

    def note(self, judgement: Judgement) -> None:
        """Add a judgement from the log. Those of a question come in order."""
        if judgement.effect is VoteEffect.counted:
            self._newest[judgement.question_id] = judgement

    def restore(self, vote: Feedback, judgement: Judgement) -> None:
        """Add a vote whose judgement is on the log."""
        if judgement.effect in (VoteEffect.counted, VoteEffect.gold):
            self._take(vote)

    def _take(self, vote: Feedback) -> None:
        if vote.annotator == GOLD_ANNOTATOR:
            self._gold.add(vote.question_id)
        self._votes_on(vote.question_id).take(vote)

    def judge(self, record: Record, vote: Feedback | None, status: GroupStatus | None, now: float) -> Judgement:
        """Return the judgement on a vote. `vote`: None if the record cannot be read. `status`: None if this run has
        scored no such group."""
        effect = self._effect_of(record, vote, status)
        feedback_id = record.text("id") if vote is None else vote.feedback_id
        told = Judgement(judgement_id=judgement_id_of(record), feedback_id=feedback_id, effect=effect, decided_at=now)
        if vote is None:
            return told
        kind = kind_of_question(vote.question_id) if vote.question_id else None
        told = replace(told, question_id=vote.question_id, kind=kind, rollouts=vote.rollouts)
        if effect is VoteEffect.gold:
            self._take(vote)
        if effect is not VoteEffect.counted or status is None or kind is None:
            return told
        self._take(vote)
        votes = self._votes_on(vote.question_id)
        quorum = self._quorum_of(vote.question_id)
        judged = votes.judge(quorum, self._settings.scale)
        applied, reason = self._applied(kind, judged, status, self._newest.get(vote.question_id))
        judgement = replace(
            told,
            quorum=quorum,
            num_votes=judged.num_votes,
            agreement=judged.agreement,
            reward=judged.reward,
            choice=judged.choice,
            correction=judged.correction,
            flagged=judged.flagged,
            applied=applied,
            reason=reason,
            result=status.result,
            batch_sequence=status.batch_sequence,
        )
        self._newest[vote.question_id] = judgement
        return judgement

    def _votes_on(self, question_id: str) -> QuestionVotes:
        if question_id not in self._votes:
            self._votes[question_id] = QuestionVotes(kind_of_question(question_id))
        return self._votes[question_id]

    def _quorum_of(self, question_id: str) -> int:
        question = self._asked.get(question_id)
        return question.quorum if question is not None else self._settings.quorum

    def _effect_of(self, record: Record, vote: Feedback | None, status: GroupStatus | None) -> VoteEffect:
        low, high = self._settings.scale
        if vote is None or not vote.question_id:
            return VoteEffect.invalid
        if vote.kind is FeedbackKind.rating and not low <= (vote.reward or 0.0) <= high:
            return VoteEffect.invalid
        if status is None:
            return VoteEffect.unknown
        effect = self._votes_on(vote.question_id).effect_of(vote)
        if vote.annotator == GOLD_ANNOTATOR or vote.question_id in self._gold:
            return VoteEffect.gold if effect is VoteEffect.counted else effect
        question = self._asked.get(vote.question_id)
        late = question is not None and question.expires_at is not None and record.timestamp_s > question.expires_at
        return VoteEffect.expired if late and effect is VoteEffect.counted else effect

    def _applied(
        self, kind: FeedbackKind, judged: Judged, status: GroupStatus, before: Judgement | None
    ) -> tuple[Applied, str]:
        """Return the effect of the votes on a question, or the reason why there is none."""
        if kind is FeedbackKind.pair:
            decided = judged.choice in (PairChoice.first, PairChoice.second)
            return (Applied.pair, "") if decided else (Applied.none, judged.reason or str(judged.choice))
        if kind is FeedbackKind.correction:
            return (Applied.correction, "") if judged.decided else (Applied.none, judged.reason)
        if kind not in (FeedbackKind.flag, self._settings.ask):
            return Applied.none, f"feedback.ask is {self._settings.ask}"
        if status.result is GroupResult.batched:
            # If people retract the votes with which the batch was made, history is wrong as well.
            wrong = judged.decided or (before is not None and is_decided(before))
            return (Applied.correction if wrong else Applied.none), judged.reason
        if not judged.decided:
            return Applied.none, judged.reason
        if status.result is not None:
            return Applied.none, f"the group is {status.result}"
        return Applied.verdict, ""


def is_decided(judgement: Judgement) -> bool:
    """Return whether a judgement is a decision, not only a report that votes are missing or disagree."""
    values = (judgement.reward, judgement.choice, judgement.correction)
    return judgement.flagged or any(value is not None for value in values)
