"""On-policy distillation by hand; its gradient is that of the divergence; a small table becomes its teacher."""

from dataclasses import replace

import numpy as np
import pytest

from rftstream.algorithms.opd import Opd
from rftstream.contracts.arrays import Array
from rftstream.core.advantages import compute_teacher_gaps
from rftstream.errors import ConfigError
from tests.golden import table
from tests.unit.algorithms.test_grpo import experience, segment


def taught(one, logprobs):
    return replace(one, additions={"teacher_logprobs": Array.of(logprobs, "float32")})


def test_gaps_by_hand():
    gaps_T = compute_teacher_gaps(np.asarray([-9.0, -0.5, np.nan, -3.0], np.float32),
                                  np.asarray([0.0, -2.0, 0.0, -1.0], np.float32), np.asarray([1, 1, 0, 1]))  # fmt: skip
    assert gaps_T.tolist() == [0.0, 1.5, 0.0, -2.0]


def test_gaps_of_odd_arrays_are_refused():
    with pytest.raises(ValueError, match=r"got \(2,\), \(3,\) and \(3,\), expected \[T\] three times"):
        compute_teacher_gaps(np.zeros(2), np.zeros(3), np.ones(3))
    with pytest.raises(ValueError, match="a logprob is not finite"):
        compute_teacher_gaps(np.asarray([0.0, np.nan]), np.zeros(2), np.ones(2))


def test_advantages_of_tokens_over_two_segments():
    """The policy gave each token a logprob of -1; beyond max_gap they are cut off."""
    one = taught(experience("a", 0.0, segment([0, 1, 1]), segment([0, 1])), [7.0, -0.25, -2.0, 7.0, -9999.0])
    rows, metrics = Opd(Opd.Config(max_gap=5.0)).prepare([one])
    assert [row.advantages.tolist() for row in rows] == [[0.0, 0.75, -1.0], [0.0, -5.0]]
    assert metrics["teacher_kl"] == pytest.approx((-0.75 + 1 + 9998) / 3)
    assert metrics["teacher_gap_max"] == 9998
    assert metrics["token_advantage_std"] == pytest.approx(np.std([0.75, -1, -5]))


@pytest.mark.parametrize("additions", [{}, {"teacher_logprobs": Array.of([0.0, 0.0, 0.0], "float32")}])
def test_without_a_teacher_it_says_what_to_do(additions):
    says = (
        r"a/0 has .* teacher_logprobs, expected one for each of its 2 tokens; add the reward 'teacher' to tasksets\.t"
    )
    with pytest.raises(ConfigError, match=says):
        Opd(Opd.Config()).prepare([replace(experience("a", 1.0), additions=additions)])


def test_what_is_masked_counts_nowhere():
    batch = [taught(experience("a", 1.0), [0.0, -3.0]), taught(experience("a", 0.0, truncated=True), [0.0, -9.0])]
    _, metrics = Opd(Opd.Config(mask_truncated=True)).prepare(batch)
    assert metrics["teacher_kl"] == 2
    rows, metrics = Opd(Opd.Config(mask_truncated=True)).prepare(batch[1:])
    assert "teacher_kl" not in metrics
    assert not rows[0].loss_mask.any()


@pytest.mark.slow
def test_a_table_becomes_its_teacher():
    """The rewards are never looked at: probabilities of right tokens go where the teacher has them, not to 1."""
    steps = list(table.play(Opd(Opd.Config()), steps=150))
    rights = [one.reward for one in steps[-40:]]
    assert np.mean([one.reward for one in steps[:3]]) < 0.3
    assert 0.75 < np.mean(rights) < 0.95
