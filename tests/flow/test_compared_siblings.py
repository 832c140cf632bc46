"""Rewards that see the group: siblings wait for each other, are judged once and together, and nobody else waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts import codec
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.errors import RewardError
from rftstream.rewards.base import RewardGroup, Score
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.disturbed import FaultAt, at_commits
from tests.flow.scene import Scene
from tests.flow.test_verifier import letters_of, verified_of

HERE = TopicPartition("rollouts", 0)
BY_WAIT = 30.0


def compared(group: RewardGroup) -> list[Score]:
    """The share of siblings that a completion beats; the reward says whom it saw, too."""
    if any(one.completion == "never" for one in group.siblings):
        raise RewardError("no order among them")
    seen = {f"seen-{number}": 1.0 for number in group.numbers}
    absent = {f"{why}-{number}": 1.0 for number, why in group.absent.items()}
    texts = [one.completion for one in group.siblings]
    return [Score(reward=sum(text > other for other in texts) / len(texts), metrics=seen | absent) for text in texts]


compared.group = True  # type: ignore[attr-defined]


def scene_of(folder: Path, *, size: int = 3, **more: Any) -> Scene:
    tasksets = {"sums": {"source": "arithmetic", "reward": f"{__name__}:compared"}}
    return Scene(folder, tasksets=tasksets, feeder__group_size=size, transport__partitions=1, **more)


def put(scene: Scene, sequence: int, siblings: Mapping[int, RolloutStatus | str]) -> None:
    """These siblings: a text is a completion."""
    ids = scene.siblings(sequence)
    for sibling, one in siblings.items():
        more = {"status": one} if isinstance(one, RolloutStatus) else {"text": one}
        scene.put("rollouts", scene.rollout(ids[sibling], **more))  # type: ignore[arg-type]


def judged(scene: Scene, sequence: int = 0) -> dict[int, tuple[float | str, frozenset[str]]]:
    """Of each sibling: its reward and what the reward saw, or the reason why it has none."""
    return {
        one.ids.sibling: (
            (one.verdict.reward, frozenset(one.verdict.metrics)) if one.verdict else (str(one.reason), frozenset())
        )
        for one in verified_of(scene).values() if one.ids.sequence == sequence
    }  # fmt: skip


def let_wait(driver: RoleDriver, seconds: float) -> None:
    """The clock goes on in small steps, and the verifier works."""
    for _ in range(int(seconds)):
        driver.work()
        driver.run.clock.advance(1.0)
    driver.work()


def saw(*words: str) -> frozenset[str]:
    return frozenset(words)


ALL = saw("seen-0", "seen-1", "seen-2")
FAILED, SKIPPED, OVERSIZED = RolloutStatus.failed, RolloutStatus.skipped, RolloutStatus.oversized
THIRD = 1 / 3


@pytest.mark.law("conservation", "unscorable")
@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        ({0: "a", 1: "b", 2: "c"}, {0: (0.0, ALL), 1: (THIRD, ALL), 2: (2 * THIRD, ALL)}),
        ({2: "a", 0: "b", 1: "b"}, {0: (THIRD, ALL), 1: (THIRD, ALL), 2: (0.0, ALL)}),
        (
            {0: "a", 1: FAILED, 2: "c"},
            {0: (0.0, saw("seen-0", "failed-1", "seen-2")), 1: ("failed", saw()),
             2: (0.5, saw("seen-0", "failed-1", "seen-2"))},
        ),
        (
            {0: SKIPPED, 1: OVERSIZED, 2: "c"},
            {0: ("skipped", saw()), 1: ("oversized", saw()), 2: (0.0, saw("skipped-0", "oversized-1", "seen-2"))},
        ),
        (
            {0: RolloutStatus.undecodable, 1: "b", 2: "a"},
            {0: ("undecodable", saw()), 1: (0.5, saw("undecodable-0", "seen-1", "seen-2")),
             2: (0.0, saw("undecodable-0", "seen-1", "seen-2"))},
        ),
        ({0: FAILED, 1: SKIPPED, 2: FAILED}, {0: ("failed", saw()), 1: ("skipped", saw()), 2: ("failed", saw())}),
        ({0: "a", 1: "never", 2: "b"}, {0: ("error", saw()), 1: ("error", saw()), 2: ("error", saw())}),
        ({0: "a", 1: "b"}, {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("settings", [{}, {"max_concurrent": 1}, {"max_waiting_bytes": 1}], ids=str)
def test_siblings_are_judged_together(
    tmp_path: Path, siblings: dict[int, Any], expected: dict[int, Any], settings: dict[str, int]
) -> None:
    """Whatever became of some; with room for one at a time, and with bodies that have to be read again."""
    scene = scene_of(tmp_path, **{f"verifier__{key}": value for key, value in settings.items()})
    put(scene, 0, siblings)
    RoleDriver(scene, "verifier").work()
    assert judged(scene) == expected
    died = Counter(why for why, _ in expected.values() if why in ("failed", "oversized", "error"))
    assert Counter(one.reason for one in letters_of(scene)) == died
    assert len({record.timestamp_s for record in scene.records("verified")}) <= 1


def test_nobody_else_waits(tmp_path: Path) -> None:
    """Neither whole groups nor those of other tasksets, though the room is full of waiting siblings."""
    scene = scene_of(tmp_path, verifier__max_concurrent=2)
    for sequence in range(5):
        put(scene, sequence, {0: "a", 1: "b"})
    put(scene, 7, {0: "a", 1: "b", 2: "c"})
    driver = RoleDriver(scene, "verifier")
    driver.work()
    assert {one.ids.sequence for one in verified_of(scene).values()} == {7}
    assert driver.service.health()["waiting"] == 10
    put(scene, 3, {2: "c"})
    driver.work()
    assert {one.ids.sequence for one in verified_of(scene).values()} == {3, 7}
    assert scene.transport().admin.committed("verifier")[HERE].offset == 0, "the oldest one waits"


@pytest.mark.law("lost", "twice", "conservation")
@pytest.mark.parametrize("restarted", [False, True], ids=["same", "restarted"])
@pytest.mark.parametrize(
    ("there", "late", "expected", "then"),
    [
        ({0: "a", 2: "b"}, {1: "c"}, {0: (0.0, 2), 2: (0.5, 2)}, {1: ("timeout", 0)}),
        ({0: "a", 2: FAILED}, {1: "c"}, {0: (0.0, 1), 2: ("failed", 0)}, {1: ("timeout", 0)}),
        ({1: "a"}, {0: "b", 2: "c"}, {1: ("timeout", 0)}, {0: (0.0, 2), 2: (0.5, 2)}),
        ({1: FAILED}, {0: "b", 2: "c"}, {1: ("failed", 0)}, {0: (0.0, 2), 2: (0.5, 2)}),
    ],
)
def test_more_than_half_are_judged_without_the_others(
    tmp_path: Path, there: dict[int, Any], late: dict[int, Any], expected: dict[int, Any], then: dict[int, Any],
    restarted: bool,
) -> None:  # fmt: skip
    """... who have no reward whenever they come, whether or not anybody remembers."""
    scene = scene_of(tmp_path, verifier__group_timeout_s=BY_WAIT)
    put(scene, 0, there)
    driver = RoleDriver(scene, "verifier", process="first")
    let_wait(driver, BY_WAIT - 5)
    assert judged(scene) == {}
    let_wait(driver, 6)
    summary = {
        number: (one, sum(word.startswith("seen") for word in words)) for number, (one, words) in judged(scene).items()
    }
    assert summary == expected
    if restarted:
        driver.restart()
    put(scene, 0, late)
    let_wait(driver, BY_WAIT + 12 if restarted else 0)
    summary = {
        number: (one, sum(word.startswith("seen") for word in words)) for number, (one, words) in judged(scene).items()
    }
    assert summary == expected | then
    assert scene.transport().admin.committed("verifier")[HERE].offset >= 3


def test_time_in_which_a_verifier_stood_still_is_no_waiting(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, verifier__group_timeout_s=BY_WAIT)
    put(scene, 0, {0: "a", 1: "b"})
    driver = RoleDriver(scene, "verifier")
    driver.work()
    scene.clock.advance(9.0)
    put(scene, 0, {2: "c"})
    for _ in range(8):
        driver.work()
        scene.clock.advance(9.0)  # stopped again and again, within the session's time-out
    assert judged(scene)[0] == (0.0, ALL)


@pytest.mark.law("lost", "twice")
@at_commits
def test_a_fault_at_the_commit_of_a_group(tmp_path: Path, point: str, fault: type[BaseException]) -> None:
    """All of its verdicts are there or none, and all of them saw all of it."""
    scene = scene_of(tmp_path)
    for sequence in range(3):
        put(scene, sequence, {0: "a", 2: "c"})
    driver = RoleDriver(scene, "verifier", process="first")
    driver.work()
    fault_at, calm = FaultAt(point, fault, most=2), scene.log.fault
    for sequence in (1, 0, 2):
        scene.log.fault = calm
        put(scene, sequence, {1: "b"})
        scene.log.fault = fault_at
        for _ in range(40):
            try:
                driver.work()
            except Kill:
                driver.restart()
            scene.clock.advance(1.0)
            counts = Counter(one.ids.sequence for one in verified_of(scene).values())
            assert set(counts.values()) <= {3}, "a group comes whole"
    assert [judged(scene, sequence) for sequence in range(3)] == [
        {0: (0.0, ALL), 1: (THIRD, ALL), 2: (2 * THIRD, ALL)}
    ] * 3


@pytest.mark.law("lost", "twice")
def test_a_restart_between_siblings_loses_none(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    driver = RoleDriver(scene, "verifier", process="first")
    for sibling, text in enumerate("cab"):
        put(scene, 0, {sibling: text})
        put(scene, 1 + sibling, {0: "a", 1: "b", 2: "c"})
        driver.work()
        driver.restart()
    let_wait(driver, 12)
    assert judged(scene) == {0: (2 * THIRD, ALL), 1: (0.0, ALL), 2: (THIRD, ALL)}
    assert len(verified_of(scene)) == 12


@pytest.mark.law("conservation")
def test_a_sibling_that_cannot_be_decoded_waits_with_the_others(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    record = codec.to_record(scene.rollout(scene.siblings(0)[1]), "rollouts", 0, run="flow")
    body = (record.value or b"")[:-3]
    scene.put_raw(NewRecord("rollouts", 0, record.key, body, record.headers))
    first = RoleDriver(scene, "verifier", process="first")
    first.work()
    assert judged(scene) == {} and letters_of(scene) == []
    first.restart()
    put(scene, 0, {0: "a", 2: "c"})
    let_wait(first, 12)
    words = saw("seen-0", "undecodable-1", "seen-2")
    assert judged(scene) == {0: (0.0, words), 1: ("undecodable", saw()), 2: (0.5, words)}
    assert [one.value for one in letters_of(scene)] == [body]


def test_who_leaves_gives_waiting_siblings_back(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    put(scene, 0, {0: "a", 1: "b"})
    first = RoleDriver(scene, "verifier", process="first")
    first.work()
    first.service.drain()
    first.work()
    assert first.done
    first.service.close()
    put(scene, 0, {2: "c"})
    RoleDriver(scene, "verifier", process="second").work()
    assert judged(scene)[2] == (2 * THIRD, ALL)
