"""Rules of feedback, left out one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rftstream.contracts.feedback import Feedback
from rftstream.contracts.questions import Judgement, Question, VoteEffect
from rftstream.contracts.records import Record, TopicPartition
from rftstream.data.feedback.fold import FeedbackFold, GroupStatus
from rftstream.data.feedback.votes import QuestionVotes
from rftstream.roles.buffer.bodies import Bodies
from rftstream.roles.buffer.groups import Group
from rftstream.roles.buffer.people.feedback import FeedbackIntake
from rftstream.roles.buffer.people.judged_rewards import JudgedBodies
from rftstream.service.role import Log
from tests.simulation.changes import Change, around, instead, together


@around(QuestionVotes, "take")
def one_person_a_quorum(take: Any, self: QuestionVotes, vote: Feedback) -> None:
    """Every revision is another person."""
    take(self, replace(vote, annotator=f"{vote.annotator}{vote.revision}"))


@around(FeedbackFold, "ask")
def expiry_ignored(ask: Any, self: FeedbackFold, question: Question) -> Any:
    return ask(self, replace(question, expires_at=None))


@around(FeedbackIntake, "_restore_votes")
def judged_again(
    _: Any, self: FeedbackIntake, log_: Log, judgements: Mapping[str, Judgement]
) -> dict[TopicPartition, int]:
    self._recorded = set()
    return log_.transport.admin.begin_offsets("feedback")


@around(FeedbackIntake, "_note_question")
def questions_forgotten(note: Any, self: FeedbackIntake, question: Question) -> None:
    note(self, question)
    self._asked.pop(question.sequence, None)


@around(FeedbackFold, "judge")
def history_changes(
    judge: Any, self: FeedbackFold, record: Record, vote: Feedback | None, status: GroupStatus | None, now: float
) -> Any:
    """Who comes after the batch is told that the reward changes."""
    return judge(self, record, vote, None if status is None else GroupStatus(), now)


RULES: dict[str, tuple[str, str, Change]] = {
    "one-person-a-quorum": ("twice", "one person twice is a quorum", one_person_a_quorum),
    "older-revisions-counted": (
        "twice", "duplicates and older revisions count",
        instead(QuestionVotes, effect_of=lambda self, vote: VoteEffect.counted),
    ),
    "expiry-ignored": ("order", "questions never expire", expiry_ignored),
    "judged-again": ("twice", "a restart judges all votes once more", judged_again),
    "votes-forgotten": (
        "lost", "a restart forgets who has voted", instead(FeedbackFold, restore=lambda self, vote, judgement: None)
    ),
    "asked-again": (
        "twice", "a group is asked about whenever it is looked at",
        together(questions_forgotten, instead(FeedbackFold, is_asked=lambda self, name: False)),
    ),
    "nobody-waits": (
        "order", "no group waits for answers", instead(FeedbackIntake, _is_held=lambda self, group, now: False)
    ),
    "bodies-as-scored": (
        "lineage", "batches have the scorer's rewards", instead(JudgedBodies, get_all=Bodies.get_all)
    ),
    "flags-ignored": (
        "conservation", "flagged rollouts are trained on",
        instead(Group, left_out=property(lambda self: {}, lambda self, value: None)),
    ),
    "gold-judged": (
        "conservation", "answers to gold questions count",
        instead(FeedbackFold, _take=lambda self, vote: self._votes_on(vote.question_id).take(vote)),
    ),
    "history-changes": ("order", "late votes are said to change the batch", history_changes),
}  # fmt: skip
"""Name -> the law that it breaks, what is left out, and the change."""
