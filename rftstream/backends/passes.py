"""The work on one batch: optimizer steps, micro-batches, and the loss of each. All torch backends share it.

Shapes: B rows of a micro-batch, T padded tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rftstream.algorithms.base import Algorithm, Denominators, TrainingRow, is_demonstration
from rftstream.backends.base import UpdatePlan
from rftstream.backends.torch.inputs import Inputs, keys, make_inputs
from rftstream.backends.torch.network import FORCED, OTHERS, Network, at_targets
from rftstream.core.balance import balance_loss, count_experts, count_likeliest, load_metrics, router_entropy
from rftstream.core.packing import grow, split_microbatches, split_minibatches
from rftstream.errors import ConfigError
from rftstream.models.routers import Routed, Routers

PROVIDED = frozenset(
    {
        "entropy",
        "proximal_logprobs",
        "no_proximal_logprobs",
        "reference_logprobs",
        "reference_rewards",
        "row_logprobs",
        "rows_without_advantage",
        "whole_groups",
    }
)
"""Names in `Algorithm.needs` that a backend with `Passes` can give."""
ALL_ROWS_LEARN = frozenset({"entropy", "reference_logprobs", "rows_without_advantage", "whole_groups"})
"""Names in `Algorithm.needs` with which rows without an advantage are also learned from. Keeping such rows apart would
then save nothing."""


LOADS = "router_loads"
"""Name among the sums of how many tokens chose each expert of each router: float64 [L, E], NaN for experts that only
other routers have."""


@dataclass(slots=True)
class Minibatch:
    """The rows of one optimizer step, cut into micro-batches. `Passes` makes it."""

    inputs: list[Inputs]
    """The micro-batches, in order. Those in which no row has an advantage come last, if such rows are kept apart."""
    num_tokens: float
    """Number of unmasked tokens of its rows."""
    denominators: Denominators
    """Divisors of losses: a share of the batch's denominators, or the mini-batch's own if the plan is not
    stratified."""
    proximal: Sequence[Tensor | None]
    """Proximal logprobs [B, T] of each of the inputs; None before they are computed."""
    reference: Sequence[Tensor | None]
    """Reference logprobs [B, T] of each of the inputs; None before they are computed."""
    first_without_signal: int
    """Index of the first of the inputs that are kept apart because none of their rows has an advantage."""
    counts_E: Tensor | None = None
    """How often its tokens choose each expert before this step, for the balancing loss: those of all processes, which
    set it. None if it has one micro-batch alone."""


def check_needs(algorithm: Algorithm, backend: str, *, critic: bool = False, classifier: bool = False) -> None:
    """Raise ConfigError if the algorithm needs something that this backend cannot give. `critic`: whether there is a
    critic. `classifier`: whether the model is a classifier."""
    held = {name for name, there in (("values", critic), ("scores", classifier)) if there}
    if missing := algorithm.needs - PROVIDED - held:
        raise ConfigError(f"backend {backend}: the algorithm needs {', '.join(sorted(missing))}, which it can't give")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchShare:
    """A process's share of a batch's micro-batches: every `count`-th, beginning with `number`. A process that trains
    alone computes all of them."""

    number: int = 0
    count: int = 1
    counts: bool = True
    """Whether the sums of this process count. If several processes compute a micro-batch together, only those of the
    first do."""


ALL = MicrobatchShare()


class Passes:
    """The forward and backward passes of one process over a batch, and the sums of their metrics.

    `train` makes one for each network that learns. It calls `compute_reference` and `compute_proximal` if the algorithm
    needs them, then `accumulate` before each optimizer step, and `metrics` at the end. Denominators are those of the
    whole batch. So if several processes have shares of it, one of them adds the others' parts with `add_part`."""

    def __init__(
        self,
        network: Network,
        rows: Sequence[TrainingRow],
        plan: UpdatePlan,
        device: torch.device,
        *,
        whole_groups: bool = False,
        signal_apart: bool = False,
        share: MicrobatchShare = ALL,
    ) -> None:
        """Cut the rows into mini-batches and micro-batches. With `whole_groups`, all rows of a group are in one
        micro-batch. With `signal_apart`, rows without an advantage get their own micro-batches; if such a loss has no
        gradient, its backward pass is skipped."""
        self._network, self._device, self._counts = network, device, share.counts
        self._routers: Routers | None = getattr(network, "routers", None)
        self._aux_coef, self._is_alone = plan.router_aux_coef, share.count == 1
        self.balances = bool(plan.router_aux_coef)
        """Whether the loss balances a mixture's experts."""
        self._flops = 0.0
        self.num_tokens = 0.0
        """Tokens trained on so far. A token counts again in each pass over the batch."""
        self._num_read = self._num_asked = 0
        self._sums: dict[str, Any] = {}
        self._losses: list[float] = []
        parts = minibatch_rows(rows, plan, whole_groups)
        whole = Denominators.of(rows, len(parts)) if plan.stratified and parts else None
        self.minibatches = [self._minibatch(part, whole, plan, whole_groups, signal_apart) for part in parts]
        """The mini-batches of one pass over the batch, one for each optimizer step. Rows without unmasked tokens are
        left out."""
        self.num_steps = len(self.minibatches) * plan.updates_per_batch
        self.num_microbatches = sum(len(minibatch.inputs) for minibatch in self.minibatches)
        """Number of micro-batches in one pass over the batch, of all processes."""
        self.num_rounds = [-(-len(minibatch.inputs) // share.count) for minibatch in self.minibatches]
        """Number of forward and backward passes that every process takes for each mini-batch."""
        for minibatch in self.minibatches:
            minibatch.inputs = minibatch.inputs[share.number :: share.count]
            minibatch.proximal = minibatch.reference = [None] * len(minibatch.inputs)
        self.num_idle = sum(self.num_rounds) - sum(len(minibatch.inputs) for minibatch in self.minibatches)
        """Number of micro-batches that this process computes in a pass over the batch only to keep in step with the
        others."""

    def wants_proximal(self, algorithm: Algorithm) -> bool:
        """Return whether proximal logprobs have to be computed before the first step. After it, the policy no longer
        gives them."""
        several = self.num_steps > 1 and "no_proximal_logprobs" not in algorithm.needs
        return several or "proximal_logprobs" in algorithm.needs

    def _minibatch(
        self,
        rows: Sequence[TrainingRow],
        whole: Denominators | None,
        plan: UpdatePlan,
        whole_groups: bool,
        signal_apart: bool,
    ) -> Minibatch:
        """Make a mini-batch. `whole` is its share of the batch's denominators; None means the denominators of its own
        rows."""
        first, others = signal_first(rows) if signal_apart else (rows, [])
        parts = [
            micro_inputs(some, plan.tokens_per_microbatch, self._network, self._device, whole_groups=whole_groups)
            for some in (first, others)
        ]
        inputs = [one for part in parts for _, one in part]
        nothing = [None] * len(inputs)
        own = Denominators.of(rows)
        return Minibatch(inputs, own.num_tokens, own if whole is None else whole, nothing, nothing, len(parts[0]))

    def compute_proximal(self) -> None:
        """Compute the logprobs of all rows under the current parameters."""
        for minibatch in self.minibatches:
            minibatch.proximal = [self._constant(inputs, self._network) for inputs in minibatch.inputs]

    def compute_reference(self, network: Network) -> None:
        """Compute the logprobs of all rows under the reference network."""
        for minibatch in self.minibatches:
            minibatch.reference = [self._constant(inputs, network) for inputs in minibatch.inputs]

    def _constant(self, inputs: Inputs, network: Network) -> Tensor:
        self._flops += network.flops(inputs, backward=False)
        with torch.no_grad():
            return network.logprobs(inputs)[0]

    def accumulate(
        self, minibatch: Minibatch, algorithm: Algorithm, backward: Callable[[Tensor], object] = Tensor.backward
    ) -> float:
        """Compute the loss of one optimizer step, accumulate its gradients over the micro-batches, and return the loss.

        `backward` is called with each micro-batch's share of the loss, unless that is known to have no gradient."""
        total = torch.zeros((), device=self._device)
        if self.balances and self._is_alone:
            minibatch.counts_E = self.count_experts(minibatch) if len(minibatch.inputs) > 1 else None
        for number, inputs in enumerate(minibatch.inputs):
            learns = number < minibatch.first_without_signal
            policy_BT, loss, metrics = self._loss(minibatch, number, algorithm, learns=learns)
            if not learns and has_gradient(loss, policy_BT):
                self._flops += self._network.flops(inputs, backward=False)
                minibatch.first_without_signal, learns = len(minibatch.inputs), True
                _, loss, metrics = self._loss(minibatch, number, algorithm, learns=True)
            if learns:
                backward(loss)
            total += loss.detach()
            self._add(metrics)
            self._flops += self._network.flops(inputs, backward=learns)
            self._num_read += sum(inputs.lengths)
            self._num_asked += inputs.num_asked
        self.num_tokens += minibatch.num_tokens
        self._losses.append(float(total))
        return self._losses[-1]

    @torch.no_grad()
    def count_experts(self, minibatch: Minibatch, idle: Sequence[Inputs] = ()) -> Tensor:
        """Return how often a mini-batch's tokens of this process choose each expert: float64 [E]. That takes a forward
        pass, since the balancing loss of a micro-batch depends on the choices of all. `idle`: inputs that do not
        count."""
        assert self._routers is not None, "`check_balanced` comes first"
        found = []
        for inputs in (*minibatch.inputs, *idle):
            with self._routers.watched() as calls:
                self._network.logprobs(inputs)
            self._flops += self._network.flops(inputs, backward=False)
            routed = at_targets(calls, inputs)
            found.append(count_likeliest([one.logits_NE for one in routed], routed[0].chosen_NK.shape[1]))
        own = found[: len(minibatch.inputs)]
        return torch.stack(own).sum(dim=0) if own else torch.zeros_like(found[0])

    def _loss(
        self, minibatch: Minibatch, number: int, algorithm: Algorithm, *, learns: bool
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return logprobs [B, T], loss and metrics of a micro-batch. With `learns`, gradients of the loss reach the
        weights; otherwise they reach only these logprobs."""
        inputs = minibatch.inputs[number]
        watched = nullcontext(()) if self._routers is None else self._routers.watched()
        with torch.set_grad_enabled(learns), watched as calls:
            policy_BT, entropy_BT = self._network.logprobs(inputs, entropy_gradient="entropy" in algorithm.needs)
        if not learns:
            policy_BT.requires_grad_()
        rows = replace(
            inputs.rows,
            entropy_BT=entropy_BT,
            proximal_logprobs_BT=minibatch.proximal[number],
            reference_logprobs_BT=minibatch.reference[number],
        )
        loss, metrics = algorithm.loss(policy_BT.view_as(policy_BT), rows, minibatch.denominators)
        metrics = {"entropy": entropy_BT.detach().sum(), **self._network.routed(), **metrics}
        if routed := at_targets(calls, inputs):
            balance, more = self._balance(minibatch, routed)
            loss, metrics = loss + self._aux_coef * balance, {**metrics, **more}
        return policy_BT, loss, metrics

    def _balance(self, minibatch: Minibatch, routed: Sequence[Routed]) -> tuple[Tensor | float, dict[str, Any]]:
        """Return a micro-batch's part of the balancing loss (0 if it does not count), and metrics of its routers."""
        logits_LNE = [one.logits_NE for one in routed]
        with torch.no_grad():
            most = max(one.logits_NE.shape[-1] for one in routed)
            chosen = [count_experts(one.chosen_NK, one.logits_NE.shape[-1]) for one in routed]
            loads = torch.stack([pad(one, (0, most - len(one)), value=math.nan) for one in chosen])
            entropy = torch.stack([router_entropy(one) for one in logits_LNE]).mean()
        metrics = {LOADS: loads, "router_entropy": entropy}
        if not self.balances:
            return 0.0, metrics
        counts_E = minibatch.counts_E
        if counts_E is None:
            counts_E = count_likeliest(logits_LNE, routed[0].chosen_NK.shape[1])
        found = balance_loss(logits_LNE, counts_E, minibatch.num_tokens)
        return found, {**metrics, "router_aux_loss": found.detach() * minibatch.num_tokens}

    def _add(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            known = self._sums.get(name)
            if known is None:
                self._sums[name] = value
            else:
                self._sums[name] = max(known, value) if name.startswith("max_") else known + value

    @property
    def last_loss(self) -> float:
        """The loss of the last step."""
        return self._losses[-1]

    def part(self) -> dict[str, Any]:
        """Return the sums of this process as plain numbers. They are empty if another process computed the same."""
        if not self._counts:
            return {"losses": [0.0] * len(self._losses), "sums": {}, "flops": 0.0, "num_read": 0, "num_asked": 0}
        return {
            "losses": self._losses,
            "sums": {
                name: value.cpu().numpy() if name == LOADS else float(value) for name, value in self._sums.items()
            },
            "flops": self._flops,
            "num_read": self._num_read,
            "num_asked": self._num_asked,
        }

    def add_part(self, part: Mapping[str, Any]) -> None:
        """Add the sums of another process. Its tokens are already counted, since the denominators are the whole
        batch's."""
        self._losses = [mine + theirs for mine, theirs in zip(self._losses, part["losses"], strict=True)]
        self._add({name: torch.from_numpy(value) if name == LOADS else value for name, value in part["sums"].items()})
        self._flops += part["flops"]
        self._num_read += part["num_read"]
        self._num_asked += part["num_asked"]

    def metrics(self, algorithm: Algorithm) -> dict[str, float]:
        """Return the metrics of all steps so far: means per token, and the largest value for names that begin with
        `max_`."""
        tokens = max(self.num_tokens, 1.0)
        values = {name: float(value) for name, value in self._sums.items() if name != LOADS}
        forced, others = values.pop(FORCED, 0.0), values.pop(OTHERS, 0.0)
        means = {name: value if name.startswith("max_") else value / tokens for name, value in values.items()}
        return {
            "loss": sum(self._losses) / max(len(self._losses), 1),
            "computed_tokens": float(self._num_read),
            "asked_tokens": float(self._num_asked),
            "shared_share": 1 - self._num_read / max(self._num_asked, 1),
            "tflop": self._flops / 1e12,
            **(load_metrics(self._sums[LOADS]) if LOADS in self._sums else {}),
            **({"routing_mismatch": others / forced} if forced else {}),
            **algorithm.summarise(means),
        }


def signal_first(rows: Sequence[TrainingRow]) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Return the rows with an advantage on some unmasked token, demonstrations included, and the other rows.

    If the first list would be empty, or had no image although the batch has some, one such row of the others is moved
    there. Its backward pass gives gradients, even if they are zeros, so that the optimizer's moments still update those
    weights."""
    first, others = list[TrainingRow](), list[TrainingRow]()
    for row in rows:
        (first if is_demonstration(row) or np.count_nonzero(row.advantages * row.loss_mask) else others).append(row)
    if others and not first:
        first.append(others.pop(0))
    if not any(row.images for row in first):
        place = next((place for place, row in enumerate(others) if row.images), None)
        if place is not None:
            first.append(others.pop(place))
    return first, others


def has_gradient(loss: Tensor, policy_BT: Tensor) -> bool:
    """Return whether the loss changes with the logprobs."""
    (found,) = torch.autograd.grad(loss, [policy_BT], retain_graph=True, allow_unused=True)
    return found is not None and bool(found.any())


@torch.no_grad()
def computed_by_row(
    rows: Sequence[TrainingRow],
    tokens_per_microbatch: int,
    network: Any,
    device: torch.device,
    compute: Callable[[Inputs], Tensor],
    share: MicrobatchShare,
) -> tuple[dict[int, np.ndarray], int]:
    """Return the outputs of `compute` for this share of the rows, by row number: float32 [T], 0 at masked tokens. Also
    return the number of micro-batches by which other processes exceed this share."""
    parts = micro_inputs(rows, tokens_per_microbatch, network, device)
    own = parts[share.number :: share.count]
    found = dict[int, np.ndarray]()
    for numbers, inputs in own:
        found_BT = compute(inputs).float().cpu().numpy()
        for place, number in enumerate(numbers.tolist()):
            found[number] = found_BT[place, : len(rows[number].token_ids)]
    return found, -(-len(parts) // share.count) - len(own)


def micro_inputs(
    rows: Sequence[TrainingRow],
    tokens_per_microbatch: int,
    network: Network,
    device: torch.device,
    *,
    whole_groups: bool = False,
) -> list[tuple[np.ndarray, Inputs]]:
    """Return the micro-batches, each with the numbers of its rows."""
    lengths_N = np.asarray([len(row.token_ids) for row in rows], dtype=np.int64)
    groups_N = np.asarray([row.group for row in rows], dtype=np.int64) if whole_groups else None
    parts = split_microbatches(
        lengths_N,
        tokens_per_microbatch,
        packed=network.packs,
        groups_N=groups_N,
        forest=grow(keys(rows)) if network.shares and lengths_N.any() else None,
    )
    return [
        (part, make_inputs([rows[one] for one in part], device, packed=network.packs, shared=network.shares))
        for part in parts
    ]


def minibatch_rows(rows: Sequence[TrainingRow], plan: UpdatePlan, whole_groups: bool) -> list[list[TrainingRow]]:
    """Return the rows of each mini-batch. Rows without unmasked tokens are left out."""
    rows = [row for row in rows if row.num_trained]
    names = [(is_demonstration(row), row.stratum) for row in rows] if plan.stratified else [(False, "")] * len(rows)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    groups_N, strata_N, rollouts_N = (
        np.asarray(one, dtype=np.int64)
        for one in ([row.group for row in rows], [numbers[name] for name in names], [row.rollout for row in rows])
    )
    parts = split_minibatches(
        groups_N, plan.minibatches, strata_N=strata_N, rollouts_N=None if whole_groups else rollouts_N
    )
    return [[rows[number] for number in part] for part in parts]
