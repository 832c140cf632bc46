"""Sequence parallelism as in DeepSpeed-Ulysses (arXiv 2309.14509): several ranks compute a micro-batch together.

Each rank has a part of the tokens of every row. Only attention needs all tokens: before it, an all-to-all exchanges
some tokens of all heads for all tokens of some heads; after it, another one reverses that. DeepSpeed's own layer does
not support packed rows of different lengths, and needs an engine that knows the groups. This layer gets the rows'
lengths like the attention of the torch backend. It gives every rank the gradients of its own tokens; their sum is the
whole gradient.

Shapes: B rows, S tokens with padding, s = S / N of them in a rank, H heads, h = H / N of them in a rank, D width of a
head; T tokens of the longest row.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rftstream.algorithms.base import TrainingRow
from rftstream.backends.deepspeed.rank_processes import is_of_others
from rftstream.backends.torch import attention
from rftstream.backends.torch.critic import ValueNetwork
from rftstream.backends.torch.inputs import Inputs, make_inputs
from rftstream.backends.torch.network import Network
from rftstream.backends.torch.paths import path_of
from rftstream.contracts.beside import window
from rftstream.core.packing import ROOT
from rftstream.errors import ConfigError

NAME = "rftstream_split"
"""Name of this attention in transformers."""

distributed: Any = torch.distributed

SETTING = "backends.deepspeed.sequence_parallel"


class _Exchange(torch.autograd.Function):
    """Send one of the parts [N, ...] to each rank of a group, and return the parts received from them."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        received: Tensor = _Exchange.apply(gradient.contiguous(), ctx.group)  # type: ignore[no-untyped-call]
        return received, None


class _Together(torch.autograd.Function):
    """Return the sum over the ranks of a group. All ranks compute the same loss from it, so each has the whole
    gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        total = own.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SequenceGroup:
    """One rank's view of the ranks that compute a micro-batch together. `Rank.join` makes it, in all ranks."""

    def __init__(self, rank: int, world_size: int, size: int, *, timeout_s: float) -> None:
        """Form groups of `size` consecutive ranks. All ranks form all groups."""
        self.size, self.number = size, rank % size
        limit = timedelta(seconds=timeout_s)  # a new group does not inherit the timeout of the group of all ranks
        groups = [
            distributed.new_group(list(range(first, first + size)), timeout=limit)
            for first in range(0, world_size, size)
        ]
        self._group = groups[rank // size]

    def all_tokens(self, own_BHsD: Tensor) -> Tensor:
        """Return this rank's heads of all tokens, [B, h, S, D], from all heads of its tokens."""
        B, H, s, D = own_BHsD.shape
        parts = own_BHsD.view(B, self.size, H // self.size, s, D).movedim(1, 0).contiguous()
        received: Tensor = _Exchange.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return received.movedim(0, 2).reshape(B, H // self.size, self.size * s, D)

    def all_heads(self, own_BhSD: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, [B, H, s, D], from its heads of all tokens."""
        B, h, S, D = own_BhSD.shape
        parts = own_BhSD.reshape(B, h, self.size, S // self.size, D).movedim(2, 0).contiguous()
        received: Tensor = _Exchange.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return received.movedim(0, 1).reshape(B, h * self.size, S // self.size, D)

    def together(self, own: Tensor) -> Tensor:
        """Return the sum over the group."""
        total: Tensor = _Together.apply(own, self._group)  # type: ignore[no-untyped-call]
        return total

    def part(self, inputs: Inputs) -> Inputs:
        """Return this rank's part of a micro-batch: its tokens, and the tokens that they predict. `lengths` and
        `parents` are those of all runs one after another, with padding.

        A rank whose tokens predict nothing gets one masked prediction, since all ranks must use the same weights."""
        num_rows, num_tokens = inputs.token_ids.shape
        own = -(-num_tokens // self.size)
        begin, padding = self.number * own, own * self.size - num_tokens
        if inputs.position_ids is None:
            lengths, parents = (own * self.size,) * num_rows, (ROOT,) * num_rows
            position_ids = torch.arange(own * self.size, device=inputs.token_ids.device).expand(num_rows, -1)
        else:
            lengths, parents = inputs.lengths, inputs.parents
            if padding:
                lengths, parents = (*lengths, padding), (*parents, ROOT)
            position_ids = functional.pad(inputs.position_ids, (0, padding))
        rows_N, places_N = inputs.sources_N // num_tokens, inputs.sources_N % num_tokens
        numbers_N = ((places_N >= begin) & (places_N < begin + own)).nonzero()[:, 0]
        part = dataclasses.replace(
            inputs,
            token_ids=functional.pad(inputs.token_ids, (0, padding))[:, begin : begin + own],
            position_ids=position_ids[:, begin : begin + own],
            lengths=lengths,
            parents=parents,
            sources_N=(rows_N * own + places_N - begin)[numbers_N],
            targets_N=inputs.targets_N[numbers_N],
            rows_N=inputs.rows_N[numbers_N],
            places_N=inputs.places_N[numbers_N],
            temperatures_N=None if inputs.temperatures_N is None else inputs.temperatures_N[numbers_N],
            beside=window(inputs.beside, num_rows, begin, begin + own),
            sets_N=None if inputs.sets_N is None else [inputs.sets_N[number] for number in numbers_N.tolist()],
        )
        if len(numbers_N):
            return part
        nothing = torch.zeros(1, dtype=torch.int64, device=inputs.token_ids.device)  # the first place is always masked
        ones = None if inputs.temperatures_N is None else torch.ones(1, device=nothing.device)
        return dataclasses.replace(
            part,
            sources_N=nothing,
            targets_N=nothing,
            rows_N=nothing,
            places_N=nothing,
            temperatures_N=ones,
            sets_N=None,  # 0 may be in no set
        )

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention like `attention.attend`, over the tokens of all ranks of the group. query [B, H, s, D],
        output [B, s, H, D]."""
        queries, keys, values = (
            self.all_tokens(one).transpose(0, 1).flatten(1, 2)[None] for one in (query, key, value)
        )
        output_1PhD, _ = attention.attend(module, queries, keys, values, attention_mask, **settings)
        output_BShD = output_1PhD.reshape(len(query), -1, *output_1PhD.shape[2:])
        return self.all_heads(output_BShD.transpose(1, 2)).transpose(1, 2).contiguous(), None


LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Kinds of rotary positions whose frequencies depend on the longest row. A rank sees only its own part of a row."""


def _rope_kinds(config: Any) -> set[str]:
    """Return the kinds of rotary positions in all layers of a model."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    tables = [given, *(one for one in given.values() if isinstance(one, dict))]
    return {str(table.get("rope_type") or table.get("type") or "default") for table in tables}


class SplitNetwork:
    """A network that the ranks of a group compute together, each for its part of the tokens. Every rank gets the
    logprobs or values of all tokens."""

    def __init__(self, network: Network, group: SequenceGroup, *, near: float) -> None:
        """ConfigError in all ranks if the model cannot be computed in this way. That is tried: the outputs must be
        within `near` of those without splitting."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        self._network, self._group = network, group
        self.model, self.flops = network.model, network.flops
        self.packs, self.shares = network.packs, network.shares
        self.routers = None  # each rank sees its part of the tokens alone
        self.routed = network.routed
        config = self.model.config.get_text_config()
        heads = int(config.num_attention_heads)
        shared = int(getattr(config, "num_key_value_heads", None) or heads)
        for what, number in ("heads", heads), ("key-value heads", shared):
            if number % group.size:
                raise ConfigError(
                    f"{SETTING}: got {group.size}, expected a divisor of the {number} {what} of the model's attention; "
                    "each rank of a group computes some of them"
                )
        if path_of(self.model).attention != attention.NAME:
            raise ConfigError(self._refused(": what its attention computes is more than ours does"))
        if kinds := _rope_kinds(config) & LENGTH_DEPENDENT:
            raise ConfigError(self._refused(f": its positions ({', '.join(sorted(kinds))}) depend on the longest row"))
        AttentionInterface.register(NAME, torch.compiler.disable(group.attend))  # type: ignore[no-untyped-call]
        AttentionMaskInterface.register(NAME, sdpa_mask)
        self._split(near)

    def _split(self, near: float) -> None:
        """Let the model attend over all ranks from now on, if that gives the same outputs as before."""
        rows = [_row(7, 11), _row(3, 2), _row(2, 40), _row(1, 6), _row(2, 30)]  # two begin alike
        probe = make_inputs(rows, self.model.device, packed=self.packs, shared=self.shares)
        with torch.no_grad():
            before = self._compute(self._network, probe)
            self.model.base_model.set_attn_implementation(NAME)
            try:
                after = self._compute(self, probe)
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                if is_of_others(error):
                    raise
                raise ConfigError(self._refused(f": {error}")) from error
        if not torch.allclose(before, after, rtol=0, atol=near):
            raise ConfigError(self._refused(""))

    def _compute(self, network: Any, inputs: Inputs) -> Tensor:
        found: Tensor = (
            network.values(inputs) if isinstance(self._network, ValueNetwork) else network.logprobs(inputs)[0]
        )
        return found

    def _refused(self, why: str) -> str:
        return f"{SETTING}: {type(self.model).__name__} can't be computed in parts{why}; leave the setting out"

    def logprobs(self, inputs: Inputs, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies [B, T] of all tokens, 0 at masked positions."""
        part = self._group.part(inputs)
        logprobs_BT, entropy_BT = self._network.logprobs(part, entropy_gradient=entropy_gradient)
        return self._together(logprobs_BT, inputs), self._together(entropy_BT, inputs)

    def values(self, inputs: Inputs) -> Tensor:
        """Return the critic's values [B, T] of the text before each token, 0 at masked positions."""
        assert isinstance(self._network, ValueNetwork)
        return self._together(self._network.values(self._group.part(inputs)), inputs)

    def _together(self, own_BT: Tensor, inputs: Inputs) -> Tensor:
        return self._group.together(torch.where(inputs.rows.loss_mask_BT > 0, own_BT, 0.0))


def _row(first: int, length: int) -> TrainingRow:
    zeros = np.zeros(length, np.float32)
    ids = np.arange(first, first + length, dtype=np.int32) % 5
    return TrainingRow(token_ids=ids, loss_mask=zeros + 1, behavior_logprobs=zeros, advantages=zeros)
