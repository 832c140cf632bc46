"""The buffer with people: what they are asked, when their votes change a batch, and that a restart changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts import codec
from rftstream.contracts.batches import Experience
from rftstream.contracts.feedback import Feedback, FeedbackKind, PairChoice, feedback_id_of, question_id_of
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.questions import Applied, Judgement, Question, VoteEffect
from rftstream.contracts.records import NewRecord
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import ConfigError
from rftstream.queries.people.feedback import read_feedback
from rftstream.roles.buffer.groups import OpenGroups, sibling_of
from rftstream.roles.buffer.people.feedback import FeedbackIntake
from rftstream.roles.buffer.progress import BufferProgress
from rftstream.service.role import Log, SingleTransaction
from rftstream.service.role_claim import MAX_WAIT_S
from rftstream.testing import RoleDriver
from tests.flow import test_buffer as buffers
from tests.flow.disturbed import FaultAt, at_commits, restarting, tick_on
from tests.flow.test_buffer import TIMEOUT, batches_of, end, results_of


class Scene(buffers.Scene):
    """A run with people, who speak by letters of the alphabet."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **{"feedback__quorum": 2, "feeder__groups_per_batch": 1, **settings})

    def say(
        self,
        who: str,
        sequence: int,
        *siblings: int,
        revision: int = 0,
        kind: FeedbackKind = FeedbackKind.label,
        asked: FeedbackKind | None = None,
        **answer: Any,
    ) -> Feedback:
        ids = self.siblings(sequence, size=9)
        rollouts = tuple(ids[number].rollout_id for number in siblings)
        question_id, annotator = question_id_of(asked or kind, rollouts), who * 32
        vote = Feedback(
            feedback_id=feedback_id_of(question_id, annotator, revision), rollout_id=rollouts[0], source="test",
            kind=kind, question_id=question_id, rollouts=rollouts, sequence=sequence, annotator=annotator,
            revision=revision, given_at=self.clock.now(), **answer,
        )  # fmt: skip
        self.put("feedback", vote, partition=sequence % self.config.transport.partitions)
        return vote

    def judgements(self) -> list[Judgement]:
        return [one for one in self.messages("judgements") if isinstance(one, Judgement)]

    def questions(self) -> list[Question]:
        return [one for one in self.messages("questions") if isinstance(one, Question)]

    def in_batches(self) -> dict[tuple[int, int], tuple[float | None, dict[str, float]]]:
        """Sequence and sibling -> reward and parts in the batch."""
        return {
            (one.ids.sequence, one.ids.sibling): (one.reward, one.parts)
            for one in self.messages("batches")
            if isinstance(one, Experience)
        }


def test_a_vote_before_the_batch_changes_the_reward_and_not_the_verdict(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feedback__share=1.0, feedback__hold_s=60.0)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0)
    buffer.work()
    assert [one.question_id for one in scene.questions()] == ["label/sums/0/0/0/0", "label/sums/0/0/0/1"]
    assert batches_of(scene) == []
    scene.say("a", 0, 0, reward=1.0)
    scene.say("a", 0, 1, reward=1.0)
    scene.say("a", 0, 0, reward=1.0, revision=1)
    buffer.work()
    assert batches_of(scene) == [], "one person twice is no quorum"
    scene.say("b", 0, 0, reward=1.0)
    scene.say("b", 0, 1, reward=1.0)
    buffer.work()
    assert scene.in_batches() == {(0, 0): (1.0, {"human": 1.0}), (0, 1): (1.0, {"human": 1.0})}
    verified = [one for one in scene.messages("verified") if isinstance(one, VerifiedRollout)]
    assert [one.verdict.reward for one in verified if one.verdict] == [0.0, 1.0]
    assert [(one.applied, one.num_votes) for one in scene.judgements()] == [
        (Applied.none, 1), (Applied.none, 1), (Applied.none, 1), (Applied.verdict, 2), (Applied.verdict, 2),
    ]  # fmt: skip
    assert [one.metrics["part/human"] for one in buffers.manifests_of(scene)] == [1.0]


def test_operators_see_the_rewards_that_people_gave_and_so_does_the_audit(tmp_path: Path) -> None:
    """The scorer's rewards of the first group differ and people's do not; the second group is the other way round."""
    scene = Scene(tmp_path, pipeline=({"op": "zero_variance"},), feedback__share=1.0, feedback__hold_s=60.0)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0)
    for one in scene.siblings(1):
        scene.put("verified", scene.verified(one, 0.0))
    buffer.work()
    for who in "ab":
        for sequence, sibling, reward in ((0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0), (1, 1, 1.0)):
            scene.say(who, sequence, sibling, reward=reward)
    scene.clock.advance(61.0)
    buffer.work()
    assert results_of(scene) == {0: ("filtered", "zero_variance"), 1: ("batched", "complete")}
    assert scene.in_batches() == {(1, 0): (0.0, {"human": 0.0}), (1, 1): (1.0, {"human": 1.0})}
    found = scene.recompute()
    assert found.fine, found.to_text()
    assert found.num_groups == 2
    asked_otherwise = loader.replace(scene.config, feedback=FeedbackSection(ask=FeedbackKind.rating))
    assert not scene.recompute(asked_otherwise).fine, "without these labels it is decided otherwise"


def test_people_and_operators_that_use_groups_again_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found operators that use groups once more.*leave out \[feedback\]"):
        RoleDriver(Scene(tmp_path, pipeline=({"op": "replay"},)), "buffer").work()


@pytest.mark.law("order")
def test_a_vote_after_the_batch_is_a_correction_that_names_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feedback__quorum=1)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0)
    scene.verify(1)
    buffer.work()
    scene.say("a", 1, 1, reward=0.0)
    buffer.work()
    (judgement,) = scene.judgements()
    assert (judgement.applied, judgement.reward) == (Applied.correction, 0.0)
    assert (judgement.result, judgement.batch_sequence) == (GroupResult.batched, 1)
    assert scene.in_batches()[1, 1] == (1.0, {})
    buffer.restart()  # what is decided is known from the log
    scene.say("a", 1, 1, kind=FeedbackKind.retract, asked=FeedbackKind.label, revision=1)
    scene.say("b", 0, 0, 1, kind=FeedbackKind.pair, choice=PairChoice.second)
    buffer.work()
    assert {(one.applied, one.batch_sequence) for one in scene.judgements()[1:]} == {
        (Applied.correction, 1), (Applied.pair, 0),
    }  # fmt: skip


def test_hold_s_by_the_clock(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feedback__share=1.0, feedback__hold_s=60.0)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0)
    buffer.work()
    scene.say("a", 0, 0, reward=1.0)
    scene.clock.advance(59.0)
    buffer.restart()  # the question says until when
    buffer.work(within_s=0.1)
    assert batches_of(scene) == []
    assert 0 < buffer.tick() <= 1.0
    scene.clock.advance(1.1)
    buffer.work()
    assert batches_of(scene) == [[0]]
    assert scene.in_batches()[0, 0] == (0.0, {}), "one vote is no quorum"
    assert len(scene.questions()) == 2


@pytest.mark.law("unscorable")
def test_people_give_rewards_where_the_scorer_could_not(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feedback__unscorable=True, feedback__hold_s=60.0, feedback__quorum=1)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0, (TIMEOUT, TIMEOUT))
    scene.verify(1, (TIMEOUT, TIMEOUT))
    buffer.work()
    assert len(scene.questions()) == 4
    for sibling in (0, 1):
        scene.say("a", 0, sibling, reward=float(sibling))
    buffer.work()
    assert scene.in_batches() == {(0, 0): (0.0, {"human": 0.0}), (0, 1): (1.0, {"human": 1.0})}
    scene.clock.advance(61.0)
    buffer.work()
    assert results_of(scene) == {0: ("batched", "complete"), 1: ("dead", "unscorable: timeout")}


def test_what_people_say_is_mixed_by_weight_and_may_be_taken_back(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feedback__quorum=1, feedback__weight=0.25, feeder__groups_per_batch=2)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(1)
    scene.say("a", 1, 0, reward=1.0)
    scene.say("b", 1, 1, reward=5.0)
    buffer.work()
    scene.say("b", 1, 1, kind=FeedbackKind.retract, asked=FeedbackKind.label, revision=1)
    buffer.restart()
    scene.verify(0)
    buffer.work()
    assert batches_of(scene) == [[0, 1]]
    assert (scene.in_batches()[1, 0], scene.in_batches()[1, 1]) == ((0.25, {"human": 1.0}), (1.0, {}))


def test_flagged_rollouts_are_left_out(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=3, feedback__quorum=1, feeder__groups_per_batch=2)
    buffer = RoleDriver(scene, "buffer")
    for sequence in (1, 2):
        scene.verify(sequence, (0.0, 1.0, 0.5))
    scene.say("a", 1, 2, kind=FeedbackKind.flag)
    for sibling in (0, 1):
        scene.say("a", 2, sibling, kind=FeedbackKind.flag)
    buffer.work()
    assert results_of(scene) == {2: ("filtered", "flagged")}
    scene.verify(0, (0.0, 1.0, 0.5))
    buffer.work()
    assert batches_of(scene) == [[0, 1]]
    assert sorted(sibling for sequence, sibling in scene.in_batches() if sequence == 1) == [0, 1]
    (outcome,) = [one for one in buffers.outcomes_of(scene) if one.sequence == 1]
    assert [one.rejected for one in outcome.rollouts] == [None, None, "feedback: flagged"]


def test_votes_on_gold_questions_change_no_reward_and_hold_nothing(tmp_path: Path) -> None:
    """The same votes as in the first test, but the right answer to one of the questions is known. A restart between the
    two, and between answers, changes nothing."""
    scene = Scene(tmp_path, feedback__share=1.0, feedback__hold_s=60.0)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0)
    scene.verify(1)
    buffer.work()
    assert len(scene.questions()) == 4
    scene.say("0", 0, 0, reward=0.0)
    buffer.work()
    buffer.restart()
    for who in "ab":
        scene.say(who, 0, 0, reward=1.0)
        buffer.work()
        buffer.restart()
        scene.say(who, 0, 1, reward=0.5)
        buffer.work()
    assert scene.in_batches() == {(0, 0): (0.0, {}), (0, 1): (0.5, {"human": 0.5})}, "it waited for one answer alone"
    scene.say("a", 0, 0, reward=0.5, revision=1)  # also after the batch
    buffer.work()
    gold = [one for one in scene.judgements() if one.question_id == "label/sums/0/0/0/0"]
    assert [(one.effect, one.num_votes, one.reward, one.applied) for one in gold] == (
        [(VoteEffect.gold, 0, None, Applied.none)] * 4
    )
    view = read_feedback(Log(scene.transport()), scene.config)
    assert len(scene.judgements()) == len(scene.records("feedback")) == len(view.votes)
    assert list(view.judgements) == ["label/sums/0/0/0/1"]
    assert view.gold["label/sums/0/0/0/0"].reward == 0.0
    assert scene.recompute().fine


def test_a_gold_question_is_not_asked(tmp_path: Path) -> None:
    """Where the right answer was said before the group is complete."""
    scene = Scene(tmp_path, feedback__share=1.0)
    buffer = RoleDriver(scene, "buffer")
    one, other = scene.siblings(0)
    scene.put("verified", scene.verified(one, 0.0))
    buffer.work()
    scene.say("0", 0, 0, reward=0.0)
    buffer.work()
    scene.put("verified", scene.verified(other, 1.0))
    buffer.work()
    assert [question.question_id for question in scene.questions()] == ["label/sums/0/0/0/1"]


def test_what_changes_nothing_is_recorded_with_the_reason(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feedback__share=1.0, feedback__quorum=1, feedback__expires_s=30.0)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0)
    buffer.work()
    scene.say("a", 0, 0, reward=0.5)
    scene.say("a", 0, 0, reward=0.5)
    scene.say("a", 0, 7, reward=0.5)
    scene.say("a", 4, 0, reward=0.5)
    scene.put("feedback", Feedback(feedback_id="f", rollout_id="sums/0/0/0/0", source="old"), partition=0)
    buffer.work()
    scene.clock.advance(31.0)
    scene.say("b", 0, 0, reward=0.5)
    buffer.work()
    counts: dict[VoteEffect, int] = {}
    for one in scene.judgements():
        counts[one.effect] = counts.get(one.effect, 0) + 1
    assert counts == {
        VoteEffect.counted: 1, VoteEffect.duplicate: 1, VoteEffect.unknown: 2, VoteEffect.invalid: 1,
        VoteEffect.expired: 1,
    }  # fmt: skip
    assert len({one.judgement_id for one in scene.judgements()}) == len(scene.records("feedback"))
    buffer.restart()
    buffer.work()
    assert len(scene.judgements()) == len(scene.records("feedback"))


def test_a_vote_that_is_read_before_its_rollout_waits_for_it(tmp_path: Path) -> None:
    """Topics are read in any order: what was not read yet is looked for on `verified` before it is unknown."""
    scene = Scene(tmp_path, feedback__quorum=1)
    scene.verify(0)
    scene.say("a", 0, 1, reward=0.25)
    scene.say("a", 0, 7, reward=0.25)
    log, groups, progress = Log(scene.transport()), OpenGroups(), BufferProgress()
    progress.read = log.transport.admin.begin_offsets("verified")
    intake = FeedbackIntake(scene.config.feedback, 0, scene.clock)
    intake.begin(log)
    for record in scene.records("feedback"):
        vote = codec.from_record(record)
        assert isinstance(vote, Feedback)
        intake.absorb(record, vote)

    def judged() -> list[tuple[str, VoteEffect]]:
        assert intake.fold(log, groups, progress) == []
        outputs = (intake.with_outputs(None) or SingleTransaction(())).outputs
        return [(one.message.rollouts[0], one.message.effect) for one in outputs if isinstance(one.message, Judgement)]

    assert judged() == [("sums/0/0/0/7", VoteEffect.unknown)]
    assert judged() == []
    for record in scene.records("verified"):
        verified = codec.from_record(record)
        assert isinstance(verified, VerifiedRollout)
        groups.add(verified, sibling_of(verified, record.place, record.offset), record.timestamp_s)
        progress.read[record.place] = record.offset + 1
    assert judged() == [("sums/0/0/0/1", VoteEffect.counted)]


@pytest.mark.law("twice")
def test_a_vote_that_cannot_be_read_is_recorded_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feedback__quorum=1)
    scene.verify(0)
    vote = scene.say("a", 0, 0, reward=1.0)
    record = codec.to_record(vote, "feedback", 0, run=scene.folder.run_id)
    scene.put_raw(NewRecord("feedback", 0, record.key, b"\xc1", record.headers))
    buffer = RoleDriver(scene, "buffer")
    for _ in range(2):
        buffer.work()
        buffer.restart()
    buffer.work()
    assert [one.effect for one in scene.judgements()] == [VoteEffect.counted, VoteEffect.invalid]


def test_without_the_section_nothing_is_read(tmp_path: Path) -> None:
    scene = buffers.Scene(tmp_path)
    scene.verify(0)
    scene.verify(1)
    buffer = RoleDriver(scene, "buffer")
    buffer.work()
    assert batches_of(scene) == [[0, 1]]
    assert not scene.records("questions")
    assert not scene.records("judgements")


# --------------------------------------------------------------------------------------------- kills


SETTINGS = {"feeder__group_size": 2, "transport__partitions": 2, "trainer__shares": 2, "feeder__groups_per_batch": 2,
            "buffer__max_body_bytes": 700, "feedback__unscorable": True, "feedback__pairs": 0.5,
            "feedback__share": 0.8, "feedback__hold_s": 1e6}  # fmt: skip
"""Groups are held until all questions are judged, so that which votes come in time is not a matter of time."""


def happenings(scene: Scene) -> list[Callable[[], None]]:
    random = Random(5)
    happens: list[tuple[float, Callable[[], None]]] = []
    for sequence in range(10):
        rewards: Any = [(0.0, 1.0), (TIMEOUT, 1.0), (TIMEOUT, TIMEOUT)][sequence % 3]
        at = sequence + 3 * random.random()
        happens.append((at, lambda s=sequence, r=rewards: scene.verify(s, r)))  # type: ignore[misc]
        for place, who in enumerate("aba"):
            revision = place // 2
            at += random.random()
            for sibling in (0, 1):
                reward = float((sequence + sibling + revision) % 2)
                happens.append(
                    (
                        at,
                        lambda w=who, s=sequence, n=sibling, r=reward, v=revision: scene.say(
                            w, s, n, reward=r, revision=v
                        ),
                    )
                )  # type: ignore[misc]
        for who in "ab":
            happens.append(
                (
                    at + 9,
                    lambda w=who, s=sequence: scene.say(w, s, 0, 1, kind=FeedbackKind.pair, choice=PairChoice.second),
                )
            )  # type: ignore[misc]
    return [*(what for _, what in sorted(happens, key=lambda one: one[0])), lambda: end(scene, 10)]


def decided_by(scene: Scene, buffer: RoleDriver, after: Callable[[], None]) -> Any:
    for happens in happenings(scene):
        happens()
        after()
    scene.log.fault = None
    scene.clock.advance(MAX_WAIT_S)  # for a successor's claim, after many commits that were lost
    for _ in range(3):
        buffer.work(within_s=0.9)
        scene.clock.advance(1.0)
    batches_of(scene)
    judgements = scene.judgements()
    assert len({one.judgement_id for one in judgements}) == len(judgements) == len(scene.records("feedback"))
    assert len({one.question_id for one in scene.questions()}) == len(scene.questions())
    view = read_feedback(Log(scene.transport()), scene.config)
    assert all(line.recorded for line in view.votes)
    for one in judgements:  # what changed a batch was written with it, or before
        if one.applied is Applied.correction and one.kind is FeedbackKind.label:
            assert one.batch_sequence is not None
    judged = {name: (one.reward, one.choice, one.num_votes) for name, one in view.judgements.items()}
    return judged, {one.question_id for one in scene.questions()}


def check_batches(scene: Scene) -> None:
    """What a batch holds is the newest that was judged while its group was open."""
    open_ones: dict[str, Judgement] = {}
    for one in scene.judgements():
        if one.result is None and one.kind is FeedbackKind.label and one.effect is VoteEffect.counted:
            open_ones[one.rollouts[0]] = one
    seen = 0
    for experience in scene.messages("batches"):
        if isinstance(experience, Experience):
            judged = open_ones.get(experience.ids.rollout_id)
            human = judged.reward if judged is not None and judged.applied is Applied.verdict else None
            assert experience.parts.get("human") == human
            seen += human is not None
    assert seen > 3


@pytest.fixture
def undisturbed(tmp_path: Path) -> Any:
    scene = Scene(tmp_path / "undisturbed", **SETTINGS)
    buffer = RoleDriver(scene, "buffer")
    found = decided_by(scene, buffer, buffer.work)
    check_batches(scene)
    return found


@pytest.mark.slow
@pytest.mark.law("lost", "twice", "order")
@pytest.mark.parametrize("every", [1, 3])
def test_a_restart_changes_nothing(tmp_path: Path, undisturbed: Any, every: int) -> None:
    scene = Scene(tmp_path, **SETTINGS)
    buffer = RoleDriver(scene, "buffer")
    assert decided_by(scene, buffer, restarting(buffer, every)) == undisturbed
    check_batches(scene)


@pytest.mark.slow
@pytest.mark.law("lost", "twice", "order")
@at_commits
def test_no_fault_at_a_commit_changes_anything(
    tmp_path: Path, undisturbed: Any, point: str, fault: type[BaseException]
) -> None:
    scene = Scene(tmp_path, **SETTINGS)
    scene.log.fault = happens = FaultAt(point, fault, "buffer", share=0.4)
    buffer = RoleDriver(scene, "buffer")
    assert decided_by(scene, buffer, lambda: tick_on(buffer)) == undisturbed
    check_batches(scene)
    assert happens.count > 5
