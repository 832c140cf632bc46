"""ReMax: what the greedy sibling of a group is for, and what becomes of groups without one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.algorithms.base import Denominators
from rftstream.algorithms.clips import ReMax
from rftstream.algorithms.requirements import has_greedy_sibling
from rftstream.config import loader
from rftstream.core.advantages import compute_baseline_advantages
from rftstream.errors import ConfigError
from tests.flow.scene import BASE
from tests.unit.algorithms.test_grpo import experience, segment


def prepared(batch, **settings):
    return ReMax(ReMax.Config(**settings)).prepare(batch)


def greedy(group, reward, *segments):
    return experience(group, reward, *segments, temperature=0.0)


def test_advantages_by_hand():
    """The greedy answer of a is paid 0.25, that of b nothing; b's greedy one comes last, with two segments."""
    batch = [greedy("a", 0.25), experience("a", 1.0, segment([0, 1, 1])), experience("a", 0.0), experience("b", 0.5),
             experience("b", 0.0), greedy("b", 0.0, segment([0, 1]), segment([0, 1]))]  # fmt: skip
    rows, metrics = prepared(batch)
    assert [row.advantages[1] for row in rows] == pytest.approx([0, 0.75, -0.25, 0.5, 0, 0, 0])
    assert [bool(row.loss_mask.any()) for row in rows] == [False, True, True, True, True, False, False]
    assert Denominators.of(rows) == Denominators(num_tokens=5, num_rows=4, num_groups=2)
    assert metrics["reward"] == pytest.approx(1.75 / 6)
    assert metrics["greedy_reward"] == pytest.approx(0.125)
    assert metrics["groups_without_baseline"] == 0
    assert metrics["groups_without_signal"] == 0


def test_a_group_without_its_greedy_sibling_is_not_trained_on():
    """It failed, or nobody could score it; the other group is as it would be alone."""
    batch = [greedy("a", None), experience("a", 1.0), experience("a", 0.0), greedy("b", 0.0), experience("b", 1.0)]
    rows, metrics = prepared(batch)
    assert [bool(row.loss_mask.any()) for row in rows] == [False, False, False, True]
    assert [row.advantages[1] for row in rows] == pytest.approx([0, 0, 0, 1])
    assert metrics["groups_without_baseline"] == 1
    rows, metrics = prepared(batch[:3])
    assert not any(row.loss_mask.any() for row in rows)
    assert metrics["groups_without_baseline"] == 1
    assert "greedy_reward" not in metrics


def test_a_sibling_that_says_the_same_teaches_nothing():
    _, metrics = prepared([greedy("a", 1.0), experience("a", 1.0), greedy("b", 0.0), experience("b", 1.0)])
    assert metrics["groups_without_signal"] == 1


def test_divergence_is_taken_from_those_that_are_trained():
    """Behaviour logprobs are -1: k1 is 0.5 for the drawn one, and the greedy one keeps its reward."""
    batch = [greedy("a", 0.5), experience("a", 1.0)]
    settings = {"kl_coef": 0.4, "kl_in": "reward", "kl_estimator": "k1"}
    algorithm = ReMax(ReMax.Config(**settings))
    rows, metrics = algorithm.prepare(batch, [np.float32([0, -3]), np.float32([0, -1.5])])
    assert rows[1].advantages[1] == pytest.approx(1.0 - 0.2 - 0.5)
    assert metrics["kl"] == pytest.approx(0.5)


REWARDS = st.lists(st.integers(-50, 50).map(lambda n: n / 8), min_size=1, max_size=24)


@given(REWARDS, st.integers(-9, 9), st.integers(0, 5))
def test_the_baseline_is_that_of_the_group(rewards, shift, offset):
    rewards_N, groups_N = np.array(rewards), np.arange(len(rewards)) % 4
    baseline_N = np.arange(len(rewards)) // 4 == offset
    found_N = compute_baseline_advantages(rewards_N, groups_N, baseline_N)
    for number, group in enumerate(groups_N.tolist()):
        place = 4 * offset + group
        expected = rewards[number] - rewards[place] if place < len(rewards) and number != place else 0.0
        assert found_N[number] == expected
    shifted_N = compute_baseline_advantages(rewards_N + shift, groups_N, baseline_N)
    assert shifted_N.tolist() == found_N.tolist()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="expected bool"):
        compute_baseline_advantages(np.zeros(2), np.zeros(2, int), np.zeros(2))
    assert len(compute_baseline_advantages(np.zeros(0), np.zeros(0, int), np.zeros(0, bool))) == 0


def test_runs_that_cannot_have_a_baseline_are_refused():
    remax = loader.replace(loader.from_dict(BASE), trainer__algorithm="remax")
    assert has_greedy_sibling(remax)
    assert not has_greedy_sibling(loader.from_dict(BASE))
    with pytest.raises(ConfigError, match=r"feeder\.group_size: got 1, expected at least 2"):
        has_greedy_sibling(loader.replace(remax, feeder__group_size=1))
    with pytest.raises(ConfigError, match=r"tasksets\.sums\.sampling\.temperature: got 0, expected more"):
        has_greedy_sibling(loader.replace(remax, sampling={"temperature": 0.0}))
