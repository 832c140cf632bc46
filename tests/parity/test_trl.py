"""Losses and gradients are those of TRL 1.16 on the same tensors, in float32: its own loss code is called.

Where TRL differs by definition, and how that is aligned here:
- its means over sequences (grpo, sapo, gspo, rloo) and Dr.GRPO's constant count all rows, ours those with an unmasked
  token: one row of the batch is empty, and ours is multiplied by `share` = rows with tokens / all rows;
- its epsilon_high of cispo is the cap itself;
- its entropy bonus is a mean over tokens whatever the loss, ours is averaged as the loss is: compared where both are;
- it does not cut log-ratios off at 20: those here are small;
- its eps of GRPO's advantages is 1e-4, ours 1e-6: a setting.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rftstream.algorithms.base import Denominators, MicroBatch
from rftstream.algorithms.clips import Dapo, Gspo, Rloo
from rftstream.algorithms.grpo import Grpo
from rftstream.config.parts import registry
from rftstream.core.advantages import compute_leave_one_out_advantages
from rftstream.integrations.foreign_configs import convert_config

ROWS, TOKENS = 7, 12
CLOSE = {"rtol": 1e-5, "atol": 1e-7}
SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def trl() -> Any:
    from trl.trainer import grpo_trainer, rloo_trainer, utils

    return SimpleNamespace(grpo=grpo_trainer.GRPOTrainer, rloo=rloo_trainer.RLOOTrainer, utils=utils)


class Case:
    """A ragged batch: completions of different lengths, tool output inside, one row without any token."""

    def __init__(self, seed: int, spread: float = 0.3) -> None:
        random = np.random.default_rng(seed)

        def normal(scale: float) -> torch.Tensor:
            return torch.tensor(scale * random.standard_normal((ROWS, TOKENS)), dtype=torch.float32)

        lengths = random.integers(1, TOKENS + 1, ROWS)
        self.completion_BT = torch.tensor(np.arange(TOKENS)[None] < lengths[:, None], dtype=torch.float32)
        self.tool_BT = torch.tensor(random.random((ROWS, TOKENS)) < 0.8, dtype=torch.float32)
        self.tool_BT[3] = 0
        self.mask_BT = self.completion_BT * self.tool_BT
        self.policy_BT = normal(1.0) - 2.5
        self.old_BT = self.policy_BT + normal(spread)
        self.behavior_BT = self.old_BT + normal(spread)
        self.reference_BT = self.policy_BT + normal(spread)
        self.entropy_BT = normal(1.0).abs()
        self.advantages_B = torch.tensor(random.standard_normal(ROWS), dtype=torch.float32)
        self.num_tokens = float(self.mask_BT.sum())
        self.num_rows = float((self.mask_BT.sum(1) > 0).sum())
        self.share = self.num_rows / ROWS

    def ours(self, algorithm: Any) -> tuple[float, torch.Tensor]:
        policy_BT = self.policy_BT.clone().requires_grad_()
        batch = MicroBatch(
            loss_mask_BT=self.mask_BT, behavior_logprobs_BT=self.behavior_BT,
            advantages_BT=self.advantages_B[:, None].expand(ROWS, TOKENS), entropy_BT=self.entropy_BT,
            proximal_logprobs_BT=self.old_BT, reference_logprobs_BT=self.reference_BT,
        )  # fmt: skip
        loss, _ = algorithm.loss(policy_BT, batch, Denominators(num_tokens=self.num_tokens, num_rows=self.num_rows))
        loss.backward()
        return float(loss.detach()), policy_BT.grad

    def theirs(self, trainer: Any, **changes: Any) -> tuple[float, torch.Tensor]:
        """`_compute_loss` of the trainer's class, of which nothing else is there."""
        policy_BT = self.policy_BT.clone().requires_grad_()
        inputs = {
            "prompt_ids": torch.zeros(ROWS, 1), "prompt_mask": torch.ones(ROWS, 1),
            "completion_ids": torch.zeros(ROWS, TOKENS), "completion_mask": self.completion_BT,
            "tool_mask": self.tool_BT, "advantages": self.advantages_B, "old_per_token_logps": self.old_BT,
            "sampling_per_token_logps": self.behavior_BT, "ref_per_token_logps": self.reference_BT,
            "num_items_in_batch": self.mask_BT.sum(), **changes.pop("inputs", {}),
        }  # fmt: skip
        options = {"use_bias_correction_kl": False, "delta": None, "sapo_temperature_pos": 1.0,
                   "sapo_temperature_neg": 1.05, "steps_per_generation": 1, **changes.pop("args", {})}  # fmt: skip
        accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        stub = SimpleNamespace(**{
            "_get_per_token_logps_and_entropies": lambda *_, **__: (policy_BT, self.entropy_BT, None),
            "get_off_policy_mask": getattr(trainer, "get_off_policy_mask", None),
            "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
            "importance_sampling_level": "token", "beta": 0.0, "args": SimpleNamespace(**options),
            "loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False,
            "vllm_importance_sampling_correction": False, "model": SimpleNamespace(training=True),
            "current_gradient_accumulation_steps": 1, "accelerator": accelerator, "max_completion_length": TOKENS,
            "_entropy_bonus_enabled": False, "use_adaptive_entropy": False, "entropy_coef": 0.0,
            "_metrics": {"train": _Anything()}, **changes,
        })  # fmt: skip
        stub.accelerator.sync_gradients = True
        loss = trainer._compute_loss(stub, None, inputs)
        loss.backward()
        return float(loss.detach()), policy_BT.grad

    def weights(self, cap: float) -> torch.Tensor:
        return (self.old_BT - self.behavior_BT).exp().clamp(max=cap)


class _Anything(dict):
    def __missing__(self, key: str) -> list[Any]:
        self[key] = []
        return self[key]


def agree(ours: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor], share: float = 1.0) -> None:
    assert abs(theirs[0]) > 1e-4 and theirs[1].abs().max() > 1e-4, "nothing is compared"
    # rows of either sign may cancel: what is left is as exact as they are
    assert ours[0] * share == pytest.approx(theirs[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(ours[1] * share, theirs[1], **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("loss", "by_sequence"),
    [
        ("grpo", True),
        ("bnpo", False),
        ("dapo", False),
        ("dr_grpo", True),
        ("luspo", True),
        ("cispo", False),
        ("sapo", True),
    ],
)
def test_converted_losses(trl: Any, seed: int, level: str, loss: str, by_sequence: bool, tmp_path: Path) -> None:
    """What `convert-config` makes of each loss_type has TRL's loss, by the token and by the row."""
    if level == "sequence" and loss in ("cispo", "sapo"):
        return  # they have no ratio of a row here, which the report says
    case, beta = Case(seed), 0.0 if level == "sequence" else 0.3
    case.advantages_B = case.advantages_B + 1  # so that rows of either sign do not cancel
    case.behavior_BT = case.old_BT  # TRL without vLLM: who sampled is the policy before the batch
    given = {"importance_sampling_level": level, "loss_type": loss, "beta": beta, "max_completion_length": TOKENS}
    ours = case.ours(converted(tmp_path, epsilon=0.1, epsilon_high=0.3, **given))
    low = {"epsilon_low": 0.1, "epsilon_high": 0.3, "args": {"use_bias_correction_kl": True}}
    agree(ours, case.theirs(trl.grpo, **given, **low), case.share if by_sequence else 1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_with_entropy(trl: Any, seed: int) -> None:
    theirs = {"loss_type": "dapo", "epsilon_high": 0.28, "_entropy_bonus_enabled": True, "entropy_coef": 0.05}
    case = Case(seed)
    agree(case.ours(Dapo(Dapo.Config(correction="none", entropy_coefficient=0.05))), case.theirs(trl.grpo, **theirs))


def converted(folder: Path, **settings: Any) -> Any:
    """Return the algorithm of the run file for settings of GRPOConfig."""
    config = {"model_name_or_path": "m", "dataset_name": "org/x", "max_steps": 1, **settings}
    (folder / "grpo.yaml").write_text("".join(f"{name}: {value}\n" for name, value in config.items()))
    values = tomllib.loads(convert_config("trl", [folder / "grpo.yaml"], trainer="grpo").run_file)
    name = values["trainer"]["algorithm"]
    kind = registry.resolve("algorithm", name)
    return kind(kind.Config(**values["algorithms"][name]))


@pytest.mark.parametrize("seed", SEEDS)
def test_dual_clip(trl: Any, seed: int) -> None:
    """TRL's delta bounds the ratio, which is the same."""
    case = Case(seed)
    plain, bounded = case.theirs(trl.grpo), case.theirs(trl.grpo, args={"delta": 1.3})
    agree(case.ours(Grpo(Grpo.Config(correction="none", normalise="sequence", dual_clip=1.3))), bounded, case.share)
    assert plain[0] != bounded[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_grpo_with_divergence_and_who_sampled(trl: Any, seed: int, unbiased: bool) -> None:
    case = Case(seed)
    config = Grpo.Config(correction_high=1.2, normalise="sequence", kl_coef=0.3, kl_unbiased=unbiased)
    theirs = case.theirs(
        trl.grpo, beta=0.3, use_vllm=True, vllm_importance_sampling_correction=True,
        args={"use_bias_correction_kl": unbiased}, inputs={"importance_sampling_ratio": case.weights(1.2)},
    )  # fmt: skip
    agree(case.ours(Grpo(config)), theirs, case.share)


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_mask(trl: Any, seed: int) -> None:
    case = Case(seed)
    case.behavior_BT, case.advantages_B = case.behavior_BT + 0.1, case.advantages_B - 1
    config = Grpo.Config(correction="none", normalise="sequence", sequence_mask=0.05)
    plain, masked = case.theirs(trl.grpo), case.theirs(trl.grpo, off_policy_mask_threshold=0.05)
    agree(case.ours(Grpo(config)), masked, case.share)
    assert plain[0] != masked[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo(trl: Any, seed: int) -> None:
    case = Case(seed, spread=1e-3)
    theirs = case.theirs(trl.grpo, importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4)
    agree(case.ours(Gspo(Gspo.Config(correction="none"))), theirs, case.share)
    case = Case(seed)
    theirs = case.theirs(
        trl.grpo, importance_sampling_level="sequence", use_vllm=True, vllm_importance_sampling_correction=True,
        inputs={"importance_sampling_ratio": case.weights(2.0)},
    )  # fmt: skip
    agree(case.ours(Gspo(Gspo.Config(clip_low=0.2, clip_high=0.2))), theirs, case.share)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo(trl: Any, seed: int) -> None:
    """TRL's RLOO has no mask of tool output, takes the row's old log-probability as one number, and counts an empty row
    as one of ratio 1, which adds a constant: here its advantage is 0."""
    case = Case(seed, spread=0.05)
    case.completion_BT, case.advantages_B[3] = case.mask_BT, 0.0
    old = {"old_logps": (case.old_BT * case.mask_BT).sum(1)}
    agree(case.ours(Rloo(Rloo.Config(correction="none"))), case.theirs(trl.rloo, inputs=old), case.share)


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "luspo", "cispo", "sapo"])
def test_advantages(trl: Any, loss: str, tmp_path: Path) -> None:
    """Of groups of four, as they are converted: TRL's spread of a group, of the batch, and none, for each loss; and the
    mean of the other siblings."""
    rewards = np.random.default_rng(0).random(12).astype(np.float32)
    groups = np.repeat(np.arange(3), 4)
    table = torch.tensor(rewards).view(3, 4)
    centred = table - table.mean(1, keepdim=True)
    spread = trl.utils.nanstd(table, dim=1)[:, None]
    spreads = {"group": spread + 1e-4, "batch": trl.utils.nanstd(table.flatten()) + 1e-4, "none": 1.0}
    for scale, divisor in spreads.items():
        algorithm = converted(tmp_path, loss_type=loss, scale_rewards=scale)
        expected = (centred / divisor).flatten().numpy()
        np.testing.assert_allclose(algorithm.advantages(rewards, groups), expected, rtol=1e-5, atol=1e-6)
    others = (table - (table.sum(1, keepdim=True) - table) / 3).flatten().numpy()
    np.testing.assert_allclose(compute_leave_one_out_advantages(rewards, groups), others, rtol=1e-5, atol=1e-6)
