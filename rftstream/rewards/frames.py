"""How a scorer and its children talk: frames of length and msgpack over pipes, and one shared page.

Parent to child: first a Setup, then lists of Items. Child to parent: a Ready, then lists of Results. The page holds
what the child is at right now (the number of the item, or of the first of several, how many, and since when), so that
the parent knows, without waking the child, which items hang or were the end of it.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import msgspec

from rftstream.rewards.base import RewardInput, Score

MAX_FRAME_BYTES = 256 * 1024 * 1024
PAGE_BYTES = 4096
IDLE = -1
"""Number on the page while no item is being scored."""

_PAGE = struct.Struct("<dqq")


class Setup(msgspec.Struct, kw_only=True):
    """The first message to a child: what it needs to build the rewards of the run."""

    config: dict[str, Any]
    """The resolved run file as plain values."""
    path: list[str]
    """The parent's sys.path, so that what it can import the child can, too."""
    slow_s: float = math.inf
    """After a failure that took so long the child tries no other item of that reward that came with it."""


class Ready(msgspec.Struct, kw_only=True):
    """The first message of a child: its rewards are built, or why they are not."""

    error: str | None = None
    """The run file's rewards cannot be built."""
    rewards: dict[str, tuple[str, str]] = {}
    """Name of the reward -> scorer and its version."""
    batched: list[str] = []
    """Rewards that take several rollouts at once."""


class ScoreItem(msgspec.Struct, array_like=True):
    """A rollout that a child is to score, with the number that its Result will name."""

    number: int
    reward: str
    input: RewardInput


class Result(msgspec.Struct, array_like=True):
    """What a child made of an item: a score, or a reason and its detail."""

    number: int
    score: Score | None
    reason: str | None = None
    detail: str = ""
    seconds: float = 0.0
    """Seconds that the call took, with all items that were scored in it."""
    tried: bool = True
    """False: it comes back as it was, since one before it gave nothing for long."""


def pack(value: Any) -> bytes:
    """Return the frame that holds `value`."""
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "little") + body


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now. ValueError for a length no frame has."""
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= 4:
            length = int.from_bytes(self._buffer[start : start + 4], "little")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._buffer) - start - 4 < length:
                break
            bodies.append(bytes(self._buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._buffer[:start]
        return bodies


class At(NamedTuple):
    """What a child is at."""

    number: int
    """Number of the item, or of the first of several; IDLE: none."""
    num_items: int
    since: float
    """time.monotonic."""


def write_page(page: Any, at: At) -> None:
    """Write into the shared page what the child is at."""
    _PAGE.pack_into(page, 0, at.since, at.number, at.num_items)


def read_page(page: Any) -> At:
    """Return what the child is at, from the shared page."""
    since, number, num_items = _PAGE.unpack_from(page, 0)
    return At(number, num_items, since)
