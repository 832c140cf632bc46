"""Bases for steps: each gives the optional members of its protocol their defaults.

A step inherits from one of these, and writes only the members that it has something to do in. The required members
(`recover`, `absorb`, `advance` ... of a single step; `start`, `advance` ... of a concurrent one) have no default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rftstream.contracts.records import Record
from rftstream.errors import ContractError
from rftstream.service.role import FOREVER, Received, Wakeup


class SingleStepDefaults:
    """A base of single steps. By default a step never has enough in hand, never ends by itself, and does nothing when
    it is paused, drained, told to leave or closed."""

    @property
    def outlives_the_run(self) -> bool:
        """Return False: the step leaves as soon as the run is finished."""
        return False

    @property
    def full(self) -> bool:
        """Return False: the step takes whatever is on the log."""
        return False

    @property
    def busy(self) -> bool:
        """Return False: the step begins nothing outside of `advance`."""
        return False

    @property
    def done(self) -> bool:
        """Return False: the step works until the run is finished."""
        return False

    def undecodable(self, record: Record, error: ContractError) -> None:
        """Pass over the record; the loop dead-letters it."""

    def idle_s(self) -> float:
        """Return FOREVER: only a record brings work."""
        return FOREVER

    def paused(self, paused: bool) -> None:
        """Go on: what the step does is bounded by what it is given."""

    def draining(self) -> None:
        """Go on: the end comes by the log."""

    def leave(self) -> None:
        """Save nothing: all that a successor needs is on the log."""

    def close(self) -> None:
        """Release nothing."""


class ConcurrentStepDefaults:
    """A base of concurrent steps. By default a step follows no topic, answers nobody outside, reports nothing and
    releases nothing."""

    def follow(self, received: Received) -> None:
        """Pass over the record."""

    def committed(self, saved: Collection[int], finished: Collection[int]) -> None:
        """Do nothing: readers of the log see the results."""

    def health(self) -> Mapping[str, object]:
        """Return nothing beside what the loop reports."""
        return {}

    def wakeups(self) -> Sequence[Wakeup]:
        """Return nothing: only the log and the time wake the worker."""
        return ()

    def close(self) -> None:
        """Release nothing."""
