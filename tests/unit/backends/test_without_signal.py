"""Rows without an advantage: they are read for the metrics, and have no backward pass where it would give nothing."""

import dataclasses

import numpy as np
import pytest
import torch

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.passes import signal_first
from tests.unit import tiny

COUNTS = {"tflop", "microbatches"}
"""Metrics of what is computed, and not of what comes of it."""


class Together(Grpo):
    """The same, with all rows in one micro-batch."""

    def __init__(self, config):
        super().__init__(config)
        self.needs |= {"whole_groups"}


class Pulled(Grpo):
    """A loss that changes with logprobs of rows without an advantage, too."""

    def token_losses(self, policy_BT, old_BT, rows):
        losses_BT, metrics = super().token_losses(policy_BT, old_BT, rows)
        return losses_BT + 0.1 * policy_BT.square() * rows.loss_mask_BT, metrics


class PulledAsItSays(Pulled):
    """One that says so."""

    def __init__(self, config):
        super().__init__(config)
        self.needs |= {"rows_without_advantage"}


class PulledTogether(Pulled, Together):
    """The same, with all rows in one micro-batch."""


def flat(rows, which):
    """The rows, without advantages in groups that `which` names."""
    return [
        dataclasses.replace(row, advantages=np.zeros_like(row.advantages)) if row.group in which else row
        for row in rows
    ]


@pytest.fixture
def trained(spec):
    """Trains a new backend on batches, and returns the metrics of each, and masters and moments at the end."""

    def train(algorithm, *batches, plan=None, **config):
        opened = tiny.backend(spec, **config)
        metrics = [opened.update(rows, algorithm, plan or tiny.plan()).metrics for rows in batches]
        masters = {name: one.detach().clone() for name, one in opened._masters.masters.items()}
        return metrics, masters | {name: one.clone() for name, one in opened._masters.moments()}

    return train


def compare(found, expected):
    for metrics, others in zip(found[0], expected[0], strict=True):
        assert metrics.keys() == others.keys()
        for name in metrics.keys() - COUNTS:
            assert metrics[name] == pytest.approx(others[name], rel=1e-4, abs=1e-6), name
    assert found[1].keys() == expected[1].keys()
    for name, one in found[1].items():
        torch.testing.assert_close(one, expected[1][name], rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"packing": False}])
@pytest.mark.parametrize("plan", [{}, {"minibatches": 2, "updates_per_batch": 2}, {"tokens_per_microbatch": 20}])
def test_weights_and_metrics_are_those_of_all_rows(trained, plan, config):
    """Beside batches of which some rows, none, and all are flat. Less is computed."""
    batches = [flat(tiny.rows(seed=seed), which) for seed, which in enumerate([{1, 3}, {}, {0, 1, 2, 3}])]
    settings = Grpo.Config()
    whole = {**plan, "tokens_per_microbatch": 16384}
    found = trained(Grpo(settings), *batches, plan=tiny.plan(**plan), **config)
    expected = trained(Together(settings), *batches, plan=tiny.plan(**whole), **config)
    compare(found, expected)
    shares = [one["tflop"] / other["tflop"] for one, other in zip(found[0], expected[0], strict=True)]
    assert shares[0] < 0.85
    assert shares[1] == pytest.approx(1)
    assert shares[2] < 0.6


def test_a_loss_that_changes_with_them_has_its_gradient(trained):
    batch = flat(tiny.rows(), {0, 2})
    settings = Grpo.Config()
    found, expected = (trained(kind(settings), batch) for kind in (Pulled, PulledTogether))
    compare(found, expected)
    assert 1 < found[0][0]["tflop"] / expected[0][0]["tflop"] < 1.3, "read once more to find out"
    told = trained(PulledAsItSays(settings), batch)
    compare(told, expected)
    assert told[0][0]["tflop"] == pytest.approx(expected[0][0]["tflop"])
    with pytest.raises(AssertionError):
        compare(found, trained(Grpo(settings), batch))


@pytest.mark.parametrize("settings", [{"entropy_coefficient": 0.1}, {"kl_coef": 0.1}])
def test_entropy_and_divergence_are_learned_from_by_all_rows(trained, settings):
    batch = flat(tiny.rows(), {0, 1, 2, 3})
    metrics, _ = trained(Grpo(Grpo.Config(**settings)), tiny.rows(), batch)
    assert metrics[1]["microbatches"] == 1
    assert metrics[1]["grad_norm"] > 1e-4


def test_an_odd_advantage_is_a_signal(trained):
    """What is not a number is found in the loss, and not passed over."""
    rows = tiny.rows()
    odd = dataclasses.replace(rows[0], advantages=np.full_like(rows[0].advantages, np.nan))
    assert signal_first([*flat(rows, {0, 1, 2, 3})[1:], odd])[0] == [odd]


def test_which_rows_come_first():
    rows = flat(tiny.rows(), {1, 2})
    masked = dataclasses.replace(rows[0], advantages=np.where(rows[0].loss_mask, 0, 1).astype(np.float32))
    expert = dataclasses.replace(rows[3], additions={"expert": np.ones_like(rows[3].advantages)})
    first, others = signal_first([masked, expert, *rows[3:6], rows[9]])
    assert [id(row) for row in first] == [id(expert), id(rows[9])], "advantages of masked tokens do not count"
    assert [id(row) for row in others] == [id(masked), *map(id, rows[3:6])]
    first, others = signal_first(rows[3:6])
    assert ([id(row) for row in first], len(others)) == ([id(rows[3])], 2)
    assert signal_first([]) == ([], [])


def test_some_row_with_an_image_has_its_backward_pass():
    """So that what sees is moved by its moments, as ever."""
    rows = flat(tiny.rows(), {1, 2})
    seeing = [dataclasses.replace(row, images=("image",)) for row in rows[3:6]]
    first, others = signal_first([*rows[:3], *seeing])
    assert ([id(row) for row in first], len(others)) == ([*map(id, rows[:3]), id(seeing[0])], 2)
    first, others = signal_first([rows[6], *seeing])
    assert ([id(row) for row in first], len(others)) == ([id(rows[6]), id(seeing[0])], 2)
