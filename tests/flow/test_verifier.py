"""The verifier alone: verdicts, reasons, and never a reward that nobody gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts import codec
from rftstream.contracts.arrays import Array
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.topics import MAX_RECORD_BYTES
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.errors import ProducerLost, RewardError, StopRule, TransactionAborted
from rftstream.metrics import REGISTRY
from rftstream.rewards.base import RewardInput, Score, ScoreReply, ScoreRequest
from rftstream.roles.verifier import VERIFIER
from rftstream.roles.verifier.groups import WaitingGroups
from rftstream.roles.verifier.step import VerifierStep
from rftstream.service.loops import results
from rftstream.service.role import Role, RoleContext
from rftstream.testing import RoleDriver
from tests.flow.disturbed import FaultAt
from tests.flow.scene import Scene

Judge = Callable[[RewardInput], Score | str]
"""A score, or the reason why there is none."""


class StubScorer:
    """Judges at once, or when it is released."""

    grouped: Collection[str] = ()

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.held: list[ScoreRequest] = []
        self.hold = False
        self.seen: list[ScoreRequest] = []

    @property
    def num_active(self) -> int:
        return len(self.held)

    def submit(self, request: ScoreRequest) -> None:
        self.held.append(request)
        self.seen.append(request)

    def poll(self, wait_s: float = 0.0) -> Sequence[ScoreReply]:
        if self.hold:
            return []
        requests, self.held = self.held, []
        return [self._reply(request) for request in requests]

    def release(self, number: int) -> None:
        """Only this one of those that are held."""
        request = self.held.pop(number)
        self.poll = lambda wait_s=0.0: self._once(request)  # type: ignore[method-assign]

    def _once(self, request: ScoreRequest) -> Sequence[ScoreReply]:
        del self.poll  # type: ignore[method-assign]
        return [self._reply(request)]

    def close(self) -> None:
        pass

    def _reply(self, request: ScoreRequest) -> ScoreReply:
        score = self.judge(request.item)
        reason = score if isinstance(score, str) else None
        return ScoreReply(
            request_id=request.request_id,
            score=None if isinstance(score, str) else score,
            scorer="stub",
            scorer_version="7",
            reason=reason,
            detail="first line\nlast line" if reason else "",
            tries=3,
        )


def stub_verifier(
    scene: Scene, judge: Judge, *, max_concurrent: int = 256, max_dead_share: float = 0.5, process: str = "verifier"
) -> tuple[RoleDriver, StubScorer]:
    scorer = StubScorer(judge)

    def build(context: RoleContext) -> Role:
        step = VerifierStep(
            scorer=scorer,
            max_concurrent=max_concurrent,
            max_dead_share=max_dead_share,
            clock=context.clock,
            groups=WaitingGroups(context.transport, context.clock, context.config.verifier),
        )
        return Role(spec=VERIFIER, step=step)

    return RoleDriver(scene, "verifier", build=build, process=process), scorer


def always(score: Score | str) -> Judge:
    return lambda item: score


def put_rollouts(scene: Scene, *sequences: int, **more: Any) -> None:
    for sequence in sequences:
        scene.put("rollouts", *(scene.rollout(one, **more) for one in scene.siblings(sequence)))


def verified_of(scene: Scene) -> dict[str, VerifiedRollout]:
    verified = [message for message in scene.messages("verified") if isinstance(message, VerifiedRollout)]
    assert len({one.ids.rollout_id for one in verified}) == len(verified)
    return {one.ids.rollout_id: one for one in verified}


def letters_of(scene: Scene) -> list[DeadLetter]:
    return [message for message in scene.messages("dead") if isinstance(message, DeadLetter)]


# --------------------------------------------------------------------------------------------- verdicts


def test_a_verdict_beside_the_rollout_unchanged(scene: Scene) -> None:
    put_rollouts(scene, 0, 1, 4)
    score = Score(reward=0.75, parts={"form": 0.5}, metrics={"length": 3.0}, detail="test 2 failed")
    stub_verifier(scene, always(score))[0].work()
    rollouts = {record.key: codec.from_record(record) for record in scene.records("rollouts")}
    for record in scene.records("verified"):
        verified = codec.from_record(record)
        assert isinstance(verified, VerifiedRollout)
        assert verified.rollout == rollouts.pop(record.key)
        assert record.partition == verified.ids.sequence % 3
        verdict = verified.verdict
        assert verdict is not None
        assert (verdict.reward, verdict.parts, verdict.metrics) == (0.75, {"form": 0.5}, {"length": 3.0})
        assert (verified.reason, verified.detail) == (None, "test 2 failed")
        assert (verdict.scorer, verdict.scorer_version) == ("stub", "7")
    assert rollouts == {}
    assert letters_of(scene) == []


def test_what_rewards_spend_is_counted(scene: Scene) -> None:
    def counted() -> float:
        return REGISTRY.get_sample_value("rftstream_reward_spent_total", {"kind": "requests"}) or 0.0

    before = counted()
    spending = Score(reward=1.0, metrics={"judge.spent_requests": 2.0, "spent_requests": 1.0, "cached": 1.0})
    put_rollouts(scene, 0)
    stub_verifier(scene, always(spending))[0].work()
    assert counted() - before == 3.0 * len(verified_of(scene))


def test_the_time_of_a_verdict_begins_when_the_scorer_has_the_rollout(scene: Scene) -> None:
    def seen(what: str) -> float:
        return REGISTRY.get_sample_value(f"rftstream_verdict_seconds_{what}") or 0.0

    count, total = seen("count"), seen("sum")
    put_rollouts(scene, 0)
    verifier, scorer = stub_verifier(scene, always(Score(reward=1.0)))
    scorer.hold = True
    while not scorer.held:
        verifier.tick()
    num_held = len(scorer.held)
    scene.clock.advance(45.0)
    scorer.hold = False
    verifier.work()
    assert num_held == len(verified_of(scene)) == seen("count") - count
    assert abs(seen("sum") - total - 45.0 * num_held) < 1.0


def test_the_built_in_rewards_are_wired(scene: Scene) -> None:
    put_rollouts(scene, 0, text=" 3")
    put_rollouts(scene, 1, text="4")
    RoleDriver(scene, "verifier").work()
    rewards = {one.ids.sequence: one.verdict.reward for one in verified_of(scene).values() if one.verdict}
    assert rewards == {0: 1.0, 1: 0.0}


def test_what_a_reward_sees(scene: Scene) -> None:
    put_rollouts(scene, 0, text="four", status=RolloutStatus.truncated, num_tokens=5)
    driver, scorer = stub_verifier(scene, always(Score(reward=0.0)))
    driver.work()
    item = scorer.seen[0].item
    assert scorer.seen[0].taskset == "sums"
    assert (item.completion, item.answer, item.prompt) == ("four", "3", "1+2=")
    assert (item.num_tokens, item.truncated) == (5, True)
    assert item.messages == ({"role": "user", "content": "1+2="}, {"role": "assistant", "content": "four"})


# --------------------------------------------------------------------------------------------- no verdict


@pytest.mark.law("unscorable")
@pytest.mark.parametrize("reason", ["error", "timeout", "missing_checker"])
def test_a_reward_that_cannot_be_computed_is_a_reason_and_a_dead_letter(scene: Scene, reason: str) -> None:
    put_rollouts(scene, 0)
    stub_verifier(scene, always(reason))[0].work()
    records = scene.records("rollouts")
    for one in verified_of(scene).values():
        assert one.verdict is None
        assert one.reason == reason
        assert one.detail == "first line\nlast line"
        assert one.rollout is not None
    letters = letters_of(scene)
    assert [(one.offset, one.value, one.headers) for one in letters] == [
        (record.offset, record.value, record.headers) for record in records
    ]
    assert {(one.topic, one.role, one.reason, one.tries) for one in letters} == {("rollouts", "verifier", reason, 3)}


@pytest.mark.law("conservation", "unscorable")
def test_rollouts_without_a_completion_pass_on_with_their_reason(scene: Scene) -> None:
    statuses = {
        0: RolloutStatus.failed,
        1: RolloutStatus.skipped,
        2: RolloutStatus.oversized,
        3: RolloutStatus.undecodable,
        4: RolloutStatus.completed,
    }
    for sequence, status in statuses.items():
        put_rollouts(scene, sequence, status=status)
    driver, scorer = stub_verifier(scene, always(Score(reward=1.0)))
    driver.work()
    reasons = {one.ids.sequence: one.reason for one in verified_of(scene).values()}
    assert reasons == {0: "failed", 1: "skipped", 2: "oversized", 3: "undecodable", 4: None}
    assert len(verified_of(scene)) == 10
    assert len(scorer.seen) == 2
    letters = Counter((one.reason, one.detail, one.tries) for one in letters_of(scene))
    assert letters == {("failed", "so it is said", 1): 2, ("oversized", "so it is said", 1): 2}, "what nobody wanted"


@pytest.mark.law("conservation", "unscorable")
def test_an_undecodable_rollout(scene: Scene) -> None:
    record = codec.to_record(scene.rollout(scene.siblings(0)[0]), "rollouts", 0, run="flow")
    body = record.value or b""
    scene.put_raw(NewRecord("rollouts", 0, record.key, body[:-3], record.headers))
    put_rollouts(scene, 3)
    stub_verifier(scene, always(Score(reward=1.0)))[0].work()
    verified = verified_of(scene)
    assert Counter(one.reason for one in verified.values()) == {UnscorableReason.undecodable: 1, None: 2}
    broken = verified[scene.siblings(0)[0].rollout_id]
    assert broken.rollout is None
    assert "rollouts[0]@0 rollout.v8" in (broken.detail or "")
    assert [one.value for one in letters_of(scene)] == [body[:-3]]


def test_a_verdict_that_no_record_can_hold(scene: Scene) -> None:
    put_rollouts(scene, 0)
    put_rollouts(scene, 1, text="plain")
    stub_verifier(scene, lambda item: Score(reward=1.0, parts={} if item.completion == "plain" else {"\udcff": 1.0}))[
        0
    ].work()
    verified = verified_of(scene)
    assert Counter((one.ids.sequence, one.reason) for one in verified.values()) == {(0, "error"): 2, (1, None): 2}
    assert len(letters_of(scene)) == 2


@pytest.mark.slow
@pytest.mark.law("unscorable", "bounded")
def test_a_verdict_that_leaves_too_little_room_for_key_and_headers(tmp_path: Path) -> None:
    """One that fills the record is written, and one byte more is unscorable."""
    scene = Scene(tmp_path, feeder__group_size=1)
    size = MAX_RECORD_BYTES - 100_000

    def score(item: RewardInput) -> Score:
        return Score(reward=1.0, additions={"bits": Array(dtype="uint8", shape=(size,), data=bytes(size))})

    driver, _ = stub_verifier(scene, score)
    for sequence, more in enumerate((0, None, 1)):
        put_rollouts(scene, sequence)
        if more is None:
            (first,) = verified_of(scene).values()
            headers = codec.headers_of(first, "r" * 249, 2**31)
            record = NewRecord("verified", 0, codec.key_of(first), codec.encode(first), headers)
            more = MAX_RECORD_BYTES - record.num_bytes
        size += more
        driver.work()
    assert [one.reason for one in verified_of(scene).values()] == [None, None, "error"]
    (letter,) = letters_of(scene)
    assert "bytes, expected at most 8388608 with key and headers" in letter.detail


@pytest.mark.law("unscorable")
def test_most_of_them_unscorable_stops_the_verifier(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=10)
    put_rollouts(scene, *range(30))
    driver, _ = stub_verifier(scene, always("error"))
    with pytest.raises(StopRule) as stopped:
        driver.work()
    assert stopped.value.exit_code == 6
    assert stopped.value.reason == "dead_letters"
    assert "200 of the last 200" in str(stopped.value)
    assert "last line" in str(stopped.value)
    before = verified_of(scene)
    mended, scorer = stub_verifier(scene, always(Score(reward=1.0)), process="mended")
    scene.clock.advance(11.0)
    mended.work()
    assert len(verified_of(scene)) == 300
    assert len(scorer.seen) == 300 - len(before)


@pytest.mark.parametrize("dies", [lambda i: i % 2 == 1, lambda i: i >= 150], ids=["every other", "last, as if retried"])
def test_some_of_them_unscorable_do_not(tmp_path: Path, dies: Callable[[int], bool]) -> None:
    scene = Scene(tmp_path, feeder__group_size=10)
    put_rollouts(scene, *range(30))
    luck = iter(range(1000))
    stub_verifier(scene, lambda item: "error" if dies(next(luck)) else Score(reward=1.0))[0].work()
    assert Counter(one.reason for one in verified_of(scene).values()) == {None: 150, "error": 150}


@pytest.mark.parametrize("status", [RolloutStatus.failed, RolloutStatus.oversized, RolloutStatus.undecodable])
def test_rollouts_that_died_before_their_reward_count_as_well(tmp_path: Path, status: RolloutStatus) -> None:
    """What there is of them is on the log when the verifier stops, with the reason."""
    scene = Scene(tmp_path, feeder__group_size=10)
    put_rollouts(scene, *range(30), status=status)
    driver, scorer = stub_verifier(scene, always(Score(reward=1.0)))
    with pytest.raises(StopRule) as stopped:
        driver.work()
    assert (stopped.value.exit_code, stopped.value.reason) == (6, "dead_letters")
    for word in ("200 of the last 200 rollouts failed before they could be scored", f"{status}, so it is said",
                 "Mend the environment or the policy"):  # fmt: skip
        assert word in str(stopped.value)
    assert scorer.seen == []
    assert len(verified_of(scene)) >= 200
    if status is not RolloutStatus.undecodable:  # which has its letter from who could not decode it
        assert len(letters_of(scene)) == len(verified_of(scene))


def test_it_says_of_what_most_of_them_died(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=10)
    put_rollouts(scene, *range(8), status=RolloutStatus.failed)
    put_rollouts(scene, *range(8, 20))
    driver, _ = stub_verifier(scene, always("timeout"))
    counts = r"have no reward \(80 failed before they could be scored, 120 could not be scored by stub\)"
    with pytest.raises(StopRule, match=counts + ".*; reason of 120 of them: timeout, last line. Mend the causes"):
        driver.work()


def test_skipped_rollouts_do_not_count(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=10)
    put_rollouts(scene, *range(30), status=RolloutStatus.skipped)
    stub_verifier(scene, always("error"))[0].work()
    assert len(verified_of(scene)) == 300
    assert letters_of(scene) == []


def raises(completion: str) -> float:
    raise RewardError("no, not this one")


@pytest.mark.law("unscorable")
def test_a_users_function_that_raises(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tasksets={"sums": {"source": "arithmetic", "reward": f"{__name__}:raises"}})
    put_rollouts(scene, 0)
    RoleDriver(scene, "verifier").work()
    assert {(one.verdict, one.reason) for one in verified_of(scene).values()} == {(None, UnscorableReason.error)}
    assert all("not this one" in one.detail for one in letters_of(scene))


# --------------------------------------------------------------------------------------------- out of order


@pytest.mark.law("lost", "twice")
def test_one_slow_reward_holds_up_nobody_and_a_successor_does_it_alone(tmp_path: Path) -> None:
    scene = Scene(tmp_path, transport__partitions=1)
    put_rollouts(scene, 0, 1)
    first, scorer = stub_verifier(scene, always(Score(reward=1.0)), process="first")
    scorer.hold = True
    first.tick()
    first.tick()
    slow = scorer.held[0]
    for _ in range(3):
        scorer.release(1)
        for _ in range(30):
            first.tick()
            scene.clock.advance(0.01)
    assert len(verified_of(scene)) == 3
    position = scene.transport().admin.committed("verifier")[TopicPartition("rollouts", 0)]
    assert (position.offset, position.metadata) == (0, "1,3")
    del first  # killed
    scene.clock.advance(11.0)
    second, again = stub_verifier(scene, always(Score(reward=0.5)), process="second")
    second.work()
    assert [request.item for request in again.seen] == [slow.item]
    assert len(verified_of(scene)) == 4
    assert verified_of(scene)[scene.siblings(0)[0].rollout_id].verdict.reward == 0.5  # type: ignore[union-attr]


def test_who_is_told_to_leave_waits_for_no_reward(tmp_path: Path) -> None:
    """What has its verdict is committed; the rest is scored by the successor."""
    scene = Scene(tmp_path, transport__partitions=1)
    put_rollouts(scene, 0, 1)
    first, scorer = stub_verifier(scene, always(Score(reward=1.0)), process="first")
    scorer.hold = True
    first.tick()
    first.tick()
    scorer.release(0)
    hanging = [request.item for request in scorer.held]
    first.tick()
    first.service.drain()
    first.work()
    assert first.done
    first.service.close()
    assert len(verified_of(scene)) == 1
    second, again = stub_verifier(scene, always(Score(reward=0.5)), process="second")
    second.work()
    assert [request.item for request in again.seen] == hanging
    assert len(verified_of(scene)) == 4


@pytest.mark.law("bounded")
def test_it_takes_no_more_than_it_has_room_for(scene: Scene) -> None:
    put_rollouts(scene, *range(10))
    driver, scorer = stub_verifier(scene, always(Score(reward=1.0)), max_concurrent=3)
    scorer.hold = True
    for _ in range(5):
        driver.tick()
    assert len(scorer.held) == 3
    scorer.hold = False
    driver.work()
    assert len(verified_of(scene)) == 20


# --------------------------------------------------------------------------------------------- a log that refuses


@pytest.mark.law("bounded")
def test_it_takes_no_more_while_results_wait_for_the_log(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that takes one result at a time, and a scorer that is quicker."""
    monkeypatch.setattr(results, "MAX_TRANSACTION_BYTES", 1)
    put_rollouts(scene, *range(10))
    verifier, _ = stub_verifier(scene, always(Score(reward=1.0)), max_concurrent=4)
    in_hand = []
    while len(verified_of(scene)) < len(scene.records("rollouts")):
        verifier.tick()
        in_hand.append(REGISTRY.get_sample_value("rftstream_in_hand", {"role": "verifier"}) or 0.0)
    assert max(in_hand) <= 4


def test_a_log_that_refuses_the_start_is_waited_for(scene: Scene) -> None:
    put_rollouts(scene, 0)
    scene.log.fault = refused = FaultAt("before_start", TransactionAborted, "verifier", most=3)
    stub_verifier(scene, always(Score(reward=1.0)))[0].work(within_s=0.5)
    assert refused.count == 3
    assert len(verified_of(scene)) == len(scene.siblings(0))


@pytest.mark.law("twice")
def test_after_an_unknown_commit_a_log_that_refuses_a_new_producer_is_waited_for(scene: Scene) -> None:
    """The commit happened: nothing is written again when it can be settled at last."""
    put_rollouts(scene, 0)
    faults: list[str] = []

    def fault(point: str, process: str) -> None:
        if process != "verifier" or len(faults) > 2:
            return
        if point == "after_commit" and not faults:
            faults.append(point)
            raise ProducerLost("no answer")
        if point == "before_start" and faults:
            faults.append(point)
            raise TransactionAborted("no broker")

    scene.log.fault = fault
    driver, _ = stub_verifier(scene, always(Score(reward=1.0)))
    driver.work(within_s=0.5)
    put_rollouts(scene, 1)
    driver.work(within_s=0.5)
    assert faults == ["after_commit", "before_start", "before_start"]
    assert len(verified_of(scene)) == len(scene.siblings(0)) + len(scene.siblings(1))
