"""Reads announced objects whole: from this machine's cache, or else from the store; the parts of a version side by
side."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TypeVar

import numpy as np

from rftstream.errors import WeightsError
from rftstream.weights.stores.anchors import AnchorCache
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.version_parts import HasObject

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_BYTES = 4 * 1024 * 1024

NUM_FETCHES = 8
"""Most parts of a version that are read at once."""
ALIGNMENT = 64
"""Bytes to whose multiples parts are aligned in memory."""

Allocate = Callable[[int], memoryview]
"""Returns that many bytes of writable memory."""


def own_memory(num_bytes: int) -> memoryview:
    """Return uninitialized memory of this process."""
    return np.empty(num_bytes, np.uint8).data if num_bytes else memoryview(b"")


def read_objects(
    store: ObjectStore, cache: AnchorCache | None, objects: Sequence[HasObject], *, where: str, allocate: Allocate
) -> list[memoryview]:
    """Return the bytes of all objects of a version, read side by side into one piece of memory. The conditions of
    `read_object` hold."""
    if len(objects) == 1:
        return [read_object(store, cache, objects[0], where=where, allocate=allocate)]
    *begins, end = itertools.accumulate((-(-one.num_bytes // ALIGNMENT) * ALIGNMENT for one in objects), initial=0)
    memory = allocate(end)
    jobs = (
        functools.partial(
            read_object,
            store,
            cache,
            one,
            where=f"{where}: {one.object}",
            allocate=functools.partial(_first, memory[begin:]),
            beside=objects,
        )
        for one, begin in zip(objects, begins, strict=True)
    )
    return list(side_by_side(jobs))


def read_object(
    store: ObjectStore,
    cache: AnchorCache | None,
    announced: HasObject,
    *,
    where: str,
    allocate: Allocate = own_memory,
    beside: Sequence[HasObject] = (),
) -> memoryview:
    """Return an object's bytes in writable memory, with the digest verified. `where` names the object in messages.
    `allocate` gives the memory, and is called again if the first attempt to read fails. `beside`: all parts of the
    version, which the cache keeps together.

    WeightsGone if the object was deleted, WeightsError if it is damaged in the store."""
    if cache is None:
        return _read_stored(store, announced, where, allocate)
    file = cache.open(announced)
    if file is None:
        with cache.turn(announced):
            if (file := cache.open(announced)) is None:
                return _read_and_keep(store, cache, announced, where, allocate, beside)
    with file:
        try:
            return _read(file, announced, where, allocate)
        except (WeightsError, OSError) as error:
            logger.warning("%s in the local cache; reading it from the store", error)
    with cache.turn(announced):
        return _read_and_keep(store, cache, announced, where, allocate, beside)


def _read_and_keep(
    store: ObjectStore,
    cache: AnchorCache,
    announced: HasObject,
    where: str,
    allocate: Allocate,
    beside: Sequence[HasObject],
) -> memoryview:
    data = _read_stored(store, announced, where, allocate)
    cache.keep(announced, data, beside=beside)
    return data


def _read_stored(store: ObjectStore, announced: HasObject, where: str, allocate: Allocate) -> memoryview:
    with store.open(announced.object) as file:
        return _read(file, announced, where, allocate)


def _read(file: IO[bytes], announced: HasObject, where: str, allocate: Allocate) -> memoryview:
    """Return the whole file as writable bytes. WeightsError unless it is the announced object."""
    num_bytes, digest = announced.num_bytes, announced.digest
    found = file.seek(0, os.SEEK_END)
    if found < num_bytes:  # before this much memory is allocated
        raise WeightsError(f"{where}: found {found} bytes, expected {num_bytes}; it is damaged")
    file.seek(0)
    view = allocate(num_bytes)
    sha256, position = hashlib.sha256(), 0
    while chunk := file.read(min(READ_BYTES, num_bytes - position + 1)):
        if position + len(chunk) > num_bytes:
            raise WeightsError(f"{where}: found more than {num_bytes} bytes, expected as many; it is damaged")
        view[position : position + len(chunk)] = chunk
        sha256.update(chunk)
        position += len(chunk)
    if position != num_bytes:
        raise WeightsError(f"{where}: found {position} bytes, expected {num_bytes}; it is damaged")
    if (made := f"sha256:{sha256.hexdigest()}") != digest:
        raise WeightsError(f"{where}: digest {made}, expected {digest}; it is damaged")
    return view


def _first(view: memoryview, num_bytes: int) -> memoryview:
    return view[:num_bytes]


def side_by_side(jobs: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
    """Yield the results of jobs in order. Up to NUM_FETCHES jobs run at once, ahead of the consumer."""
    with ThreadPoolExecutor(NUM_FETCHES) as pool:
        running: deque[Future[T]] = deque()
        for job in jobs:
            running.append(pool.submit(job))
            if len(running) >= NUM_FETCHES:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
