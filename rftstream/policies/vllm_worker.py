"""The part that runs inside vLLM's own worker processes and takes over weights in place. vLLM mixes this class into its
worker.

This module does not import vllm: the engine imports this module."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module


class WeightsReceiver:
    """The methods that the engine calls by name in every worker, between two decoding steps."""

    def rftstream_load(self, path: str) -> None:
        """Load all weights from a safetensors file with the names of the checkpoint.

        The model's own loader fuses, splits and shards them, and prepares what its kernels need, as in the first
        load."""
        from safetensors.torch import load_file

        worker = cast(Any, self)
        # Its complaints are about layers without weights of their own: rotary tables, a tied head.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        tensors: Iterable[tuple[str, Tensor]] = load_file(path).items()
        names = [name for name, _ in worker.get_model().named_parameters()]
        worker.reload_weights(weights_iterator=((renamed(name, names), tensor) for name, tensor in tensors))
        for module in _tied(worker.get_model()):
            module.quant_method.process_weights_after_loading(module)

    def rftstream_prepare(self, client: int) -> None:
        """Prepare the worker, once, before anything is sampled. `client` is the id of the process that the engine
        works for, on this machine."""
        worker = cast(Any, self)
        if worker.device.type == "cpu":
            _spare_generators(worker.model_runner)
        self._end_with(client)

    def _end_with(self, client: int) -> None:
        """Start a thread that ends the engine when its client is gone. A client that is killed cannot tell anybody."""
        engine = os.getppid() if os.getppid() != client else None
        descriptor = os.pidfd_open(client)

        def watch() -> None:
            select.select([descriptor], [], [])
            if engine is not None and engine == os.getppid():
                os.kill(engine, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, name="rftstream-watch", daemon=True).start()


TOWER, INNER = "vision_tower.", "vision_model."


def renamed(name: str, known: Iterable[str]) -> str:
    """Return a weight's name as the engine's loader knows it, whose own parameters are `known`. CLIP's and SigLIP's
    towers have one module less in transformers 5 than in the checkpoints that vLLM reads."""
    head, tower, rest = name.partition(TOWER)
    if tower and not rest.startswith(INNER) and any(f"{TOWER}{INNER}" in one for one in known):
        return f"{head}{TOWER}{INNER}{rest}"
    return name


def _tied(model: Module) -> Iterator[Any]:
    """Yield the layers that share another layer's weight, and of which vLLM's kernels for CPUs keep a packed copy.
    `reload_weights` makes the copy anew only for the layer that the weight was loaded into."""
    seen: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        if weight.data_ptr() in seen and hasattr(module, "cpu_linear"):
            yield module
        seen.add(weight.data_ptr())


def _spare_generators(runner: Any) -> None:
    """Keep vLLM from resetting random numbers on a CPU, where that fails and ends the worker.

    vLLM resets the numbers of a request when it throws a token away: of a long prompt that is computed in pieces, or
    of one computed anew. Here such a request goes on with its next numbers."""
    if (original := getattr(runner, "_bookkeeping_sync", None)) is None:
        return

    def bookkeeping(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        thrown = [row for row in generators if runner.discard_request_mask.np[row]]
        spared = {row: generators.pop(row) for row in thrown}
        try:
            return original(*args, **kwargs)
        finally:
            generators.update(spared)

    runner._bookkeeping_sync = bookkeeping
