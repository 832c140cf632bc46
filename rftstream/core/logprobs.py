"""Logprobs and entropies of tokens from hidden states, without ever holding all logits, in forward or in backward.

Logits are computed one chunk at a time. The backward pass starts with the last chunk, whose logits still exist, and
computes those of the other chunks again from hidden states and head. Inside of a chunk a few rows are processed at a
time, so that they stay in a cache.

Shapes: N tokens, n of a chunk, k of a block of it, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rftstream.core.allowed import AllowedSets

BLOCK_BYTES = {"cpu": 2 << 20}
"""Bytes of float32 logits that are processed at once: on a CPU as many as a core's cache holds, elsewhere as many as
keep the device busy."""
OTHER_BLOCK_BYTES = 64 << 20

NOTHING = -1e4
"""A log-probability below which the probability is 0 in every float type. It replaces -inf, since 0 * -inf would be
NaN."""


@dataclass(frozen=True, slots=True)
class _Settings:
    chunk_tokens: int
    dtype: torch.dtype
    """Data type of the logits from the head."""
    exact: torch.dtype
    """Data type of all computations on the logits."""
    keeps_last: bool
    allowed: AllowedSets | None


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor | None,
    token_ids_N: Tensor,
    temperatures_N: Tensor | None = None,
    *,
    bias_V: Tensor | None = None,
    allowed: AllowedSets | None = None,
    chunk_tokens: int,
    entropy_gradient: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token at its temperature, and the entropy of its distribution.

    z = (W h + b) / temperature;  logp = z[token] - logsumexp(z);  entropy = logsumexp(z) - sum softmax(z) z.

    hidden_ND: float [N, D]; or logits [N, V], where `weight_VD` is None. token_ids_N: int64 [N]. temperatures_N: float
    [N], above 0; None: 1. `allowed`: the ids that each token could be, over which all sums run; None: all ids. `dtype`:
    what the head computes in; default: that of the hidden states, and float32 where these are float16, in which logits
    may overflow. At most `chunk_tokens` rows of logits exist at once. Returns float [N] twice, of float32 at least; the
    entropy has a gradient only if wished. Gradients are exact, of first order.
    """
    if hidden_ND.ndim != 2 or token_ids_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"token_logprobs: got hidden {tuple(hidden_ND.shape)} and tokens {tuple(token_ids_N.shape)}, expected "
            "[N, D] and [N]"
        )
    if temperatures_N is not None and temperatures_N.shape != token_ids_N.shape:
        raise ValueError(f"token_logprobs: got temperatures {tuple(temperatures_N.shape)}, expected [{len(hidden_ND)}]")
    if token_ids_N.dtype != torch.int64 or not hidden_ND.is_floating_point():
        raise TypeError(f"token_logprobs: got {hidden_ND.dtype}, {token_ids_N.dtype}, expected a float type and int64")
    if chunk_tokens < 1:
        raise ValueError(f"token_logprobs: got chunks of {chunk_tokens} tokens, expected at least 1")
    if dtype is None or weight_VD is None:
        dtype = torch.float32 if hidden_ND.dtype == torch.float16 and weight_VD is not None else hidden_ND.dtype
    settings = _Settings(
        chunk_tokens=chunk_tokens,
        dtype=dtype,
        exact=torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32,
        keeps_last=torch.is_grad_enabled() and weight_VD is not None,
        allowed=allowed,
    )
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias_V, token_ids_N, temperatures_N, settings
    )
    return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor | None,
        bias_V: Tensor | None,
        token_ids_N: Tensor,
        temperatures_N: Tensor | None,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N, logsumexp_N = (
            torch.empty(len(hidden_ND), dtype=settings.exact, device=hidden_ND.device) for _ in range(3)
        )
        head = _Head(weight_VD, bias_V, settings.dtype)
        logits_nV = None
        for chunk in _slices(0, len(hidden_ND), settings.chunk_tokens):
            logits_nV = head.logits(hidden_ND[chunk])
            for rows in _blocks(chunk, logits_nV):
                scaled_kV = _scaled(logits_nV[_within(rows, chunk)], temperatures_N, rows, settings)
                top_k1 = scaled_kV.amax(dim=1, keepdim=True)
                found_k = scaled_kV.gather(1, token_ids_N[rows, None]).squeeze(1)
                shifted_kV = (scaled_kV - top_k1).clamp_(min=NOTHING)
                weights_kV = shifted_kV.exp()
                total_k = weights_kV.sum(dim=1)
                log_total_k = total_k.log()
                logsumexp_N[rows] = log_total_k + top_k1.squeeze(1)
                logprobs_N[rows] = found_k - logsumexp_N[rows]
                entropy_N[rows] = log_total_k - torch.linalg.vecdot(weights_kV, shifted_kV) / total_k
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, token_ids_N, temperatures_N, logsumexp_N, entropy_N)
        ctx.settings = settings
        ctx.last_nV = logits_nV if settings.keeps_last else None
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs_N: Tensor | None, by_entropy_N: Tensor | None) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias_V, token_ids_N, temperatures_N, logsumexp_N, entropy_N = ctx.saved_tensors
        settings, last_nV = ctx.settings, ctx.last_nV
        ctx.last_nV = None  # it becomes the gradient; a second backward pass makes it again
        if by_logprobs_N is None and by_entropy_N is None:
            return (None,) * 6
        head = _Head(weight_VD, bias_V, settings.dtype)
        gradients = _Gradients(hidden_ND, head, ctx.needs_input_grad)
        for chunk in reversed(list(_slices(0, len(hidden_ND), settings.chunk_tokens))):
            logits_nV = head.logits(hidden_ND[chunk]) if last_nV is None else last_nV
            last_nV = None
            by_logits_nV = logits_nV if weight_VD is not None else torch.empty_like(logits_nV)
            for rows in _blocks(chunk, logits_nV):
                scaled_kV = _scaled(logits_nV[_within(rows, chunk)], temperatures_N, rows, settings)
                log_kV = (scaled_kV - logsumexp_N[rows, None]).clamp_(min=NOTHING)
                by_kV = log_kV.exp()
                if by_entropy_N is not None:
                    # dH/dz = -p (log p + H)
                    factor_kV = log_kV.add_(entropy_N[rows, None]).mul_(by_entropy_N[rows, None])
                    if by_logprobs_N is not None:
                        factor_kV += by_logprobs_N[rows, None]
                    by_kV.mul_(factor_kV).neg_()
                elif by_logprobs_N is not None:
                    by_kV.mul_(-by_logprobs_N[rows, None])
                if by_logprobs_N is not None:  # dlogp/dz = [token] - p
                    by_kV.scatter_add_(1, token_ids_N[rows, None], by_logprobs_N[rows, None])
                if temperatures_N is not None:
                    by_kV.div_(temperatures_N[rows, None])
                by_logits_nV[_within(rows, chunk)] = by_kV
            gradients.add(chunk, by_logits_nV)
        return (*gradients.result(), None, None, None)


@dataclass(frozen=True, slots=True)
class _Head:
    weight_VD: Tensor | None
    bias_V: Tensor | None
    dtype: torch.dtype

    def logits(self, hidden_nD: Tensor) -> Tensor:
        if self.weight_VD is None:
            return hidden_nD
        logits_nV = self.cast(hidden_nD) @ self.cast(self.weight_VD).T
        return logits_nV if self.bias_V is None else logits_nV.add_(self.bias_V)

    def cast(self, array: Tensor) -> Tensor:
        return array.to(self.dtype)


class _Gradients:
    """The needed gradients of hidden states, weight and bias, each summed in the data type of its array."""

    def __init__(self, hidden_ND: Tensor, head: _Head, needed: tuple[bool, ...]) -> None:
        self._hidden_ND, self._head = hidden_ND, head
        self._by_hidden_ND = torch.empty_like(hidden_ND) if needed[0] else None
        self._by_weight_VD: Tensor | None = None
        self._by_bias_V: Tensor | None = None
        self._needs_weight, self._needs_bias = needed[1:3]

    def add(self, chunk: slice, by_logits_nV: Tensor) -> None:
        weight_VD, bias_V = self._head.weight_VD, self._head.bias_V
        if weight_VD is None:
            if self._by_hidden_ND is not None:
                self._by_hidden_ND[chunk] = by_logits_nV
            return
        if self._by_hidden_ND is not None:
            self._by_hidden_ND[chunk] = by_logits_nV @ self._head.cast(weight_VD)
        if self._needs_weight:
            hidden_nD = self._head.cast(self._hidden_ND[chunk])
            if self._by_weight_VD is None:
                self._by_weight_VD = (by_logits_nV.T @ hidden_nD).to(weight_VD.dtype)
            elif self._by_weight_VD.dtype == hidden_nD.dtype:
                self._by_weight_VD.addmm_(by_logits_nV.T, hidden_nD)
            else:
                self._by_weight_VD += by_logits_nV.T @ hidden_nD
        if self._needs_bias and bias_V is not None:
            by_bias_V = by_logits_nV.sum(dim=0).to(bias_V.dtype)
            self._by_bias_V = by_bias_V if self._by_bias_V is None else self._by_bias_V + by_bias_V

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self._by_hidden_ND, self._by_weight_VD, self._by_bias_V


def _slices(begin: int, end: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, end)) for start in range(begin, end, size))


def _blocks(chunk: slice, logits_nV: Tensor) -> Iterator[slice]:
    """Yield slices of the chunk whose logits fit into a block of the device. Indices are relative to the chunk."""
    num_bytes = BLOCK_BYTES.get(logits_nV.device.type, OTHER_BLOCK_BYTES)
    return _slices(chunk.start, chunk.stop, max(num_bytes // (4 * max(logits_nV.shape[1], 1)), 1))


def _within(rows: slice, chunk: slice) -> slice:
    return slice(rows.start - chunk.start, rows.stop - chunk.start)


def _scaled(logits_kV: Tensor, temperatures_N: Tensor | None, rows: slice, settings: _Settings) -> Tensor:
    scaled_kV = logits_kV.to(settings.exact)
    if temperatures_N is not None:
        scaled_kV = scaled_kV / temperatures_N[rows, None]
    forbidden_kV = (
        None if settings.allowed is None else settings.allowed.forbidden(rows, scaled_kV.shape, scaled_kV.device)
    )
    if forbidden_kV is None:
        return scaled_kV
    is_copy = scaled_kV.data_ptr() != logits_kV.data_ptr()
    return (scaled_kV if is_copy else scaled_kV.clone()).masked_fill_(forbidden_kV, -torch.inf)
