"""A training step of TRL's GRPOTrainer on rows that are given: its own `training_step`, then clipping and AdamW.

Completions and rewards come in by its `rollout_func` and a reward function; all else is TRL's: batches, advantages,
loss, forward, backward. Set up as for a CPU: float32, all micro-batches of a step made at once, its default loss, no
logging; no gradient checkpointing, which is its default, as the other sides do without. A row's advantage is 1 or -1,
so rewards are not scaled.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rftstream.algorithms.base import TrainingRow
from rftstream.backends.base import OptimizerSettings
from rftstream.models.spec import ModelSpec

MAX_GRAD_NORM = 1.0


def installed() -> bool:
    return importlib.util.find_spec("trl") is not None


class TrlStep:
    """The rows stand in groups of two, one beside the other; `rows_at_once` go through the model together."""

    def __init__(
        self, spec: ModelSpec, rows: Sequence[TrainingRow], *, rows_at_once: int, lr: float, folder: str
    ) -> None:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func is new there
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        optimizer = OptimizerSettings()
        self._num_microbatches, left = divmod(len(rows), rows_at_once)
        assert not left, "TRL's micro-batches are of one size"
        starts = [int(np.flatnonzero(row.loss_mask)[0]) for row in rows]
        given: dict[str, Any] = {
            "prompt_ids": [row.token_ids[:start].tolist() for row, start in zip(rows, starts, strict=True)],
            "completion_ids": [row.token_ids[start:].tolist() for row, start in zip(rows, starts, strict=True)],
            "logprobs": None,
        }
        rewards = [float(row.advantages[start]) for row, start in zip(rows, starts, strict=True)]

        def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
            return dict(given)

        def reward(completions: list[str], **columns: Any) -> list[float]:
            return rewards

        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            learning_rate=lr,
            per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=self._num_microbatches,
            num_generations=2,
            max_completion_length=max(map(len, given["completion_ids"])),
            scale_rewards="none",
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=MAX_GRAD_NORM,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
        tokenizers: Any = AutoTokenizer
        self._inputs = [{"prompt": str(row.group)} for row in rows]
        self._trainer: Any = GRPOTrainer(
            model=str(spec.folder),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(self._inputs),
            processing_class=tokenizers.from_pretrained(spec.folder),
            rollout_func=rollouts,
        )
        self._trainer.create_optimizer()
        self._trainer.current_gradient_accumulation_steps = self._num_microbatches  # its loop would say so

    def step(self) -> float:
        """The gradient's norm."""
        trainer = self._trainer
        for _ in range(self._num_microbatches):
            trainer.training_step(trainer.model, self._inputs, None)
        norm = float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), MAX_GRAD_NORM))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return norm
