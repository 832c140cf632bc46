"""The part that runs inside vLLM's own worker processes and takes over weights in place. vLLM mixes this class into its
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
"""Modules of vLLM's reloading that complain about layers without weights of their own (rotary tables, a tied head), and
about weights that were not loaded, because they are as they were."""


class WeightsReceiver:
    """The methods that the engine calls by name in every worker, between two decoding steps."""

    _rftstream_uses: LayerUses | None = None

    def rftstream_load(self, path: str, changed: list[str] | None = None) -> dict[str, int]:
        """Load weights from a safetensors file with the names of the checkpoint: those that changed, by name, or all.
        Returns the numbers of tensors that are there, that changed, and that the model's loader was given.

        The file is mapped and not copied. The model's own loader fuses, splits and shards the tensors, and prepares
        what its kernels need, as in the first load. An error leaves a model that is of no use."""
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


def map_tensors(path: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as views of the file itself, sorted by name. A loader that writes to
    them writes to a copy of its own."""
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
    """Which layers of the engine's model the checkpoint's tensors go into, as the model's loader was seen to put them
    there. A worker makes it, loads through `watched`, and calls `learn` behind each load of all tensors.

    vLLM makes a layer anew from what it is given of it: from a fused layer's q without k and v would come rubbish. So
    of each layer all tensors are given, or none."""

    def __init__(self) -> None:
        self._names: dict[Module, set[str]] = {}
        """Layer -> what it takes of a whole checkpoint."""
        self._layers: dict[str, set[Module]] = {}
        """Tensor -> the layers that it goes into. A tensor that is not there goes into none, or nobody knows."""
        self._seen: dict[Module, set[str]] = {}
        """Layer -> what it took in the last load."""
        self._current = ""

    def watched(self, model: Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors to the model's loader, one after the other, and note which layers take them."""
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
        @functools.wraps(load)  # vLLM knows its own loaders by their names
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._seen.setdefault(module, set()).add(self._current)
            return load(*args, **kwargs)

        cast(Any, noted).rftstream_notes = True
        return noted

    def learn(self) -> None:
        """Take what was seen in the last load for what each layer needs. Nothing is known of a loader that puts tensors
        aside and loads them in the end."""
        self._names, self._layers = self._seen, {}
        if not self._is_in_order():
            return
        for module, names in self._names.items():
            for name in names:
                self._layers.setdefault(name, set()).add(module)

    def _is_in_order(self) -> bool:
        return all("" not in names for names in self._seen.values())

    def needed(self, changed: Iterable[str]) -> list[str] | None:
        """Return what has to be given to the loader for tensors that changed, sorted: they, and all others of their
        layers. None for all there is, where it is not known which layers a tensor goes into."""
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
        """Return whether a layer that takes tensors took none in the last load."""
        return module in self._names and module not in self._seen

    def are_complete(self) -> bool:
        """Return whether in the last load each layer took all that it needs, or nothing."""
        return all(names == self._names.get(module) for module, names in self._seen.items())


TOWER, INNER = "vision_tower.", "vision_model."


def renamed(name: str, known: Iterable[str]) -> str:
    """Return a weight's name as the engine's loader knows it, whose own parameters are `known`. CLIP's and SigLIP's
    towers have one module less in transformers 5 than in the checkpoints that vLLM reads."""
    head, tower, rest = name.partition(TOWER)
    if tower and not rest.startswith(INNER) and any(f"{TOWER}{INNER}" in one for one in known):
        return f"{head}{TOWER}{INNER}{rest}"
    return name


def _tied(model: Module) -> Iterator[tuple[Module, Any]]:
    """Yield pairs of layers: one that has a weight, and one that shares it, and of which vLLM's kernels for CPUs keep a
    packed copy. `reload_weights` makes the copy anew only for the layer that the weight was loaded into."""
    owners: dict[int, Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        owner = owners.setdefault(weight.data_ptr(), module)
        if owner is not module and hasattr(module, "cpu_linear"):
            yield owner, module


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
