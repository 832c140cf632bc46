"""What the ranks of a backend are told once: their settings, DeepSpeed's configuration, and which micro-batches are
whose."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends.base import UpdatePlan
from rftstream.backends.deepspeed.rank_processes import RankPlace
from rftstream.backends.passes import MicrobatchShare
from rftstream.errors import ConfigError
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_tokens import ImageTokens

OWNED = {
    "train_batch_size": "a batch is what the feeder makes: feeder.groups_per_batch and feeder.group_size",
    "sequence_parallel_size": "backends.deepspeed.sequence_parallel",
    "data_parallel_size": "backends.deepspeed.processes and sequence_parallel",
    "train_micro_batch_size_per_gpu": "trainer.tokens_per_microbatch",
    "gradient_accumulation_steps": "trainer.tokens_per_microbatch",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "trainer.adam_betas, trainer.adam_eps and trainer.weight_decay",
    "scheduler": "trainer.lr and its schedule",
    "fp16": "masters are float32; backends.deepspeed.autocast",
    "bf16": "masters are float32; backends.deepspeed.autocast",
    "amp": "backends.deepspeed.autocast",
    "torch_autocast": "backends.deepspeed.autocast",
    "zero_optimization.stage": "backends.deepspeed.stage",
    "zero_optimization.compute_grad_norm": "the norm is always needed",
    "zero_optimization.zenflow": "nothing: a step ends before the next begins",
}
"""Settings of DeepSpeed that the backend makes itself -> the setting to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Settings of the backend that are the same for all ranks."""

    stage: int
    sequence_parallel: int
    """Ranks that compute a micro-batch together."""
    deepspeed: Mapping[str, Any]
    """The whole configuration of DeepSpeed's engine."""
    packing: bool
    gradient_checkpointing: bool
    autocast: str
    max_logits_bytes: int
    timeout_s: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStart:
    """Where a critic begins."""

    settings: CriticConfig
    folder: str
    """Folder of the model that it begins as."""


def share_of(place: RankPlace, *, together: int) -> MicrobatchShare:
    """Return the share of a rank, of which `together` in a row compute the same micro-batches."""
    number, in_group = divmod(place.rank, together)
    return MicrobatchShare(number=number, count=place.size // together, counts=in_group == 0)


def check_gpus(size: int, device: torch.device) -> None:
    """Raise ConfigError if there are no `size` GPUs from `device` on."""
    if device.type == "cuda" and (device.index or 0) + size > (found := torch.cuda.device_count()):
        raise ConfigError(
            f"backends.deepspeed.processes: {size} from trainer.device {device} on, but there are {found} GPUs; each "
            "process needs one"
        )


def check_sequence_parallel(together: int, size: int, model: ModelSpec) -> None:
    """Raise ConfigError if groups of `together` ranks do not make up `size` ranks, or cannot compute the model."""
    where = f"backends.deepspeed.sequence_parallel: got {together}, expected"
    if size % together:
        raise ConfigError(f"{where} a divisor of the {size} processes")
    if together > 1 and ImageTokens.of(model.folder) is not None:
        raise ConfigError(f"{where} 1, for {model.name} is shown images, which are not computed in parts")


def deepspeed_config(settings: Any) -> dict[str, Any]:
    """Return DeepSpeed's whole configuration, from the Config of the backend."""
    for key, instead in OWNED.items():
        section, _, name = key.rpartition(".")
        table = settings.config.get(section, {}) if section else settings.config
        if isinstance(table, dict) and name in table:
            raise ConfigError(f"backends.deepspeed.config.{key}: is not to be set here; set instead {instead}")
    if settings.offload_optimizer and settings.stage == 0:
        raise ConfigError("backends.deepspeed.offload_optimizer: needs a stage of at least 1, got 0")
    if settings.offload_parameters and settings.stage != 3:
        raise ConfigError(f"backends.deepspeed.offload_parameters: needs stage 3, got {settings.stage}")
    zero: dict[str, Any] = {"stage": settings.stage}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    made = {
        "train_micro_batch_size_per_gpu": 1,  # a formality: what is computed at once is decided by its tokens
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # set for each step; without ZeRO it would clip at 1 by itself
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    merged = _merged(made, settings.config)
    for name in ("offload_optimizer", "offload_param"):
        table = merged["zero_optimization"].get(name)
        if isinstance(table, dict) and table.get("device") == "nvme":
            raise ConfigError(
                f"backends.deepspeed.config.zero_optimization.{name}.device: 'nvme' is not supported, for checkpoints "
                "are read from memory; use 'cpu'"
            )
    return merged


def _merged(made: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(made)
    for key, value in given.items():
        known = result.get(key)
        result[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return result


def even_budget(rows: Sequence[TrainingRow], plan: UpdatePlan, size: int) -> int:
    """Return the tokens of a micro-batch, at most what the plan says, so that all ranks have about as much to do."""
    if size == 1:
        return plan.tokens_per_microbatch
    lengths = [len(row.token_ids) for row in rows if row.loss_mask.any()]
    tokens = sum(lengths) / plan.minibatches
    num_rounds = max(math.ceil(tokens / (size * plan.tokens_per_microbatch)), 1)
    fair = tokens / (size * num_rounds) + max(lengths, default=0) / 2  # rows are not cut, so bins are not quite full
    return min(plan.tokens_per_microbatch, max(math.ceil(fair), 1))
