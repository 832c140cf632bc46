"""The compiled passes over weights: kernels.c and taking.c, as a library that is built once on a machine.

The library is first searched beside the source. `python -m rftstream.weights.deltas.kernels` builds it there, for
images and installs without a compiler. Next the user's cache is searched. Otherwise the library is compiled into the
cache. Places that other users can write to are not trusted. Calls release the GIL."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rftstream.errors import WeightsError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "taking.c", "coding.h"))
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared")
TOO_LONG, NO_MEMORY, DAMAGED = -1, -2, -3
BLOCK = 64
AS_IT_IS, FLOAT32_TO_F16 = -1, -2


class Form(NamedTuple):
    """How elements of a dtype are split into parts."""

    width: int
    """Bytes of an element."""
    mantissa: int
    """Bits below the exponent."""


FORMS = {"BF16": Form(2, 7), "F16": Form(2, 10), "F32": Form(4, 23)}
"""Safetensors' names of the dtypes that have streams."""


@dataclass(frozen=True, slots=True)
class Noted:
    """Notes of the changes that `take` made to arrays. `code` needs them together with the current arrays."""

    changed: np.ndarray
    """Bits that mark the changed elements, uint64: one bit for each element; each array begins a new word."""
    before: np.ndarray
    """Old bits of the elements that changed, uint8."""
    totals: list[int]
    """Number of elements of each array that changed."""


def take(old: Sequence[np.ndarray], new: Sequence[np.ndarray], form: Form, ways: Sequence[int]) -> Noted:
    """Copy `new` into `old`, pair by pair, and return the changes. The arrays are of bytes, aligned to elements.

    `ways` tell how each array of `new` is read: AS_IT_IS, or as float32 to be rounded. In the latter case the value is
    FLOAT32_TO_F16 or, for BF16, the bits of a rounded NaN."""
    counts = [len(one) // form.width for one in old]
    changed = np.empty(sum(-(-count // BLOCK) for count in counts), np.uint64)
    before, totals = np.empty(sum(map(len, old)), np.uint8), np.zeros(max(len(old), 1), np.int64)
    _library().rft_take(
        len(old),
        _pointers(old),
        _pointers(new),
        (ctypes.c_int64 * len(counts))(*counts),
        (ctypes.c_int * len(ways))(*ways),
        form.width,
        changed.ctypes.data,
        before.ctypes.data,
        totals.ctypes.data,
    )
    found: list[int] = totals[: len(old)].tolist()
    return Noted(changed, before[: sum(found) * form.width].copy(), found)


def without_changes(noted: Noted) -> Noted:
    """Return notes of the same arrays without changes."""
    return Noted(np.zeros_like(noted.changed), noted.before[:0], [0] * len(noted.totals))


def code(now: Sequence[np.ndarray], noted: Noted, form: Form, capacity: int) -> np.ndarray | None:
    """Return the stream of the noted changes; None if it is longer than `capacity` bytes."""
    counts = [len(one) // form.width for one in now]
    out = np.empty(capacity, np.uint8)
    length = _library().rft_code(
        len(now),
        _pointers(now),
        (ctypes.c_int64 * len(counts))(*counts),
        *form,
        noted.changed.ctypes.data,
        noted.before.ctypes.data,
        sum(noted.totals),
        out.ctypes.data,
        capacity,
    )
    if length == NO_MEMORY:
        raise MemoryError(f"no memory for the changes of {sum(counts)} elements")
    return out[:length] if length >= 0 else None


def apply(data: Sequence[np.ndarray], form: Form, stream: np.ndarray) -> list[int] | None:
    """Change `data` by a stream, and return the number of changed elements in each array.

    None if the stream is damaged; `data` is unusable then."""
    counts = [len(one) // form.width for one in data]
    changed = np.zeros(max(len(data), 1), np.int64)
    result = _library().rft_apply(
        len(data),
        _pointers(data),
        (ctypes.c_int64 * len(counts))(*counts),
        *form,
        stream.ctypes.data,
        len(stream),
        changed.ctypes.data,
    )
    if result == NO_MEMORY:
        raise MemoryError("no memory for the model of a delta")
    return changed[: len(data)].tolist() if result == 0 else None


def why_not() -> str:
    """Return why there is no compiled library on this machine; empty if there is one. The library is built now if
    necessary."""
    try:
        _library()
    except (WeightsError, OSError) as error:
        return str(error)
    return ""


def build(target: Path, sources: Sequence[Path] = SOURCES, flags: Sequence[str] = FLAGS) -> None:
    """Compile a library atomically. The headers are beside the sources. WeightsError if there is no compiler, or if it
    fails."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise WeightsError(
            f"{sources[0].name}: found no C compiler to build it with; install gcc, or run `python -m {__name__}` "
            "where there is one"
        )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        library = Path(folder) / target.name
        done = subprocess.run(
            [
                compiler,
                *flags,
                "-o",
                str(library),
                *(str(source) for source in sources if source.suffix == ".c"),
                "-lm",
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise WeightsError(
                f"{sources[0].name}: {compiler} failed: {done.stderr.strip()[-500:]}; set CC to another one"
            )
        library.replace(target)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(built(SOURCES, FLAGS)))
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    form = (ctypes.c_int, ctypes.c_int)
    library.rft_take.argtypes = (number, *(pointer,) * 4, ctypes.c_int, pointer, pointer, pointer)
    library.rft_take.restype = None
    library.rft_code.argtypes = (number, pointer, pointer, *form, pointer, pointer, number, pointer, number)
    library.rft_apply.argtypes = (number, pointer, pointer, *form, pointer, number, pointer)
    library.rft_code.restype = library.rft_apply.restype = number
    return library


def built(sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Return the path of the library for these sources, compiled if necessary. Its name identifies sources and
    platform."""
    beside = beside_source(sources, flags)
    if beside.exists():
        return beside
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rftstream" / "kernels"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_ours(cache):
            library = cache / beside.name
            if not library.exists():
                build(library, sources, flags)
            if _is_ours(library):
                return library
    except OSError:  # there is no home folder, or no right to write to it
        pass
    library = Path(tempfile.mkdtemp(prefix="rftstream-kernels-")) / beside.name
    build(library, sources, flags)
    return library


def _is_ours(path: Path) -> bool:
    """Return whether no other user could have written the file."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def beside_source(sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Return the path of the library beside its source, which exists if it was built for an image or an install without
    a compiler."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + " ".join(flags).encode()).hexdigest()[
        :16
    ]
    return sources[0].with_name(f"{sources[0].stem}-{digest}-{sysconfig.get_platform()}.so")


def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


if __name__ == "__main__":
    build(beside_source(SOURCES, FLAGS))
    print(beside_source(SOURCES, FLAGS), file=sys.stderr)
