"""`[model.make] family`: small models of transformers' families, with the names and layers of that family."""

import dataclasses

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rftstream.config import loader
from rftstream.config.sections import MakeModel
from rftstream.errors import ConfigError
from rftstream.models.folders.made import make_model
from rftstream.preflight.checks.check import check
from rftstream.weights.checkpoint_names import names_of

MAKE = MakeModel(family="qwen3_moe", layers=1, width=16, heads=2, context=16)


def test_a_mixture_has_its_checkpoints_names(tmp_path):
    """So vLLM and the hub read it. The same settings and seed give the same weights."""
    folders = [tmp_path / name for name in ("first", "again", "other")]
    names = [make_model(MAKE, folder, seed) for folder, seed in zip(folders, (1, 1, 2), strict=True)]
    assert names[0] == names[1] != names[2]
    first, again, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert first["model.layers.0.mlp.experts.3.down_proj.weight"].shape == (16, 8)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folders[0], output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.eos_token_id == 0
    assert names_of(model, folders[0]).tensors.keys() == first.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma2", "gpt_oss", "lfm2", "qwen3_next", "deepseek_v3", "granitemoehybrid", "bamba"]
)
def test_other_families_are_made_too(family, tmp_path):
    make_model(dataclasses.replace(MAKE, family=family, width=32), tmp_path / family, 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family)
    found = model(input_ids=torch.tensor([[3, 4, 5]])).logits
    assert bool(found.isfinite().all())
    assert float(found.detach().std()) < 1.0  # nearly uniform at first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "qwen3moe"}, r"has no causal language model 'qwen3moe'; did you mean 'qwen3_moe'"),
        ({"vision": True}, r"model.make.vision: got the family 'qwen3_moe', expected 'llama'; leave it out"),
    ],
)
def test_what_cannot_be_made_is_said(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make_model(dataclasses.replace(MAKE, **change), tmp_path / "model", 1)
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3_moe", []),
        ("lfm2", ["policy hf computes lfm2 in plain batches, since it keeps states"]),
        ("bloom", ["policy hf has no exact cache for bloom"]),
    ],
)
def test_check_says_which_are_slow_to_sample(family, said):
    make = {"family": family, "layers": 1, "width": 16, "heads": 2, "context": 16}
    tasksets = {"sums": {"source": "arithmetic", "reward": "exact"}}
    report = check(loader.from_dict({"run": {"name": "a", "steps": 1}, "model": {"make": make}, "tasksets": tasksets}))
    assert not report.errors
    assert [one.partition(":")[0] for one in report.warnings if "policy hf" in one] == said
