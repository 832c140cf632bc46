"""Votes in the studio: the question of a page, and one function that writes answers.

Pages and the interface for programs make a row for `rftstream feedback add`, which is written in the same way. The
voter is the owner of the token, never a field of the request.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.exceptions import HTTPException

from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts.feedback import FeedbackKind, question_id_of
from rftstream.contracts.questions import Judgement, Question
from rftstream.data.feedback.agreement import Share
from rftstream.data.feedback.rows import vote_of
from rftstream.data.feedback.selection import choose_order
from rftstream.gateway.keys import GatewayKeys, run_secret
from rftstream.queries.catalog.finding import GroupRow, RolloutRow, find_group
from rftstream.queries.people.annotators import AnnotatorsView, disguised, questions_to, read_annotators
from rftstream.queries.people.feedback import FeedbackView, VoteLine, open_questions, opinions_of, question_state
from rftstream.runs.folder import OpenRun
from rftstream.runs.writes.feedback import Added, add_votes
from rftstream.studio.access import StudioRole
from rftstream.studio.pages.page import PageOfRun

KINDS = tuple(kind for kind in FeedbackKind if kind is not FeedbackKind.retract)
STATES = ("open", "judged", "expired")
"""The states of a question."""
MAX_LEAD_S = 24 * 3600.0
"""Longest time to an answer that is recorded. A longer one means that the annotator did something else meanwhile."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownQuestion:
    """The question of a page, whether the run asks it or not. `find_question` makes it."""

    question_id: str
    kind: FeedbackKind
    group: GroupRow
    rows: tuple[RolloutRow, ...]
    """The rollouts in the order of display."""
    order: tuple[int, ...]
    """The order of display, as indexes into the rollouts in order of siblings."""
    question: Question | None
    """The question. None: the run does not ask it, but people may answer it all the same."""
    judgement: Judgement | None
    mine: VoteLine | None
    """Vote in force of the viewer."""

    @property
    def rollouts(self) -> tuple[str, ...]:
        """Return the rollouts in order of siblings."""
        names = [row.rollout_id for row in self.rows]
        return tuple(sorted(names, key=lambda name: int(name.rpartition("/")[2])))


def find_question(page: PageOfRun, kind: str, group_id: str, siblings: str) -> ShownQuestion:
    """Return a question by the parts of its id. HTTPException if its rollouts do not exist."""
    group = find_group(page.catalog, page.moment, group_id)
    if group is None:
        raise HTTPException(404, f"no group {group_id!r} in this run")
    numbers = [int(part) for part in siblings.split("+") if part.isdecimal() and part.isascii() and len(part) < 10]
    wanted = 2 if kind == FeedbackKind.pair else 1
    if kind not in KINDS or len(numbers) != wanted or numbers != sorted(set(numbers)):
        known = ", ".join(KINDS)
        raise HTTPException(404, f"no question {kind}/{group_id}/{siblings}; kinds are {known}, a pair has N+M")
    if numbers[-1] >= len(group.siblings):
        raise HTTPException(404, f"the group {group_id} has the rollouts 0 to {len(group.siblings) - 1}")
    rollouts = [group.siblings[number].rollout_id for number in numbers]
    question_id = question_id_of(FeedbackKind(kind), rollouts)
    view = page.run.people()
    seed = page.run.look(lambda run, _: run.config.run.seed)
    mine = own_opinions(page, view).get(question_id)
    question = next((question for question in view.questions if question.question_id == question_id), None)
    if question is None and (gold := view.gold.get(question_id)) is not None and view.questions:
        like = next(iter(open_questions(view, time.time())), view.questions[-1])
        question = disguised(gold, like, seed)
    recorded = () if question is None else question.order
    order = recorded or choose_order(seed, question_id, len(rollouts))
    return ShownQuestion(
        question_id=question_id,
        kind=FeedbackKind(kind),
        group=group,
        rows=tuple(group.siblings[numbers[place]] for place in order),
        order=order,
        question=question,
        judgement=view.judgements.get(question_id),
        mine=mine,
    )


def annotator_of(page: PageOfRun) -> str | None:
    """Return the viewer's hash on the log; None for a viewer who may not vote."""
    if page.viewer.role < StudioRole.annotator:
        return None
    name = page.viewer.name

    def annotator(run: OpenRun, _: object) -> str:
        return GatewayKeys(run_secret(run.folder.run_id), run.folder.run_id).annotator(name)

    return page.run.look(annotator)


def own_opinions(page: PageOfRun, view: FeedbackView) -> dict[str, VoteLine]:
    """Return the viewer's votes in force, by question; none for a viewer who may not vote."""
    annotator = annotator_of(page)
    return {} if annotator is None else opinions_of(view, annotator)


def judgements_of(page: PageOfRun, rollout_id: str) -> list[Judgement]:
    """Return how people judge a rollout. Who may vote sees only those of questions that they have answered."""
    view = page.run.people()
    found = [one for one in view.judgements.values() if rollout_id in one.rollouts]
    if annotator_of(page) is None:
        return found
    mine = own_opinions(page, view)
    return [one for one in found if one.question_id in mine]


def questions_in(page: PageOfRun, view: FeedbackView, mine: Collection[str], state: str, now: float) -> list[Question]:
    """Return the questions in one of STATES. Waiting questions have the most urgent first, and annotators also get gold
    questions among them. `mine`: questions that the viewer has answered."""
    if state != "open":
        return [question for question in view.questions if question_state(view, question, now) == state]
    annotator = annotator_of(page)
    if annotator is None or not view.gold:
        return open_questions(view, now)
    settings, seed = page.run.look(lambda run, _: (run.config.feedback or FeedbackSection(), run.config.run.seed))
    return questions_to(annotator, view, settings, seed, answered=mine, now=now)


def annotators_shown_to(page: PageOfRun) -> AnnotatorsView:
    """Return the figures of annotators: all for operators, and for an annotator their own without those of gold
    questions, since these would reveal the right answers one by one."""
    view = page.run.people()
    found = read_annotators(view, page.run.look(lambda run, _: run.config))
    if page.viewer.role >= StudioRole.operator:
        return found
    own = found.only(annotator_of(page) or "")
    hidden = () if own is None else (replace(own, gold=Share(count=0, total=0)),)
    return AnnotatorsView(annotators=hidden, all_together={}, num_gold=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenVote:
    """A vote, and its effect. `say` makes it."""

    question_id: str
    added: Added


def say(page: PageOfRun, row: Row, *, source: str) -> WrittenVote:
    """Write the viewer's vote, unless it repeats their last one. ConfigError if the row is no vote, or if its rollouts
    are not scored in this run. `source`: the interface that the vote came through."""
    vote = vote_of({**row, "by": page.viewer.name, "source": source}, "vote")
    scored = _scored(page, vote.rollouts)
    known = page.run.revisions
    added = page.run.look(
        lambda run, _: add_votes(run.transport, run.config, run.folder, [vote], scored=scored, revisions=known)
    )
    return WrittenVote(question_id=vote.question_id, added=added)


def _scored(page: PageOfRun, rollouts: Sequence[str]) -> dict[str, int]:
    """Return sibling -> the feeder's count of its group, for those of these siblings that the catalog knows to be
    scored."""
    group = find_group(page.catalog, page.moment, rollouts[0].rpartition("/")[0])
    rows = () if group is None else group.siblings
    return {
        row.rollout_id: group.sequence
        for row in rows
        if group is not None and row.rollout_id in rollouts and row.verified_offset is not None
    }
