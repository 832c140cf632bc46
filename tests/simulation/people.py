"""The laws of feedback, told by a model of its own: one judgement for each vote, distinct people make a quorum, and a
batch holds what was judged before it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rftstream.contracts import codec
from rftstream.contracts.batches import Experience
from rftstream.contracts.feedback import GOLD_ANNOTATOR, Feedback, FeedbackKind, PairChoice
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.questions import Applied, Judgement, Question, VoteEffect
from rftstream.contracts.records import Record
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import ContractError
from rftstream.queries.audits.balance import AuditReport
from rftstream.queries.people.feedback import read_feedback
from rftstream.service.role import Log
from rftstream.transport.memory.log import MemoryTransaction

if TYPE_CHECKING:
    from tests.simulation.laws import Laws

JUDGED_BY_MOST = (FeedbackKind.label, FeedbackKind.pair)


class PeopleLaws:
    """What was said and what became of it, transaction by transaction. `Laws` calls `transaction` for each, before it
    looks at the records one by one."""

    def __init__(self, laws: Laws) -> None:
        self._laws = laws
        self.settings = laws.config.feedback
        self.votes: dict[str, tuple[Record, Feedback | None]] = {}
        """By partition/offset."""
        self.judged: dict[str, Judgement] = {}
        self.questions: dict[str, Question] = {}
        self.effects: Counter[str] = Counter()
        self.applied: Counter[str] = Counter()
        self._opinions: dict[str, dict[str, tuple[int, Any]]] = defaultdict(dict)
        """Question -> annotator -> the newest revision that counts, and the answer; None: taken back."""
        self._ever_judged: set[str] = set()
        self._gold: dict[str, int] = {}
        """Question -> the offset of its first right answer; what its partition says after it changes nothing."""
        self._human: dict[str, float] = {}
        """Rewards by rollout, as judgements of open groups say."""
        self._flagged: set[str] = set()
        self._verified: set[str] = set()
        self._outcomes: dict[str, GroupOutcome] = {}

    def transaction(self, transaction: MemoryTransaction) -> None:
        if self.settings is None:
            return
        messages = [
            (record, _message_of(record))
            for place, records in transaction.records.items()
            if place.topic in ("feedback", "questions", "judgements", "outcomes", "verified")
            for record in records
        ]
        now = {one.group_id: one for _, one in messages if isinstance(one, GroupOutcome) and not one.late}
        for record, message in messages:
            if record.topic == "feedback" and not codec.is_foreign(record):
                assert isinstance(message, Feedback | None)
                self.votes[f"{record.partition}/{record.offset}"] = record, message
        for _, message in messages:
            match message:
                case VerifiedRollout():
                    self._verified.add(message.ids.rollout_id)
                case Question():
                    assert message.group_id not in self._outcomes, "people are asked while the group is open"
                    self.questions[message.question_id] = message
        for _, message in messages:
            if isinstance(message, Judgement):
                self._judgement(message, now)
        for outcome in now.values():
            self._outcome(outcome)
        self._outcomes |= now

    def _judgement(self, said: Judgement, now: dict[str, GroupOutcome]) -> None:
        assert said.judgement_id in self.votes, "somebody said it"
        assert said.judgement_id not in self.judged, "each vote is judged once"
        self.judged[said.judgement_id] = said
        self.effects[str(said.effect)] += 1
        record, vote = self.votes[said.judgement_id]
        if vote is None or not vote.question_id:
            assert said.effect is VoteEffect.invalid
            return
        known = self._opinions[vote.question_id]
        revision, _ = known.get(vote.annotator, (-1, None))
        question = self.questions.get(vote.question_id)
        late = question is not None and question.expires_at is not None and record.timestamp_s > question.expires_at
        match said.effect:
            case VoteEffect.unknown:
                assert not set(vote.rollouts) <= self._verified, "it was scored"
            case VoteEffect.duplicate:
                assert vote.revision == revision
            case VoteEffect.outdated:
                assert vote.revision < revision
            case VoteEffect.expired:
                assert late
                assert vote.question_id not in self._gold
            case VoteEffect.gold:
                if vote.annotator == GOLD_ANNOTATOR:
                    self._gold.setdefault(vote.question_id, record.offset)
                assert self._gold[vote.question_id] <= record.offset
                assert vote.revision > revision, "a newer revision stands"
                known[vote.annotator] = vote.revision, None
                assert replace(said, decided_at=0.0) == Judgement(
                    judgement_id=said.judgement_id, feedback_id=vote.feedback_id, effect=VoteEffect.gold,
                    question_id=vote.question_id, kind=said.kind, rollouts=vote.rollouts,
                ), "nothing is judged"  # fmt: skip
            case VoteEffect.counted:
                assert set(vote.rollouts) <= self._verified
                assert not late
                assert vote.question_id not in self._gold, "the answer is known"
                assert vote.annotator != GOLD_ANNOTATOR
                assert vote.revision > revision, "a newer revision stands"
                known[vote.annotator] = vote.revision, _answer(vote)
                self._counted(said, vote, question, now)

    def _counted(
        self, said: Judgement, vote: Feedback, question: Question | None, now: dict[str, GroupOutcome]
    ) -> None:
        assert self.settings is not None
        answers = [answer for _, answer in self._opinions[said.question_id].values() if answer is not None]
        assert said.num_votes == len(answers), "votes are those of distinct people"
        quorum = question.quorum if question is not None else self.settings.quorum
        kind = FeedbackKind(said.question_id.partition("/")[0])
        decided = said.flagged or any(one is not None for one in (said.reward, said.choice, said.correction))
        if decided:
            self._ever_judged.add(said.question_id)
            assert len(answers) >= (1 if kind is FeedbackKind.correction else quorum), "no quorum"
            if kind in JUDGED_BY_MOST:
                ((most, count), *others) = Counter(answers).most_common(2)
                assert not others or others[0][1] < count, "a tie"
                assert (said.reward if kind is FeedbackKind.label else said.choice) == most
        group = vote.rollout_id.rpartition("/")[0]
        before, meanwhile = self._outcomes.get(group), now.get(group)
        outcome = before if before is not None else meanwhile
        assert said.result is not None or before is None, "the group was decided"
        if said.result is not None:
            assert outcome is not None
            assert (said.result, said.batch_sequence) == (outcome.result, outcome.batch_sequence)
        self.applied[str(said.applied)] += 1
        if said.applied is Applied.verdict:
            assert decided
            assert said.result is None, "history stays"
            assert kind in (self.settings.ask, FeedbackKind.flag), "labels and ratings do not mix"
        if said.result is None and kind == self.settings.ask:
            self._human.pop(vote.rollout_id, None)
            if said.applied is Applied.verdict and said.reward is not None:
                self._human[vote.rollout_id] = said.reward
        if said.result is None and kind is FeedbackKind.flag:
            (self._flagged.add if said.applied is Applied.verdict else self._flagged.discard)(vote.rollout_id)

    def _outcome(self, outcome: GroupOutcome) -> None:
        """Who was to wait has waited."""
        asked = [one for one in self.questions.values() if one.group_id == outcome.group_id]
        until = max((one.held_until for one in asked if one.held_until is not None), default=0.0)
        early = outcome.decided_at < until
        answered = self._ever_judged | self._gold.keys()
        assert not early or all(one.question_id in answered for one in asked), "it did not wait for people"
        if outcome.result is GroupResult.batched:
            for one in outcome.rollouts:
                assert (one.rejected == "feedback: flagged") is (one.rollout_id in self._flagged)

    def reward(self, experience: Experience, verdict: float | None) -> float | None:
        """What the reward in a batch has to be, given that of the scorer."""
        name = experience.ids.rollout_id
        assert name not in self._flagged
        human = self._human.get(name)
        assert experience.parts.get("human") == human
        if human is None or self.settings is None:
            assert verdict is not None
            return verdict
        weight = self.settings.weight
        if verdict is None or weight == 1.0:
            return human
        return (1.0 - weight) * verdict + weight * human

    def check_end(self, report: AuditReport) -> None:
        if self.settings is None or not (self.votes or self.questions):
            return
        assert report.people is not None
        assert report.people.votes == len(self.votes)
        assert dict(report.people.judged) == self.effects
        assert report.people.pending == len(self.votes) - len(self.judged)
        view = read_feedback(Log(self._laws.simulation.transport()), self._laws.config)
        mine = {one.judgement_id: one for one in self.judged.values()}
        for line in view.votes:
            assert line.recorded is (line.judgement.judgement_id in mine)
            if line.recorded:
                assert line.judgement == mine[line.judgement.judgement_id]


def _message_of(record: Record) -> Any:
    try:
        return codec.from_record(record) if record.value is not None and not codec.is_foreign(record) else None
    except ContractError:
        return None


def _answer(vote: Feedback) -> Any:
    if vote.kind is FeedbackKind.retract or vote.choice is PairChoice.cannot_judge:
        return None
    return {
        FeedbackKind.pair: vote.choice,
        FeedbackKind.correction: (vote.correction or "").strip(),
        FeedbackKind.flag: True,
    }.get(vote.kind, vote.reward)
