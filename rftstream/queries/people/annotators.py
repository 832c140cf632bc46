"""Figures of each annotator: agreement with the others, time, sides, and the answers to gold questions.

Annotators are keyed hashes, as on the log. Kinds of answers are compared separately, since they have no common scale.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rftstream.config.role_sections import FeedbackSection
from rftstream.config.sections import RunConfig
from rftstream.contracts.feedback import GOLD_ANNOTATOR, Feedback, FeedbackKind, PairChoice
from rftstream.contracts.ids import derive_seed, unit_interval
from rftstream.contracts.questions import Question, VoteEffect
from rftstream.data.feedback.agreement import Agreement, Answer, Share, agreement_of_all, agreement_with_others
from rftstream.data.feedback.selection import choose_order
from rftstream.queries.formatting import columns, number, plural, table
from rftstream.queries.people.feedback import FeedbackView, open_questions
from rftstream.queries.plain import Report, pick

COMPARED = (FeedbackKind.pair, FeedbackKind.label, FeedbackKind.rating)
"""Kinds whose answers are compared. Corrections are left out, since two people seldom write the same one, and so are
flags, since the absence of a flag is no answer."""
GOLD_DISTANCE = 0.25
"""Share of the scale by which a rating may differ from the right one: one step of 1 to 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatorFigures(Report):
    """The figures of one annotator. `read_annotators` makes it."""

    JSON = "* agreement=agreement_to_json"

    annotator: str
    """32 hex digits."""
    votes: Mapping[str, int]
    """Answers in force, by kind, without those to gold questions."""
    agreement: Mapping[str, Agreement]
    """Agreement with the others on the same questions, by kind; kinds with nothing to compare are left out."""
    median_time_s: float | None
    """Median seconds from seeing a question to the answer. None: not known."""
    cannot_judge: Share
    """Share of the pairs that the annotator cannot judge."""
    left: Share
    """Pairs of which the left one was chosen, among pairs with one choice and a known order."""
    gold: Share
    """Right answers to gold questions. Only the first answer to each counts."""

    def agreement_to_json(self) -> dict[str, Any]:
        """Return the agreement with the others by kind."""
        return _agreements_to_json(self.agreement)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatorsView(Report):
    """The figures of a run's annotators. `read_annotators` makes it."""

    JSON = "annotators all_together=all_together_to_json gold_questions=num_gold"

    annotators: Sequence[AnnotatorFigures]
    """Figures of the annotators, by hash."""
    all_together: Mapping[str, Agreement]
    """Agreement of all annotators on each question, by kind."""
    num_gold: int
    """Gold questions with a right answer in force."""

    def all_together_to_json(self) -> dict[str, Any]:
        """Return the agreement of all annotators by kind."""
        return _agreements_to_json(self.all_together)

    def only(self, annotator: str) -> AnnotatorFigures | None:
        """Return the figures of one annotator; None if no vote of theirs counts."""
        return next((one for one in self.annotators if one.annotator == annotator), None)

    def to_text(self) -> str:
        """Return all figures as text for people."""
        if not self.annotators:
            return "nobody has voted; `rftstream feedback add RUN --from FILE` adds votes"
        rows: list[tuple[object, ...]] = [("annotator", "votes", "median time", "cannot judge", "left side", "gold")]
        for one in self.annotators:
            time_s = "-" if one.median_time_s is None else f"{number(one.median_time_s, 1)} s"
            shares = map(_text, (one.cannot_judge, one.left, one.gold))
            rows.append((one.annotator[:8], sum(one.votes.values()), time_s, *shares))
        lines = columns(rows, left=1)
        compared = [("all together", kind, *_cells(found)) for kind, found in self.all_together.items()]
        for one in self.annotators:
            compared += [(one.annotator[:8], kind, *_cells(found)) for kind, found in one.agreement.items()]
        lines += table(("agreement", "kind", "questions", "agree", "alpha"), compared, left=2)
        return "\n".join([*lines, "", plural(self.num_gold, "gold question")])


def _agreements_to_json(found: Mapping[str, Agreement]) -> dict[str, Any]:
    return {kind: pick(one, "questions=num_questions agreement=similarity alpha") for kind, one in found.items()}


def _cells(found: Agreement) -> tuple[object, ...]:
    agree = "-" if found.similarity is None else f"{100 * found.similarity:.0f} %"
    return found.num_questions, agree, "-" if found.alpha is None else f"{found.alpha:.2f}"


def _text(share: Share) -> str:
    if share.interval is None:
        return "-"
    low, high = (100 * end for end in share.interval)
    return f"{share.count}/{share.total} ({low:.0f} to {high:.0f} %)"


# --------------------------------------------------------------------------------------------- counting

Said = Mapping[str, Mapping[str, Feedback]]
"""Question -> annotator -> the vote in force."""


def read_annotators(view: FeedbackView, config: RunConfig) -> AnnotatorsView:
    """Return the figures of each annotator, from the votes that count."""
    scale = (config.feedback or FeedbackSection()).scale
    said, said_of_gold = _standing(view, VoteEffect.counted), _standing(view, VoteEffect.gold)
    right, asked = _gold_scores(view, scale)
    by_annotator: dict[str, list[Feedback]] = defaultdict(list)
    for votes in said.values():
        for annotator, vote in votes.items():
            by_annotator[annotator].append(vote)
    all_of_them = {*by_annotator, *asked}
    figures = []
    for annotator in sorted(all_of_them):
        own = by_annotator[annotator]
        every = own + [votes[annotator] for votes in said_of_gold.values() if annotator in votes]
        times = [vote.lead_time_s for vote in every if vote.lead_time_s is not None]
        figures.append(
            AnnotatorFigures(
                annotator=annotator,
                votes=Counter(str(vote.kind) for vote in own),
                agreement=_compare(annotator, own, said, scale),
                median_time_s=statistics.median(times) if times else None,
                cannot_judge=_cannot_judge(every),
                left=_left(every),
                gold=Share(count=right[annotator], total=asked[annotator]),
            )
        )
    together = {
        str(kind): found
        for kind in COMPARED
        if (found := agreement_of_all(_answers(said, kind), scale=_scale_of(kind, scale))).num_questions
    }
    num_gold = sum(vote.kind is not FeedbackKind.retract for vote in view.gold.values())
    return AnnotatorsView(annotators=figures, all_together=together, num_gold=num_gold)


def _standing(view: FeedbackView, effect: VoteEffect) -> Said:
    """Return the votes in force with this effect, without votes that were taken back."""
    newest: dict[str, dict[str, Feedback]] = defaultdict(dict)
    for line in view.votes:
        vote = line.vote
        if vote is not None and line.judgement.effect is effect and vote.annotator != GOLD_ANNOTATOR:
            newest[vote.question_id][vote.annotator] = vote  # a vote that counts is newer than one that counted before
    return {
        question_id: {who: vote for who, vote in votes.items() if vote.kind is not FeedbackKind.retract}
        for question_id, votes in newest.items()
    }


def _compare(annotator: str, own: Iterable[Feedback], said: Said, scale: tuple[float, float]) -> dict[str, Agreement]:
    shared: dict[FeedbackKind, list[tuple[Answer, list[Answer]]]] = defaultdict(list)
    for vote in own:
        answer = _answer(vote)
        others = [_answer(other) for who, other in said[vote.question_id].items() if who != annotator]
        known = [other for other in others if other is not None]
        if answer is not None and known:
            shared[vote.kind].append((answer, known))
    return {
        str(kind): agreement_with_others(shared[kind], scale=_scale_of(kind, scale))
        for kind in COMPARED
        if kind in shared
    }


def _answers(said: Said, kind: FeedbackKind) -> Iterable[list[Answer]]:
    for votes in said.values():
        answers = [_answer(vote) for vote in votes.values() if vote.kind is kind]
        yield [answer for answer in answers if answer is not None]


def _answer(vote: Feedback) -> Answer | None:
    """Return the part of a vote that is compared; None if there is none."""
    if vote.kind is FeedbackKind.pair:
        return None if vote.choice in (None, PairChoice.cannot_judge) else str(vote.choice)
    return vote.reward if vote.kind in COMPARED else None


def _scale_of(kind: FeedbackKind, scale: tuple[float, float]) -> tuple[float, float] | None:
    return scale if kind is FeedbackKind.rating else None


def _cannot_judge(votes: Iterable[Feedback]) -> Share:
    choices = [vote.choice for vote in votes if vote.kind is FeedbackKind.pair]
    return Share(count=choices.count(PairChoice.cannot_judge), total=len(choices))


def _left(votes: Iterable[Feedback]) -> Share:
    places = {PairChoice.first: 0, PairChoice.second: 1}
    sides = [vote.order.index(places[vote.choice]) for vote in votes if vote.choice in places and vote.order]
    return Share(count=sides.count(0), total=len(sides))


def _gold_scores(view: FeedbackView, scale: tuple[float, float]) -> tuple[Counter[str], Counter[str]]:
    """Return the number of right answers, and of answers, to gold questions, by annotator. Only the first answer
    counts, so that nobody gains by finding out that a question was gold."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    for line in view.votes:
        vote = line.vote
        if vote is None or line.judgement.effect is not VoteEffect.gold or vote.annotator == GOLD_ANNOTATOR:
            continue
        truth, answer = view.gold.get(vote.question_id), _answer(vote)
        key = vote.question_id, vote.annotator
        if truth is None or truth.kind is FeedbackKind.retract or answer is None or key in seen:
            continue
        seen.add(key)
        asked[vote.annotator] += 1
        right[vote.annotator] += is_right(vote, truth, scale)
    return right, asked


def is_right(vote: Feedback, truth: Feedback, scale: tuple[float, float]) -> bool:
    """Return whether an answer to a gold question is right: a rating within GOLD_DISTANCE of the scale, or another
    answer that is equal."""
    if vote.kind is FeedbackKind.pair:
        return vote.choice == truth.choice
    distance = abs((vote.reward or 0.0) - (truth.reward or 0.0))
    allowed = GOLD_DISTANCE * (scale[1] - scale[0]) if vote.kind is FeedbackKind.rating else 0.0
    return distance <= allowed or math.isclose(distance, allowed, abs_tol=1e-9)


# ------------------ the questions for one annotator: those that wait for answers, with gold questions between them


def questions_to(
    annotator: str, view: FeedbackView, settings: FeedbackSection, seed: int, *, answered: Collection[str], now: float
) -> list[Question]:
    """Return the open questions for an annotator, the most urgent first. `answered`: questions that the annotator has
    answered.

    Gold questions are drawn by the seed, the annotator, and the number of answered questions, so that the list stays
    the same until the next answer. There is no gold after the last waiting question.
    """
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
    """Return a gold question in the form of another question, without the answer."""
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
    """Yield the gold questions that an annotator has not answered, in an order that depends on the annotator."""
    waiting = [
        one for one in view.gold.values() if one.kind is not FeedbackKind.retract and one.question_id not in answered
    ]
    yield from sorted(waiting, key=lambda one: derive_seed(seed, "gold order", annotator, one.question_id))
