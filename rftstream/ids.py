"""Ids, seeds and partitions: derived, never drawn, so that a step done twice gives the same ones."""

from __future__ import annotations

import hashlib


def group_id(taskset: str, taskset_pass: int, index: int, attempt: int) -> str:
    return f"{taskset}/{taskset_pass}/{index}/{attempt}"


def rollout_id(group: str, sibling: int) -> str:
    return f"{group}/{sibling}"


def derive_seed(run_seed: int, *parts: object) -> int:
    """A seed below 2**63 that depends on the run's seed and the parts alone."""
    text = "\x1f".join([str(run_seed), *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
