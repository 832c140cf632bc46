"""The routers of mixtures of experts, as the trainer and the sampler see them."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from rftstream.models.folders.tiny_copy import tiny_config
from rftstream.models.routers import Routers
from tests.families import CONFIGS


def made(family):
    """A tiny model of a family with random weights."""
    config = tiny_config(transformers.CONFIG_MAPPING[family](**copy.deepcopy(CONFIGS.get(family, {}))))
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "jamba", "deepseek_v3", "gpt_oss"])
def test_what_a_router_chooses_is_what_its_experts_get(family):
    model = made(family)
    routers = Routers.of(model)
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    got = []
    for module in experts:
        module.register_forward_pre_hook(lambda module, inputs: got.append(inputs[1]))
    token_ids_BT = torch.randint(2, 60, (2, 11))
    with routers.watched() as calls:
        model(input_ids=token_ids_BT, use_cache=False)
    model(input_ids=token_ids_BT, use_cache=False)  # no longer watched
    assert len(calls) == len(experts)
    for [routed], chosen_NK in zip(calls, got, strict=False):
        assert torch.equal(routed.chosen_NK, chosen_NK)
        assert routed.logits_NE.shape == (22, 4)
        assert routed.logits_NE.requires_grad


def test_a_dense_model_has_no_routers():
    assert Routers.of(made("llama")) is None
