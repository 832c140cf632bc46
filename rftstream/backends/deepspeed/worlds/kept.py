"""The state between two batches in the main memory of rank 0, from which another world of ranks goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rftstream.backends.base import POLICY
from rftstream.backends.deepspeed.rank_training import Rank
from rftstream.backends.deepspeed.shards import MASTER, REFERENCE


@dataclass(slots=True)
class KeptState:
    """Whole masters and moments of all networks, 12 bytes for each trained parameter, and the random numbers of rank 0.

    It is complete before it takes the place of the one before. So there is always one from which all ranks can go on,
    wherever they were lost."""

    tensors: dict[tuple[str, str, str], Tensor] = field(default_factory=dict)
    """Tensors in float32, by network, kind and name."""
    steps: dict[str, float] = field(default_factory=dict)
    """Network -> number of steps that its optimizer has taken."""
    reference: Mapping[str, Tensor] | None = None
    """Masters of a renewed reference."""
    random: Tensor = field(default_factory=torch.get_rng_state)

    @staticmethod
    def of(rank: Rank, call: Callable[..., Any], *, reference: Mapping[str, Tensor] | None) -> KeptState:
        """Collect the state from all ranks. `call`: has all ranks make a call, as `DeepSpeedBackend._call` does."""
        kept = KeptState(reference=reference)

        def keep(network: str, kind: str, name: str, value: Tensor) -> None:
            kept.tensors[network, kind, name] = value.detach().to("cpu", torch.float32, copy=True)

        call("give", {}, {"keep": keep})
        kept.steps = {network: trained.shards.num_steps for network, trained in rank.trained.items()}
        return kept

    def put(self, call: Callable[..., Any]) -> None:
        """Give all ranks this state. They have just been opened."""
        if self.reference is not None:
            masters = self.reference
            call("load_reference", {"renewed": True}, {"renewed": True, "read": lambda _, name: masters[name]})
        for network, steps in self.steps.items():
            arguments = {"network": network, "moments": bool(steps), "num_steps": steps}

            def read(kind: str, name: str, network: str = network) -> Tensor:
                return self.tensors[network, kind, name]

            call("load", arguments, {**arguments, "read": read})
        torch.set_rng_state(self.random)

    def renew_reference(self) -> None:
        """Make the policy the reference."""
        self.reference = {
            name: value for (network, kind, name), value in self.tensors.items() if (network, kind) == (POLICY, MASTER)
        }

    def read(self, network: str, kind: str, name: str) -> Tensor:
        """Return a master, a moment or a master of the renewed reference: the whole tensor in float32, not a copy."""
        if kind == REFERENCE:
            assert self.reference is not None
            return self.reference[name]
        return self.tensors[network, kind, name]

    def num_steps(self, network: str) -> float:
        """Return the number of steps that the network's optimizer has taken."""
        return self.steps[network]
