"""Episodes of several agents: each role is compared with the same role of the siblings, by its own reward."""

from dataclasses import replace

import numpy as np
import pytest

from rftstream.algorithms.scored import collect_scored
from rftstream.contracts.arrays import Array
from tests.suite.each import each
from tests.unit.algorithms.test_algorithms import ALGORITHMS, build
from tests.unit.algorithms.test_grpo import experience, segment


def of(role, *mask):
    return replace(segment(list(mask)), role=role)


def episode(group, reward, *segments, **roles):
    return replace(experience(group, reward, *segments), roles=roles)


def test_the_advantage_of_a_role_is_that_among_the_same_role_of_the_siblings():
    batch = [
        episode("a", 0.5, of("solver", 0, 1), of("critic", 0, 1, 1), of("solver", 0, 1), solver=1.0, critic=0.0),
        episode("a", 0.5, of("critic", 0, 1), of("solver", 0, 1), solver=0.0, critic=4.0),
        episode("b", 1.0, of("solver", 0, 1), of("judge", 0, 1), solver=1.0, judge=None),
        episode("b", 0.0, of("solver", 0, 1), of("critic", 0, 1), solver=1.0, critic=3.0),
    ]
    rows, metrics = build(("grpo", {"advantage_eps": 1e-9})).prepare(batch)
    half = 1 / np.sqrt(2)
    assert [float(row.advantages[0]) for row in rows] == pytest.approx([half, half, -half, half, -half, 0, 0, 0])
    assert [row.group for row in rows] == [0, 0, 1, 1, 0, 2, 2, 3], "the judge has no row, and is not trained"
    assert [row.rollout for row in rows] == [0, 0, 1, 2, 3, 4, 5, 6], "what PPO takes for one conversation"
    assert (metrics["num_groups"], metrics["num_rollouts"], metrics["groups_without_signal"]) == (2, 4, 1)
    assert metrics["roles_alone"] == 1, "the critic of the second group"
    assert (metrics["role_signal/solver"], metrics["role_signal/critic"]) == (0.5, 0.5)


def test_a_reward_that_tells_no_roles_apart_is_that_of_all_and_segments_may_have_none():
    batch = [episode("a", reward, of("solver", 0, 1), of("", 0, 1)) for reward in (1.0, 0.0)]
    told = [episode("a", reward, of("solver", 0, 1), of("", 0, 1), solver=1 - reward) for reward in (1.0, 0.0)]
    for some, signs in ((batch, [1, 1, -1, -1]), (told, [-1, 1, 1, -1])):
        rows, _ = build(("grpo", {})).prepare(some)
        assert [np.sign(row.advantages[1]) for row in rows] == signs


def test_arrays_over_all_tokens_are_cut_and_a_limit_is_that_of_the_episode():
    one = episode("a", 1.0, of("solver", 0, 1, 1), of("critic", 0, 1), solver=1.0, critic=0.0)
    one = replace(one, sampling=replace(one.sampling, max_tokens=3), truncated=True,
                  additions={"t": Array.of(range(5), "float32"), "other": Array.of([1, 2], "float32")})  # fmt: skip
    scored = collect_scored([one])
    solver, critic = scored.experiences
    assert (solver.additions["t"].numpy().tolist(), critic.additions["t"].numpy().tolist()) == ([0, 1, 2], [3, 4])
    assert critic.additions["other"] == one.additions["other"]
    assert scored.overlong_penalties(0.5).tolist() == [-1, -1], "of 3 tokens, though no role has more than 2"
    assert scored.leave_out_truncated(scored.rows())[1] == 1


@each("name", ALGORITHMS)
def test_every_algorithm_takes_a_role_for_a_rollout_of_its_own(name):
    """As if somebody had written down each role as a rollout, in a group of its own."""
    settings = {"opd": {"reward_weight": 1.0}}.get(name, {})
    rewards = {"solver": (1.0, 0.0, 0.5), "critic": (0.25, 0.5, 0.0)}
    batch = [
        episode("a", 0.1, of("solver", 0, 1, 1), of("critic", 0, 1), of("critic", 0, 1, 1),
                solver=solver, critic=critic)
        for solver, critic in zip(*rewards.values(), strict=True)
    ]  # fmt: skip
    if name == "remax":
        batch[0] = replace(batch[0], sampling=replace(batch[0].sampling, temperature=0.0))
    alone = [
        replace(
            whole, segments=some, reward=whole.roles[role], roles={}, ids=replace(whole.ids, group_id=f"a {role}"),
            additions={"teacher_logprobs": Array.of(np.concatenate([one.behavior_logprobs.numpy() for one in some]),
                                                    "float32")},
        )
        for whole in batch
        for role, some in (("solver", whole.segments[:1]), ("critic", whole.segments[1:]))
    ]  # fmt: skip
    alone = [replace(one, segments=tuple(replace(part, role="") for part in one.segments)) for one in alone]
    algorithm = build((name, settings))
    for row, expected in zip(algorithm.prepare(batch)[0], algorithm.prepare(alone)[0], strict=True):
        np.testing.assert_array_equal(row.advantages, expected.advantages)
        np.testing.assert_array_equal(row.loss_mask, expected.loss_mask)
        assert (row.group, row.rollout) == (expected.group, expected.rollout)
