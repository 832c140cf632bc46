"""How each annotator judges, from votes whose figures are known, and what one is asked with gold questions between."""

from __future__ import annotations

from typing import Any

import pytest

from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts.feedback import (
    GOLD_ANNOTATOR,
    Feedback,
    FeedbackKind,
    PairChoice,
    feedback_id_of,
    question_id_of,
)
from rftstream.contracts.questions import Question, QuestionReason, VoteEffect
from rftstream.contracts.records import Record
from rftstream.data.feedback.fold import OPEN, FeedbackFold
from rftstream.queries.people.annotators import AnnotatorsView, questions_to, read_annotators
from rftstream.queries.people.feedback import FeedbackView, VoteLine, gold_answers, question_state
from tests.configs import small_run

CONFIG = small_run(explorer={"policy": "fake"}, trainer={"backend": "fake"}, feedback={"share": 1.0, "quorum": 2})
PAIR, LABEL, RATING = FeedbackKind.pair, FeedbackKind.label, FeedbackKind.rating
FIRST, SECOND = PairChoice.first, PairChoice.second


class Said:
    """Votes one after the other, folded as the buffer folds them."""

    def __init__(self) -> None:
        self.view = FeedbackView()
        self._fold = FeedbackFold(CONFIG.feedback or FeedbackSection())

    def ask(self, count: int) -> None:
        for number in range(count):
            rollouts = (f"sums/0/{number}/0/0",)
            question = Question(
                question_id=question_id_of(LABEL, rollouts), kind=LABEL, rollouts=rollouts,
                group_id=f"sums/0/{number}/0",
                sequence=number, reason=QuestionReason.share, quorum=2, asked_at=100.0 + number, order=(0,),
            )  # fmt: skip
            self._fold.ask(question)
            self.view.questions.append(question)

    def __call__(
        self, who: str, problem: int, kind: FeedbackKind, *, revision: int = 0, back: bool = False, **answer: Any
    ) -> VoteEffect:
        rollouts = tuple(f"sums/0/{problem}/0/{sibling}" for sibling in range(2 if kind is PAIR else 1))
        annotator = GOLD_ANNOTATOR if who == "gold" else who * 32
        question_id = question_id_of(kind, rollouts)
        vote = Feedback(
            feedback_id=feedback_id_of(question_id, annotator, revision), rollout_id=rollouts[0], source="test",
            kind=FeedbackKind.retract if back else kind, question_id=question_id, rollouts=rollouts, sequence=problem,
            annotator=annotator, revision=revision, **answer,
        )  # fmt: skip
        record = Record("feedback", 0, len(self.view.votes), 0.0, b"", b"", ())
        judgement = self._fold.judge(record, vote, OPEN, 1.0)
        self.view.votes.append(VoteLine(record, vote, judgement, True))
        self.view.judgements, self.view.gold = self._fold.judgements, gold_answers(self.view.votes)
        return judgement.effect

    def figures(self) -> AnnotatorsView:
        return read_annotators(self.view, CONFIG)


def test_figures_by_hand() -> None:
    """Ada and Bob agree on three of four pairs, the wrong one among them; Cyd rates, and is compared with Ada alone."""
    said = Said()
    for problem, (ada, bob) in enumerate([(FIRST, FIRST), (SECOND, SECOND), (FIRST, FIRST), (FIRST, SECOND)]):
        said("a", problem, PAIR, choice=ada, order=(0, 1), lead_time_s=2.0 + problem)
        said("b", problem, PAIR, choice=bob, order=(1, 0))
    said("b", 7, PAIR, choice=PairChoice.cannot_judge, order=(0, 1))
    said("a", 0, RATING, reward=2.0, lead_time_s=100.0)
    said("c", 0, RATING, reward=3.0)
    said("c", 1, RATING, reward=3.0)
    said("a", 0, LABEL, reward=1.0)  # nobody else says anything of it
    found = said.figures()
    ada, bob, cyd = found.annotators
    assert [one.annotator[0] for one in found.annotators] == ["a", "b", "c"]
    assert (ada.votes, bob.votes, cyd.votes) == ({"pair": 4, "rating": 1, "label": 1}, {"pair": 5}, {"rating": 2})
    assert (ada.median_time_s, bob.median_time_s) == (4.0, None)
    assert (ada.left.count, ada.left.total) == (3, 4), "the first was left, and chosen three times"
    assert (bob.left.count, bob.left.total) == (2, 4)
    assert (bob.cannot_judge.count, bob.cannot_judge.total, ada.cannot_judge.total) == (1, 5, 4)
    assert set(ada.agreement) == {"pair", "rating"}, "kinds are compared each for itself"
    assert (ada.agreement["pair"].num_questions, ada.agreement["pair"].similarity) == (4, 0.75)
    # 5 x first and 3 x second; 1 - 7 * 2 / (64 - 25 - 9)
    assert ada.agreement["pair"].alpha == pytest.approx(1 - 14 / 30)
    assert ada.agreement["pair"] == bob.agreement["pair"] == found.all_together["pair"]
    assert (cyd.agreement["rating"].num_questions, cyd.agreement["rating"].similarity) == (1, 0.75)
    assert ada.gold.total == 0 and found.num_gold == 0
    text = found.to_text()
    assert "aaaaaaaa" in text and "75 %" in text and "0.53" in text
    assert found.to_json()["annotators"][0]["agreement"]["pair"]["questions"] == 4
    assert "nobody has voted" in Said().figures().to_text()


def test_the_newest_that_counts_is_compared_and_what_was_taken_back_is_not() -> None:
    said = Said()
    said("a", 0, LABEL, reward=1.0)
    said("b", 0, LABEL, reward=0.0)
    said("b", 0, LABEL, reward=1.0, revision=1)
    assert said("b", 0, LABEL, reward=0.0, revision=0) is VoteEffect.outdated
    assert said.figures().all_together["label"].similarity == 1.0
    said("b", 0, LABEL, revision=2, back=True)
    found = said.figures()
    assert found.all_together == {} and [dict(one.votes) for one in found.annotators] == [{"label": 1}]


def test_gold_measures_and_changes_nothing() -> None:
    said = Said()
    said.ask(3)
    for problem in range(3):
        assert said("gold", problem, LABEL, reward=1.0) is VoteEffect.gold
    for problem, reward in enumerate((1.0, 0.0, 1.0)):
        assert said("a", problem, LABEL, reward=reward) is VoteEffect.gold
        assert said("b", problem, LABEL, reward=1.0) is VoteEffect.gold
    said("a", 1, LABEL, reward=1.0, revision=1)  # the first answer counts
    assert said.view.judgements == {} and {question_state(said.view, one, 0.0) for one in said.view.questions} == {
        "gold"
    }
    ada, bob = said.figures().annotators
    assert (ada.gold.count, ada.gold.total, bob.gold.count, bob.gold.total) == (2, 3, 3, 3)
    assert ada.votes == {} and ada.agreement == {}, "gold answers are no votes"
    said("gold", 1, LABEL, reward=0.0, revision=1)  # it was wrong
    ada, bob = said.figures().annotators
    assert (ada.gold.count, bob.gold.count) == (3, 2)
    said("gold", 1, LABEL, revision=2, back=True)
    ada, bob = said.figures().annotators
    assert (ada.gold.count, ada.gold.total, bob.gold.total) == (2, 2, 2)
    assert said("c", 1, LABEL, reward=1.0) is VoteEffect.gold, "once gold, always gold"
    assert said.figures().num_gold == 2


def test_right_about_ratings_and_pairs() -> None:
    said = Said()
    said("gold", 0, RATING, reward=4.0)
    said("gold", 1, PAIR, choice=SECOND)
    for who, rating, choice in (("a", 3.0, SECOND), ("b", 2.9, PairChoice.tie), ("c", 5.0, PairChoice.cannot_judge)):
        said(who, 0, RATING, reward=rating)
        said(who, 1, PAIR, choice=choice, order=(0, 1))
    assert [(one.gold.count, one.gold.total) for one in said.figures().annotators] == [(2, 2), (0, 2), (1, 1)]


def test_votes_before_gold_keep_their_judgement() -> None:
    """The command refuses such a question; whoever writes to the log by themselves gets the same everywhere."""
    said = Said()
    said("a", 0, LABEL, reward=1.0)
    said("b", 0, LABEL, reward=1.0)
    said("gold", 0, LABEL, reward=0.0)
    said("b", 0, LABEL, reward=0.0, revision=1)
    (judgement,) = said.view.judgements.values()
    assert (judgement.num_votes, judgement.reward) == (2, 1.0)


# --------------------------------------------------------------------------------------------- what is asked


def asked(said: Said, who: str, answered: set[str], share: float = 0.25) -> list[Question]:
    return questions_to(who * 32, said.view, FeedbackSection(gold=share), 5, answered=answered, now=200.0)


def test_gold_questions_stand_between_the_others_and_look_like_them() -> None:
    said = Said()
    said.ask(60)
    for problem in range(100, 130):
        said("gold", problem, LABEL, reward=1.0, comment="why")
    found = asked(said, "a", set())
    gold = [one for one in found if one.question_id in said.view.gold]
    assert len(found) == 60 + len(gold) and 8 <= len(gold) <= 30
    assert [one for one in found if one not in gold] == said.view.questions
    for place, one in enumerate(found):
        if one in gold:
            following = next(other for other in found[place:] if other not in gold)
            assert (one.asked_at, one.quorum, one.reason) == (
                following.asked_at,
                following.quorum,
                QuestionReason.share,
            )
    assert found[-1] not in gold
    assert found == asked(said, "a", set()), "it is the same until somebody answers"
    assert [one.question_id for one in asked(said, "b", set())] != [one.question_id for one in found]
    assert not set(said.view.gold) & {one.question_id for one in asked(said, "a", set(), share=0.0)}


def test_who_answers_in_order_gets_the_list_that_they_saw() -> None:
    said = Said()
    said.ask(30)
    for problem in range(100, 110):
        said("gold", problem, LABEL, reward=1.0)
    seen, answered = [one.question_id for one in asked(said, "a", set())], set[str]()
    for name in seen:
        waiting = [one.question_id for one in asked(said, "a", answered) if one.question_id not in answered]
        assert waiting[0] == name
        answered.add(name)
    assert not [one for one in asked(said, "a", answered) if one.question_id not in answered]


def test_what_was_taken_back_is_not_asked() -> None:
    said = Said()
    said.ask(20)
    said("gold", 100, LABEL, reward=1.0)
    said("gold", 100, LABEL, revision=1, back=True)
    assert asked(said, "a", set(), share=0.9) == said.view.questions
