"""Settings that the ranks get once: the backend's own, DeepSpeed's configuration, and the assignment of
micro-batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta

from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends.base import UpdatePlan
from rftstream.backends.deepspeed.rank_processes import RankPlace
from rftstream.backends.passes import MicrobatchShare
from rftstream.backends.torch.inputs import keys
from rftstream.core.packing import grow
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
"""Settings of DeepSpeed that the backend sets itself -> the setting to use instead."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The backend's settings that are the same for all ranks."""

    stage: Literal[0, 1, 2, 3] = 2
    """Stage of ZeRO. 0 distributes nothing over the processes; 1 distributes masters and moments; 2 also gradients; 3
    also weights."""
    sequence_parallel: Annotated[int, Meta(ge=1)] = 1
    """For long rollouts: this many ranks, a divisor of all ranks, compute each micro-batch together. Each rank holds
    its part of the tokens of every row (DeepSpeed-Ulysses). The number has to divide the attention heads and the
    key-value heads. `trainer.tokens_per_microbatch` counts the tokens of all these ranks."""
    offload_optimizer: bool = False
    """Keep masters and moments in main memory and run the optimizer there. Needs stage 1 or higher."""
    offload_parameters: bool = False
    """Keep the weights in main memory while they are not used for computation. Stage 3 only."""
    config: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's own settings, merged into the settings made from the others, e.g. `{ zero_optimization = {
    overlap_comm = true } }`. Batch sizes, clipping, optimizer and number formats are set elsewhere in the run file."""
    timeout_s: Annotated[float, Meta(gt=0)] = 45.0
    """Seconds that ranks wait for one another before the trainer gives up and starts again. A rank may be late by the
    time of one micro-batch of `trainer.tokens_per_microbatch`."""
    packing: bool = True
    """Pack rows without padding, like `backends.torch.packing`."""
    share_prefixes: bool = True
    """Compute what rows begin with alike once, like `backends.torch.share_prefixes`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    autocast: Literal["auto", "none", "bfloat16"] = "auto"
    """Matrix products in bfloat16; auto: only on GPUs. Weights and masters are always float32."""
    max_logits_bytes: Annotated[int, Meta(ge=1 << 16)] = 256 << 20
    """Bytes of float32 logits that a rank holds at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStart:
    """The initial state of a critic."""

    settings: CriticConfig
    folder: str
    """Folder of the model from which the critic is initialised."""


def share_of(place: RankPlace, *, together: int) -> MicrobatchShare:
    """Return a rank's share. `together` consecutive ranks compute the same micro-batches."""
    number, in_group = divmod(place.rank, together)
    return MicrobatchShare(number=number, count=place.size // together, counts=in_group == 0)


def check_gpus(size: int, device: torch.device, *, least: int | None = None) -> int:
    """Return the number of ranks that have a GPU each, counted from `device`: `size`, or fewer if `least` allows it.
    ConfigError if there are too few."""
    if device.type != "cuda" or (device.index or 0) + size <= (found := torch.cuda.device_count()):
        return size
    if least is not None and (left := found - (device.index or 0)) >= least:
        return left
    raise ConfigError(
        f"backends.deepspeed.processes: {size} from trainer.device {device} on, but there are {found} GPUs; each "
        "process needs one"
    )


def check_min_ranks(least: int | None, processes: int, together: int) -> None:
    """Raise ConfigError if worlds of at least this many ranks cannot be formed."""
    if least is None:
        return
    launched = RankPlace.given()
    size = processes if launched is None else launched.size
    if least > size:
        raise ConfigError(f"backends.deepspeed.min_ranks: got {least}, expected at most {size}, the number of ranks")
    if least % together:
        raise ConfigError(
            f"backends.deepspeed.min_ranks: got {least}, expected a multiple of sequence_parallel, {together}"
        )


def check_sequence_parallel(together: int, size: int, model: ModelSpec) -> None:
    """Raise ConfigError if groups of `together` ranks do not divide `size` ranks, or cannot compute the model."""
    where = f"backends.deepspeed.sequence_parallel: got {together}, expected"
    if size % together:
        raise ConfigError(f"{where} a divisor of the {size} processes")
    if together > 1 and ImageTokens.of(model.folder) is not None:
        raise ConfigError(f"{where} 1, for {model.name} is shown images, which are not computed in parts")


def deepspeed_config(settings: RankSettings) -> dict[str, Any]:
    """Return the whole configuration of DeepSpeed's engine. ConfigError for settings that exclude each other."""
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
        "train_micro_batch_size_per_gpu": 1,  # required, unused: tokens decide a micro-batch
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # set for each step; without ZeRO DeepSpeed would clip at 1 by default
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


def even_budget(rows: Sequence[TrainingRow], plan: UpdatePlan, size: int, *, shared: bool = False) -> int:
    """Return the tokens of a micro-batch, at most the plan's limit, so that all ranks have about the same amount of
    work. `shared`: whether rows are packed as trees."""
    if size == 1:
        return plan.tokens_per_microbatch
    rows = [row for row in rows if row.loss_mask.any()]
    lengths = [len(row.token_ids) for row in rows]
    computed = grow(keys(rows)).lengths_S.tolist() if shared and rows else lengths
    tokens = sum(computed) / plan.minibatches
    num_rounds = max(math.ceil(tokens / (size * plan.tokens_per_microbatch)), 1)
    fair = tokens / (size * num_rounds) + max(lengths, default=0) / 2  # rows are not cut, so bins are not quite full
    return min(plan.tokens_per_microbatch, max(math.ceil(fair), 1))
