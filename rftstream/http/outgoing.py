"""What a server has written to a client, and whether the client's side has taken it."""

from __future__ import annotations

import asyncio


class Outgoing(asyncio.Protocol):
    """The writing side of a connection, a base of connections. The event loop calls `pause_writing` and
    `resume_writing`; who derives from it sets `_transport` when the connection is made, and `is_lost` when the client
    is gone."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._drained = asyncio.Event()
        """Whether the client's side has taken all that was sent."""
        self.is_lost = False
        """Whether the client has gone away."""

    def pause_writing(self) -> None:
        """Note that the client has not taken all that was sent."""
        self._drained.clear()

    def resume_writing(self) -> None:
        """Note that the client has taken all that was sent."""
        self._drained.set()

    async def is_delivered(self) -> bool:
        """Wait until the client's side has taken all that was sent; return False if it went away before."""
        await self._drained.wait()
        return self.has_taken_all()

    def has_taken_all(self) -> bool:
        """Return whether the client's side has taken all that was sent, and is there."""
        # A connection that is closing has not heard that it is lost yet, and nothing was written to it.
        is_there = not self.is_lost and self._transport is not None and not self._transport.is_closing()
        return is_there and self._drained.is_set()

    def close(self) -> None:
        """Cut the connection, once what was sent is taken."""
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
