"""DPO's loss and gradient are those of TRL 1.16 on the same logprobs, in float32: its own loss code is called."""

from __future__ import annotations

import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftstream.algorithms.base import Denominators, MicroBatch
from rftstream.algorithms.dpo import Dpo

PAIRS, TOKENS, BETA = 5, 9, 0.3


@pytest.fixture(scope="module")
def trainer() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def theirs(trainer: Any, policy_BT: torch.Tensor, reference_BT: torch.Tensor, mask_BT: torch.Tensor) -> Any:
    """`_compute_loss` of the trainer's class, of which nothing else is there. Chosen rows first, then rejected ones;
    position t of its arrays speaks of token t + 1."""
    kept_BT = torch.where(mask_BT > 0, policy_BT, 0.0)[:, 1:]
    zeros_BT = torch.zeros_like(kept_BT.detach())
    outputs = SimpleNamespace(log_probs=kept_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=zeros_BT > 0)
    chosen_B, rejected_B = torch.where(mask_BT > 0, reference_BT, 0.0)[:, 1:].sum(dim=1).chunk(2)
    metrics: dict[str, Any] = defaultdict(list)
    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device=torch.device("cpu"))
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=same, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0],
        beta=BETA, label_smoothing=0.0, use_weighting=False, _metrics={"train": metrics}, _total_train_tokens=0,
        _tp_size=1,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.zeros(mask_BT.shape, dtype=torch.int64), "attention_mask": torch.ones(mask_BT.shape),
        "completion_mask": mask_BT.long(), "ref_chosen_logps": chosen_B, "ref_rejected_logps": rejected_B,
    }  # fmt: skip
    return trainer._compute_loss(stub, lambda **_: outputs, inputs, False), metrics


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dpo(trainer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random() -> torch.Tensor:
        return torch.rand((2 * PAIRS, TOKENS), generator=generator)

    mask_BT = (random() < 0.7).float()
    mask_BT[:, 0], mask_BT[:, -1] = 0, 1
    policy_BT, reference_BT = -4 * random(), -4 * random()
    wanted_BT = policy_BT.clone().requires_grad_()
    loss, metrics = theirs(trainer, wanted_BT, reference_BT, mask_BT)
    loss.backward()

    ours_BT = policy_BT.clone().requires_grad_()
    pairs_B, signs_B = torch.arange(PAIRS).repeat(2), torch.tensor([1.0] * PAIRS + [-1.0] * PAIRS)
    dpo = Dpo(Dpo.Config(beta=BETA))
    batch = MicroBatch(
        loss_mask_BT=mask_BT, behavior_logprobs_BT=torch.zeros_like(mask_BT), advantages_BT=torch.ones_like(mask_BT),
        additions={"pair": pairs_B[:, None].float().expand(-1, TOKENS), "sign": signs_B[:, None].expand(-1, TOKENS)},
        reference_logprobs_BT=reference_BT,
    )  # fmt: skip
    tokens = float(mask_BT.sum())
    ours, sums = dpo.loss(ours_BT, batch, Denominators(num_tokens=tokens, num_rows=2.0 * PAIRS, num_groups=PAIRS))
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(loss.detach()), abs=1e-5)
    torch.testing.assert_close(ours_BT.grad, wanted_BT.grad, rtol=1e-5, atol=1e-6)
    means = dpo.summarise({name: float(value) / tokens for name, value in sums.items()})
    assert means["accuracy"] == pytest.approx(metrics["rewards/accuracies"][0], abs=1e-5)
    assert means["margin"] == pytest.approx(metrics["rewards/margins"][0], abs=1e-5)
    assert means["chosen_reward"] == pytest.approx(metrics["rewards/chosen"][0], abs=1e-5)
