"""Skips repeated problems: repeated in the same taskset, in another one, or in an evaluation (contamination).

Equal prompts are found by a digest, nearly equal ones by MinHash. MinHash's candidates are compared shingle by shingle,
so that no problem below the required similarity is skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from rftstream.config.ranges import Positive
from rftstream.contracts.tasks import Problem
from rftstream.data.operators.base import KEEP, Draw, Problems, RunProblems, Seed, Skip, TaskDecision
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.shingles import (
    BandIndex,
    choose_rows,
    jaccard,
    minhash,
    normalized,
    numbers_in,
    shingles_of,
)
from rftstream.errors import ConfigError

_CHUNK = 2048
"""Number of problems whose signatures are computed at once."""

_KEPT_SHINGLES = 4096
"""Number of texts whose shingles are kept in memory for comparison."""

_SEED = 1
"""Seed of the hashes. It is the same for all runs, since another seed has no advantage."""


class Dedupe:
    """Skips all but the first of equal or nearly equal problems, and those that are in an evaluation.

    The first is the one with the smallest index in the first taskset of the run file. Only prompts are compared:
    without system messages, case, width and spaces, and with the digests of their images. The index uses the tasksets'
    original problems, so other operators do not affect it. Problems that a taskset gains later are not in the index,
    and are kept."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "dedupe"`."""

        similarity: Annotated[float, Meta(gt=0, le=1)] = 0.8
        """Smallest share of common shingles of nearly equal problems; 1: only equal prompts are found."""
        ngram: Positive = 3
        """Number of words in a shingle."""
        same_numbers: bool = True
        """Treat problems with different numbers as different, however similar: `3 + 4` is not `3 + 5`."""
        across: bool = True
        """Also skip problems that an earlier taskset has."""
        evaluations: bool = True
        """Also skip problems that an evaluation has."""
        num_hashes: Positive = 128
        """Number of hashes in a signature: more hashes miss fewer pairs, but take longer."""
        rows: Positive | None = None
        """Number of hashes in a band; default: the number that finds 95 of 100 pairs that are just similar enough."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.rows is not None and config.rows > config.num_hashes:
            raise ConfigError(f"rows: got {config.rows}, expected at most num_hashes = {config.num_hashes}")
        self._skips: dict[tuple[str, int], str] = {}
        """Taskset and index -> the reason for skipping."""

    def prepare(self, problems: RunProblems) -> None:
        """Read all problems, and find repeated ones."""
        evaluations = problems.open_evaluations() if self._config.evaluations else ()
        if self._config.across:
            self._skips = dict(self._search(evaluations, problems.tasksets))
        else:
            found = [self._search(evaluations, (taskset,)) for taskset in problems.tasksets]
            self._skips = {place: reason for some in found for place, reason in some}

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a repeated problem."""
        reason = self._skips.get((draw.taskset, draw.index))
        return KEEP if reason is None else Skip(reason)

    def _search(
        self, evaluations: tuple[Problems, ...], tasksets: tuple[Problems, ...]
    ) -> Iterator[tuple[tuple[str, int], str]]:
        search = _Search(self._config)
        for evaluation in evaluations:
            for _ in search.repeated(evaluation, f"the evaluation {evaluation.name}"):
                pass  # an evaluation may repeat itself
        for taskset in tasksets:
            for index, reason in search.repeated(taskset, taskset.name):
                yield (taskset.name, index), reason


@dataclass(frozen=True, slots=True)
class _Text:
    """The text of a problem, for comparison with earlier ones."""

    index: int
    shingles: frozenset[str]
    apart: tuple[tuple[str, ...], ...]
    """Values that must be equal: problems in which they differ are never nearly equal."""


class _Search:
    """Finds for each text whether it occurred before."""

    def __init__(self, config: Dedupe.Config) -> None:
        self._config = config
        self._digests: dict[bytes, str] = {}
        """Digest of a text -> the place of its first occurrence."""
        self._places: list[tuple[Problems, int, str]] = []
        """Texts that are in the bands, by their numbers."""
        self._is_near = config.similarity < 1
        rows = config.rows or choose_rows(config.similarity, config.num_hashes) if self._is_near else 1
        self._bands = BandIndex(rows)
        self._shingles = lru_cache(_KEPT_SHINGLES)(self._shingles_at)

    def repeated(self, problems: Problems, where: str) -> Iterator[tuple[int, str]]:
        """Yield the indices of repeated problems, and the reasons for skipping them."""
        chunk: list[_Text] = []
        for index, problem in enumerate(problems):
            text = text_of(problem)
            digest = hashlib.blake2b(repr((text, media_of(problem))).encode(), digest_size=16).digest()
            if digest in self._digests:
                yield index, f"equal in {self._digests[digest]}"
                continue
            self._digests[digest] = where
            if self._is_near:
                numbers = numbers_in(text) if self._config.same_numbers else ()
                chunk.append(_Text(index, shingles_of(text, self._config.ngram), (numbers, media_of(problem))))
                if len(chunk) == _CHUNK:
                    yield from self._near(problems, where, chunk)
                    chunk = []
        yield from self._near(problems, where, chunk)

    def _near(self, problems: Problems, where: str, chunk: list[_Text]) -> Iterator[tuple[int, str]]:
        if not chunk:
            return
        signatures = minhash([one.shingles for one in chunk], self._config.num_hashes, _SEED)
        for one, signature in zip(chunk, signatures, strict=True):
            for number in self._bands.candidates(signature, one.apart):
                if jaccard(one.shingles, self._shingles(number)) >= self._config.similarity:
                    yield one.index, f"nearly equal in {self._places[number][2]}"
                    break
            else:
                self._bands.add(len(self._places), signature, one.apart)
                self._places.append((problems, one.index, where))

    def _shingles_at(self, number: int) -> frozenset[str]:
        problems, index, _ = self._places[number]
        return shingles_of(text_of(problems.source.problem(index)), self._config.ngram)


def text_of(problem: Problem) -> str:
    """Return the compared text of a problem: its messages without the system's, normalised."""
    return normalized("\n".join(message.content for message in problem.messages if message.role != "system"))


def media_of(problem: Problem) -> tuple[str, ...]:
    """Return the digests of a problem's images, or their places."""
    return tuple(media.digest or media.url for message in problem.messages for media in message.media)
