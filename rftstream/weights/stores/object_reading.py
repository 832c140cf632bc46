"""An object that was announced is read whole: from this machine's cache, or else from the store."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from typing import IO

import numpy as np

from rftstream.contracts.versions import DeltaObject, WeightsAnnounced
from rftstream.errors import WeightsError
from rftstream.weights.stores.anchors import AnchorCache
from rftstream.weights.stores.store import ObjectStore

logger = logging.getLogger(__name__)

READ_BYTES = 4 * 1024 * 1024

Announced = WeightsAnnounced | DeltaObject

Allocate = Callable[[int], memoryview]
"""Returns writable memory of a number of bytes."""


def own_memory(num_bytes: int) -> memoryview:
    """Return memory of this process, not filled with anything."""
    return np.empty(num_bytes, np.uint8).data if num_bytes else memoryview(b"")


def read_object(
    store: ObjectStore,
    cache: AnchorCache | None,
    announced: Announced,
    *,
    where: str,
    allocate: Allocate = own_memory,
) -> memoryview:
    """Return an object's bytes, which can be written to, their digest compared. `where` is what messages call it.
    They lie in memory of `allocate`, which is asked again where a first try to read them fails.

    WeightsGone if it was deleted, WeightsError if it is damaged in the store."""
    if cache is None:
        return _read_stored(store, announced, where, allocate)
    file = cache.open(announced)
    if file is None:
        with cache.turn(announced):
            if (file := cache.open(announced)) is None:
                return _read_and_keep(store, cache, announced, where, allocate)
    with file:
        try:
            return _read(file, announced, where, allocate)
        except (WeightsError, OSError) as error:
            logger.warning("%s in the local cache; reading it from the store", error)
    with cache.turn(announced):
        return _read_and_keep(store, cache, announced, where, allocate)


def _read_and_keep(
    store: ObjectStore, cache: AnchorCache, announced: Announced, where: str, allocate: Allocate
) -> memoryview:
    data = _read_stored(store, announced, where, allocate)
    cache.keep(announced, data)
    return data


def _read_stored(store: ObjectStore, announced: Announced, where: str, allocate: Allocate) -> memoryview:
    with store.open(announced.object) as file:
        return _read(file, announced, where, allocate)


def _read(file: IO[bytes], announced: Announced, where: str, allocate: Allocate) -> memoryview:
    """Return the whole file in bytes that can be written to. WeightsError unless it is what was announced."""
    num_bytes, digest = announced.num_bytes, announced.digest
    found = file.seek(0, os.SEEK_END)
    if found < num_bytes:  # before so much memory is asked for
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
