"""The order of problems: pure functions of counts and seeds, so that a restart needs no state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from rftstream.contracts.ids import derive_seed

ROUNDS = 6


def order(length: int, taskset_pass: int, seed: int) -> Callable[[int], int]:
    """Return the order of a pass through a taskset: position in the pass -> index of the problem. The seed is the
    taskset's own, which is derived from the run's."""
    pass_seed = derive_seed(seed, "pass", taskset_pass)
    return lambda position: shuffle_index(position, length, seed=pass_seed)


def mix(weights: Mapping[str, float], counts: Mapping[str, int]) -> str:
    """Return the taskset of the next group: the one furthest behind its weight, the first of equals.

    `counts`: the groups taken from each so far. Weights of 3 and 1 give A A B A, A A B A, ... (Webster's method). Leave
    out exhausted tasksets.
    """
    usable = [name for name, weight in weights.items() if weight > 0]
    assert usable, "a taskset with a weight"
    return min(usable, key=lambda name: (counts.get(name, 0) + 0.5) / weights[name])


def shuffle_index(position: int, length: int, *, seed: int) -> int:
    """Return the value of a permutation of range(length) at `position`, without storing the permutation.

    It is a Feistel network over the next power of four, walked until it lands below `length` (at most a few steps).
    """
    assert 0 <= position < length, "a position of the pass"
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    index = position
    while True:
        index = _feistel(index, half_bits, seed)
        if index < length:
            return index


def _feistel(index: int, half_bits: int, seed: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = index >> half_bits, index & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mix(right, number, seed) & mask)
    return left << half_bits | right


def _mix(value: int, number: int, seed: int) -> int:
    key = seed.to_bytes(8, "little") + bytes([number])
    return int.from_bytes(hashlib.blake2b(value.to_bytes(8, "little"), digest_size=8, key=key).digest(), "little")
