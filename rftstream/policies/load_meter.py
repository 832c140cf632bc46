"""How busy `hf` is: the tokens of its steps, their seconds, and the memory that its rows take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import torch

from rftstream import metrics
from rftstream.policies.base import EngineLoad

if TYPE_CHECKING:
    from rftstream.policies.hf.cache import SlotCache

MEASURED_EVERY_S = 1.0
"""Seconds of work between two measurements of the free memory."""
ROOM = 0.4
"""Share of the free memory that further rows may take. A cache that grows is copied, and passes need memory, too."""


class LoadMeter:
    """The measures of an engine. `HfPolicy` makes it, adds the tokens of each step, and does the work that they take
    inside `with meter`. Prompts are computed outside: their seconds are those of many later tokens."""

    def __init__(self, cache: SlotCache, device: torch.device, num_waiting: Callable[[], int]) -> None:
        """`num_waiting`: returns the number of requests that wait for a place."""
        self._cache, self._device, self._num_waiting = cache, device, num_waiting
        self._computed, self._reused = (metrics.PROMPT_TOKENS.labels(result) for result in ("computed", "reused"))
        self.num_tokens = 0
        self._busy_s, self._began_s = 0.0, 0.0
        self._memory, self._measured_at_s = 0.0, -MEASURED_EVERY_S
        """Used share of the memory for rows, and the value of `_busy_s` at its measurement."""

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._busy_s += time.perf_counter() - self._began_s

    def asked(self, num_tokens: int, num_computed: int) -> None:
        """Count the tokens of prompts, and those that had to be computed."""
        self._computed.inc(num_computed)
        self._reused.inc(num_tokens - num_computed)

    def load(self) -> EngineLoad:
        """Return the measures."""
        if self._busy_s >= self._measured_at_s + MEASURED_EVERY_S:
            self._measured_at_s = self._busy_s
            used = self._cache.used_bytes
            free = self._cache.spare_bytes + _free_bytes(self._device)
            self._memory = used / max(1.0, used + ROOM * free)
        return EngineLoad(
            num_tokens=self.num_tokens, busy_s=self._busy_s, num_waiting=self._num_waiting(), memory=self._memory
        )


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held
