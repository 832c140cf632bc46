"""A reference that follows the policy: what it is, that it is saved, and that a restart changes no bit."""

import numpy as np
import pytest

from rftstream.algorithms.grpo import Grpo
from rftstream.config.sections import LoraSection
from tests.unit import tiny

GRPO = Grpo(Grpo.Config(kl_coef=0.5))
KINDS = ["whole", "offloaded", "adapters"]


@pytest.fixture
def make(tmp_path):
    import dataclasses

    spec = tiny.make(tmp_path)

    def backend(kind):
        if kind == "adapters":
            pytest.importorskip("peft")
            return tiny.backend(dataclasses.replace(spec, lora=LoraSection(rank=2)))
        return tiny.backend(spec, offload_optimizer=kind == "offloaded")

    return backend


def train(backend, *seeds, renew=()):
    for seed in seeds:
        if seed in renew:
            backend.renew_reference()
        assert not backend.update(tiny.rows(seed=seed), GRPO, tiny.plan(lr=1e-2)).skipped


def said(backend):
    return np.concatenate(backend.reference_logprobs(tiny.rows(), 64))


def policy_says(backend):
    return np.concatenate(backend.logprobs(tiny.rows(), 64))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_policy_of_that_version_from_then_on(make, kind):
    backend = make(kind)
    first = policy_says(backend)
    train(backend, 0, 1)
    np.testing.assert_allclose(said(backend), first, atol=1e-5)
    then = policy_says(backend)
    backend.renew_reference()
    np.testing.assert_array_equal(said(backend), then)
    train(backend, 2)
    np.testing.assert_array_equal(said(backend), then)
    after = policy_says(backend)
    assert np.abs(after - then).max() > 1e-3
    backend.renew_reference()
    np.testing.assert_array_equal(said(backend), after)
    np.testing.assert_array_equal(policy_says(backend), after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_changes_no_bit(make, kind, tmp_path):
    through, renew = make(kind), (1, 3)
    train(through, 0, 1, renew=renew)
    saved = tiny.whole_state(through, tmp_path / "saved")
    assert "reference.safetensors" in saved
    train(through, 2, 3, 4, renew=renew)
    resumed = make(kind)
    resumed.load(tmp_path / "saved")
    assert tiny.whole_state(resumed, tmp_path / "loaded") == saved
    train(resumed, 2, 3, 4, renew=renew)
    assert tiny.whole_state(resumed, tmp_path / "resumed") == tiny.whole_state(through, tmp_path / "through")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_checkpoint_brings_back_version_0(make, kind, tmp_path):
    backend = make(kind)
    begun = said(backend)
    train(backend, 0)
    assert "reference.safetensors" not in tiny.whole_state(backend, tmp_path / "early")
    train(backend, 1, 2, renew=(2,))
    assert not np.array_equal(said(backend), begun)
    backend.load(tmp_path / "early")
    np.testing.assert_array_equal(said(backend), begun)
