"""A model's served tensors in memory, with their digests. A follower or a publisher owns them."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from rftstream.errors import WeightsError
from rftstream.weights.snapshot import Line, RawTensor, data_view, digest_of_lines

T = TypeVar("T")

MAX_THREADS = 16


class ServedState:
    """A copy of a model. Its owner changes `arrays` in place, names the changed ones with `touched`, and requests
    digests at the end."""

    def __init__(
        self,
        tensors: Mapping[str, RawTensor],
        *,
        copy: bool,
        threads: int | None = None,
        changing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Request each tensor once. Without `copy`, the state uses the tensors' own bytes, which must be writable.

        `threads` is the number of threads that compute digests and changes; all cores by default. A delta is applied
        inside `changing`, which may wait until no reader is active."""
        self.changing = changing
        self.threads = threads or min(len(os.sched_getaffinity(0)), MAX_THREADS)
        self.tensors: dict[str, RawTensor] = {}
        """Views of the arrays, sorted by name."""
        self.arrays: dict[str, np.ndarray] = {}
        """uint8 [num_bytes]."""
        for name in sorted(tensors):
            tensor = tensors[name]
            array: np.ndarray = np.frombuffer(data_view(tensor), np.uint8)
            array = array.copy() if copy or not len(array) else array
            self.arrays[name] = array
            self.tensors[name] = RawTensor(tensor.dtype, tensor.shape, array.data)
        self._digests: dict[str, str] = {}

    def part(self, names: Iterable[str]) -> ServedState:
        """Return the state of some of the tensors, in the same memory and with the same digests."""
        part = copy.copy(self)
        part.tensors = {name: self.tensors[name] for name in names if name in self.tensors}
        part.arrays = {name: self.arrays[name] for name in part.tensors}
        return part

    def touched(self, names: Iterable[str]) -> None:
        """Forget the digests of tensors whose bytes changed."""
        for name in names:
            self._digests.pop(name, None)

    @contextlib.contextmanager
    def of_no_use_after_errors(self) -> Iterator[None]:
        """Forget all digests after an error inside, so that later digests show the actual state."""
        try:
            yield
        except BaseException:
            self._digests.clear()
            raise

    def digests(self) -> dict[str, str]:
        """Return name -> sha256 (hex) of the tensor's bytes, sorted by name. Missing digests are computed."""
        missing = [name for name in self.arrays if name not in self._digests]
        found = self.in_threads([lambda name=name: _sha256(self.arrays[name]) for name in missing])  # type: ignore[misc]
        self._digests.update(zip(missing, found, strict=True))
        return {name: self._digests[name] for name in self.arrays}

    def digest(self) -> str:
        """Return the digest of the whole state in the form of announcements (snapshot.state_digest)."""
        return digest_of_lines(self.lines())

    def lines(self) -> list[Line]:
        """Return the lines of the digest, sorted by name."""
        digests = self.digests()
        return [(name, tensor.dtype, tensor.shape, digests[name]) for name, tensor in self.tensors.items()]

    def in_threads(self, jobs: Iterable[Callable[[], T]]) -> list[T]:
        """Run jobs that release the GIL, and return their results in order. No more jobs are taken from the iterable
        than can run at once."""
        jobs = iter(jobs)
        if self.threads == 1:
            return [job() for job in jobs]
        results: list[T] = []
        with ThreadPoolExecutor(self.threads) as pool:
            running = []
            for job in jobs:
                running.append(pool.submit(job))
                if len(running) > self.threads:
                    results.append(running.pop(0).result())
            results += [job.result() for job in running]
        return results

    def check_same_tensors(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]], where: str) -> None:
        """Raise WeightsError unless names, dtypes and shapes are equal to these."""
        for name in sorted(tensors.keys() | self.tensors.keys()):
            mine = self.tensors.get(name)
            found = tensors.get(name)
            expected = None if mine is None else (mine.dtype, mine.shape)
            if found != expected:
                raise WeightsError(
                    f"{where}: tensor {name!r}: found {_form(found)}, expected {_form(expected)}; another model's?"
                )


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.data).hexdigest()


def _form(found: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if found is None else f"{found[0]} {list(found[1])}"
