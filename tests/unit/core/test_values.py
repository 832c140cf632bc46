import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.core.values import compute_gae, explained_variance

SHARES = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def row(*values):
    return np.asarray([values], dtype=np.float64)


def test_numbers_by_hand():
    """gamma 0.5, lam 0.5: deltas 1 + 0.5 * 4 - 2 = 1, 0 + 0.5 * 6 - 4 = -1, 3 - 6 = -3."""
    advantages_NT, returns_NT = compute_gae(row(1, 0, 3), row(2, 4, 6), row(1, 1, 1), gamma=0.5, lam=0.5)
    third, second = -3.0, -1 + 0.25 * -3
    assert advantages_NT.tolist() == [[1 + 0.25 * second, second, third]]
    assert returns_NT.tolist() == [[2 + 1 + 0.25 * second, 4 + second, 3.0]]


def test_what_a_tool_said_is_no_step():
    """Masked tokens between are passed over without a discount, and may hold anything."""
    odd = np.nan
    found = compute_gae(row(odd, 1, odd, odd, 0, 3, odd), row(odd, 2, odd, 1e6, 4, 6, odd), row(0, 1, 0, 0, 1, 1, 0),
                        gamma=0.5, lam=0.5)  # fmt: skip
    plain = compute_gae(row(1, 0, 3), row(2, 4, 6), row(1, 1, 1), gamma=0.5, lam=0.5)
    for one, other in zip(found, plain, strict=True):
        assert one[0, [1, 4, 5]].tolist() == other[0].tolist()
        assert not one[0, [0, 2, 3, 6]].any()


def plain_gae(rewards, values, mask, gamma, lam):
    """The definition, as two loops over the places that count."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    kept = [place for place, keeps in enumerate(mask) if keeps]
    for first in range(len(kept)):
        total = 0.0
        for later in range(first, len(kept)):
            after = values[kept[later + 1]] if later + 1 < len(kept) else 0.0
            delta = rewards[kept[later]] + gamma * after - values[kept[later]]
            total += (gamma * lam) ** (later - first) * delta
        advantages[kept[first]], returns[kept[first]] = total, total + values[kept[first]]
    return advantages, returns


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 12), SHARES, SHARES)
def test_it_is_the_definition(seed, num_rows, length, gamma, lam):
    random = np.random.default_rng(seed)
    rewards_NT, values_NT = random.standard_normal((2, num_rows, length))
    mask_NT = (random.random((num_rows, length)) < 0.6).astype(np.float32)
    found = compute_gae(rewards_NT, np.where(mask_NT, values_NT, np.nan), mask_NT, gamma=gamma, lam=lam)
    for number in range(num_rows):
        expected = plain_gae(rewards_NT[number], values_NT[number], mask_NT[number], gamma, lam)
        for array_NT, one in zip(found, expected, strict=True):
            np.testing.assert_allclose(array_NT[number], one, rtol=1e-12, atol=1e-12)


def test_explained_variance():
    returns = np.asarray([1.0, 2, 3, 6])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns + 5, returns) == 1  # as GAE's baseline it would be off, but it varies alike
    assert explained_variance(np.full(4, 9.0), returns) == 0
    # errors 1, 0, 0, -1: variance 0.5; that of the returns 3.5
    assert explained_variance(np.asarray([0.0, 2, 3, 7]), returns) == pytest.approx(1 - 0.5 / 3.5)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(np.asarray([1.0, 2]), np.asarray([3.0, 3])) == 0
    assert explained_variance(np.zeros(0), np.zeros(0)) == 0


@pytest.mark.parametrize(("shape", "gamma", "message"), [((1, 3), 1.0, "expected"), ((1, 2), 1.5, "gamma 1.5")])
def test_what_does_not_fit_is_refused(shape, gamma, message):
    with pytest.raises(ValueError, match=message):
        compute_gae(row(1, 2), np.zeros(shape), row(1, 1), gamma=gamma, lam=1.0)
    with pytest.raises(ValueError, match="twice"):
        explained_variance(np.zeros(2), np.zeros(3))
