"""What the buffer adds up: by taskset where there are several, staleness by where it came from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rftstream.contracts.outcomes import GroupResult, RolloutSummary
from rftstream.contracts.rollouts import RolloutStatus, VersionSpan
from rftstream.contracts.tasks import RolloutIds
from rftstream.contracts.verdicts import PEOPLE, Verdict, VerifiedRollout
from rftstream.metrics import MAX_NAMES_OF_RECORD, NAMES_LEFT_OUT, fit_names
from rftstream.roles.buffer.tally import Tally
from tests.unit.synthetic import rollout


def summary(reward: float) -> RolloutSummary:
    return RolloutSummary(rollout_id="r", num_tokens=2, status=RolloutStatus.completed, reward=reward)


def verified(taskset: str, versions: tuple[int, ...] = (3,), **parts: float) -> VerifiedRollout:
    one = rollout(RolloutIds(rollout_id="r/0", group_id="r", taskset=taskset, sibling=0, group_size=1, sequence=0,
                             min_version=0))  # fmt: skip
    spans = tuple(VersionSpan(start=i, count=1, trainer_epoch=1, version=v) for i, v in enumerate(versions))
    one = replace(one, segments=(replace(one.segments[0], versions=spans),))
    verdict = Verdict(reward=0.0, scorer="s", scorer_version="1", parts=parts)
    return VerifiedRollout(ids=one.ids, rollout=one, verdict=verdict)


def test_several_tasksets_have_each_their_own() -> None:
    tally = Tally()
    tally.group("sums", GroupResult.batched, [summary(0.0), summary(1.0)])
    tally.group("maze", GroupResult.batched, [summary(4.0), summary(4.0)])
    tally.rollout(verified("sums", a=1.0), 5)
    tally.rollout(verified("maze", a=2.0, b=3.0), 5)
    values = tally.metrics()
    assert (values["reward/sums"], values["reward_std/sums"]) == (0.5, 0.5)
    assert (values["reward/maze"], values["reward_std/maze"]) == (4.0, 0.0)
    assert values["reward_std"] == pytest.approx((((0 - 2.25) ** 2 + (1 - 2.25) ** 2 + 2 * (4 - 2.25) ** 2) / 4) ** 0.5)
    assert {name: value for name, value in values.items() if name.startswith("part/")} == {
        "part/a": 1.5, "part/b": 3.0, "part/sums/a": 1.0, "part/maze/a": 2.0, "part/maze/b": 3.0,
    }  # fmt: skip


def test_a_taskset_has_the_reward_of_its_newest_rollout() -> None:
    tally, verdicts = Tally(), [("1", 5.0), ("2", 7.0), ("1", 6.0)]
    for version, at in verdicts:
        one = verified("sums")
        assert one.verdict is not None
        tally.rollout(replace(one, verified_at=at, verdict=replace(one.verdict, scorer_version=version)), 5)
    tally.rollout(verified("maze"), 5)
    by_people = verified("maze")
    assert by_people.verdict is not None
    tally.rollout(replace(by_people, verified_at=9.0, verdict=replace(by_people.verdict, scorer=PEOPLE)), 5)
    assert tally.scorers() == {"maze": "s 1", "sums": "s 2"}


def test_one_taskset_is_not_named_twice() -> None:
    tally = Tally()
    tally.group("sums", GroupResult.batched, [summary(0.0), summary(1.0)])
    tally.rollout(verified("sums", **{"a": 1.0, "style/tone": 0.25}), 5)
    values = tally.metrics()
    assert (values["part/a"], values["part/style/tone"], values["reward_std"]) == (1.0, 0.25, 0.5)
    assert not {"part/sums/a", "part/sums/style/tone", "reward_std/sums"} & values.keys()


def test_what_was_spent_is_summed_and_not_only_a_mean() -> None:
    tally = Tally()
    for amounts in (
        {"spent_requests": 2.0},
        {"judge.spent_requests": 1.0, "judge-2.spent_requests": 4.0, "cached": 1.0},
    ):
        one = verified("sums")
        assert one.verdict is not None
        tally.rollout(replace(one, verdict=replace(one.verdict, metrics=amounts)), 5)
    values = tally.metrics()
    assert (values["spent/requests"], values["metric/spent_requests"]) == (7.0, 2.0)
    assert {name for name in values if name.startswith("spent/")} == {"spent/requests"}


@pytest.mark.law("staleness")
def test_staleness_in_flight_and_in_the_queue() -> None:
    """Trained at 7: sampled by 3 to 5, and by 6 alone."""
    tally = Tally()
    tally.rollout(verified("sums", (3, 4, 5)), 7)
    tally.rollout(verified("sums", (6,)), 7)
    values = tally.metrics()
    assert (values["staleness_in_flight"], values["staleness_in_queue"]) == (1.0, 1.5)
    tally = Tally()
    tally.rollout(verified("sums", (3, 4, 5)), None)
    assert "staleness_in_flight" not in tally.metrics()


def test_rewards_too_large_to_square_stop_nobody() -> None:
    """They are finite, so they are rewards; a metric that is not finite is left out."""
    for reward in (1e200, 1.7e308):
        tally = Tally()
        tally.group("sums", GroupResult.batched, [summary(reward), summary(reward), summary(0.0)])
        values = tally.metrics()
        assert values["batched_share"] == 1.0
        assert all(map(math.isfinite, values.values()))


@pytest.mark.slow
def test_names_with_ids_in_them_leave_room_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """What the most rollouts have stays, and the rest is counted."""
    tally = Tally()
    tally.group("sums", GroupResult.batched, [summary(1.0)])
    for number in range(400):
        one = verified("sums", **{f"{number}_{i}": 1.0 for i in range(180)}, tone=0.5)
        one = replace(one, rollout=replace(one.rollout, metrics={f"{number}": 1.0, "turns": 3.0}))  # type: ignore[type-var]
        tally.rollout(one, 5)
    values = tally.metrics()
    assert (values["part/tone"], values["metric/turns"], values["reward"]) == (0.5, 3.0, 1.0)
    assert len(values) == MAX_NAMES_OF_RECORD
    assert values[NAMES_LEFT_OUT] > 180 * 400 - MAX_NAMES_OF_RECORD
    assert "put ids into the names" in caplog.text
    again = fit_names({**values, "loss": 1.0, "kl": 2.0})
    assert (again["loss"], len(again)) == (1.0, MAX_NAMES_OF_RECORD)
    assert again[NAMES_LEFT_OUT] == values[NAMES_LEFT_OUT] + 2, "which are own names"


def test_a_group_has_a_spread_if_one_of_its_roles_has_one() -> None:
    """As in games whose rewards add up to 0."""

    def spread(*roles: dict[str, float | None], rewards: tuple[float, ...] = (0.0, 0.0)) -> float:
        tally = Tally()
        one = [replace(summary(reward), roles=own) for reward, own in zip(rewards, roles, strict=True)]
        tally.group("sums", GroupResult.batched, one)
        return 1.0 - tally.metrics()["zero_variance_share"]

    assert spread({"a": 1.0, "b": -1.0}, {"a": -1.0, "b": 1.0})
    assert spread({"a": 1.0}, {"a": 1.0}, rewards=(0.0, 1.0))
    assert not spread({"a": 1.0, "judge": None}, {"a": 1.0})
    assert not spread({"a": 1.0}, {"b": 0.0}), "nothing is compared with anything"
    tally = Tally()
    for reward in (1.0, 0.0):
        body = verified("sums", a=1.0)
        assert body.verdict is not None
        tally.rollout(replace(body, verdict=replace(body.verdict, roles={"a": reward, "judge": None})), 5)
    means = tally.metrics()
    assert (means["role/a"], means["part/a"]) == (0.5, 1.0) and "role/judge" not in means
