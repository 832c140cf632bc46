"""Models that transformers converts while it loads them (mixtures, renamed layers): their versions have the names and
tensors of their checkpoints."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.deepspeed import backend as deepspeed_backend
from rftstream.config.sections import LoraSection
from rftstream.weights.snapshot import RawTensor
from tests.unit import tiny
from tests.unit.backends.test_deepspeed import make_backend

pytestmark = pytest.mark.slow

GRPO = Grpo(Grpo.Config())


def exported(backend, folder):
    folder.mkdir()
    backend.export(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_neox", "deepseek_v3", "nemotron_h", "gemma4_text"])
def test_versions_are_checkpoints(family, tmp_path):
    """They are trained, published, loaded by the sampler between two tokens' steps, and exported."""
    spec = tiny.make(tmp_path, family=family, layers=1, heads=2)
    begun = load_file(spec.folder / "model.safetensors")
    backend = tiny.backend(spec)
    served = backend.served_tensors()
    assert {name: tensor.shape for name, tensor in served.items()} == {n: tuple(t.shape) for n, t in begun.items()}
    policy = tiny.policy(spec, dict(served))
    assert backend.update(tiny.rows(), GRPO, tiny.plan()).metrics["grad_norm"] > 0
    after = {name: RawTensor(one.dtype, one.shape, bytes(one.data)) for name, one in backend.served_tensors().items()}
    policy.load(after, tiny.name(1))
    done = tiny.drain_one(policy, tiny.request(1))
    row = dataclasses.replace(
        tiny.rows(1)[0],
        token_ids=np.asarray([4, 11, 5, 15, *done.token_ids], np.int32),
        loss_mask=np.asarray([0] * 4 + [1] * len(done.token_ids), np.float32),
    )
    [found] = backend.logprobs([row])
    np.testing.assert_allclose(found[4:], done.behavior_logprobs, atol=1e-4)
    final = exported(backend, tmp_path / "final")
    assert final.keys() == begun.keys()
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits = loaded(torch.from_numpy(row.token_ids[None].astype(np.int64))).logits[0].log_softmax(-1)
    true = logits[3:-1].gather(1, torch.from_numpy(row.token_ids[4:, None].astype(np.int64)))[:, 0]
    np.testing.assert_allclose(found[4:], true.detach(), atol=1e-4)


def test_adapters_of_a_mixture_are_merged_under_its_names(tmp_path):
    pytest.importorskip("peft")
    spec = dataclasses.replace(
        tiny.make(tmp_path, family="qwen3_moe", layers=1, heads=2), lora=LoraSection(rank=4, alpha=8.0)
    )
    backend = tiny.backend(spec)
    backend.update(tiny.rows(), GRPO, tiny.plan())
    names = set(backend.served_tensors())
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert not any("experts" in name for name in names)
    final, begun = exported(backend, tmp_path / "final"), load_file(spec.folder / "model.safetensors")
    assert final.keys() == begun.keys()
    changed = {name.split(".")[-2] for name in final if not torch.equal(final[name], begun[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 3, "processes": 2}])
def test_ranks_publish_what_one_process_publishes(config, kept, open_alone, monkeypatch, tmp_path):
    spec = tiny.make(tmp_path, family="qwen3_moe", layers=1, heads=2)
    whole = tiny.backend(spec)
    with monkeypatch.context() as patch:
        if config.get("processes") == 2:
            patch.setattr(deepspeed_backend, "Ranks", lambda *args, **settings: kept())
        ranks = open_alone(make_backend(spec, **config))
    assert tiny.state(ranks) == tiny.state(whole)
    for backend in (whole, ranks):
        backend.update(tiny.rows(), GRPO, tiny.plan(lr=1e-3))
    expected, found = exported(whole, tmp_path / "whole"), exported(ranks, tmp_path / "ranks")
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-3)
