"""The protocol between a scorer and its children: frames of length and msgpack over pipes, and one shared page.

The parent sends a Setup, then lists of ScoreItems. The child sends a Ready, then lists of Results. The page holds the
child's current work (an At). So the parent knows, without waking the child, which items hang or killed it. There
a child that hangs also writes where it is.
"""

from __future__ import annotations

import math
import os
import re
import signal
import struct
import sysconfig
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rftstream.frames import frame
from rftstream.rewards.base import RewardGroup, RewardInput, Score

MAX_FRAME_BYTES = 256 * 1024 * 1024
PAGE_BYTES = 16384
TRACE_AT = 4096
"""Place on the page at which a child that is told to (TRACE_SIGNAL) writes where its threads are."""
TRACE_SIGNAL = signal.SIGUSR2
IDLE = -1
"""Number on the page while no item is being scored."""

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of our own code."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_PAGE = struct.Struct("<dqqdqd")


class Setup(msgspec.Struct, kw_only=True):
    """The first message to a child: everything that it needs to build the rewards of the run."""

    config: dict[str, Any]
    """The resolved run file as plain values."""
    path: list[str]
    """The parent's sys.path, so that the child can import the same modules."""
    slow_s: float = math.inf
    """Seconds of a failure after which the child returns the reward's other items of the list untried."""


class Ready(msgspec.Struct, kw_only=True):
    """The first message from a child: the rewards are built, or they cannot be built."""

    error: str | None = None
    """Why the run file's rewards cannot be built; None if they are."""
    rewards: dict[str, tuple[str, str]] = {}
    """Name of the reward -> scorer and its version."""
    batched: list[str] = []
    """Names of rewards that score several rollouts at once."""
    concurrent: dict[str, int] = {}
    """Name of a reward that scores rollouts at the same time, each by itself -> how many."""
    grouped: list[str] = []
    """Names of rewards that see whole groups."""
    without_tokens: list[str] = []
    """Names of rewards that get no tokens."""
    given: list[str] = []
    """Names of rewards that take the reward of the environment."""


class ScoreItem(msgspec.Struct, array_like=True):
    """A rollout for a child to score, or a group of rollouts. Its Result has the same number."""

    number: int
    reward: str
    inputs: tuple[RewardInput, ...]
    over_limit: tuple[int, ...] = ()
    """Parts of the reward whose limits the policy's answer exceeded; these parts are 0. Part p (from 1) of the sibling
    at place i of n parts is p + n * i."""
    numbers: tuple[int, ...] = ()
    """Number of each sibling in its group; empty for a single rollout."""
    absent: dict[int, str] = {}
    """Numbers of the siblings that are not here -> why."""

    @property
    def group(self) -> RewardGroup | None:
        """Return the group; None for a single rollout."""
        if not self.numbers:
            return None
        return RewardGroup(siblings=self.inputs, numbers=self.numbers, absent=self.absent)


class ScoreOutcome(NamedTuple):
    """The result for a rollout: its score, or the reason for its absence with a detail."""

    score: Score | None
    reason: str | None = None
    detail: str = ""
    away: bool = False
    """Whether there is no score because a service that the reward asks is away (away.py)."""


class Result(msgspec.Struct, array_like=True):
    """A child's answer to a ScoreItem."""

    number: int
    outcomes: list[ScoreOutcome]
    """The results for the rollouts of the item, in order."""
    seconds: float = 0.0
    """Seconds of the call, for all items that it scored, without the time in which others had the processor."""
    tried: bool = True
    """False if the item comes back untried, since an earlier item was slow and gave no score."""


def pack(value: Any) -> bytes:
    """Return the frame that holds `value`."""
    return frame(msgspec.msgpack.encode(value))


def pack_items(items: Sequence[bytes]) -> list[bytes]:
    """Return the frame that holds a list of encoded ScoreItems, in pieces, so that long ones are not copied."""
    head = b"\xdc" + len(items).to_bytes(2, "big")  # msgpack's array of 16 bits
    num_bytes = len(head) + sum(map(len, items))
    return [num_bytes.to_bytes(4, "little") + head, *items]


class At(NamedTuple):
    """The item that a child works on, or the first of several items in one call."""

    number: int
    """Number of the item, or of the first of several. IDLE if there is none."""
    num_items: int
    since: float
    """When the call began, in seconds of `time.monotonic`, or the time until which the reward asked to wait
    (evaluating.py)."""
    part: int = 0
    """Number of the part of the reward, from 1, that is evaluating the policy's answer (evaluating.py). 0: none."""
    cpu_s: float = 0.0
    """Seconds of CPU time that the child had used at that moment."""
    delay_s: float = 0.0
    """Seconds that the child had waited for a processor because of others when the call began."""


def write_page(page: Any, at: At) -> None:
    """Write the child's current work into the shared page."""
    _PAGE.pack_into(page, 0, at.since, at.number, at.num_items, at.cpu_s, at.part, at.delay_s)


def read_page(page: Any) -> At:
    """Return the child's current work from the shared page."""
    since, number, num_items, cpu_s, part, delay_s = _PAGE.unpack_from(page, 0)
    return At(number, num_items, since, part, cpu_s, delay_s)


def waited_s(pid: int | str = "self") -> float:
    """Return the seconds that a process has spent in the run queue while others ran; 0 if the system does not say."""
    try:
        file = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 100).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
    finally:
        os.close(file)


def read_trace(page: Any) -> str:
    """Return what the child wrote about its threads; empty if it was not told to, or cannot."""
    text: bytes = page[TRACE_AT:PAGE_BYTES]
    return text.partition(b"\0")[0].decode(errors="replace")


def users_place(trace: str) -> str:
    """Return the innermost line of the user's own code in a trace, as `file:line, in function`; empty if there is
    none."""
    libraries = (PACKAGE, "<", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib")))
    for file, line, function in _FRAME.findall(trace):
        if not file.startswith(libraries):
            return f"{file}:{line}, in {function}"
    return ""
