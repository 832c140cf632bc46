"""Masters and moments as DeepSpeed's engine holds them: whole without ZeRO, otherwise one part in every process.

Only this module uses undocumented names of DeepSpeed. That is why pyproject.toml allows a narrow range of its versions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rftstream.errors import BackendError

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)
REFERENCE = "reference"
"""Kind of the masters of a renewed reference."""


class Shards:
    """Masters and moments without ZeRO: every process has all of them, and DeepSpeed only adds up gradients.
    `shards_of` makes it. All ranks call every method in the same way; only values may differ."""

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Size]) -> None:
        self._engine, self._parameters, self.shapes = engine, parameters, shapes
        for master in self.masters():
            self._optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                **{kind: torch.zeros_like(master, requires_grad=False) for kind in MOMENTS},
            }

    @property
    def _optimizer(self) -> torch.optim.AdamW:
        return self._engine.optimizer  # type: ignore[no-any-return]

    def masters(self) -> list[Tensor]:
        """Return the tensors that the optimizer steps, as this process holds them."""
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def step(self, lr: float, max_grad_norm: float) -> float:
        """Take a step with the gradients of the last backward pass, and return their norm. If the norm is NaN or
        infinite, nothing changes. The gradients are dropped in both cases."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            self._engine.zero_grad()
            return norm
        if max_grad_norm and norm > max_grad_norm:
            torch._foreach_mul_(gradients, max_grad_norm / norm)
        self.set_lr(lr)
        self._engine.step()
        return norm

    def gather(self, kind: str, name: str) -> Tensor:
        """Return the whole tensor in every process, float32. For a master it may be the parameter itself."""
        parameter = self._parameters[name]
        return parameter.detach() if kind == MASTER else self._optimizer.state[parameter][kind]

    def collect(self, name: str, rank: int, dtype: torch.dtype) -> Tensor | None:
        """Return a whole master at the rank with this number, in float32 or in the dtype; None elsewhere. Here every
        rank has it, and nothing is sent."""
        return self._parameters[name].detach()

    def own(self, kind: str, name: str) -> Tensor:
        """Return a whole tensor of the only process: a view, not a copy."""
        return self._own_part(kind, name).detach().view(-1)[: self.shapes[name].numel()].view(self.shapes[name])

    def _own_part(self, kind: str, name: str) -> Tensor:
        return self.gather(kind, name)

    def put(self, kind: str, name: str, value: Tensor) -> None:
        """Write a whole tensor into the masters or moments. Call `refresh` after all tensors are written."""
        self.gather(kind, name).copy_(value)

    @property
    def num_steps(self) -> float:
        """Number of steps that the optimizer has taken."""
        return float(self._optimizer.state[self.masters()[0]]["step"])

    @num_steps.setter
    def num_steps(self, value: float) -> None:
        for master in self.masters():
            self._optimizer.state[master]["step"].fill_(value)

    def forget_moments(self) -> None:
        """Reset the moments and the number of steps to 0."""
        self.num_steps = 0.0
        for master in self.masters():
            for kind in MOMENTS:
                self._optimizer.state[master][kind].zero_()

    def copy(self) -> list[Tensor]:
        """Return a copy of this process's part of masters and moments."""
        return [one.detach().clone() for one in self._state()]

    def restore(self, copied: list[Tensor]) -> None:
        """Put back what `copy` returned."""
        _copy_into(self._state(), copied)
        self.refresh()

    def copy_masters(self) -> list[Tensor]:
        """Return a copy of this process's part of the masters."""
        return [master.detach().clone() for master in self.masters()]

    def restore_masters(self, copied: list[Tensor]) -> None:
        """Put back what `copy_masters` returned."""
        _copy_into(self.masters(), copied)
        self.refresh()

    def refresh(self) -> None:
        """Update the network's weights from the masters."""

    def room(self) -> Iterable[Tensor]:
        """Return buffers that exist between batches but hold nothing then."""
        return ()

    def _state(self) -> list[Tensor]:
        masters = self.masters()
        return masters + [value for master in masters for _, value in sorted(self._optimizer.state[master].items())]


class ZeroShards(Shards):
    """Masters and moments under ZeRO 1 and 2: each process has a part of them (and of the gradients), and all
    weights."""

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(engine, parameters, shapes)
        self._order: list[int] = []
        """Numbers of the parameters in the order in which their gradients came in the passes since the last step."""
        if self._adds_up_in_order():
            numbers = {parameter: number for number, parameter in enumerate(parameters.values())}
            parameter: Any  # hooks are untyped
            for parameter in numbers:
                parameter.register_post_accumulate_grad_hook(lambda one: self._order.append(numbers[one]))
        self._link()

    def _adds_up_in_order(self) -> bool:
        """Return whether DeepSpeed adds up gradients in the order in which each rank computes them."""
        zero = self._engine.optimizer
        return torch.distributed.get_world_size() > 1 and bool(zero.partition_gradients or zero.overlap_comm)

    def _check_order(self) -> None:
        """Raise BackendError, in all ranks, if gradients of different parameters were added up."""
        mine = zlib.crc32(np.asarray(self._order, np.int32).tobytes())
        self._order.clear()
        limits = torch.tensor([mine, -mine], device=self._engine.device)
        torch.distributed.all_reduce(limits, op=torch.distributed.ReduceOp.MAX)
        if int(limits[0]) != -int(limits[1]):
            raise BackendError(
                "the backward passes of the ranks had their gradients in different orders, and this stage of ZeRO adds "
                "them up in that order, so that they would be wrong; set backends.deepspeed.stage to 0 or 3"
            )

    def _link(self) -> None:
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _optimizer(self) -> torch.optim.AdamW:
        return self._engine.optimizer.optimizer  # type: ignore[no-any-return]

    def step(self, lr: float, max_grad_norm: float) -> float:
        """Take a step. DeepSpeed computes the norm over all processes, and skips the step if the norm is not finite."""
        if self._adds_up_in_order():
            self._check_order()
        zero = self._engine.optimizer
        zero.clip_grad = max_grad_norm
        self.set_lr(lr)
        self._engine.step()
        return math.inf if zero.overflow else float(zero._global_grad_norm)

    def gather(self, kind: str, name: str) -> Tensor:
        """Return the whole tensor in every process, gathered from all parts."""
        if kind == MASTER:
            return self._parameters[name].detach()  # a float32 parameter is the master itself, and is whole
        return self._gather_part(kind, name)

    def _gather_part(self, kind: str, name: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self._parameters[name]
        if kind == MASTER:
            found = safe_get_full_fp32_param(parameter)
        else:
            found = safe_get_full_optimizer_state(parameter, kind)
        return found.view(self.shapes[name])  # type: ignore[no-any-return]

    def _own_part(self, kind: str, name: str) -> Tensor:
        parameter: Any = self._parameters[name]
        return parameter._hp_mapping.get_hp_fragment(None if kind == MASTER else kind)  # type: ignore[no-any-return]

    def put(self, kind: str, name: str, value: Tensor) -> None:
        """Write this process's part of a whole tensor."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        parameter = self._parameters[name]
        if kind == MASTER:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, kind)

    def refresh(self) -> None:
        """Update the network's weights from the masters."""
        self._engine.optimizer.update_lp_params()


class ZeroWeightShards(ZeroShards):
    """Masters and moments under ZeRO 3: each process also has only a part of the weights."""

    def _link(self) -> None:
        pass

    def _adds_up_in_order(self) -> bool:
        return False  # DeepSpeed sorts them first

    def masters(self) -> list[Tensor]:
        return list(self._engine.optimizer.fp32_partitioned_groups_flat)  # the optimizer has them only while it steps

    def gather(self, kind: str, name: str) -> Tensor:
        """Return the whole tensor in every process, gathered from all parts."""
        return self._gather_part(kind, name)

    def _own_part(self, kind: str, name: str) -> Tensor:
        part, _ = self._engine.optimizer._get_fp32_opt_state_partition(
            self._parameters[name], release_swap_buffers=False, optim_state_key=None if kind == MASTER else kind
        )
        return part  # type: ignore[no-any-return]

    def collect(self, name: str, rank: int, dtype: torch.dtype) -> Tensor | None:
        """Return a whole master at the rank with this number, in the dtype; None elsewhere. Each rank sends its
        part."""
        part, shape = self._own_part(MASTER, name).detach().view(-1).to(dtype), self.shapes[name]
        is_mine = torch.distributed.get_rank() == rank
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size())] if is_mine else None
        torch.distributed.gather(part, parts, dst=rank)
        return None if parts is None else torch.cat(parts)[: shape.numel()].view(shape)

    def put(self, kind: str, name: str, value: Tensor) -> None:
        """Write this process's part of a whole tensor. The part may reach beyond the tensor's end."""
        zero, parameter, part = self._engine.optimizer, self._parameters[name], self._own_part(kind, name)
        size, rank = part.numel(), zero._get_param_partition_rank(parameter)
        mine = value.flatten()[size * rank : size * (rank + 1)]
        part.data.zero_()
        part.data[: mine.numel()].copy_(mine)

    def room(self) -> Iterable[Tensor]:
        """Return the buckets for gradients of one backward pass: 2 GB each, as DeepSpeed makes them."""
        buckets = self._engine.optimizer.ipg_buckets.values()
        return [bucket.buffer for bucket in buckets if bucket.buffer is not None]

    def refresh(self) -> None:
        """Update the network's weights from the masters."""
        zero = self._engine.optimizer
        self._engine.empty_partition_cache()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if kept := zero.persistent_parameters:
            kept[0].all_gather(kept)


def _copy_into(places: list[Tensor], copied: list[Tensor]) -> None:
    with torch.no_grad():
        for one, value in zip(places, copied, strict=True):
            one.copy_(value)


def shards_of(
    engine: Any, stage: int, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Size]
) -> Shards:
    """Return the shards for a stage of ZeRO."""
    cls = {0: Shards, 1: ZeroShards, 2: ZeroShards, 3: ZeroWeightShards}[stage]
    return cls(engine, parameters, shapes)


def count_anew() -> None:
    """Restart ZeRO 3's numbering of modules and parameters at 0. It continues from model to model, but all ranks need
    the same numbers, and some ranks may be new."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
