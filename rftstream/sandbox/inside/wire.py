"""Messages between the two sides of the sandbox, over a stream socket: eight bytes of lengths, a JSON head, a body.

Descriptors travel with the first byte of a message. The outer side rejects a message that is too large.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

MAX_HEAD_BYTES = 64 << 20
MAX_BODY_BYTES = 256 << 20
MAX_DESCRIPTORS = 8


class WireBroken(OSError):
    """The other side is gone, or sent an invalid message."""


def send(
    channel: socket.socket, head: dict[str, Any], body: bytes | memoryview = b"", descriptors: Sequence[int] = ()
) -> None:
    """Send a message. WireBroken if the other side is gone."""
    text = json.dumps(head, separators=(",", ":")).encode()
    data = len(text).to_bytes(4, "little") + len(body).to_bytes(4, "little") + text
    try:
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            data = data[channel.sendmsg([data], rights) :]
        channel.sendall(data)
        if body:
            channel.sendall(body)
    except (BrokenPipeError, ConnectionResetError, TimeoutError) as error:
        raise WireBroken(f"cannot be sent: {error}") from None


def receive(channel: socket.socket, *, max_bytes: int = MAX_BODY_BYTES) -> tuple[dict[str, Any], bytes, list[int]]:
    """Return the next message: head, body and descriptors. WireBroken at the end of the stream."""
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
    try:
        data, ancillary, _, _ = channel.recvmsg(8, space, socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
        lengths = data + _read(channel, 8 - len(data)) if data else b""
        head_bytes, body_bytes = int.from_bytes(lengths[:4], "little"), int.from_bytes(lengths[4:], "little")
        if not data or head_bytes > MAX_HEAD_BYTES or body_bytes > max_bytes:
            for descriptor in descriptors:
                os.close(descriptor)
            raise WireBroken("the other side is gone" if not data else f"a message of {head_bytes + body_bytes} bytes")
        head = json.loads(_read(channel, head_bytes))
        return head, _read(channel, body_bytes), list(descriptors)
    except (ConnectionResetError, ValueError, RecursionError) as error:
        raise WireBroken(f"no message: {error}") from None


def _read(channel: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = channel.recv(min(length, 1 << 20))
        if not part:
            raise WireBroken("the other side is gone in the middle of a message")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
