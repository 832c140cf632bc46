"""How people's votes are folded, which rollouts they are asked about, and what a file of votes may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts.feedback import (
    Feedback,
    FeedbackKind,
    PairChoice,
    feedback_id_of,
    question_id_of,
)
from rftstream.contracts.outcomes import GroupResult, RolloutSummary
from rftstream.contracts.questions import Applied, Judgement, QuestionReason, VoteEffect
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.data.feedback.fold import OPEN, FeedbackFold, GroupStatus
from rftstream.data.feedback.rows import read_votes
from rftstream.data.feedback.selection import choose_questions
from rftstream.errors import ConfigError

GROUP = "sums/0/17/0"
BATCHED = GroupStatus(GroupResult.batched, 3)


def vote(
    who: str,
    *,
    revision: int = 0,
    kind: FeedbackKind = FeedbackKind.label,
    asked: FeedbackKind | None = None,
    rollouts: tuple[str, ...] = (f"{GROUP}/1",),
    **answer: Any,
) -> Feedback:
    question_id, annotator = question_id_of(asked or kind, rollouts), who * 32
    return Feedback(
        feedback_id=feedback_id_of(question_id, annotator, revision), rollout_id=rollouts[0], source="test", kind=kind,
        question_id=question_id, rollouts=rollouts, sequence=17, annotator=annotator, revision=revision, **answer,
    )  # fmt: skip


class Folded:
    """A fold to which votes come one after the other."""

    def __init__(self, **settings: Any) -> None:
        self.fold = FeedbackFold(FeedbackSection(**settings))
        self.offset = 0

    def __call__(self, one: Feedback | None, status: GroupStatus | None = OPEN, at: float = 0.0) -> Judgement:
        record = Record("feedback", 0, self.offset, at, b"", b"", (("id", b"some id"),))
        self.offset += 1
        return self.fold.judge(record, one, status, 5.0)


@pytest.mark.law("twice")
def test_one_person_twice_is_no_quorum() -> None:
    fold = Folded(quorum=2)
    first = fold(vote("a", reward=1.0))
    again = fold(vote("a", reward=1.0, revision=1))
    for judgement in (first, again):
        assert (judgement.effect, judgement.num_votes, judgement.applied) == (VoteEffect.counted, 1, Applied.none)
        assert (judgement.reward, judgement.reason) == (None, "quorum")
    second = fold(vote("b", reward=1.0))
    assert (second.num_votes, second.reward, second.applied, second.reason) == (2, 1.0, Applied.verdict, "")


def test_an_edit_takes_the_place_and_a_retract_takes_it_back() -> None:
    fold = Folded(quorum=2)
    fold(vote("a", reward=1.0))
    assert fold(vote("b", reward=0.0)).reason == "tie"
    edited = fold(vote("b", reward=1.0, revision=1))
    assert (edited.reward, edited.agreement) == (1.0, 1.0)
    late_copy = fold(vote("b", reward=0.0))
    assert (late_copy.effect, late_copy.applied) == (VoteEffect.outdated, Applied.none)
    assert fold(vote("b", reward=1.0, revision=1)).effect is VoteEffect.duplicate
    back = fold(vote("b", kind=FeedbackKind.retract, asked=FeedbackKind.label, revision=2))
    assert (back.effect, back.num_votes, back.reason, back.reward) == (VoteEffect.counted, 1, "quorum", None)
    assert fold(vote("a", kind=FeedbackKind.retract, asked=FeedbackKind.label, revision=1)).reason == "no votes"


def test_after_the_batch_a_correction_is_recorded() -> None:
    fold = Folded()
    late = fold(vote("a", reward=0.0), BATCHED)
    assert (late.applied, late.result, late.batch_sequence) == (Applied.correction, GroupResult.batched, 3)
    # the batch was made with what somebody takes back now: that is wrong, too
    early = Folded()
    assert early(vote("a", reward=0.0)).applied is Applied.verdict
    back = early(vote("a", kind=FeedbackKind.retract, asked=FeedbackKind.label, revision=1), BATCHED)
    assert (back.applied, back.reward, back.batch_sequence) == (Applied.correction, None, 3)
    filtered = fold(vote("a", reward=0.0, rollouts=(f"{GROUP}/2",)), GroupStatus(GroupResult.filtered))
    assert (filtered.applied, filtered.reason) == (Applied.none, "the group is filtered")


def test_labels_and_ratings_never_mix() -> None:
    fold = Folded(ask="rating", scale=(1.0, 5.0))
    rated = [fold(vote(who, kind=FeedbackKind.rating, reward=number)) for who, number in (("a", 2.0), ("b", 5.0))]
    assert [one.reward for one in rated] == [0.25, 0.625]  # the median, on a scale from 0 to 1
    assert rated[1].agreement == pytest.approx(0.25)
    label = fold(vote("a", reward=1.0))
    assert (label.reward, label.applied, label.reason) == (1.0, Applied.none, "feedback.ask is rating")
    assert fold(vote("a", kind=FeedbackKind.rating, reward=9.0, revision=1)).effect is VoteEffect.invalid


def test_pairs() -> None:
    fold, both = Folded(quorum=2), (f"{GROUP}/0", f"{GROUP}/1")

    def say(who: str, choice: PairChoice, revision: int = 0) -> Judgement:
        return fold(vote(who, kind=FeedbackKind.pair, rollouts=both, choice=choice, revision=revision))

    assert say("a", PairChoice.cannot_judge).num_votes == 0
    assert say("b", PairChoice.second).reason == "quorum"
    judged = say("c", PairChoice.second)
    assert (judged.choice, judged.applied, judged.agreement) == (PairChoice.second, Applied.pair, 1.0)
    say("b", PairChoice.both_bad, 1)
    bad = say("c", PairChoice.both_bad, 1)
    assert (bad.choice, bad.applied, bad.reason) == (PairChoice.both_bad, Applied.none, "both_bad")


def test_corrections_and_flags() -> None:
    fold = Folded(quorum=2)

    def correct(who: str, text: str) -> Judgement:
        return fold(vote(who, kind=FeedbackKind.correction, correction=text))

    assert correct("a", "4").correction == correct("b", " 4 ").correction.replace("b" * 32, "a" * 32)  # type: ignore[union-attr]
    assert correct("c", "5").correction == f"correction/{GROUP}/1/{'b' * 32}/0"  # two against one
    assert not fold(vote("a", kind=FeedbackKind.flag)).flagged
    flagged = fold(vote("b", kind=FeedbackKind.flag))
    assert (flagged.flagged, flagged.applied) == (True, Applied.verdict)


def test_what_changes_nothing_says_why() -> None:
    fold = Folded()
    (asked,) = choose_questions(
        FeedbackSection(share=1.0, expires_s=10.0), 0, GROUP, 17, [(summary(1, 0.0), {})], now=100.0
    )
    fold.fold.ask(asked)
    assert fold(vote("a", reward=1.0), at=110.5).effect is VoteEffect.expired
    assert fold(vote("a", reward=1.0), status=None).effect is VoteEffect.unknown
    assert fold(vote("a", reward=1.0), at=110.0).effect is VoteEffect.counted
    unreadable = fold(None)
    assert (unreadable.effect, unreadable.feedback_id) == (VoteEffect.invalid, "some id")
    old = Feedback(feedback_id="f", rollout_id=f"{GROUP}/1", source="somebody", reward=1.0)
    assert fold(old).effect is VoteEffect.invalid


def test_a_restored_fold_goes_on_as_it_was() -> None:
    votes = [vote("a", reward=1.0), vote("b", reward=1.0), vote("b", reward=0.0, revision=1), vote("c", reward=0.0)]
    for cut in range(len(votes)):
        whole, parted = Folded(quorum=2), Folded(quorum=2)
        said = [whole(one) for one in votes]
        for one, judgement in zip(votes[:cut], said[:cut], strict=True):
            parted.fold.note(judgement)
            parted.fold.restore(one, judgement)
        parted.offset = cut
        assert [parted(one) for one in votes[cut:]] == said[cut:]


# --------------------------------------------------------------------------------------------- selection


def summary(sibling: int, reward: float | None, status: RolloutStatus = RolloutStatus.completed) -> RolloutSummary:
    return RolloutSummary(rollout_id=f"{GROUP}/{sibling}", num_tokens=3, status=status, reward=reward)


def test_selection_by_rules() -> None:
    settings = FeedbackSection(unscorable=True, disagreement=0.5, quorum=2, expires_s=60.0, hold_s=5.0)
    siblings = [
        (summary(0, None), {}), (summary(1, 0.5), {"a": 0.0, "b": 1.0}), (summary(2, 0.5), {"a": 0.4, "b": 0.6}),
        (summary(3, None, RolloutStatus.failed), {}),
    ]  # fmt: skip
    asked = choose_questions(settings, 0, GROUP, 17, siblings, now=100.0)
    assert [(one.question_id, one.reason) for one in asked] == [
        (f"label/{GROUP}/0", QuestionReason.unscorable), (f"label/{GROUP}/1", QuestionReason.disagreement),
    ]  # fmt: skip
    assert {(one.quorum, one.expires_at, one.held_until, one.sequence) for one in asked} == {(2, 160.0, 105.0, 17)}


def test_shares_are_drawn_by_the_seed() -> None:
    settings = FeedbackSection(share=0.25, pairs=0.25)
    groups = [f"sums/0/{number}/0" for number in range(400)]

    def asked(seed: int) -> list[str]:
        return [
            one.question_id
            for group in groups
            for one in choose_questions(
                settings, seed, group, 0,
                [(RolloutSummary(rollout_id=f"{group}/{n}", num_tokens=1, status=RolloutStatus.completed,
                                 reward=float(n)), {}) for n in range(2)],
                now=0.0,
            )
        ]  # fmt: skip

    assert asked(1) == asked(1) != asked(2)
    labels = sum(one.startswith("label/") for one in asked(1))
    pairs = sum(one.startswith("pair/") for one in asked(1))
    assert 150 < labels < 250
    assert 60 < pairs < 140


def test_a_pair_has_different_rewards_and_swapped_sides() -> None:
    settings = FeedbackSection(pairs=1.0)
    orders = set()
    for number in range(20):
        group = f"sums/0/{number}/0"
        siblings = [
            (RolloutSummary(rollout_id=f"{group}/{n}", num_tokens=1, status=RolloutStatus.completed,
                            reward=float(n == 2)), {}) for n in range(3)
        ]  # fmt: skip
        (asked,) = choose_questions(settings, 0, group, number, siblings, now=0.0)
        assert asked.rollouts[1] == f"{group}/2"
        orders.add(asked.order)
    assert orders == {(0, 1), (1, 0)}


# --------------------------------------------------------------------------------------------- rows


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    rows = [
        {"rollout": f"{GROUP}/1", "by": "ada", "label": 1},
        {"rollouts": [f"{GROUP}/0", f"{GROUP}/10"], "by": "bob", "choice": "tie", "order": [1, 0], "lead_time_s": 3},
        {"rollout": f"{GROUP}/1", "by": "ada", "correction": "4", "comment": "so"},
        {"rollout": f"{GROUP}/1", "by": "ada", "flag": "rude"},
        {"rollout": f"{GROUP}/1", "by": "ada", "retract": "label"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    votes = list(read_votes(path))
    assert [one.question_id for one in votes] == [
        f"label/{GROUP}/1", f"pair/{GROUP}/0+10", f"correction/{GROUP}/1", f"flag/{GROUP}/1", f"label/{GROUP}/1",
    ]  # fmt: skip
    assert votes[3].comment == "rude"
    assert votes[1].order == (1, 0)


def test_a_pair_is_one_question_whoever_is_named_first(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    row = {"rollouts": [f"{GROUP}/10", f"{GROUP}/9"], "by": "ada", "choice": "first", "order": [0, 1]}
    path.write_text(json.dumps(row), encoding="utf-8")
    (vote,) = read_votes(path)
    assert vote.question_id == f"pair/{GROUP}/9+10"
    assert vote.rollouts == (f"{GROUP}/9", f"{GROUP}/10")
    assert (vote.choice, vote.order) == (PairChoice.second, (1, 0))


@pytest.mark.parametrize(("row", "text"), [
    ({"rollout": f"{GROUP}/1", "label": 1}, "by: got None, expected the annotator's name"),
    ({"rollout": f"{GROUP}/1", "by": "a"}, "found no answer, expected one of label, rating, choice"),
    ({"rollout": f"{GROUP}/1", "by": "a", "label": 1, "rating": 2}, "found label, rating, expected one of"),
    ({"rollout": f"{GROUP}/1", "by": "a", "label": True}, "label: got True, expected a finite number"),
    ({"rollout": f"{GROUP}/1", "by": "a", "lable": 1}, "lable: unknown; .*did you mean 'label'"),
    ({"rollout": "here", "by": "a", "label": 1}, "rollouts: got here, expected one rollout, taskset/pass/index"),
    ({"rollout": f"{GROUP}/1", "by": "a", "choice": "tie"}, ".*expected two siblings of one group"),
    ({"rollouts": [f"{GROUP}/1", f"{GROUP}/3"], "by": "a", "choice": "left"}, "choice: got 'left', expected one of"),
    ([1], "got list, expected an object"),
])  # fmt: skip
def test_what_is_wrong_with_a_row(tmp_path: Path, row: Any, text: str) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_text(f"\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"votes\.jsonl:2: {text}"):
        list(read_votes(path))
