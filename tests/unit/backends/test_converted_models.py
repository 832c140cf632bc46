"""Models that transformers converts while it loads them (mixtures, renamed layers): their versions have the names and
tensors of their checkpoints."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from rftstream.algorithms.grpo import Grpo
from rftstream.config.sections import LoraSection
from tests.unit import tiny
from tests.unit.backends.with_ranks import make_backend

pytestmark = pytest.mark.slow

GRPO = Grpo(Grpo.Config())


def exported(backend, folder):
    folder.mkdir()
    backend.export(folder)
    return load_file(folder / "model.safetensors")


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 3, "processes": 2}])
def test_ranks_publish_what_one_process_publishes(family, config, open_kept, tmp_path):
    """Mixtures, and hybrids."""
    spec = tiny.make(tmp_path, family=family, layers=1, heads=2)
    whole = tiny.backend(spec)
    ranks = open_kept(make_backend(spec, **config))
    assert tiny.state(ranks) == tiny.state(whole)
    plan = tiny.plan(lr=1e-3, tokens_per_microbatch=60, router_aux_coef=0.1)
    theirs, ours = (backend.update(tiny.rows(), GRPO, plan).metrics for backend in (whole, ranks))
    for name in ("loss", "router_aux_loss", "router_max_load", "router_entropy", "router_dead_experts"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    expected, found = exported(whole, tmp_path / "whole"), exported(ranks, tmp_path / "ranks")
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-3)
