"""How ranks check that the others are alive: each rank increments a number in the store of rank 0.

When a process ends, its connections are closed, and the others notice. When a process hangs, or its host is cut off,
its connections stay open for hours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

BEAT_S = 0.5
"""Seconds between two beats of a rank, and between two checks of the others' beats."""


class Heartbeat:
    """Sends the beats of one rank, and checks the beats of others.

    `Ranks` makes one in rank 0 for all others, and each other rank makes one for rank 0. `start` is called first. Then
    the owner calls `tick` every BEAT_S and asks for the `silent` ranks."""

    def __init__(self, store: Any, rank: int, others: Iterable[int], *, silence_s: float) -> None:
        """`store`: a connection of its own, since it hangs when rank 0 does. `silence_s`: seconds without a beat after
        which a rank is silent."""
        self._store, self._rank, self._silence_s = store, rank, silence_s
        self._heard = dict.fromkeys(others, 0)
        self._missed = dict.fromkeys(self._heard, 0)
        """Ticks since the last beat. Ticks are counted, not seconds, because ticks stop when this process is
        stopped."""
        self._expects = False
        self._ended = threading.Event()

    def expect(self) -> None:
        """Count the others as silent from now on though they were never heard: they live already."""
        self._expects = True

    def start(self) -> None:
        """Start to beat and listen, in a thread."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Stop beating and listening."""
        self._ended.set()

    def tick(self) -> None:
        """Count a tick of BEAT_S."""
        for rank, heard in self._heard.items():
            if heard or self._expects:  # before its first beat a rank may still be starting
                self._missed[rank] += 1

    def silent(self) -> list[int]:
        """Return the ranks that were heard before and are silent now."""
        return [rank for rank, missed in self._missed.items() if missed * BEAT_S > self._silence_s]

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._store.add(f"beat/{self._rank}", 1)
                for rank, before in self._heard.items():
                    heard = self._store.add(f"beat/{rank}", 0)
                    if heard != before:
                        self._heard[rank], self._missed[rank] = heard, 0
            except RuntimeError:  # too late this time; or rank 0 is gone, which other checks detect
                continue
