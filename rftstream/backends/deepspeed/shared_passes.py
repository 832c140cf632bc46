"""What one rank computes of a batch: its share of the micro-batches. The sum over ranks is the whole batch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rftstream.algorithms.base import TrainingRow
from rftstream.backends.base import UpdatePlan
from rftstream.backends.deepspeed.settings import RankShare
from rftstream.backends.passes import Passes
from rftstream.backends.torch.critic import CriticPasses


class SharedPasses(Passes):
    """The passes of one rank over a batch: its share of the micro-batches, with the denominators of the whole batch.

    `Rank.update` makes it for each batch. Rank 0 adds the parts of the other ranks with `add_part` afterwards."""

    def __init__(
        self,
        network: Any,
        rows: Sequence[TrainingRow],
        plan: UpdatePlan,
        device: torch.device,
        *,
        whole_groups: bool = False,
        share: RankShare,
    ) -> None:
        super().__init__(network, rows, plan, device, whole_groups=whole_groups)
        self._counts = share.counts
        self.num_of_all = self.num_microbatches
        self.num_rounds = [-(-len(minibatch.inputs) // share.count) for minibatch in self.minibatches]
        """Forward and backward passes that every rank takes for each mini-batch."""
        for minibatch in self.minibatches:
            minibatch.inputs = minibatch.inputs[share.number :: share.count]
            minibatch.proximal = minibatch.reference = [None] * len(minibatch.inputs)
        self.num_idle = sum(self.num_rounds) - self.num_microbatches
        """Micro-batches of a pass over the batch that this rank takes only because the others take one."""

    def part(self) -> dict[str, Any]:
        """Return what this rank added up, as plain numbers. It is nothing if another rank computed the same."""
        if not self._counts:
            return {"losses": [0.0] * len(self._losses), "sums": {}, "flops": 0.0, "num_read": 0}
        return {
            "losses": self._losses,
            "sums": {name: float(value) for name, value in self._sums.items()},
            "flops": self._flops,
            "num_read": self._num_read,
        }

    def add_part(self, part: Mapping[str, Any]) -> None:
        """Add what another rank added up. Its tokens count already: the denominators are the whole batch's."""
        self._losses = [mine + theirs for mine, theirs in zip(self._losses, part["losses"], strict=True)]
        self._add(part["sums"])
        self._flops += part["flops"]
        self._num_read += part["num_read"]


class SharedCriticPasses(SharedPasses, CriticPasses):
    """The passes of one rank over a batch through the critic."""
