"""What the exporter says of people, by hand."""

from __future__ import annotations

from dataclasses import replace

from rftstream.contracts.questions import Applied, VoteEffect
from rftstream.contracts.records import Record
from rftstream.queries.curves.exported import people_figures
from rftstream.queries.people.feedback import FeedbackView, VoteLine
from tests.contracts.samples import SAMPLES

ASKED = SAMPLES["question.v1"]
JUDGED = SAMPLES["judgement.v1"]
NOW = 1000.0


def vote(effect: VoteEffect, *, recorded: bool = True) -> VoteLine:
    return VoteLine(Record("feedback", 0, 0, 0.0, b"", b"", ()), None, replace(JUDGED, effect=effect), recorded)


def test_nobody_was_asked() -> None:
    assert people_figures(FeedbackView(), NOW) == {}


def test_questions_by_how_they_stand_and_votes_by_what_became_of_them() -> None:
    view = FeedbackView(
        questions=[
            replace(ASKED, question_id="judged", asked_at=100.0, expires_at=None),
            replace(ASKED, question_id="expired", asked_at=200.0, expires_at=NOW - 1),
            replace(ASKED, question_id="newer", asked_at=500.0, expires_at=NOW + 1),
            replace(ASKED, question_id="older", asked_at=400.0, expires_at=None),
        ],
        votes=[vote(VoteEffect.counted), vote(VoteEffect.expired), vote(VoteEffect.counted, recorded=False)],
        judgements={"judged": replace(JUDGED, applied=Applied.verdict)},
    )
    found = people_figures(view, NOW)
    assert dict(found["rftstream_run_questions"]) == {("open",): 2, ("judged",): 1, ("expired",): 1}
    votes = dict(found["rftstream_run_votes_total"])
    assert votes[("counted",)] == votes[("expired",)] == 1
    assert votes[("duplicate",)] == 0 and len(votes) == len(VoteEffect)
    assert found["rftstream_run_votes_pending"] == [((), 1)]
    assert found["rftstream_run_oldest_question_timestamp_seconds"] == [((), 400.0)]


def test_without_an_open_question_none_is_the_oldest() -> None:
    view = FeedbackView(questions=[replace(ASKED, expires_at=NOW - 1)])
    assert people_figures(view, NOW)["rftstream_run_oldest_question_timestamp_seconds"] == []
