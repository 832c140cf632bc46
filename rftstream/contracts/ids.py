"""Ids, seeds and partitions. They are derived, never random, so that a repeated step gives the same ones."""

from __future__ import annotations

import hashlib


def group_id(taskset: str, taskset_pass: int, index: int, attempt: int) -> str:
    """Return the id of a group: `taskset/pass/index/attempt`."""
    return f"{taskset}/{taskset_pass}/{index}/{attempt}"


def split_group_id(group: str) -> tuple[str, int, int, int] | None:
    """Return taskset, pass, index and attempt; None if the text is no group_id."""
    taskset, *numbers = group.split("/")
    if not taskset or len(numbers) != 3 or not all(number.isdecimal() and number.isascii() for number in numbers):
        return None
    taskset_pass, index, attempt = map(int, numbers)
    return taskset, taskset_pass, index, attempt


def next_attempt(group: str) -> str:
    """Return the id of the next attempt of a group."""
    base, _, attempt = group.rpartition("/")
    return f"{base}/{int(attempt) + 1}"


def rollout_id(group: str, sibling: int) -> str:
    """Return the id of a rollout: `group_id/sibling`."""
    return f"{group}/{sibling}"


def derive_seed(run_seed: int, *parts: object) -> int:
    """Return a seed below 2**63 that depends only on the run's seed and the parts."""
    text = "\x1f".join([str(run_seed), *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def unit_interval(seed: int) -> float:
    """Return the number in [0, 1) for a derived seed."""
    return seed / 2**63
