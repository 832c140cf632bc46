"""The routers of mixtures of experts, as the trainer and the sampler see them."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from rftstream.backends.base import OptimizerSettings
from rftstream.backends.deepspeed.backend import DeepSpeedBackend
from rftstream.config import loader
from rftstream.core.balance import balance_loss, count_experts, load_metrics, router_entropy
from rftstream.errors import ConfigError
from rftstream.models.routers import Routers
from rftstream.preflight.checks.check import check
from tests.unit import tiny
from tests.unit.models.test_exactness import GRPO, compute_gradients, gradient_error, made, run_of, sampled_rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "jamba", "deepseek_v3", "gpt_oss"])
def test_what_a_router_chooses_is_what_its_experts_get(family, tmp_path):
    model, _ = made(family, tmp_path)
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


COEF = 0.3


def true_balance(model):
    """transformers' load-balancing loss of the rows, padded, over the tokens that predict unmasked ones."""
    rows = sampled_rows()
    token_ids_BT = pad_sequence([torch.from_numpy(row.token_ids[:-1]).long() for row in rows], batch_first=True)
    counts_BT = pad_sequence([torch.from_numpy(row.loss_mask[1:]) for row in rows], batch_first=True)
    output = model(input_ids=token_ids_BT, output_router_logits=True, use_cache=False)
    config = model.config.get_text_config()
    family = sys.modules[type(model).__module__]
    experts = output.router_logits[0].shape[-1]
    return family.load_balancing_loss_func(output.router_logits, experts, config.num_experts_per_tok, counts_BT)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "jamba"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("gpt_oss", "granitemoe", "minimax_m2", "olmoe")),
    ],
)
@pytest.mark.parametrize("tokens_per_microbatch", [45, 16384])
def test_experts_are_balanced_as_by_transformers(family, tokens_per_microbatch, tmp_path):
    """However rows are packed and cut into micro-batches."""
    model, spec = made(family, tmp_path)
    backend = tiny.backend(spec)
    plan = tiny.plan(tokens_per_microbatch=tokens_per_microbatch, router_aux_coef=COEF)
    compute_gradients(model)
    balance = true_balance(model)
    (COEF * balance).backward()
    balance = float(balance.detach())
    assert gradient_error(backend._network.model, model, plan) < (1e-3, "")
    metrics = backend.update(sampled_rows(), GRPO, plan).metrics
    assert metrics["router_aux_loss"] == pytest.approx(balance, rel=1e-4)
    plain = tiny.backend(spec).update(sampled_rows(), GRPO, replace(plan, router_aux_coef=0.0)).metrics
    assert metrics["loss"] == pytest.approx(plain["loss"] + COEF * balance, rel=1e-3)
    same = ("router_max_load", "router_entropy", "router_dead_experts")
    assert [metrics[name] for name in same] == pytest.approx([plain[name] for name in same], rel=1e-4)
    assert "router_aux_loss" not in plain


def test_load_and_entropy_by_hand():
    counts_LE = torch.stack([count_experts(torch.tensor([[0, 1], [0, 1], [0, 2]]), 4), torch.ones(4).double()])
    assert load_metrics(counts_LE) == pytest.approx({"router_max_load": (2.0 + 1.0) / 2, "router_dead_experts": 1 / 8})
    even_NE = torch.zeros(6, 4)
    assert float(router_entropy(even_NE)) == pytest.approx(6 * np.log(4), rel=1e-6)
    assert float(balance_loss([even_NE], torch.full((4,), 3.0), 6)) == pytest.approx(2.0)  # two experts a token
    narrow = torch.tensor([2.0, 2.0, torch.nan, torch.nan], dtype=torch.float64)  # another router has more experts
    assert load_metrics(torch.stack([counts_LE[1], narrow]))["router_dead_experts"] == 0.0


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama", "trainer.router_aux_coef: the model has no routers, expected a mixture of experts"),
        ("deepseek_v3", "trainer.router_aux_coef: transformers has no load-balancing loss for the model"),
    ],
)
def test_what_cannot_be_balanced_is_said(family, said, tmp_path):
    """By `check`, too."""
    _, spec = made(family, tmp_path)
    with pytest.raises(ConfigError, match=said):
        tiny.backend(spec).update(sampled_rows(), GRPO, tiny.plan(router_aux_coef=COEF))
    run = run_of(tmp_path) | {"trainer": {"router_aux_coef": COEF}}
    assert said in " ".join(check(loader.from_dict(run)).errors)


def test_ranks_that_see_a_part_of_the_tokens_cannot_balance(tmp_path):
    """A mixture of experts is not called a dense model because its ranks share the tokens."""
    _, spec = made("qwen3_moe", tmp_path)
    said = "2 ranks see a part of them each; set backends.deepspeed.sequence_parallel to 1"
    settings = {"processes": 2, "sequence_parallel": 2}
    run = run_of(tmp_path) | {"trainer": {"router_aux_coef": COEF, "backend": "deepspeed"}}
    assert said in " ".join(check(loader.from_dict(run | {"backends": {"deepspeed": settings}})).errors)
    backend = DeepSpeedBackend(DeepSpeedBackend.Config(**settings), model=spec, optimizer=OptimizerSettings(), seed=0)
    with pytest.raises(ConfigError, match=said):
        backend.update(sampled_rows(), GRPO, tiny.plan(router_aux_coef=COEF))
