"""Tells whose fault it is when a reward exceeds its limits: the policy's, while its answer is being evaluated.

A reward that evaluates what the policy wrote first reads the problem's own answer. From then on only the policy's
answer can take long. It says so with `evaluating_answer`, which a child of the scorer notes in the page that it shares
with its parent. If the child is then killed for its time limit, the rollout is scored again, with 0 for that reward: an
answer that cannot be evaluated is a wrong one, or policies would learn to escape a 0. Without the note, the limit is
our own failure, and the rollout is unscorable.

Memory is limited meanwhile, so that a huge answer ends as a MemoryError in the reward and not as a killed process.

A reward that runs programs in a sandbox has limits of its own for them. It says with `allow_time` how long the scorer
has to wait for a program, so that a program at its limit is a 0 and not a reward that hangs.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_MEMORY_BYTES = 2 << 30
"""Memory that evaluating one answer may take."""

_watch: Callable[[int], None] | None = None
_part = 1
_is_evaluating = False
_allow: Callable[[float], None] | None = None


def watch_evaluations(watch: Callable[[int], None] | None) -> None:
    """Let `watch` be called with the number of the part that begins to evaluate an answer, and with 0 afterwards."""
    global _watch
    _watch = watch


def watch_allowances(allow: Callable[[float], None] | None) -> None:
    """Let `allow` be called with the seconds that a reward asks for."""
    global _allow
    _allow = allow


def allow_time(seconds: float) -> None:
    """Let the scorer's time limit begin anew, `seconds` from now. Rewards call it that stop by themselves by then."""
    if _allow is not None:
        _allow(seconds)


def begin_part(number: int) -> None:
    """Note which part of a composite reward is asked from now on, from 1."""
    global _part
    _part = number


@contextlib.contextmanager
def evaluating_answer() -> Iterator[None]:
    """Say that from here to the end of the block, a time or memory limit is the fault of the policy's answer."""
    if _watch is None:
        yield
        return
    global _is_evaluating
    _watch(_part)
    _is_evaluating = True
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
        _is_evaluating = False
        _watch(0)


@contextlib.contextmanager
def apart_from_answer() -> Iterator[None]:
    """Say that in this block, inside of `evaluating_answer`, the time limit is not the fault of the policy's answer."""
    if _watch is None or not _is_evaluating:
        yield
        return
    _watch(0)
    try:
        yield
    finally:
        _watch(_part)


def _memory_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return 64 << 30
    return pages * resource.getpagesize()
