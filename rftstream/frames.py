"""Frames: messages of a known length on a stream of bytes, as processes of one machine send them to each other.

A frame is the length of its body in four bytes, little-endian, and the body.
"""

from __future__ import annotations


def frame(body: bytes) -> bytes:
    """Return the frame that holds `body`."""
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """Cuts a stream of bytes into frames. Each end of a pipe has one, and calls `feed` with the bytes that it reads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that are complete now. ValueError for a length that no frame has."""
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= 4:
            length = int.from_bytes(self._buffer[start : start + 4], "little")
            if length > self._max_bytes:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._buffer) - start - 4 < length:
                break
            bodies.append(bytes(self._buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._buffer[:start]
        return bodies
