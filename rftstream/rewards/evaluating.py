"""Determines who is to blame when a reward exceeds its limits: the policy, while its answer is being evaluated.

A reward that evaluates the policy's text first reads the problem's own answer. After that only the policy's answer can
take long. The reward marks this with `evaluating_answer`, which the scorer's child records in the page that it shares
with its parent. If the child is then killed for its time limit, the rollout is scored again, with 0 for that reward: an
answer that cannot be evaluated counts as wrong, since policies would otherwise learn to escape a 0. Without the mark,
the limit is our own failure, and the rollout is unscorable.

Memory is limited during the evaluation, so that a huge answer raises MemoryError in the reward and does not kill the
process.

A reward that runs programs in a sandbox has its own limits for them, and one that asks a served model has its own for
answers. With `allow_time` it tells the scorer how long to wait for one, so that a program at its limit gives 0 and does
not count as a hung reward, and an answer that is late costs no other rollout its score.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_MEMORY_BYTES = 2 << 30
"""Bytes of memory that the evaluation of one answer may use."""

_watch: Callable[[int], None] | None = None
_allow: Callable[[float], None] | None = None


class _Work(threading.local):
    """The work of one thread. Rewards of other rollouts are called in other threads meanwhile (at_once.py)."""

    part = 1
    is_evaluating = False


_work = _Work()


def watch_evaluations(watch: Callable[[int], None] | None) -> None:
    """Call `watch` with the number of each part that begins to evaluate an answer, and with 0 afterwards."""
    global _watch
    _watch = watch


def watch_allowances(allow: Callable[[float], None] | None) -> None:
    """Call `allow` with the seconds that a reward asks for."""
    global _allow
    _allow = allow


def allow_time(seconds: float) -> None:
    """Restart the scorer's time limit: it ends `seconds` from now. For rewards that stop by themselves within that
    time."""
    if _allow is not None:
        _allow(seconds)


def begin_part(number: int) -> None:
    """Record which part of a composite reward the calling thread calls next, counted from 1."""
    _work.part = number


@contextlib.contextmanager
def evaluating_answer() -> Iterator[None]:
    """Declare that inside this block a time or memory limit is the fault of the policy's answer."""
    if _watch is None:
        yield
        return
    _watch(_work.part)
    _work.is_evaluating = True
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = _memory_bytes() + MAX_MEMORY_BYTES
    inside = before[0] == resource.RLIM_INFINITY or limit < before[0]
    if inside:
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        if inside:
            resource.setrlimit(resource.RLIMIT_AS, before)
        _work.is_evaluating = False
        _watch(0)


@contextlib.contextmanager
def apart_from_answer() -> Iterator[None]:
    """Declare that inside this block, within `evaluating_answer`, the time limit is not the fault of the policy's
    answer."""
    if _watch is None or not _work.is_evaluating:
        yield
        return
    _watch(0)
    try:
        yield
    finally:
        _watch(_work.part)


def _memory_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return 64 << 30
    return pages * resource.getpagesize()
