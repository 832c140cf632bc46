"""The part that runs inside vLLM's own worker processes and replaces weights in place. vLLM mixes this class into its
worker.

This module does not import vllm: the engine imports this module."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import select
import signal
import threading
from typing import TYPE_CHECKING, Any, cast

from rftstream.weights.snapshot import DTYPES, RawTensor, decode_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Module

QUIET = ("layerwise", "inplace")
"""Modules of vLLM's reloading that warn about layers without their own weights (rotary tables, a tied head), and about
weights that were not loaded because they are unchanged."""


class WeightsReceiver:
    """The methods that the engine calls by name in every worker, between two decoding steps."""

    _rftstream_uses: LayerUses | None = None

    def rftstream_load(self, path: str, changed: list[str] | None = None) -> dict[str, int]:
        """Load weights from a safetensors file with the names of the checkpoint: the changed ones, by name, or all.
        Return the numbers of tensors in the file, of changed ones, and of those passed to the model's loader.

        The file is mapped and not copied. The model's own loader fuses, splits and shards the tensors, and prepares
        them for its kernels, as in the first load. After an error the model is unusable."""
        if self._rftstream_uses is None:
            self._rftstream_uses = LayerUses()
        uses, tensors = self._rftstream_uses, map_tensors(path)
        given = None if changed is None else uses.needed(changed)
        if given is not None:
            self._rftstream_take({name: tensors[name] for name in given})
        if given is None or not uses.are_complete():
            given = list(tensors)
            self._rftstream_take(tensors)
            uses.learn()
        return {"tensors": len(tensors), "changed": len(tensors if changed is None else changed), "given": len(given)}

    def _rftstream_take(self, tensors: Mapping[str, Tensor]) -> None:
        worker = cast(Any, self)
        for module in QUIET:
            logging.getLogger(f"vllm.model_executor.model_loader.reload.{module}").setLevel(logging.ERROR)
        model = worker.get_model()
        names = [name for name, _ in model.named_parameters()]
        uses = self._rftstream_uses
        assert uses is not None
        watched = uses.watched(model, tensors)
        worker.reload_weights(weights_iterator=((renamed(name, names), tensor) for name, tensor in watched))
        for owner, module in _tied(model):
            if not uses.left_alone(owner):
                module.quant_method.process_weights_after_loading(module)

    def rftstream_prepare(self, client: int) -> None:
        """Prepare the worker, once, before anything is sampled. `client`: id of the process on this machine that uses
        the engine."""
        worker = cast(Any, self)
        if worker.device.type == "cpu":
            _spare_generators(worker.model_runner)
            _repack_experts(worker.get_model())
        self._end_with(client)

    def _end_with(self, client: int) -> None:
        """Start a thread that ends the engine when its client is gone, since a killed client cannot say so."""
        engine = os.getppid() if os.getppid() != client else None
        descriptor = os.pidfd_open(client)

        def watch() -> None:
            select.select([descriptor], [], [])
            if engine is not None and engine == os.getppid():
                os.kill(engine, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, name="rftstream-watch", daemon=True).start()


def map_tensors(path: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as views of the mapped file, sorted by name. If a loader writes to them,
    it writes to a private copy."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _view(tensor) for name, tensor in decode_snapshot(mapping, where=path).items()}


def _view(tensor: RawTensor) -> Tensor:
    import torch

    dtype = _torch_dtypes()[tensor.dtype]
    if not tensor.num_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(tensor.data, dtype=torch.uint8).view(dtype).reshape(tensor.shape)


@functools.cache
def _torch_dtypes() -> dict[str, Any]:
    import torch

    names = {ours: name for name, ours in DTYPES.items()} | {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
    return {ours: getattr(torch, name) for ours, name in names.items() if hasattr(torch, name)}


class LayerUses:
    """Records which layers of the engine's model use which tensors of the checkpoint, by observing the model's loader.
    A worker makes it, loads through `watched`, and calls `learn` after each load of all tensors.

    vLLM rebuilds a layer from the tensors that it gets: a fused layer that got q without k and v would be garbage. So
    each layer gets all of its tensors, or none."""

    def __init__(self) -> None:
        self._names: dict[Module, set[str]] = {}
        """Layer -> the tensors that it uses of a whole checkpoint."""
        self._layers: dict[str, set[Module]] = {}
        """Tensor -> the layers that use it. A tensor that is missing here is used by no layer, or its layers are
        unknown."""
        self._seen: dict[Module, set[str]] = {}
        """Layer -> the tensors that it got in the last load."""
        self._current = ""

    def watched(self, model: Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors to the model's loader, one after the other, and record which layers take them."""
        self._seen = {}
        for module in model.modules():
            for held in (*module._parameters.values(), *module._buffers.values()):
                load = getattr(held, "weight_loader", None)
                if load is not None and not hasattr(load, "rftstream_notes"):
                    cast(Any, held).weight_loader = self._noting(module, load)
        for name, tensor in tensors.items():
            self._current = name
            yield name, tensor
        self._current = ""

    def _noting(self, module: Module, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)  # vLLM recognises its own loaders by their names
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._seen.setdefault(module, set()).add(self._current)
            return load(*args, **kwargs)

        cast(Any, noted).rftstream_notes = True
        return noted

    def learn(self) -> None:
        """Learn from the last load which tensors each layer needs. Nothing can be learned from a loader that collects
        tensors and loads them at the end."""
        self._names, self._layers = self._seen, {}
        if not self._is_in_order():
            return
        for module, names in self._names.items():
            for name in names:
                self._layers.setdefault(name, set()).add(module)

    def _is_in_order(self) -> bool:
        return all("" not in names for names in self._seen.values())

    def needed(self, changed: Iterable[str]) -> list[str] | None:
        """Return the tensors to pass to the loader if `changed` ones changed, sorted: these, and all others of their
        layers. None for all tensors, if it is unknown which layers use one of them."""
        needed: set[str] = set()
        waiting = set(changed)
        while waiting:
            name = waiting.pop()
            if name not in self._layers:
                return None
            needed.add(name)
            for module in self._layers[name]:
                waiting |= self._names[module] - needed
        return sorted(needed)

    def left_alone(self, module: Module) -> bool:
        """Return whether a layer that uses tensors got none in the last load."""
        return module in self._names and module not in self._seen

    def are_complete(self) -> bool:
        """Return whether in the last load each layer got all tensors that it needs, or none."""
        return all(names == self._names.get(module) for module, names in self._seen.items())


TOWER, INNER = "vision_tower.", "vision_model."


def renamed(name: str, known: Iterable[str]) -> str:
    """Return a weight's name as the engine's loader names it; `known` are the names of the loader's parameters. In
    transformers 5, CLIP's and SigLIP's towers have one module less than in the checkpoints that vLLM reads."""
    head, tower, rest = name.partition(TOWER)
    if tower and not rest.startswith(INNER) and any(f"{TOWER}{INNER}" in one for one in known):
        return f"{head}{TOWER}{INNER}{rest}"
    return name


def _tied(model: Module) -> Iterator[tuple[Module, Any]]:
    """Yield pairs of layers: one that has a weight, and one that shares it and for which vLLM's CPU kernels keep a
    packed copy. `reload_weights` renews the copy only for the layer into which the weight was loaded."""
    owners: dict[int, Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        owner = owners.setdefault(weight.data_ptr(), module)
        if owner is not module and hasattr(module, "cpu_linear"):
            yield owner, module


def _repack_experts(model: Module) -> None:
    """Keep vLLM from loading new weights of experts in the order of the checkpoint, where its CPU kernels need them
    packed: it packs them only while it makes a layer's kernel, which it does not do again when weights are replaced."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(getattr(method, "moe_kernel", None), "fused_experts"):
            method.process_weights_after_loading = functools.partial(_with_new_kernel, method)


def _with_new_kernel(method: Any, layer: Module) -> None:
    method.moe_kernel = None
    type(method).process_weights_after_loading(method, layer)


def _spare_generators(runner: Any) -> None:
    """Keep vLLM from resetting random numbers on a CPU, where that fails and ends the worker.

    vLLM resets a request's random numbers when it discards a token: for a long prompt that is computed in pieces, or
    for a recomputed one. Here such a request continues with its next numbers."""
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
