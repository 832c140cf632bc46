"""The questions and votes of a run, and how they are judged. They are read from the log. Votes without a recorded
judgement are judged by the same fold that the buffer uses.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rftstream.config.role_sections import FeedbackSection
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.feedback import GOLD_ANNOTATOR, Feedback, FeedbackKind
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.questions import Judgement, Question, VoteEffect
from rftstream.contracts.records import Record, TopicPartition
from rftstream.data.feedback.fold import OPEN, FeedbackFold, GroupStatus, is_decided, judgement_id_of
from rftstream.errors import ContractError
from rftstream.queries.decoding import decoded
from rftstream.queries.formatting import columns, listed, number, plural
from rftstream.queries.plain import Report, pick
from rftstream.roles.buffer.people.judged_rewards import JudgedRewards
from rftstream.service.records.in_force import RecordsInForce
from rftstream.service.role import Log

TOPICS = ("feedback", "questions", "judgements")


@dataclass(frozen=True, slots=True)
class VoteLine:
    """A record of `feedback`, and its effect. `read_feedback` makes it."""

    record: Record
    vote: Feedback | None
    """The vote. None if it cannot be read."""
    judgement: Judgement
    recorded: bool
    """Whether the judgement is on the log. If not, it is the one that the buffer would record."""


@dataclass(slots=True)
class FeedbackView:
    """All questions and votes of a run. `read_feedback` makes it."""

    questions: list[Question] = field(default_factory=list)
    votes: list[VoteLine] = field(default_factory=list)
    judgements: Mapping[str, Judgement] = field(default_factory=dict)
    """question_id -> the newest judgement that counts."""
    gold: Mapping[str, Feedback] = field(default_factory=dict)
    """question_id -> right answer to a gold question, or a retract if it was taken back. No data for annotators is made
    from it."""

    @property
    def effects(self) -> Counter[str]:
        """Records of `feedback`, counted by effect."""
        return Counter(str(line.judgement.effect) for line in self.votes)


def gold_answers(votes: Sequence[VoteLine]) -> dict[str, Feedback]:
    """Return the newest right answer to each gold question, by question_id; a retract if it was taken back."""
    return {
        line.vote.question_id: line.vote
        for line in votes
        if line.vote is not None and line.vote.annotator == GOLD_ANNOTATOR and line.judgement.effect is VoteEffect.gold
    }


def has_feedback(log: Log) -> bool:
    """Return whether the run has the topics of feedback. Runs of older releases lack some."""
    return set(TOPICS) <= set(log.transport.admin.topics())


class FeedbackRecords:
    """The records on the topics of feedback. `read_feedback` makes one, or gets one that its caller keeps for a run and
    a transport and that then reads only new records."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.judgements: list[Judgement] = []
        self.questions: list[Question] = []
        self.votes: list[tuple[Record, Feedback | None]] = []
        """The votes, with None for one that cannot be read."""
        self._positions: dict[TopicPartition, int] = {}
        self._rule: RecordsInForce | None = None
        self._view: tuple[Any, float, FeedbackView] | None = None
        """The ends of the topics, the time, and the view at the last call."""

    def view(
        self, log: Log, config: RunConfig, find_statuses: FindStatuses | None, *, for_s: float = math.inf
    ) -> FeedbackView:
        """Return the result of `read_feedback`. It is made again if there are new records, or after `for_s` seconds."""
        ends, now = [log.ends(topic) for topic in TOPICS] if has_feedback(log) else [], time.monotonic()
        if self._view is None or self._view[0] != ends or now - self._view[1] > for_s:
            self._view = ends, now, read_feedback(log, config, find_statuses=find_statuses, kept=self)
        return self._view[2]

    def follow(self, log: Log) -> None:
        """Read new records. Judgements are read before votes, so that the vote of each judgement is read, too."""
        ends = {place: offset for topic in TOPICS for place, offset in log.ends(topic).items()}
        if any(ends.get(place, 0) < offset for place, offset in self._positions.items()):
            self._begin()  # the run was made anew
        rule = self._rule = self._rule or RecordsInForce(log.transport)
        for _, message in rule.messages(self._new(log, "judgements")):
            if isinstance(message, Judgement):
                self.judgements.append(message)
        for _, message in rule.messages(self._new(log, "questions")):
            if isinstance(message, Question):
                self.questions.append(message)
        self.votes.extend(
            (record, decoded(record, Feedback)) for record in self._new(log, "feedback") if not codec.is_foreign(record)
        )

    def _new(self, log: Log, topic: str) -> Iterator[Record]:
        for record in log.read(topic, start=self._positions):
            self._positions[record.place] = record.offset + 1
            yield record


FindStatuses = Callable[[Sequence[Feedback]], Mapping[str, GroupStatus]]
"""Function that returns the state of the groups of some votes, by feedback_id. Votes on unscored rollouts are left
out."""


def read_feedback(
    log: Log, config: RunConfig, *, find_statuses: FindStatuses | None = None, kept: FeedbackRecords | None = None
) -> FeedbackView:
    """Read the questions and votes of a run, live or not. `find_statuses` is called for votes without a judgement;
    without it, outcomes and headers of rollouts are read. `kept`: the records of the last call."""
    view = FeedbackView()
    if not has_feedback(log):
        return view
    kept = FeedbackRecords() if kept is None else kept
    kept.follow(log)
    fold = FeedbackFold(config.feedback or FeedbackSection())
    recorded = {judgement.judgement_id: judgement for judgement in kept.judgements}
    for judgement in kept.judgements:
        fold.note(judgement)
    for question in kept.questions:
        fold.ask(question)
    view.questions = list(kept.questions)
    votes = kept.votes
    new = [vote for record, vote in votes if vote is not None and judgement_id_of(record) not in recorded]
    statuses = _statuses(log, config, new) if find_statuses is None else find_statuses(new)
    for record, vote in votes:
        known = recorded.get(judgement_id_of(record))
        if known is None:
            status = statuses.get(vote.feedback_id) if vote is not None else None
            judged = fold.judge(record, vote, status, record.timestamp_s)
        else:
            judged = known
            if vote is not None:
                fold.restore(vote, known)
        view.votes.append(VoteLine(record, vote, judged, known is not None))
    view.judgements = fold.judgements
    view.gold = gold_answers(view.votes)
    return view


@dataclass(frozen=True, slots=True)
class FeedbackBalance(Report):
    """Votes on the log, and their judgements: votes = judged + pending. `count_feedback` makes it."""

    votes: int
    judged: Mapping[str, int]
    """Recorded judgements, by effect."""
    pending: int
    """Votes that have no judgement yet."""
    questions: int

    def to_text(self) -> str:
        """Return the counts as a line for people."""
        effects = listed(dict(sorted(self.judged.items())))
        pending = f"{self.pending:,} pending until the run goes on" if self.pending else ""
        parts = ", ".join(part for part in (effects, pending) if part)
        return f"people: {plural(self.questions, 'question')}, {plural(self.votes, 'vote')}: {parts or 'none'}"


def count_feedback(log: Log) -> tuple[FeedbackBalance | None, list[str]]:
    """Count votes and judgements from headers; None if there are none. Also return a sentence for each broken promise:
    a judgement without a vote."""
    if not has_feedback(log):
        return None, []
    judged: dict[str, str] = {}
    for record in log.read("judgements", bodies=False):  # read before the votes, which come first on the log
        if not codec.is_foreign(record):
            effect = (record.header("effect") or b"").decode("ascii", "backslashreplace")
            judged[(record.header("id") or b"").decode("ascii", "backslashreplace")] = effect
    questions = sum(not codec.is_foreign(record) for record in log.read("questions", bodies=False))
    votes = {judgement_id_of(record) for record in log.read("feedback", bodies=False) if not codec.is_foreign(record)}
    if not votes and not questions and not judged:
        return None, []
    sentences = []
    if strangers := sorted(set(judged) - votes):
        sentences.append(
            f"judgements: {plural(len(strangers), 'judgement')} of what nobody said, first of feedback {strangers[0]}"
        )
    counts = Counter(judged.values())
    return FeedbackBalance(len(votes), counts, len(votes - set(judged)), questions), sentences


def judged_rewards(log: Log, config: RunConfig) -> JudgedRewards:
    """Return the changes by people's judgements to each group at the time of its decision."""
    rewards = JudgedRewards(config.feedback or FeedbackSection())
    for _, judgement in log.in_force("judgements") if has_feedback(log) else ():
        if isinstance(judgement, Judgement):
            rewards.learn(judgement)
    return rewards


def _statuses(log: Log, config: RunConfig, votes: Sequence[Feedback]) -> dict[str, GroupStatus]:
    """Return the state of the groups of these votes, by feedback_id. Votes on rollouts that this run did not score are
    left out."""
    wanted = {rollout for vote in votes for rollout in vote.rollouts}
    if not wanted:
        return {}
    groups = {rollout.rpartition("/")[0].encode() for rollout in wanted}
    found: dict[str, GroupStatus] = {}
    named: set[str] = set()
    for record in log.read("outcomes"):
        if record.header("group_id") in groups:
            with contextlib.suppress(ContractError):  # a reader skips records that cannot be read
                outcome = log.rule.decode(record)
                if isinstance(outcome, GroupOutcome):
                    named |= {rollout.rollout_id for rollout in outcome.rollouts}
                    if not outcome.late:
                        found[outcome.group_id] = GroupStatus(outcome.result, outcome.batch_sequence)
    partitions = {(vote.sequence or 0) % config.transport.partitions for vote in votes}
    for record in log.read("verified", bodies=False, partitions=partitions):
        named.add((record.header("rollout_id") or b"").decode("ascii", "backslashreplace"))
    return {
        vote.feedback_id: found.get(vote.rollout_id.rpartition("/")[0], OPEN)
        for vote in votes
        if vote.rollouts and set(vote.rollouts) <= named
    }


# --------------------------------------------------------------------------------------------- shown


def question_state(view: FeedbackView, question: Question, now: float) -> str:
    """Return the state of a question: judged, expired, open, or gold."""
    if question.question_id in view.gold:
        return "gold"
    judgement = view.judgements.get(question.question_id)
    if judgement is not None and is_decided(judgement):
        return "judged"
    return "expired" if question.expires_at is not None and now > question.expires_at else "open"


def questions_to_json(view: FeedbackView, now: float) -> list[dict[str, Any]]:
    """Return a dict for each question, with its state."""
    return [
        {
            **msgspec.to_builtins(question),
            "state": question_state(view, question, now),
            "num_votes": judgement.num_votes if (judgement := view.judgements.get(question.question_id)) else 0,
        }
        for question in view.questions
    ]


def questions_to_text(view: FeedbackView, now: float) -> str:
    """Return the questions as text for people."""
    if not view.questions:
        return "nobody was asked anything; [feedback] in the run file says whom to ask about"
    names = ("question_id", "reason", "num_votes", "quorum", "state")
    rows = [[question[name] for name in names] for question in questions_to_json(view, now)]
    return "\n".join(columns([("question", "why", "votes", "quorum", "state"), *rows], left=2))


def open_questions(view: FeedbackView, now: float) -> list[Question]:
    """Return the questions that wait for answers, the most urgent first: groups that wait in the buffer, then questions
    that expire soon, then those that lack few votes."""

    def urgency(question: Question) -> tuple[float, float, int, float]:
        judgement = view.judgements.get(question.question_id)
        missing = question.quorum - (judgement.num_votes if judgement is not None else 0)
        held = question.held_until if question.held_until is not None and question.held_until > now else math.inf
        return held, question.expires_at or math.inf, missing, question.asked_at

    return sorted(
        (question for question in view.questions if question_state(view, question, now) == "open"), key=urgency
    )


def opinions_of(view: FeedbackView, annotator: str) -> dict[str, VoteLine]:
    """Return the newest vote of an annotator on each question, without votes that were taken back."""
    newest: dict[str, VoteLine] = {}
    for line in view.votes:
        vote = line.vote
        if vote is None or not vote.question_id or vote.annotator != annotator:
            continue
        known = newest.get(vote.question_id)
        if known is None or known.vote is None or vote.revision > known.vote.revision:
            newest[vote.question_id] = line
    return {
        question_id: line
        for question_id, line in newest.items()
        if line.vote is not None and line.vote.kind is not FeedbackKind.retract
    }


def judgements_to_json(view: FeedbackView) -> list[dict[str, Any]]:
    """Return the newest judgement of each question as a dict, with whether it is on the log."""
    recorded = {line.judgement.judgement_id for line in view.votes if line.recorded}
    return [
        {**msgspec.to_builtins(judgement), "recorded": judgement.judgement_id in recorded}
        for judgement in view.judgements.values()
    ]


def judgements_to_text(view: FeedbackView) -> str:
    """Return the judgements of the questions as text for people."""
    if not view.judgements:
        return "nothing is judged; `rftstream feedback add RUN --from FILE` adds votes"
    rows = [("question", "votes", "agreement", "judged", "applied", "batch")]
    for one in view.judgements.values():
        batch = "-" if one.batch_sequence is None else f"{one.batch_sequence} (v{one.batch_sequence + 1})"
        applied = f"{one.applied}: {one.reason}" if one.reason else str(one.applied)
        votes, agreement = f"{one.num_votes}/{one.quorum}", number(one.agreement, 2)
        rows.append((one.question_id, votes, agreement, judged_text(one), applied, batch))
    return "\n".join(columns(rows, left=1))


def judged_text(judgement: Judgement) -> str:
    """Return the result of a judgement in a word."""
    if judgement.flagged:
        return "flagged"
    if judgement.choice is not None:
        return str(judgement.choice)
    if judgement.correction is not None:
        return "corrected"
    return number(judgement.reward, 3)


def votes_to_json(view: FeedbackView) -> list[dict[str, Any]]:
    """Return a dict for each record of `feedback`, with its effect."""
    return [
        {
            **pick(line, "partition=record.partition offset=record.offset recorded"),
            **pick(line.judgement, "effect applied reason"),
            "vote": None if line.vote is None else msgspec.to_builtins(line.vote),
        }
        for line in view.votes
    ]


def votes_to_text(view: FeedbackView) -> str:
    """Return one line for each vote, and the number of votes with each effect."""
    if not view.votes:
        return "nobody said anything; `rftstream feedback add RUN --from FILE` adds votes"
    rows = [("vote", "annotator", "revision", "says", "effect")]
    for line in view.votes:
        vote = line.vote
        effect = str(line.judgement.effect)
        if vote is None or not vote.question_id:
            rows.append((str(line.record), "-", "-", "-", effect))
        else:
            rows.append((vote.question_id, vote.annotator[:8], str(vote.revision), vote_text(vote), effect))
    counts = listed(dict(sorted(view.effects.items())))
    pending = sum(not line.recorded for line in view.votes)
    tail = f"; {plural(pending, 'vote')} not recorded by the buffer yet" if pending else ""
    return "\n".join([*columns(rows, left=2), "", f"{plural(len(view.votes), 'vote')}: {counts}{tail}"])


def vote_text(vote: Feedback) -> str:
    """Return the answer of a vote in a few words."""
    if vote.reward is not None:
        return f"{vote.kind} {number(vote.reward, 3)}"
    if vote.choice is not None:
        return str(vote.choice)
    if vote.correction is not None:
        return f"correction {vote.correction[:40]!r}"
    return str(vote.kind)
