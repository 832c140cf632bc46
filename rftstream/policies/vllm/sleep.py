"""The part of vLLM's engine that releases the GPU's memory: when it is idle, or on request."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

from rftstream.errors import PolicyError
from rftstream.policies.vllm.arguments import EngineSettings
from rftstream.policies.vllm.exchange import WeightsExchange, short


class SleepingEngine:
    """A base of `Engine`. All methods are called in the event loop's thread."""

    _config: EngineSettings
    _engine: Any
    _running: dict[str, asyncio.Task[None]]
    _queues: dict[str, Any]
    """Queues of the requests that run in the engine, by request id."""
    _outcomes: queue.SimpleQueue[Any]
    _gate: asyncio.Lock
    _weights: WeightsExchange
    started: bool

    def __init__(self) -> None:
        self._asleep = False
        self._sleep: asyncio.TimerHandle | None = None
        self._sleeping: asyncio.Task[None] | None = None
        self._waking: asyncio.Task[None] | None = None

    def _begin_loading(self) -> None:
        """Begin to load the newest version after all running requests have finished, unless that has begun."""
        raise NotImplementedError

    def _plan_sleep(self) -> None:
        after_s = self._config.sleep_after_s
        if after_s is not None and not self._running:
            loop = asyncio.get_running_loop()
            self._cancel_sleep()
            self._sleep = loop.call_later(after_s, self._begin_sleep)

    def _cancel_sleep(self) -> None:
        if self._sleep is not None:
            self._sleep.cancel()
            self._sleep = None

    def _begin_sleep(self) -> None:
        self._sleeping = asyncio.get_running_loop().create_task(self._fall_asleep())

    async def _fall_asleep(self) -> None:
        async with self._gate:
            if self._running or self._asleep:
                return
            try:
                await self._engine.sleep(level=1, mode="keep")
                self._asleep = True
            except Exception as error:  # half asleep: its state is unknown
                self._outcomes.put(PolicyError(f"policy vllm: the engine did not fall asleep: {short(error)}"))

    async def rest(self) -> None:
        """Sleep until `rouse`, even with running requests: they are kept, and their computed states are dropped. No
        request enters, and no weights are exchanged meanwhile. PolicyError if the engine fails."""
        await self._gate.acquire()
        self._cancel_sleep()
        if self.started and not self._asleep:
            try:
                await self._engine.sleep(level=1, mode="keep")
            except Exception as error:  # half asleep: its state is unknown
                raise PolicyError(f"policy vllm: the engine did not fall asleep: {short(error)}") from error
            self._asleep = True

    async def rouse(self) -> None:
        """End the sleep of `rest`. PolicyError if the engine fails."""
        try:
            await self._wake_up()
        finally:
            self._gate.release()
        self._plan_sleep()

    async def _awake(self) -> None:
        """Wake the engine if it sleeps. If a waiting caller is cancelled, the waking continues."""
        self._cancel_sleep()
        if self._asleep:
            if self._waking is None:
                self._waking = asyncio.get_running_loop().create_task(self._wake())
            await asyncio.shield(self._waking)

    async def _wake(self) -> None:
        try:
            async with self._gate:
                await self._wake_up()
        except PolicyError as error:  # the waiting caller may be gone
            self._outcomes.put(error)
            raise
        finally:
            self._waking = None

    async def _wake_up(self) -> None:
        """Wake the engine, and load the version that came while it slept. The caller holds the gate."""
        if not self._asleep:  # it was told to rest and to wake while this caller waited for the gate
            return
        try:
            await self._engine.wake_up()
        except Exception as error:
            raise PolicyError(f"policy vllm: the engine did not wake: {short(error)}") from error
        self._asleep = False
        if self._weights.is_due and self._queues and self._config.in_flight == "finish":
            self._begin_loading()  # running requests were interrupted, and have to end first
        elif self._weights.is_due:
            await self._weights.take_newest(self._engine, clear_cache=True)
