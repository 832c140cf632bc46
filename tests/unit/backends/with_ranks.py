"""What tests of the backend deepspeed build, and how they compare it with the one-process torch backend.

What is equal and how closely: losses, norms and metrics to 1e-4 of their size; moments, which hold the gradients, to
1e-4 of the largest of their tensor; weights to 2% of the learning rate for each step, since Adam's steps are all of
about that size, however small the gradient that decides on their direction.
"""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.deepspeed.backend import DeepSpeedBackend
from rftstream.backends.torch.backend import TorchBackend
from tests.unit import tiny
from tests.unit.backends.kept_ranks import TIMEOUT_S

LR = 1e-3
OPTIMIZER = OptimizerSettings(weight_decay=0.1)
GRPO = Grpo(Grpo.Config(entropy_coefficient=0.01))
KL = Grpo(Grpo.Config(kl_coef=0.1))


def make_backend(spec, *, images=None, **config):
    """TIMEOUT_S: other work on the machine must not look like a rank that hangs."""
    settings = DeepSpeedBackend.Config(**{"timeout_s": TIMEOUT_S, **config})
    return DeepSpeedBackend(settings, model=spec, optimizer=OPTIMIZER, seed=0, images=images)


def torch_backend(spec, *, critic=None, images=None, **config):
    backend = TorchBackend(TorchBackend.Config(**config), model=spec, optimizer=OPTIMIZER, seed=0, images=images)
    if critic is not None:
        backend.hold_critic(*critic)
    backend.open()
    return backend


def plan(**changes):
    return tiny.plan(**{"lr": LR, "tokens_per_microbatch": 30, **changes})


BATCHES = [
    (tiny.rows(seed=1), plan()),
    (tiny.rows(1, seed=2), plan(max_grad_norm=0.0)),  # less than there are ranks
    (tiny.rows(seed=3), plan(minibatches=2, max_grad_norm=0.05)),
]
NUM_STEPS = 4


def train(backend, algorithm=GRPO):
    return [backend.update(rows, algorithm, how).metrics for rows, how in BATCHES]


def saved(backend, folder, files=("masters", "optimizer")):
    folder.mkdir()
    backend.save(folder)
    return {name: load_file(folder / f"{name}.safetensors") for name in files}


def agree(found, expected):
    """Metrics and files."""
    metrics_agree(found[0], expected[0])
    files_agree(found[1], expected[1], NUM_STEPS)


def metrics_agree(found, expected):
    skip = {"microbatches", "computed_tokens", "tflop", "ranks"}  # idle ranks and smaller micro-batches
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() - skip == theirs.keys() - skip
        for name in theirs.keys() - skip:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def values_agree(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def files_agree(found, expected, num_steps):
    for file, tensors in expected.items():
        assert found[file].keys() == tensors.keys()
        for name, theirs in tensors.items():
            near = 1e-4 * np.abs(theirs).max() + 1e-12 if "optimizer" in file else 0.02 * LR * num_steps
            np.testing.assert_allclose(found[file][name], theirs, rtol=0, atol=near, err_msg=f"{file} {name}")


def unchanged(found, before):
    return all(np.array_equal(found[file][name], array) for file in before for name, array in before[file].items())


def skips_what_is_no_number(backend, algorithm, folder, *plans):
    """The files before."""
    rows = tiny.rows(seed=2)
    rows[-1] = dataclasses.replace(rows[-1], advantages=np.full_like(rows[-1].advantages, np.nan))
    before = saved(backend, folder / "before")
    for number, changes in enumerate(plans):
        update = backend.update(rows, algorithm, plan(**changes))
        assert update.skipped and not np.isfinite(update.metrics["loss"])
        assert unchanged(saved(backend, folder / f"skipped{number}"), before)
    return before
