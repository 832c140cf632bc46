"""BM25: ranks the texts of a corpus by the words of a query."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

_WORD = re.compile(r"\w+")


class Bm25:
    """An index of texts, ranked as by Okapi BM25 with the idf of Lucene, which is never negative: each word of the
    query that a text has adds

        ln(1 + (N - n + 0.5) / (n + 0.5)) * f (k1 + 1) / (f + k1 (1 - b + b length / mean length))

    with N texts, n of them with the word, f times in this text. Robertson and Zaragoza, The Probabilistic Relevance
    Framework: BM25 and Beyond (2009)."""

    def __init__(self, texts: Iterable[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        places: dict[str, array[int]] = {}
        counts: dict[str, array[int]] = {}
        lengths = array("i")
        for place, text in enumerate(texts):
            words = words_of(text)
            lengths.append(len(words))
            for word, count in Counter(words).items():
                places.setdefault(word, array("i")).append(place)
                counts.setdefault(word, array("i")).append(count)
        self.size = len(lengths)
        """Number of texts."""
        lengths_N = np.array(lengths, dtype=np.float32)
        mean = float(lengths_N.mean()) if self.size and lengths_N.any() else 1.0
        damping_N = k1 * (1 - b + b * lengths_N / mean)
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, where in places.items():
            texts_n, counts_n = np.array(where, dtype=np.int32), np.array(counts[word], dtype=np.float32)
            idf = math.log(1 + (self.size - len(where) + 0.5) / (len(where) + 0.5))
            self._postings[word] = texts_n, idf * counts_n * (k1 + 1) / (counts_n + damping_N[texts_n])

    def best(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return the indices and scores of the best texts that contain a word of the query, best first; of equal ones,
        the first."""
        scores_N = np.zeros(self.size, np.float32)
        for word in dict.fromkeys(words_of(query)):
            if word in self._postings:
                texts_n, weights_n = self._postings[word]
                scores_N[texts_n] += weights_n
        order = np.argsort(-scores_N, kind="stable")[:count]
        return [(int(place), float(scores_N[place])) for place in order if scores_N[place] > 0]


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.casefold())
