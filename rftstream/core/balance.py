"""How evenly a mixture's routers use its experts, and the loss that balances them (arXiv 2101.03961, equations 4 to 6).

Shapes: L routers, N tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def count_experts(chosen_NK: Tensor, num_experts: int) -> Tensor:
    """Return how many tokens chose each expert: float64 [E]."""
    return torch.bincount(chosen_NK.flatten(), minlength=num_experts).double()


def count_likeliest(logits_LNE: Sequence[Tensor], num_chosen: int) -> Tensor:
    """Return how often each expert is among the likeliest of a token, in all routers together: float64 [E]. A bias
    that chooses other experts does not count."""
    counts = (count_experts(one.topk(num_chosen, dim=-1).indices, one.shape[-1]) for one in logits_LNE)
    return torch.stack(list(counts)).sum(dim=0)


def balance_loss(logits_LNE: Sequence[Tensor], counts_E: Tensor, num_tokens: float) -> Tensor:
    """Return a micro-batch's part of the load-balancing loss of an optimizer step.

    E sum_e f_e P_e, with f_e = counts_e / (L num_tokens) of the whole step, which has no gradient, and P_e = the sum of
    the probability of expert e over routers and tokens / (L num_tokens). It is at least about K; K if all experts are
    used alike. The parts of all micro-batches add up to the loss of the step, however its tokens are cut.
    """
    total = len(logits_LNE) * max(num_tokens, 1.0)
    sums_E = torch.stack([one.float().softmax(dim=-1).sum(dim=0) for one in logits_LNE]).sum(dim=0)
    return len(counts_E) * (counts_E.float() / total * (sums_E / total)).sum()


def router_entropy(logits_NE: Tensor) -> Tensor:
    """Return the sum over tokens of the entropy of a router's probabilities, in nats."""
    log_NE = logits_NE.float().log_softmax(dim=-1)
    return -(log_NE.exp() * log_NE).sum()


def load_metrics(counts_LE: Tensor) -> Mapping[str, float]:
    """Return how unevenly tokens were spread: the largest load of an expert as a multiple of the mean, and the share of
    experts that no token chose; both are means over routers. NaN stands for no expert."""
    means_L = counts_LE.nanmean(dim=1).clamp(min=1e-9)
    return {
        "router_max_load": float((counts_LE.nan_to_num(0.0).amax(dim=1) / means_L).mean()),
        "router_dead_experts": float((counts_LE == 0).sum() / (~counts_LE.isnan()).sum()),
    }
