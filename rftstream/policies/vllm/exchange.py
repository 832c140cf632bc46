"""How a version gets into vLLM's engine: the waiting version, the version of the engine's workers, and the exchange
between two decoding steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rftstream.errors import PolicyError
from rftstream.policies.vllm.shared import SharedAdapter
from rftstream.weights.shared_memory import SharedTensors

ADAPTER = "rftstream"
"""The adapter's name in the engine. There is never more than one adapter."""

Shared = SharedTensors | SharedAdapter
"""A version in a form that the engine's processes can read."""


class WeightsExchange:
    """The weights of an engine. `Engine` makes it, puts each version there with `put`, and calls `take_newest` when the
    engine can load it: the engine is awake, and no request enters meanwhile. All calls come from the event loop's
    thread."""

    def __init__(self, *, has_images: bool) -> None:
        """`has_images`: whether the engine caches image features that its weights computed."""
        self._has_images = has_images
        self._newest: tuple[Shared, str] | None = None
        self.has_version = asyncio.Event()
        """Whether requests may enter: set while the engine has the newest readable version. It is unset before the
        first version, when the weights are random, and after a version that was gone before the engine could read
        it."""
        self._taken: Mapping[str, object] | None = None
        """Marks of the tensors that all of the engine's workers have; None while unknown."""
        self._is_whole = True
        """False during an exchange, and for good after an error in the middle of one."""
        self.label = ""
        """The version that the engine has."""
        self.adapter: Any = None
        """The adapter of all requests, as vLLM's LoRARequest; None if versions are whole models."""

    @property
    def is_due(self) -> bool:
        """Whether a version waits to be loaded."""
        return self._newest is not None

    def put(self, shared: Shared, label: str) -> None:
        """Put a version there to wait. It replaces a version that already waits."""
        self.drop()
        self._newest = (shared, label)

    def drop(self) -> None:
        """Drop the waiting version."""
        if self._newest is not None:
            _close(self._newest[0])
        self._newest = None

    def check_whole(self) -> None:
        """Raise PolicyError if an exchange failed: the engine may then have weights of two versions."""
        if not self._is_whole:
            raise PolicyError("policy vllm: the engine does not have all weights of a version; it cannot go on")

    async def take_newest(self, engine: Any, *, clear_cache: bool) -> bool:
        """Make the engine load the waiting version. Return False if its memory has changed since: running requests
        continue, and new ones wait for the next version, since they may require one as new as this. PolicyError if the
        exchange fails."""
        assert self._newest is not None
        (shared, label), self._newest = self._newest, None
        if await self._exchange(engine, shared, label, clear_cache=clear_cache):
            self.has_version.set()
            return True
        self.has_version.clear()
        return False

    async def _exchange(self, engine: Any, shared: Shared, label: str, *, clear_cache: bool) -> bool:
        """Exchange the weights. Return False if their memory has changed; then nothing was done."""
        self.check_whole()
        try:
            if isinstance(shared, SharedAdapter):
                self._is_whole = False
                await engine.pause_generation(mode="keep", clear_cache=clear_cache)
                self.adapter = await _adapter_taken(engine, shared.path)
            else:
                with shared.reading() as is_current:
                    if not is_current:
                        return False
                    self._is_whole = False
                    await engine.pause_generation(mode="keep", clear_cache=clear_cache)
                    await self._hand_over(engine, shared)
            if self._has_images:  # the workers have dropped them, and the scheduler must know
                await engine.reset_encoder_cache()
            await engine.update_weight_version(label)
            await engine.resume_generation()
        except Exception as error:  # half old, half new: this engine cannot continue
            raise PolicyError(f"policy vllm: taking over weights {label} failed: {short(error)}") from error
        finally:
            _close(shared)
        self.label, self._is_whole = label, True
        return True

    async def _hand_over(self, engine: Any, shared: SharedTensors) -> None:
        """Make each worker read the tensors that differ from its own."""
        changed, self._taken = shared.changed_since(self._taken), None
        if changed is None or changed:
            answers = await engine.collective_rpc("rftstream_load", args=(shared.memory.path, changed))
            expected = (len(shared), len(shared if changed is None else changed))
            if not answers or any((answer["tensors"], answer["changed"]) != expected for answer in answers):
                raise PolicyError(f"its workers read {answers}, expected {expected[0]} tensors, {expected[1]} changed")
        self._taken = shared.marks


def _close(shared: Shared) -> None:
    """Release a version that nobody will read any more. SharedTensors belong to their owner."""
    if isinstance(shared, SharedAdapter):
        shared.close()


async def _adapter_taken(engine: Any, path: str) -> Any:
    """Replace the engine's adapter by the one in a folder, and return the LoRARequest for it. Running requests refer to
    the adapter by its number, so they continue with the new one."""
    from vllm.lora.request import LoRARequest

    if not await engine.add_lora(LoRARequest(ADAPTER, 1, path, load_inplace=True)):
        raise PolicyError("the engine did not take the adapter")
    return LoRARequest(ADAPTER, 1, path)


def short(error: BaseException) -> str:
    """Return a vLLM error in one line, cut if it is long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
