"""Texts as sets of shingles, and the search for nearly equal sets (Broder, 1997): MinHash with bands.

A shingle is a number of consecutive words. The similarity of two texts is the share of common shingles among all their
shingles (Jaccard).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rftstream.errors import ConfigError, pip_install

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EAST_ASIAN = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_EAST_ASIAN}]|(?:(?![{_EAST_ASIAN}])\w)+|[^\w\s]")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")

MIN_RECALL = 0.95
"""Share of the pairs with just enough similarity that `choose_rows` aims to find."""


def normalized(text: str) -> str:
    """Return a text without differences of case, width and spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def numbers_in(text: str) -> tuple[str, ...]:
    """Return the numbers in a text, in order."""
    return tuple(_NUMBER.findall(text))


def shingles_of(text: str, size: int) -> frozenset[str]:
    """Return the shingles of `size` words in a normalised text. Signs and Chinese and Japanese characters count as
    words. A text with fewer words is one shingle."""
    words = _WORD.findall(text)
    if len(words) <= size:
        return frozenset((" ".join(words),))
    return frozenset(" ".join(words[place : place + size]) for place in range(len(words) - size + 1))


def jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    """Return the share of common shingles among all shingles of both sets."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def choose_rows(similarity: float, num_hashes: int) -> int:
    """Return the largest number of rows in a band with which pairs of this similarity share a band often enough.

    They share one of b = num_hashes // r bands with probability 1 - (1 - s^r)^b."""
    for rows in range(num_hashes, 1, -1):
        if 1.0 - (1.0 - similarity**rows) ** (num_hashes // rows) >= MIN_RECALL:
            return rows
    return 1


def minhash(sets: Sequence[frozenset[str]], num_hashes: int, seed: int) -> NDArray[np.uint32]:
    """Return the MinHash signatures of sets of shingles, shape [sets, num_hashes]. ConfigError without the package
    `rensa`."""
    try:
        import rensa
    except ImportError:
        raise ConfigError(
            f"similarity: needs the package rensa; {pip_install('rftstream[data]')} where the feeder runs, or set it "
            "to 1 to find equal problems only"
        ) from None
    digests = rensa.RMinHash.digests_from_token_sets([sorted(one) for one in sets], num_hashes, seed)
    return np.array(digests, np.uint32).reshape(len(sets), num_hashes)


class BandIndex:
    """Finds texts that share a band of their signatures. For each text, callers first use `candidates`, then `add`."""

    def __init__(self, rows: int) -> None:
        """`rows`: number of hashes in a band."""
        self._rows = rows
        self._buckets: dict[Hashable, list[int]] = {}

    def candidates(self, signature: NDArray[np.uint32], apart: Hashable = None) -> list[int]:
        """Return the numbers of the texts that share a band, in order. Texts with another value of `apart` are never
        found."""
        found = {number for key in self._keys(signature, apart) for number in self._buckets.get(key, ())}
        return sorted(found)

    def add(self, number: int, signature: NDArray[np.uint32], apart: Hashable = None) -> None:
        """Add a text."""
        for key in self._keys(signature, apart):
            self._buckets.setdefault(key, []).append(number)

    def _keys(self, signature: NDArray[np.uint32], apart: Hashable) -> Iterator[Hashable]:
        width, text = self._rows * signature.itemsize, signature.tobytes()
        for band in range(len(signature) // self._rows):
            yield band, text[band * width : (band + 1) * width], apart
