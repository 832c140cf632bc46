"""Logprobs and entropies of tokens from logits, in float32 however the logits come. Shapes: N tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(logits_NV: Tensor, token_ids_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and the entropy of the distribution it comes from, at its temperature.

    z = logits / temperature;  logp = z[token] - logsumexp(z);  entropy = logsumexp(z) - sum softmax(z) z.

    logits_NV: float [N, V]. token_ids_N: int64 [N]. temperatures_N: float [N], above 0. Returns float [N] twice, of
    float32 at least.
    """
    if logits_NV.ndim != 2 or token_ids_N.shape != logits_NV.shape[:1] or temperatures_N.shape != token_ids_N.shape:
        raise ValueError(
            f"token_logprobs: got logits {tuple(logits_NV.shape)}, tokens {tuple(token_ids_N.shape)}, temperatures "
            f"{tuple(temperatures_N.shape)}, expected [N, V], [N], [N]"
        )
    if token_ids_N.dtype != torch.int64 or not logits_NV.is_floating_point():
        raise TypeError(f"token_logprobs: got {logits_NV.dtype}, {token_ids_N.dtype}, expected a float type and int64")
    exact = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    scaled_NV = logits_NV.to(exact) / temperatures_N.to(exact)[:, None]
    logsumexp_N = scaled_NV.logsumexp(dim=-1)
    logprobs_N = scaled_NV.gather(1, token_ids_N[:, None]).squeeze(1) - logsumexp_N
    probs_NV = (scaled_NV - logsumexp_N[:, None]).exp()
    # -inf logits (impossible tokens) count for nothing in the entropy
    entropy_N = logsumexp_N - (probs_NV * scaled_NV.clamp(min=torch.finfo(exact).min)).sum(dim=-1)
    return logprobs_N, entropy_N


def chunked_token_logprobs(
    hidden_ND: Tensor,
    project: Callable[[Tensor], Tensor],
    token_ids_N: Tensor,
    temperatures_N: Tensor,
    *,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same from hidden states, a chunk at a time: logits of more than `chunk_tokens` tokens never exist at once.

    With more than one chunk each is computed again in the backward pass. The entropy has a gradient only if wished.

    hidden_ND: float [N, D]. `project`: [n, D] -> [n, V]. Returns [N] twice, as `token_logprobs`.
    """
    if hidden_ND.ndim != 2 or len(hidden_ND) != len(token_ids_N):
        raise ValueError(f"chunked_token_logprobs: got hidden {tuple(hidden_ND.shape)} for {len(token_ids_N)} tokens")

    def one(hidden_nD: Tensor, token_ids_n: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor]:
        logits_nV = project(hidden_nD)
        if entropy_gradient:
            return token_logprobs(logits_nV, token_ids_n, temperatures_n)
        exact = torch.float64 if logits_nV.dtype == torch.float64 else torch.float32
        scaled_nV = logits_nV.to(exact) / temperatures_n.to(exact)[:, None]
        logprobs_n = scaled_nV.gather(1, token_ids_n[:, None]).squeeze(1) - scaled_nV.logsumexp(dim=-1)
        with torch.no_grad():
            return logprobs_n, token_logprobs(logits_nV.detach(), token_ids_n, temperatures_n)[1]

    if len(token_ids_N) <= chunk_tokens:
        return one(hidden_ND, token_ids_N, temperatures_N)
    parts = []
    for start in range(0, len(token_ids_N), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        arguments = (hidden_ND[chunk], token_ids_N[chunk], temperatures_N[chunk])
        parts.append(checkpoint(one, *arguments, use_reentrant=False) if torch.is_grad_enabled() else one(*arguments))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
