"""Rules of feedback, left out one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

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
from tests.simulation.changes import changed


def one_person_a_quorum() -> Iterator[None]:
    """Every revision is another person."""
    take = QuestionVotes.take

    def mutated(self: QuestionVotes, vote: Feedback) -> None:
        take(self, replace(vote, annotator=f"{vote.annotator}{vote.revision}"))

    with changed(QuestionVotes, "take", mutated):
        yield


def older_revisions_counted() -> Iterator[None]:
    def mutated(self: QuestionVotes, vote: Feedback) -> VoteEffect:
        return VoteEffect.counted

    with changed(QuestionVotes, "effect_of", mutated):
        yield


def expiry_ignored() -> Iterator[None]:
    ask = FeedbackFold.ask

    with changed(FeedbackFold, "ask", lambda self, question: ask(self, replace(question, expires_at=None))):
        yield


def judged_again_after_a_restart() -> Iterator[None]:
    """What was judged before a restart is judged once more."""

    def mutated(self: FeedbackIntake, log_: Log, judgements: Mapping[str, Judgement]) -> dict[TopicPartition, int]:
        self._recorded = set()
        return log_.transport.admin.begin_offsets("feedback")

    with changed(FeedbackIntake, "_restore_votes", mutated):
        yield


def votes_forgotten_at_a_restart() -> Iterator[None]:
    """Judgements stay, but nobody knows any more who has voted."""
    with changed(FeedbackFold, "restore", lambda self, vote, judgement: None):
        yield


def asked_again_after_a_restart() -> Iterator[None]:
    note = FeedbackIntake._note_question

    def forgets(self: FeedbackIntake, question: Question) -> None:
        note(self, question)
        self._asked.pop(question.sequence, None)

    with (
        changed(FeedbackIntake, "_note_question", forgets),
        changed(FeedbackFold, "is_asked", lambda self, name: False),
    ):
        yield


def nobody_waits() -> Iterator[None]:
    def mutated(self: FeedbackIntake, group: Group, now: float) -> bool:
        return False

    with changed(FeedbackIntake, "_is_held", mutated):
        yield


def bodies_as_scored() -> Iterator[None]:
    """The outcome has the judged reward, and the batch that of the scorer."""

    with changed(JudgedBodies, "get_all", Bodies.get_all):
        yield


def flags_ignored() -> Iterator[None]:
    with changed(Group, "left_out", property(lambda self: {}, lambda self, value: None)):
        yield


def history_changes() -> Iterator[None]:
    """Who comes after the batch is told that the reward changes."""
    judge = FeedbackFold.judge

    def mutated(
        self: FeedbackFold, record: Record, vote: Feedback | None, status: GroupStatus | None, now: float
    ) -> Judgement:
        return judge(self, record, vote, None if status is None else GroupStatus(), now)

    with changed(FeedbackFold, "judge", mutated):
        yield


def gold_judged() -> Iterator[None]:
    """Whoever answers a gold question judges it."""
    with changed(FeedbackFold, "_take", lambda self, vote: self._votes_on(vote.question_id).take(vote)):
        yield


RULES: dict[str, tuple[str, str, Callable[[], Iterator[None]]]] = {
    "one-person-a-quorum": ("twice", "one person twice is a quorum", one_person_a_quorum),
    "older-revisions-counted": ("twice", "duplicates and older revisions count", older_revisions_counted),
    "expiry-ignored": ("order", "questions never expire", expiry_ignored),
    "judged-again": ("twice", "a restart judges all votes once more", judged_again_after_a_restart),
    "votes-forgotten": ("lost", "a restart forgets who has voted", votes_forgotten_at_a_restart),
    "asked-again": ("twice", "a group is asked about whenever it is looked at", asked_again_after_a_restart),
    "nobody-waits": ("order", "no group waits for answers", nobody_waits),
    "bodies-as-scored": ("lineage", "batches have the scorer's rewards", bodies_as_scored),
    "flags-ignored": ("conservation", "flagged rollouts are trained on", flags_ignored),
    "gold-judged": ("conservation", "answers to gold questions count", gold_judged),
    "history-changes": ("order", "late votes are said to change the batch", history_changes),
}
"""Name -> the law that it breaks, what is left out, and the change."""
