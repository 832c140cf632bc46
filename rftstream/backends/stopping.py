"""How a batch is left half trained by a trainer that is told to leave: its successor trains it again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from rftstream.errors import RftError


class UpdateStopped(RftError):
    """The batch was left half trained. Masters and optimizer are as before it."""


class UpdateStop:
    """The request to leave a batch half trained. A backend that can do so makes one, as its attribute `stopping`.

    The trainer's thread calls `ask` once. The backend's thread trains inside of `allowed`, and there raises
    UpdateStopped at the next `check`. Outside of it `check` does nothing; an optimizer step does not call it."""

    def __init__(self, *, closely: bool = False) -> None:
        """`closely`: check before each layer of models, and at each gradient, since on a CPU a pass may take minutes.
        Compiled layers have no such hooks."""
        self._closely = closely
        self._asked = threading.Event()
        self._is_allowed = False

    def ask(self) -> None:
        """Ask that the computation end soon. No batch follows."""
        self._asked.set()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let `check` raise inside of this context."""
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False

    def check(self, *_: Any) -> None:
        """Raise UpdateStopped if that was asked for. Any arguments are ignored, so that this can be a hook."""
        if self._is_allowed and self._asked.is_set():
            raise UpdateStopped("the batch was left half trained")

    def sleep(self, seconds: float) -> None:
        """Wait, and check meanwhile."""
        self._asked.wait(seconds)
        self.check()

    def watch(self, model: Any) -> None:
        """Check before each forward pass of a model of torch, which begins with its embeddings."""
        from torch.nn import Embedding, Module

        modules: list[Module] = [module for module in model.modules() if isinstance(module, Embedding)]
        if self._closely:
            from transformers.modeling_layers import GradientCheckpointingLayer

            modules += [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.check)
        for module in modules:
            module.register_forward_pre_hook(self.check)


def stop_allowed(backend: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the backend may leave a batch half trained. It does nothing for one that cannot."""
    stopping: UpdateStop | None = getattr(backend, "stopping", None)
    return contextlib.nullcontext() if stopping is None else stopping.allowed()
