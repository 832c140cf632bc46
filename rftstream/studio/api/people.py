"""The part of the interface for programs about people: questions, votes, and figures of annotators."""

from __future__ import annotations

import time

import msgspec

from rftstream.contracts.questions import Question
from rftstream.queries.people.feedback import FeedbackView
from rftstream.studio.access import StudioRole
from rftstream.studio.api.types import (
    AnnotatorList,
    NoteBody,
    NoteItem,
    QuestionItem,
    QuestionPage,
    VoteBody,
    VoteDone,
    convert,
)
from rftstream.studio.pages.note_pages import add_note, remove_note
from rftstream.studio.pages.page import PageOfRun, count_in_query, word_in_query
from rftstream.studio.voting import STATES, annotators_shown_to, own_opinions, questions_in, say

MAX_QUESTIONS = 200


def questions(page: PageOfRun) -> QuestionPage:
    """Questions to people that wait for answers, or that are judged or expired."""
    state, skip = word_in_query(page, "state", STATES) or STATES[0], count_in_query(page, "skip") or 0
    view, now = page.run.people(), time.time()
    mine = own_opinions(page, view)
    chosen = questions_in(page, view, mine, state, now)
    more = skip + MAX_QUESTIONS
    return QuestionPage(
        questions=tuple(_question(view, one, state, one.question_id in mine) for one in chosen[skip:more]),
        total=len(chosen),
        skip=more if more < len(chosen) else None,
    )


def _question(view: FeedbackView, asked: Question, state: str, answered: bool) -> QuestionItem:
    judgement = view.judgements.get(asked.question_id)
    num_votes = 0 if judgement is None else judgement.num_votes
    return convert(
        {**msgspec.to_builtins(asked), "state": state, "num_votes": num_votes, "answered": answered}, QuestionItem
    )


def feedback(page: PageOfRun, body: VoteBody) -> VoteDone:
    """Vote on a rollout or on two siblings, change a vote, or take it back."""
    values = msgspec.to_builtins(body)
    said = say(page, {name: value for name, value in values.items() if value is not None}, source="api")
    asked = next(
        (question for question in page.run.people().questions if question.question_id == said.question_id), None
    )
    return VoteDone(
        question_id=said.question_id,
        written=said.added.new > 0,
        edit=said.added.edits > 0,
        expired=asked is not None and asked.expires_at is not None and time.time() > asked.expires_at,
        applies=said.added.applies,
    )


def notes(page: PageOfRun) -> list[NoteItem]:
    """Notes on rollouts, groups and versions, newest first."""
    found = page.run.notes.notes(target=page.asked("target")[:200], tag=page.asked("tag")[:40])
    return [convert(note, NoteItem) for note in found]


def note(page: PageOfRun, body: NoteBody) -> NoteItem:
    """Write a note on a rollout, a group or a version, or take one back."""
    if body.remove is not None:
        return convert(remove_note(page, body.remove), NoteItem)
    return convert(add_note(page, body.target, body.text, body.tags), NoteItem)


def annotators(page: PageOfRun) -> AnnotatorList:
    """Figures of annotators: operators get all of them, an annotator only their own, without those of gold
    questions."""
    found = annotators_shown_to(page).to_json()
    if page.viewer.role < StudioRole.operator:
        found["gold_questions"] = None
        found["annotators"] = [{**one, "gold": None} for one in found["annotators"]]
    return msgspec.convert(found, AnnotatorList)
