"""What one annotator is asked: the questions that wait for answers, with gold questions between them.

A gold question looks like the one that it stands before. Its right answer stays out of everything that is made here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace

from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts.feedback import Feedback, FeedbackKind
from rftstream.contracts.ids import derive_seed, unit_interval
from rftstream.contracts.questions import Question
from rftstream.data.feedback.selection import choose_order
from rftstream.queries.people.feedback import FeedbackView, open_questions


def questions_to(
    annotator: str, view: FeedbackView, settings: FeedbackSection, seed: int, *, answered: Collection[str], now: float
) -> list[Question]:
    """Return the open questions as an annotator is asked them, the most urgent first. `answered`: questions that they
    have answered.

    Which of the next ones are gold is drawn by seed, annotator, and how many they have answered, so that the list stays
    the same until they answer. After the last question that waits there is no gold."""
    gold = _gold_for(annotator, view, seed, answered)
    draws = (
        unit_interval(derive_seed(seed, "gold", annotator, count)) < settings.gold
        for count in itertools.count(len(answered))
    )
    found = []
    coming = next(gold, None)
    for question in open_questions(view, now):
        if question.question_id not in answered:
            while next(draws) and coming is not None:
                found.append(disguised(coming, question, seed))
                coming = next(gold, None)
        found.append(question)
    return found


def disguised(gold: Feedback, like: Question, seed: int) -> Question:
    """Return a gold question as it is shown: like another question, and without the answer."""
    return replace(
        like,
        question_id=gold.question_id,
        kind=gold.kind,
        rollouts=gold.rollouts,
        group_id=gold.rollout_id.rpartition("/")[0],
        sequence=gold.sequence or 0,
        order=choose_order(seed, gold.question_id, len(gold.rollouts)),
    )


def _gold_for(annotator: str, view: FeedbackView, seed: int, answered: Collection[str]) -> Iterator[Feedback]:
    """Yield the gold questions that an annotator has not answered, in an order of their own."""
    waiting = [
        one for one in view.gold.values() if one.kind is not FeedbackKind.retract and one.question_id not in answered
    ]
    yield from sorted(waiting, key=lambda one: derive_seed(seed, "gold order", annotator, one.question_id))
