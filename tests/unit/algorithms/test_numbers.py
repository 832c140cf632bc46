"""Losses and advantages of each algorithm, computed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rftstream.algorithms.base import Denominators, MicroBatch
from rftstream.algorithms.clips import Dapo, GiGpo, MaxRl, ReinforcePlusPlus, sampled_runs
from rftstream.algorithms.ratios import KEPT, M2po
from rftstream.contracts.arrays import Array
from rftstream.errors import ConfigError
from tests.suite.each import each
from tests.unit.algorithms.test_algorithms import build
from tests.unit.algorithms.test_grpo import experience, segment

ln = math.log
GOOD, BAD = ln(0.625) + ln(0.3), ln(0.2)
"""Log-probabilities of the two rows below."""


def gate(ratio, tau):
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def batch():
    """A good row of two tokens, a bad one of one: ratios to before 1.25, 0.75 and 0.5, of before to who sampled 2, 1
    and 0.5."""
    rows = MicroBatch(
        loss_mask_BT=torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64),
        behavior_logprobs_BT=torch.tensor([[0.25, 0.4], [0.8, 1.0]], dtype=torch.float64).log(),
        advantages_BT=torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64),
        additions={KEPT: torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)},
    )
    policy = torch.tensor([[0.625, 0.3], [0.2, 1.0]], dtype=torch.float64).log()
    return rows, policy, torch.tensor([[0.5, 0.4], [0.4, 1.0]], dtype=torch.float64).log()


NONE = {"correction": "none"}


@each(
    ("name", "options", "expected"),
    [
        ("grpo", NONE, (-1.2 - 0.75 + 0.8) / 3),
        ("grpo", {**NONE, "normalise": "sequence"}, ((-1.2 - 0.75) / 2 + 0.8) / 2),
        ("grpo", {}, (-1.2 * 2 - 0.75 + 0.8 * 0.5) / 3),
        ("grpo", {"correction_high": 1.5}, (-1.2 * 1.5 - 0.75 + 0.8 * 0.5) / 3),
        ("grpo", {"correction": "clamp", "correction_low": 0.6}, (-1.2 * 2 - 0.75 + 0.8 * 0.6) / 3),
        ("grpo", {"correction": "mask", "correction_high": 1.5}, (-0.75 + 0.8 * 0.5) / 3),
        ("grpo", {"correction": "icepop", "correction_low": 0.6}, (-1.2 * 2 - 0.75) / 3),
        ("grpo", {"correction": "mis", "correction_level": "geometric"},
         (-(1.2 + 0.75) * math.sqrt(2) + 0.8 * 0.5) / 3),
        ("grpo", {"correction": "mis", "correction_level": "sequence", "correction_low": 0.6}, -(1.2 + 0.75) * 2 / 3),
        ("opd", NONE, (-1.2 - 0.75 + 0.8) / 3),
        ("maxrl", NONE, (-1.2 - 0.75 + 0.8) / 3),
        ("gigpo", NONE, (-1.2 - 0.75 + 0.8) / 3),
        ("reinforce_plus_plus", NONE, (-1.2 - 0.75 + 0.8) / 3),
        ("remax", NONE, (-1.2 - 0.75 + 0.8) / 3),
        ("ppo", NONE, (-1.2 - 0.75 + 0.8) / 3),
        ("dr_grpo", {**NONE, "row_tokens": 10}, (-1.2 - 0.75 + 0.8) / (2 * 10)),
        ("dapo", NONE, (-1.25 - 0.75 + 0.8) / 3),
        ("gspo", NONE, (-math.sqrt(0.9375) + (1 - 3e-4)) / 2),
        ("gspo", {**NONE, "normalise": "token"}, (-2 * math.sqrt(0.9375) + (1 - 3e-4)) / 3),
        ("gspo", {**NONE, "normalise": "constant", "row_tokens": 10}, (-2 * math.sqrt(0.9375) + (1 - 3e-4)) / (2 * 10)),
        ("gspo", {}, (-math.sqrt(0.9375) * 1.5 + (1 - 3e-4) * 0.5) / 2),
        ("rloo", NONE, (-0.9375 + 0.8) / 2),
        ("cispo", {**NONE, "max_ratio": 1.1}, (-1.1 * ln(0.625) - 0.75 * ln(0.3) + 0.5 * BAD) / 3),
        ("sapo", NONE, (-(gate(1.25, 1.0) + gate(0.75, 1.0)) / 2 + gate(0.5, 1.05)) / 2),
        ("opmd", {"tau": 3.0}, (-GOOD + BAD) / 3 / 4),
        ("kimi", {"tau": 0.5}, ((1 - 0.5 * ln(1.875)) ** 2 + (-1 - 0.5 * ln(0.25)) ** 2) / 2),
        ("kimi", {"tau": 0.5, "start": "proximal"}, ((1 - 0.5 * ln(0.9375)) ** 2 + (-1 - 0.5 * ln(0.5)) ** 2) / 2),
        ("asymre", {}, (-GOOD + BAD) / 2),
        ("topr", {}, (-GOOD + 0.25 * BAD) / 2),
        ("dppo", {}, (-0.75 + 1e-3 * (ln(2.5) ** 2 + ln(0.75) ** 2 + ln(0.25) ** 2)) / 3),
        ("dppo", {"max_rise": 0.4, "max_fall": 0.7, "square_coef": 0.0}, (-2.5 - 0.75 + 0.25) / 3),
        ("m2po", {}, (-0.75 + 0.25) / 3),
    ],
)  # fmt: skip
def test_losses(name, options, expected):
    rows, policy, before = batch()
    rows = replace(rows, proximal_logprobs_BT=before)
    loss, _ = build((name, options)).loss(policy, rows, Denominators(num_tokens=3, num_rows=2))
    assert float(loss) == pytest.approx(expected)


@each(
    ("name", "options", "expected"),
    [
        ("grpo", {}, [1.1547, -0.5774, -0.5774, 0.7071, -0.7071]),
        ("opd", {}, [0.0, 0.0, 0.0, 0.0, 0.0]),
        ("opd", {"reward_weight": 0.5}, [0.57735, -0.28868, -0.28868, 0.35355, -0.35355]),
        ("gigpo", {}, [2 * 1.15470, -2 * 0.57735, -2 * 0.57735, 2 * 0.70711, -2 * 0.70711]),
        ("dr_grpo", {}, [2 / 3, -1 / 3, -1 / 3, 0.25, -0.25]),
        ("dr_grpo", {"scale_rewards": "group"}, [1.1547, -0.5774, -0.5774, 0.7071, -0.7071]),
        ("grpo", {"scale_rewards": "none"}, [2 / 3, -1 / 3, -1 / 3, 0.25, -0.25]),
        ("cispo", {"scale_rewards": "batch"}, [1.3333, -0.6667, -0.6667, 0.5, -0.5]),
        ("rloo", {}, [1.0, -0.5, -0.5, 0.5, -0.5]),
        ("maxrl", {}, [2.0, -1.0, -1.0, 1 / 3, -1 / 3]),
        ("topr", {}, [0.5, -0.5, -0.5, 0.5, 0.0]),
        ("asymre", {}, [2 / 3 + 0.1, -1 / 3 + 0.1, -1 / 3 + 0.1, 0.35, -0.15]),
        ("opmd", {}, [2 / 3, -1 / 3, -1 / 3, 0.25, -0.25]),
        ("opmd", {"baseline": "soft"}, [1 - 0.452833, -0.452833, -0.452833, 1 - 0.780930, 0.5 - 0.780930]),
        ("kimi", {}, [2 / 3, -1 / 3, -1 / 3, 0.25, -0.25]),
        ("reinforce_plus_plus", {}, [1.0, -1.0, -1.0, 1.0, 0.0]),
        ("reinforce_plus_plus", {"group_baseline": True}, [1.498537, -0.749269, -0.749269, 0.561951, -0.561951]),
    ],
)  # fmt: skip
def test_advantages(name, options, expected):
    """Rewards 1, 0, 0 in one group, 1 and 0.5 in the other, a token each; soft baselines: ln((e + 2) / 3) and
    ln((e + e^0.5) / 2)."""
    rewards = [("a", 1.0), ("a", 0.0), ("a", 0.0), ("b", 1.0), ("b", 0.5)]
    rows, metrics = build((name, options)).prepare([experience(group, reward) for group, reward in rewards])
    assert [row.advantages[1] for row in rows] == pytest.approx(expected, abs=1e-4)
    if name == "topr":
        assert metrics["imitated_share"] == pytest.approx(3 / 5)


def test_divergence_by_token():
    """Behaviour logprobs are -1, so k1 is 0.5 at one token of the first rollout's second row; it counts at that token
    and all before it, in both rows, and not after. Tool output lies between and is passed through."""
    algorithm = ReinforcePlusPlus(ReinforcePlusPlus.Config(kl_coef=0.4, kl_estimator="k1", kl_in="reward"))
    first = experience("a", 1.0, segment([0, 1, 0, 1]), segment([0, 1, 1]))
    batch = [first, experience("b", 0.0)]
    reference = [np.float32(one) for one in ([0, -1, np.nan, -1], [0, -1.5, -1], [0, -1])]
    rows, metrics = algorithm.prepare(batch, reference)
    returns = np.asarray([0.8, 0.8, 0.8, 1.0, 0.0])
    white = (returns - returns.mean()) / returns.std(ddof=1)
    found = np.concatenate([row.advantages[row.loss_mask > 0] for row in rows])
    np.testing.assert_allclose(found, white, rtol=1e-5)
    assert metrics["kl"] == pytest.approx(0.5 / 5)
    assert metrics["reward_after_kl"] == pytest.approx(0.8 / 2)
    assert not rows[0].advantages[[0, 2]].any()


def test_truncated_rollouts_are_not_whitened_along():
    algorithm = ReinforcePlusPlus(ReinforcePlusPlus.Config(mask_truncated=True))
    batch = [experience("a", 1.0), experience("b", 0.0), experience("c", 9.0, truncated=True)]
    rows, _ = algorithm.prepare(batch)
    assert [row.advantages[1] for row in rows] == pytest.approx([0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5), 0.0])


def test_overlong_penalty():
    """10 tokens allowed, penalised from the ninth on: 8, 9 and 10 tokens lose 0, 0.5 and 1 times 0.4."""
    algorithm = Dapo(Dapo.Config(overlong_penalty=0.4, advantage_eps=1e-9))
    batch = [experience("a", 1.0, segment([0] + [1] * 4), segment([0] + [1] * (count - 4))) for count in (8, 9, 10)]
    batch = [replace(one, sampling=replace(one.sampling, max_tokens=10)) for one in batch]
    rows, metrics = algorithm.prepare(batch)
    assert [row.advantages[1] for row in rows[::2]] == pytest.approx([1.0, 0.0, -1.0])
    assert metrics["overlong_penalty"] == pytest.approx(-0.2)
    assert (metrics["reward"], metrics["groups_without_signal"]) == (1.0, 0)


def test_rewards_below_zero_have_no_likelihood():
    with pytest.raises(ConfigError, match=r"maxrl got a reward of -1, expected none below 0"):
        MaxRl(MaxRl.Config()).prepare([experience("a", -1.0), experience("a", 1.0)])
    for options in ({"overlong_share": 0.2}, {"kl_coef": 0.1, "kl_in": "reward"}):
        with pytest.raises(ConfigError, match=r"algorithms\.maxrl\.\w+: could make a reward negative"):
            MaxRl(MaxRl.Config(**options))
    assert MaxRl(MaxRl.Config(kl_coef=0.1)).needs == {"reference_logprobs"}


def test_second_moment_is_of_the_whole_batch():
    """Log-ratios 0.1, 0.2, 0.3 and 1.0: with the largest their mean square is 0.285, without it 0.14 / 3."""
    algorithm = M2po(M2po.Config(threshold=0.05))
    assert algorithm.needs == {"row_logprobs"}
    rows, _ = algorithm.prepare([experience("a", 1.0, segment([0, 1, 1])), experience("a", 0.0, segment([0, 1, 1]))])
    logprobs = [np.float32([np.nan, -0.9, 0.0]), np.float32([np.nan, -1.2, -0.7])]
    refined, metrics = algorithm.refine(rows, logprobs)
    assert [row.additions[KEPT].tolist() for row in refined] == [[0, 1, 0], [0, 1, 1]]
    assert metrics["second_moment_dropped"] == 0.25
    none = M2po(M2po.Config(threshold=1e-6)).refine(rows, logprobs)
    assert none[1]["second_moment_dropped"] == 1.0


def talk(group, reward, *states):
    """A rollout of one segment: the states shown, a token each, and after each a sampled token, 9."""
    ids = [token for state in states for token in (state, 9)]
    plain = segment([0, 1] * len(states))
    return experience(group, reward, replace(plain, token_ids=Array.of(ids, "int32")))


def test_turns_that_meet_in_a_state_are_compared():
    """Discount 0.5. All begin in state 1: returns 0.5, 0 and 1. The first two meet in state 2, at once with returns 1
    and 0; state 3 is seen by one, and the other group's states are others."""
    algorithm = GiGpo(GiGpo.Config(discount=0.5, turn_weight=0.1, advantage_eps=1e-9))
    batch = [talk("a", 1.0, 1, 2), talk("a", 0.0, 1, 3, 2), talk("a", 1.0, 1), talk("b", 5.0, 1, 2), talk("b", 5.0, 4)]
    rows, _ = algorithm.prepare(batch)
    of_rollouts = np.asarray([1 / 3, -2 / 3, 1 / 3, 0, 0]) / math.sqrt(1 / 3)
    first = (np.asarray([0.5, 0.0, 1.0]) - 0.5) / 0.5
    second = np.asarray([1, -1]) / math.sqrt(2)
    expected = [[first[0], second[0]], [first[1], 0, second[1]], [first[2]], [0, 0], [0]]
    for row, whole, own in zip(rows, of_rollouts, expected, strict=True):
        found = row.advantages[row.loss_mask > 0]
        assert found == pytest.approx([whole + 0.1 * turn for turn in own], abs=1e-6)


def test_turns_go_on_over_segments():
    """What a turn led to counts the turns after it in the next segment; with a mean of two rollouts at state 0 1 2."""
    algorithm = GiGpo(GiGpo.Config(discount=0.5, advantage_eps=1e-9))
    long = experience("a", 1.0, segment([0, 0, 0, 1]), segment([0, 1, 0, 1]))
    rows, _ = algorithm.prepare([long, experience("a", 0.25, segment([0, 0, 0, 1]))])
    equal = 1.0 * 0.5**2 - 0.25
    assert equal == 0
    assert rows[0].advantages[3] == pytest.approx(1 / math.sqrt(2)), "the rollout's alone: both lead to 0.25 from there"
    assert [list(sampled_runs(np.asarray(mask))) for mask in ([0, 1, 1, 0, 1], [0, 0], [1])] == [
        [(1, 3), (4, 5)], [], [(0, 1)]
    ]  # fmt: skip
