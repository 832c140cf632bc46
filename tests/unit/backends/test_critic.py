"""The critic of the torch backend: what it says, how it learns, and that it is saved, skipped and restored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rftstream.algorithms.ppo import Ppo
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config.sections import LoraSection
from rftstream.errors import ConfigError
from tests.unit import tiny
from tests.unit.backends.test_torch import gradients

LR = 1e-2
CHANGES = [{}, {"minibatches": 2, "updates_per_batch": 2, "tokens_per_microbatch": 30}]


@pytest.fixture
def ppo():
    return Ppo(Ppo.Config(critic=CriticConfig(lr=LR)))


def opened(spec, ppo, folder=None, **config):
    backend = TorchBackend(TorchBackend.Config(**config), model=spec, optimizer=OptimizerSettings(), seed=0)
    backend.hold_critic(ppo.critic, folder or spec.folder)
    backend.open()
    return backend


def estimated(backend, ppo, seed=0):
    """Rows with what the critic says of them, each a rollout of its own that is paid at its end."""
    rows = []
    for number, row in enumerate(tiny.rows(seed=seed)):
        rewards = np.zeros_like(row.advantages)
        rewards[np.flatnonzero(row.loss_mask)[-1:]] = row.advantages[0]
        rows.append(dataclasses.replace(row, rollout=number, advantages=rewards))
    return ppo.estimate(rows, backend.values(rows, 16384))[0]


def trained(backend, ppo, seed=0, **changes):
    return backend.update(estimated(backend, ppo, seed), ppo, tiny.plan(**changes))


def critic_bytes(state):
    return {name: data for name, data in state.items() if name.startswith("critic")}


def reward_model(folder, spec, *, tokens=False, vocabulary=None, **settings):
    """A made model for classification, of the policy's sizes."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

    config = AutoConfig.from_pretrained(spec.folder, num_labels=1, **settings)
    config.vocab_size = vocabulary or config.vocab_size
    torch.manual_seed(7)
    kind = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
    model = kind.from_config(config).float()
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.slow
def test_it_begins_by_saying_nothing(spec, ppo):
    values = opened(spec, ppo).values(tiny.rows(), 64)
    assert [len(one) for one in values] == [len(row.token_ids) for row in tiny.rows()]
    assert not any(one.any() for one in values)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [False, True])
def test_a_reward_model_says_what_it_said_before(spec, ppo, tmp_path, tokens):
    """Of a row it says at each place what the model gives for the tokens so far."""
    model = reward_model(tmp_path / "reward", spec, tokens=tokens)
    backend = opened(spec, ppo, tmp_path / "reward")
    rows = tiny.rows(4)
    for row, said in zip(rows, backend.values(rows, 64), strict=True):
        for t in np.flatnonzero(row.loss_mask).tolist():
            with torch.no_grad():
                logits = model(input_ids=torch.from_numpy(row.token_ids[:t].astype(np.int64))[None]).logits
            assert said[t] == pytest.approx(float(logits[0, -1, 0] if tokens else logits[0, 0]), abs=1e-5)
        assert not said[row.loss_mask == 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_no_budget_and_no_layout_changes_values_and_gradients(spec, ppo, tmp_path, packing, monkeypatch):
    """Up to float32's rounding."""
    reward_model(tmp_path / "reward", spec)
    plain = opened(spec, ppo, tmp_path / "reward", packing=False)
    rows = estimated(plain, ppo)
    expected = critic_gradients(plain, monkeypatch)
    loss = plain.update(rows, ppo, tiny.plan()).metrics["value_loss"]
    for tokens in (1, 40, 16384):
        backend = opened(spec, ppo, tmp_path / "reward", packing=packing)
        for found, said in zip(backend.values(rows, tokens), plain.values(rows, 16384), strict=True):
            np.testing.assert_allclose(found, said, rtol=1e-4, atol=1e-6)
        found = critic_gradients(backend, monkeypatch)
        update = backend.update(rows, ppo, tiny.plan(tokens_per_microbatch=tokens))
        assert update.metrics["value_loss"] == pytest.approx(loss, abs=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def critic_gradients(backend, monkeypatch):
    return gradients(backend._trained["critic"], monkeypatch)


@pytest.mark.slow
def test_it_learns_what_comes(spec, ppo):
    """The same batch again and again: it comes to know its returns, with a learning rate of its own."""
    backend = opened(spec, ppo)
    first = ppo.estimate(estimated(backend, ppo), backend.values(tiny.rows(), 64))[1]
    losses = [trained(backend, ppo, lr=0.0).metrics["value_loss"] for _ in range(60)]
    assert first["value_explained_variance"] == pytest.approx(0, abs=1e-6)
    assert losses[-1] < losses[0] / 5
    metrics = trained(backend, ppo, lr=0.0).metrics
    assert {"value_clip_share", "critic_grad_norm", "loss", "grad_norm", "ratio"} <= metrics.keys()


@pytest.mark.slow
def test_both_networks_are_their_own(spec, ppo):
    """The policy's first step is what it is beside a critic that does not learn."""
    backend, alone = opened(spec, ppo), opened(spec, Ppo(Ppo.Config(critic=CriticConfig(lr=0.0))))
    rows = estimated(backend, ppo)
    backend.update(rows, ppo, tiny.plan())
    alone.update(rows, ppo, tiny.plan())
    assert tiny.state(backend) == tiny.state(alone)
    assert any(one.any() for one in backend.values(rows, 64)) > any(one.any() for one in alone.values(rows, 64))


def test_in_a_warm_up_only_the_critic_learns(spec, ppo, tmp_path):
    backend = opened(spec, ppo)
    before = tiny.whole_state(backend, tmp_path / "before")
    update = trained(backend, ppo, trains_policy=False)
    after = tiny.whole_state(backend, tmp_path / "after")
    assert {name for name in after if after[name] != before[name]} == {
        "critic.safetensors",
        "critic_optimizer.safetensors",
    }
    assert {"value_loss", "critic_grad_norm", "num_tokens", "tflop"} <= update.metrics.keys()
    assert "loss" not in update.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "odd"),
    [
        *((changes, odd) for changes in CHANGES for odd in ("advantages", "returns")),
        ({"trains_policy": False, "updates_per_batch": 2}, "returns"),
    ],
)
def test_a_nan_leaves_both_as_they_were(spec, ppo, tmp_path, changes, odd):
    backend = opened(spec, ppo)
    trained(backend, ppo, seed=1)
    before = tiny.whole_state(backend, tmp_path / "before")
    rows = list(estimated(backend, ppo, seed=2))
    bad = np.full_like(rows[-1].advantages, np.nan)
    if odd == "returns":
        rows[-1] = dataclasses.replace(rows[-1], additions={**rows[-1].additions, "returns": bad})
    else:
        rows[-1] = dataclasses.replace(rows[-1], advantages=bad)
    update = backend.update(rows, ppo, tiny.plan(**changes))
    assert update.skipped
    assert np.isnan(update.metrics["value_loss" if odd == "returns" else "loss"])
    assert tiny.whole_state(backend, tmp_path / "after") == before
    assert not trained(backend, ppo, seed=3).skipped


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("config", [{}, {"offload_optimizer": True}])
def test_save_and_load_go_on_bit_for_bit(spec, ppo, tmp_path, changes, config):
    backend = opened(spec, ppo, **config)
    trained(backend, ppo, seed=1, **changes)
    saved = tiny.whole_state(backend, tmp_path / "saved")
    trained(backend, ppo, seed=2, **changes)
    successor = opened(spec, ppo, **config)
    successor.load(tmp_path / "saved")
    assert tiny.whole_state(successor, tmp_path / "again") == saved
    trained(successor, ppo, seed=2, **changes)
    assert tiny.whole_state(successor, tmp_path / "b") == tiny.whole_state(backend, tmp_path / "a")


@pytest.mark.slow
def test_a_checkpoint_without_a_critic_begins_it_anew(spec, ppo, tmp_path, caplog):
    tiny.whole_state(tiny.backend(spec), tmp_path / "saved")
    backend = opened(spec, ppo)
    fresh = critic_bytes(tiny.whole_state(backend, tmp_path / "fresh"))
    trained(backend, ppo)
    backend.load(tmp_path / "saved")
    assert critic_bytes(tiny.whole_state(backend, tmp_path / "loaded")) == fresh
    assert "has no critic; it begins anew" in caplog.text


def test_a_critic_does_not_change_what_is_drawn(spec, ppo):
    torch.manual_seed(3)
    tiny.backend(spec)
    before = torch.get_rng_state()
    opened(spec, ppo)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_recomputing_and_offloading_change_nothing(spec, ppo):
    plain = trained(opened(spec, ppo), ppo).metrics
    for config in ({"gradient_checkpointing": True}, {"offload_optimizer": True}):
        assert trained(opened(spec, ppo, **config), ppo).metrics == pytest.approx(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_labels": 2}, "a LlamaForSequenceClassification with 2 outputs, expected a reward model with one"),
        ({"vocabulary": 5}, "knows 5 tokens, expected the 17 of the policy"),
    ],
)
def test_what_is_no_critic_is_refused(spec, ppo, tmp_path, settings, message):
    from transformers import AutoConfig

    folder: Path = tmp_path / "reward"
    reward_model(folder, spec, vocabulary=settings.get("vocabulary"), pad_token_id=0)
    if "num_labels" in settings:
        from transformers import AutoModelForSequenceClassification

        AutoModelForSequenceClassification.from_config(
            AutoConfig.from_pretrained(spec.folder, num_labels=2)
        ).save_pretrained(folder)
    with pytest.raises(ConfigError, match=message):
        opened(spec, ppo, folder)
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        opened(spec, ppo, tmp_path)


@pytest.mark.slow
def test_beside_adapters_it_is_a_whole_model(spec, ppo, tmp_path):
    pytest.importorskip("peft")
    backend = opened(dataclasses.replace(spec, lora=LoraSection(rank=2)), ppo)
    assert not trained(backend, ppo).skipped
    assert any(one.any() for one in backend.values(tiny.rows(), 64))
    whole = tiny.whole_state(backend, tmp_path / "a")
    assert len(whole["critic.safetensors"]) > 4 * len(whole["masters.safetensors"])
