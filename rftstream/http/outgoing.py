"""The data that a server has written to a client, and whether the client has taken it."""

from __future__ import annotations

import asyncio


class Outgoing(asyncio.Protocol):
    """The writing side of a connection, a base class of connections. The event loop calls `pause_writing` and
    `resume_writing`. A subclass sets `_transport` when the connection is made, and `is_lost` when the client is
    gone."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._drained = asyncio.Event()
        """Set when the client has taken all sent data."""
        self.is_lost = False
        """Whether the client has gone away."""

    def pause_writing(self) -> None:
        """Record that the client has not taken all sent data."""
        self._drained.clear()

    def resume_writing(self) -> None:
        """Record that the client has taken all sent data."""
        self._drained.set()

    async def is_delivered(self) -> bool:
        """Wait until the client has taken all sent data. Return False if the client went away first."""
        await self._drained.wait()
        return self.has_taken_all()

    def has_taken_all(self) -> bool:
        """Return whether the client has taken all sent data and is still there."""
        # A closing connection does not know yet that it is lost, and nothing was written to it.
        is_there = not self.is_lost and self._transport is not None and not self._transport.is_closing()
        return is_there and self._drained.is_set()

    def close(self) -> None:
        """Close the connection after the sent data was taken."""
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
