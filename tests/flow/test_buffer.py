"""The buffer alone: which groups make which batch, what becomes of the others, and that a restart changes nothing."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.control import TasksEnded
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import UnscorableReason
from rftstream.errors import StopRule
from rftstream.roles.buffer import bodies
from rftstream.testing import RoleDriver
from tests.flow import scene as scenes

TIMEOUT = UnscorableReason.timeout


class Scene(scenes.Scene):
    """Where staleness is not what is tested, it bounds nothing."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **{"feeder__max_staleness": 100, **settings})


def outcomes_of(scene: Scene, *, late: bool = False) -> list[GroupOutcome]:
    return [one for one in scene.messages("outcomes") if isinstance(one, GroupOutcome) and one.late is late]


def results_of(scene: Scene) -> dict[int, tuple[str, str]]:
    """Sequence -> result and reason."""
    outcomes = outcomes_of(scene)
    assert len({one.sequence for one in outcomes}) == len(outcomes)
    return {one.sequence: (str(one.result), one.reason) for one in outcomes}


def batches_of(scene: Scene) -> list[list[int]]:
    """The sequences of each batch, in order over the shares; what manifests promise is checked on the way."""
    shares = scene.config.trainer.shares
    batches: list[list[list[int]]] = []
    for share in range(shares):
        experiences: list[Experience] = []
        encoded: list[bytes] = []
        number = 0
        for record in scene.records("batches"):
            if record.partition != share:
                continue
            message = codec.from_record(record)
            if isinstance(message, Experience):
                assert (message.batch_sequence, message.share, message.position) == (number, share, len(experiences))
                experiences.append(message)
                encoded.append(record.value or b"")
                continue
            assert isinstance(message, BatchManifest)
            assert (message.batch_sequence, message.share, message.num_shares) == (number, share, shares)
            assert message.count == len(experiences)
            assert message.digest == codec.digest_of_experiences(encoded)
            assert tuple(dict.fromkeys(one.ids.group_id for one in experiences)) == message.groups
            if share == 0:
                batches.append([])
            batches[number].append([int(group.split("/")[2]) for group in message.groups])
            number, experiences, encoded = number + 1, [], []
        assert not experiences
        assert number == len(batches)
    return [[sequence for share in batch for sequence in share] for batch in batches]


def manifests_of(scene: Scene) -> list[BatchManifest]:
    return [one for one in scene.messages("batches") if isinstance(one, BatchManifest) and one.share == 0]


# --------------------------------------------------------------------------------------------- order


@pytest.mark.law("order")
def test_batches_wait_for_the_next_undecided_group(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    buffer = RoleDriver(scene, "buffer")
    for sequence in (3, 1, 2):
        scene.verify(sequence)
    buffer.work()
    assert batches_of(scene) == []
    assert outcomes_of(scene) == []
    scene.verify(0)
    buffer.work()
    assert batches_of(scene) == [[0, 1], [2, 3]]
    assert results_of(scene) == dict.fromkeys(range(4), ("batched", "complete"))
    assert {one.sequence: one.batch_sequence for one in outcomes_of(scene)} == {0: 0, 1: 0, 2: 1, 3: 1}


def test_a_group_is_complete_with_all_its_siblings(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=3, feeder__groups_per_batch=1)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0, (1.0, 0.0), only=(2, 0))
    buffer.work()
    assert batches_of(scene) == []
    scene.verify(0, (0.5,), only=(1,))
    buffer.work()
    assert batches_of(scene) == [[0]]
    experiences = [one for one in scene.messages("batches") if isinstance(one, Experience)]
    assert [(one.ids.sibling, one.reward) for one in experiences] == [(0, 0.0), (1, 0.5), (2, 1.0)]


@pytest.mark.law("order")
@pytest.mark.parametrize("order", range(6))
def test_which_groups_make_a_batch_does_not_depend_on_timing(tmp_path: Path, order: int) -> None:
    scene = Scene(tmp_path, buffer__zero_variance="replace", feeder__group_size=2)
    records = []
    for sequence in range(12):
        rewards = {2: (1.0, 1.0), 5: (TIMEOUT, TIMEOUT), 7: (0.0, 0.0)}.get(sequence, (0.0, 1.0))
        records += [(sequence, sibling, reward) for sibling, reward in enumerate(rewards)]
    Random(order).shuffle(records)
    buffer = RoleDriver(scene, "buffer")
    for sequence, sibling, reward in records:
        scene.verify(sequence, (reward,), only=(sibling,))
        if order % 2:
            buffer.work()
    buffer.work()
    assert batches_of(scene) == [[0, 1], [3, 4], [6, 8], [9, 10]]
    assert {n: result for n, (result, _) in results_of(scene).items() if result != "batched"} == {
        2: "filtered",
        5: "dead",
        7: "filtered",
    }


@pytest.mark.law("conservation")
def test_rejected_groups_are_decided_at_once_and_never_wait_for_a_batch(tmp_path: Path) -> None:
    scene = Scene(tmp_path, buffer__zero_variance="replace")
    buffer = RoleDriver(scene, "buffer")
    scene.verify(5, (1.0, 1.0))
    buffer.work()
    assert results_of(scene) == {5: ("filtered", "zero_variance")}
    scene.verify(4, (TIMEOUT, UnscorableReason.error))
    buffer.work()
    assert results_of(scene)[4] == ("dead", "unscorable: error, timeout")
    assert batches_of(scene) == []


# --------------------------------------------------------------------------------------------- too few, too much alike


@pytest.mark.parametrize(("min_siblings", "scored", "result"), [
    (2, 4, "batched"), (2, 2, "batched"), (2, 1, "dead"), (1, 1, "batched"), (1, 0, "dead"), (9, 4, "batched"),
    (9, 3, "dead"),
])  # fmt: skip
def test_min_siblings(tmp_path: Path, min_siblings: int, scored: int, result: str) -> None:
    scene = Scene(tmp_path, feeder__group_size=4, feeder__groups_per_batch=1, buffer__min_siblings=min_siblings)
    scene.verify(0, [float(n) for n in range(scored)] + [TIMEOUT] * (4 - scored))
    RoleDriver(scene, "buffer").work()
    (outcome,) = outcomes_of(scene)
    assert outcome.result == result
    assert [one.reward for one in outcome.rollouts] == [float(n) for n in range(scored)] + [None] * (4 - scored)
    assert [one.reason for one in outcome.rollouts] == [None] * scored + ["timeout"] * (4 - scored)
    experiences = [one for one in scene.messages("batches") if isinstance(one, Experience)]
    assert len(experiences) == (scored if result == "batched" else 0)


def test_a_group_of_one(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=1)
    scene.verify(0, (1.0,))
    scene.verify(1, (0.0,))
    RoleDriver(scene, "buffer").work()
    assert batches_of(scene) == [[0, 1]]


def test_groups_all_alike_are_kept_by_default(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.verify(0, (1.0, 1.0))
    scene.verify(1, (0.0, 1.0))
    RoleDriver(scene, "buffer").work()
    assert batches_of(scene) == [[0, 1]]
    assert manifests_of(scene)[0].metrics["zero_variance_share"] == 0.5


@pytest.mark.parametrize("restarts", [False, True])
def test_no_signal_ends_the_run(tmp_path: Path, restarts: bool) -> None:
    scene = Scene(tmp_path, buffer__zero_variance="replace", buffer__max_refill=5)
    buffer = RoleDriver(scene, "buffer")
    for sequence in range(4):
        scene.verify(sequence, (0.0, 0.0))
        buffer.work()
        if restarts:
            buffer.restart()
    scene.verify(4)
    scene.verify(5)
    buffer.work()
    assert batches_of(scene) == [[4, 5]]
    for sequence in range(6, 10):  # the count begins anew with a batch
        scene.verify(sequence, (0.0, 0.0))
        buffer.work()
        if restarts:
            buffer.restart()
    scene.verify(10, (1.0, 1.0))
    scene.verify(11)
    with pytest.raises(StopRule, match="5 groups were filtered, and 1 of the 2 groups of a batch came") as stopped:
        buffer.work()
    assert (stopped.value.reason, stopped.value.exit_code) == ("no_signal", 6)
    assert len(results_of(scene)) == 11


# --------------------------------------------------------------------------------------------- deadline, lateness


def test_the_deadline_counts_from_the_first_record_of_the_group(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=3, feeder__groups_per_batch=1, buffer__group_deadline_s=10.0)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0, (1.0,), only=(0,))
    scene.clock.advance(5.0)
    scene.verify(1, (1.0, 0.0), only=(0, 1))
    buffer.work()
    scene.clock.advance(5.1)
    buffer.work()
    assert results_of(scene) == {0: ("expired", "deadline")}
    scene.clock.advance(4.0)
    buffer.work()
    assert len(results_of(scene)) == 1
    scene.clock.advance(1.0)
    buffer.work()
    assert results_of(scene)[1] == ("batched", "deadline")
    assert batches_of(scene) == [[1]]


@pytest.mark.law("order")
def test_the_deadline_counts_by_the_log_and_outlives_a_restart(tmp_path: Path) -> None:
    scene = Scene(tmp_path, buffer__group_deadline_s=10.0)
    scene.verify(0, (1.0,), only=(0,))
    scene.clock.advance(11.0)
    RoleDriver(scene, "buffer").work()
    assert results_of(scene) == {0: ("expired", "deadline")}


@pytest.mark.law("twice", "conservation")
@pytest.mark.parametrize("restarts", [False, True])
def test_each_sibling_that_comes_late_gets_one_record_of_its_own(tmp_path: Path, restarts: bool) -> None:
    scene = Scene(
        tmp_path,
        feeder__group_size=4,
        feeder__groups_per_batch=1,
        buffer__group_deadline_s=1.0,
        transport__partitions=1,
    )
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0, (1.0,), only=(0,))
    scene.verify(1, (1.0, 0.0), only=(0, 3))
    scene.verify(2, (1.0,), only=(0,))
    scene.clock.advance(2.0)
    buffer.work()
    assert results_of(scene) == {n: ("batched" if n == 1 else "expired", "deadline") for n in range(3)}
    for sequence, sibling in ((0, 1), (1, 1), (0, 2), (1, 2), (0, 3)):
        scene.verify(sequence, (1.0,), only=(sibling,))
        if restarts:
            buffer.restart()
        buffer.work()
    late = outcomes_of(scene, late=True)
    assert [(one.sequence, one.rollouts[0].rollout_id[-1], len(one.rollouts)) for one in late] == [
        (0, "1", 1),
        (1, "1", 1),
        (0, "2", 1),
        (1, "2", 1),
        (0, "3", 1),
    ]
    assert {(one.result, one.reason) for one in late} == {(GroupResult.expired, "late")}
    assert batches_of(scene) == [[1]]
    assert len(outcomes_of(scene)) == 3


def test_a_group_that_is_overdue_but_waits_for_its_turn_takes_more_siblings(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=3, feeder__groups_per_batch=2, buffer__group_deadline_s=1.0)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(1, (1.0, 0.0), only=(0, 1))
    scene.clock.advance(2.0)
    buffer.work()
    scene.verify(1, (0.5,), only=(2,))
    scene.verify(0, (1.0, 0.0, 0.0))
    buffer.work()
    assert results_of(scene) == {0: ("batched", "complete"), 1: ("batched", "complete")}
    assert [len(one.rollouts) for one in outcomes_of(scene)] == [3, 3]


# --------------------------------------------------------------------------------------------- staleness


@pytest.mark.law("staleness")
def test_drop_takes_groups_as_they_come_and_expires_what_is_too_old(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__on_stale="drop", feeder__groups_per_batch=1, feeder__max_staleness=1)
    buffer = RoleDriver(scene, "buffer")
    for sequence, version in ((5, 0), (3, 0), (0, 0), (4, 1), (1, 2)):
        scene.verify(sequence, version=version)
        buffer.work()
    assert batches_of(scene) == [[5], [3], [4], [1]]
    assert results_of(scene)[0] == ("expired", "stale")
    assert [one.max_staleness for one in manifests_of(scene)] == [0, 1, 1, 1]


def test_of_many_that_are_ready_drop_takes_the_oldest_first(tmp_path: Path) -> None:
    """In the order in which they came the older two would expire behind the younger."""
    scene = Scene(tmp_path, feeder__on_stale="drop", feeder__groups_per_batch=2, feeder__max_staleness=0)
    for sequence, version in ((4, 1), (2, 1), (3, 0), (1, 0)):
        scene.verify(sequence, version=version)
    RoleDriver(scene, "buffer").work()
    assert batches_of(scene) == [[1, 3], [2, 4]]


@pytest.mark.law("staleness")
def test_staleness_is_that_of_the_oldest_token_of_all_siblings(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__on_stale="drop", feeder__groups_per_batch=1, feeder__max_staleness=0)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(0)
    buffer.work()
    scene.verify(1, (0.0,), only=(0,), version=1)
    scene.verify(1, (1.0,), only=(1,), version=0)
    scene.verify(2, (0.0, 1.0), version=1)
    buffer.work()
    assert batches_of(scene) == [[0], [2]]
    assert results_of(scene)[1] == ("expired", "stale")


@pytest.mark.law("staleness")
def test_the_hard_check_holds_for_wait_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__groups_per_batch=1, feeder__max_staleness=0)
    scene.verify(0)
    scene.verify(1, version=0)  # nobody should have sampled it with that
    scene.verify(2, version=1)
    RoleDriver(scene, "buffer").work()
    assert batches_of(scene) == [[0], [2]]
    assert results_of(scene)[1] == ("expired", "stale")


# --------------------------------------------------------------------------------------------- the end


def end(scene: Scene, admitted: int) -> None:
    scene.put("control", TasksEnded(admitted=admitted, reason="taskset"))


@pytest.mark.parametrize(("admitted", "batches"), [
    (0, [[]]), (1, [[0]]), (2, [[0, 1]]), (3, [[0, 1], [2]]), (4, [[0, 1], [2, 3]]),
])  # fmt: skip
@pytest.mark.parametrize("end_first", [True, False])
def test_the_last_batch(tmp_path: Path, admitted: int, batches: list[list[int]], end_first: bool) -> None:
    scene = Scene(tmp_path)
    buffer = RoleDriver(scene, "buffer")
    if end_first:
        end(scene, admitted)
        buffer.work()
    for sequence in range(admitted):
        scene.verify(sequence)
        buffer.work()
    if not end_first:
        end(scene, admitted)
        buffer.work()
        if batches[-1] != [] and len(batches[-1]) == 2:
            batches = [*batches, []]  # the last full one was written before anybody knew
    assert batches_of(scene) == batches
    assert [one.last for one in manifests_of(scene)] == [False] * (len(batches) - 1) + [True]
    buffer.restart()
    buffer.work()
    assert batches_of(scene) == batches


def test_the_last_batch_waits_for_what_is_undecided(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    buffer = RoleDriver(scene, "buffer")
    end(scene, 3)
    scene.verify(0, (TIMEOUT, TIMEOUT))
    scene.verify(2)
    buffer.work()
    assert batches_of(scene) == []
    scene.verify(1, (TIMEOUT, TIMEOUT))
    buffer.work()
    assert batches_of(scene) == [[2]]
    assert manifests_of(scene)[0].last


def test_a_last_batch_of_rejected_groups_alone_is_empty(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer__shares=2)
    buffer = RoleDriver(scene, "buffer")
    end(scene, 2)
    scene.verify(1, (TIMEOUT, TIMEOUT))
    scene.verify(0, (TIMEOUT, TIMEOUT))
    buffer.work()
    assert batches_of(scene) == [[]]
    assert manifests_of(scene)[0].last
    buffer.restart()
    buffer.work()
    assert batches_of(scene) == [[]]


def test_a_run_that_is_given_more_goes_on_after_its_last_batch(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    buffer = RoleDriver(scene, "buffer")
    end(scene, 1)
    scene.verify(0)
    buffer.work()
    assert batches_of(scene) == [[0]]
    scene.put_raw(NewRecord("control", 0, b"end", None))
    buffer.restart()
    scene.verify(1)
    buffer.work()
    assert batches_of(scene) == [[0]]
    scene.verify(2)
    buffer.work()
    assert batches_of(scene) == [[0], [1, 2]]


# --------------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize("shares", [1, 2, 3])
@pytest.mark.parametrize("groups_per_batch", [1, 2, 4, 7])
def test_groups_stay_inside_a_share(tmp_path: Path, shares: int, groups_per_batch: int) -> None:
    scene = Scene(tmp_path, trainer__shares=shares, feeder__groups_per_batch=groups_per_batch, feeder__group_size=3)
    for sequence in range(2 * groups_per_batch):
        scene.verify(sequence, (0.0, 0.5, TIMEOUT if sequence % 3 == 0 else 1.0))
    RoleDriver(scene, "buffer").work()
    count = groups_per_batch
    assert batches_of(scene) == [list(range(count)), list(range(count, 2 * count))]
    place: dict[str, int] = {}
    sizes: dict[int, int] = dict.fromkeys(range(shares), 0)
    for one in scene.messages("batches"):
        if isinstance(one, Experience):
            assert place.setdefault(one.ids.group_id, one.share) == one.share
        elif isinstance(one, BatchManifest):
            sizes[one.share] += len(one.groups)
            assert (one.num_groups, one.total_groups) == (count, count * (one.batch_sequence + 1))
    assert max(sizes.values()) - min(sizes.values()) <= 2


# --------------------------------------------------------------------------------------------- what it holds and says


def positions_of(scene: Scene) -> list[tuple[int, int]]:
    """Low-water and read offset of each partition."""
    committed = scene.transport().admin.committed("buffer")
    places = [committed[TopicPartition("verified", n)] for n in range(scene.config.transport.partitions)]
    return [(one.offset, int((one.metadata or f"{one.offset}").split()[0])) for one in places]


@pytest.mark.law("lost")
def test_positions_keep_the_oldest_open_group(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__groups_per_batch=1, transport__partitions=2)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(2, (0.0,), only=(0,))
    scene.verify(0)
    scene.verify(4)
    scene.verify(1)
    buffer.work()
    assert batches_of(scene) == [[0], [1]]
    assert positions_of(scene) == [(0, 5), (2, 2)]
    scene.verify(2, (1.0,), only=(1,))
    buffer.work()
    assert batches_of(scene) == [[0], [1], [2]]
    assert positions_of(scene) == [(3, 6), (2, 2)]
    scene.verify(3)
    buffer.work()
    assert positions_of(scene) == [(6, 6), (4, 4)]


@pytest.mark.law("bounded")
@pytest.mark.parametrize("max_body_bytes", [1, 1000])
def test_bodies_over_the_limit_are_read_again_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_body_bytes: int
) -> None:
    monkeypatch.setattr(bodies, "PART_BYTES", 1)  # so that each group is read alone
    large = Scene(tmp_path / "large")
    small = Scene(tmp_path / "small", buffer__max_body_bytes=max_body_bytes)
    digests = []
    for scene in (large, small):
        buffer = RoleDriver(scene, "buffer")
        buffer.work()
        opened = opened_readers(buffer, monkeypatch)
        for sequence in reversed(range(8)):
            scene.verify(sequence, num_tokens=3 + sequence)
            buffer.work()
            assert int(str(buffer.service.health()["body_bytes"])) <= scene.config.buffer.max_body_bytes
        assert batches_of(scene) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert buffer.service.health()["body_bytes"] == 0
        digests.append([one.digest for one in manifests_of(scene)])
        assert len(opened) == (scene is small), "one reader is kept for all bodies"
    assert digests[0] == digests[1]


def opened_readers(driver: RoleDriver, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which every reader is added that the role opens from now on."""
    opened: list[Any] = []
    transport, open_one = driver.service.transport, driver.service.transport.reader

    def reader(*arguments: Any, **more: Any) -> Any:
        opened.append(open_one(*arguments, **more))
        return opened[-1]

    monkeypatch.setattr(transport, "reader", reader)
    return opened


@pytest.mark.law("conservation", "unscorable")
def test_an_undecodable_record_is_a_sibling_without_a_reward(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__group_size=3, feeder__groups_per_batch=1, transport__partitions=1)
    scene.verify(0, (0.0, 1.0), only=(0, 1))
    record = codec.to_record(scene.verified(scene.siblings(0)[2], 1.0), "verified", 0, run="flow")
    scene.put_raw(NewRecord("verified", 0, record.key, b"\xc1", record.headers))
    nobody = tuple(pair for pair in record.headers if pair[0].startswith("contract"))
    scene.put_raw(NewRecord("verified", 0, b"nobody", b"\xc1", nobody))
    scene.put_raw(NewRecord("verified", 0, b"foreign", b"\xc1", ()))
    scene.verify(1, (0.0, 1.0, 1.0))
    RoleDriver(scene, "buffer").work()
    assert batches_of(scene) == [[0], [1]]
    outcome = outcomes_of(scene)[0]
    assert [one.status for one in outcome.rollouts][2] is RolloutStatus.undecodable
    assert [one.reason for one in outcome.rollouts][2] is UnscorableReason.undecodable
    letters = [one for one in scene.messages("dead") if isinstance(one, DeadLetter)]
    assert sorted(one.offset for one in letters) == [2, 3, 4]
    assert {(one.topic, one.role, one.value) for one in letters} == {("verified", "buffer", b"\xc1")}


def test_the_reward_of_a_step_is_the_mean_over_all_that_was_decided_since(tmp_path: Path) -> None:
    scene = Scene(tmp_path, buffer__zero_variance="replace", feeder__group_size=3)
    buffer = RoleDriver(scene, "buffer")
    scene.verify(1, (1.0, 1.0, 1.0))
    buffer.work()
    scene.verify(2, (0.25, TIMEOUT, TIMEOUT))
    buffer.restart()
    buffer.work()
    scene.verify(0, (0.0, 1.0, TIMEOUT))
    scene.verify(3, (0.0, 0.0, 1.0))
    scene.verify(4, (0.5, 0.0, 0.0))
    scene.verify(5, (0.0, 0.0, 1.0))
    buffer.work()
    assert batches_of(scene) == [[0, 3], [4, 5]]
    first, second = (one.metrics for one in manifests_of(scene))
    assert first["reward"] == pytest.approx((3.0 + 0.25 + 1.0 + 1.0) / (3 + 1 + 2 + 3))
    assert first["rollouts"] == 12
    assert first["unscored_share"] == 3 / 12
    assert (first["filtered_share"], first["dead_share"], first["batched_share"]) == (0.25, 0.25, 0.5)
    assert second["reward"] == pytest.approx(1.5 / 6)
    assert second["length_mean"] == 2.0
