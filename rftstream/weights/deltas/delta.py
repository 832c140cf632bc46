"""A delta is the lossless difference between two states of a model, some hundred times smaller than the weights.

docs/weights-format.md describes the format. A file is 16 bytes (magic, format, length of the header), the header
(compressed JSON), and the parts one after another. kernels.c makes streams of changes, several at a time. The elements
of a stream are those of all tensors of a dtype, tensor after tensor in order of names.

Some changed tensors are stored whole instead: tensors of dtypes without streams, and the tensors of a small model that
changed in most elements, as float32 models do. There, coding each element would take longer than it saves. Their stream
has no changes then."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from rftstream.contracts.versions import VersionName
from rftstream.errors import WeightsError
from rftstream.weights.deltas import kernels
from rftstream.weights.deltas.delta_source import NewBytes, NewTensors
from rftstream.weights.deltas.delta_streams import Forms, StreamSpan, cut, lengths_of
from rftstream.weights.deltas.kernels import FORMS, Noted
from rftstream.weights.snapshot import ITEM_BYTES, MAX_HEADER_BYTES, RawTensor
from rftstream.weights.state import ServedState

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"RFTDELTA"
FORMAT = 1
LANE_ELEMENTS = 8 << 20
"""Elements in a stream: enough to learn how often weights change, and few enough to keep all cores busy."""
MAX_LANE_ELEMENTS = (1 << 31) - 2
"""Most elements of a stream that a reader accepts."""
NOTED = 1 / 8
"""Share of a stream's elements. If more of them changed, they are coded at once, since notes of changes take memory."""
WHOLE_BYTES = 1 << 20
"""Largest stream, in bytes of elements, whose tensors are stored whole if more than half of the elements changed."""
SHORT = 16
"""Hex digits of a tensor's digest in the header. The digests of whole states are stored in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """A run of bytes of the file."""

    dtype: str
    num_elements: int
    tensor: str | None
    """Name of the tensor that is stored whole here, compressed; None for a stream of changes."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeader:
    """The header of a delta's file: the states before and after, and the positions of the parts."""

    model: str
    name: VersionName
    parent: VersionName
    old: str
    """Digest of the state to which the delta applies."""
    new: str
    """Digest of the state that the delta makes."""
    tensors: Forms
    """Name -> dtype and shape, sorted by name."""
    old_digests: Mapping[str, str]
    """Name -> first hex digits of the tensor's sha256."""
    new_digests: Mapping[str, str]
    parts: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class _Taken:
    span: StreamSpan
    how: Noted | np.ndarray | None
    """Notes that are still to be coded, or the stream; None if the stream would be too long."""
    whole: tuple[str, ...] = ()
    """Tensors that are stored whole, and have no changes in the stream."""

    def coded(self, state: ServedState) -> np.ndarray | None:
        """Return the stream; None if it would be too long."""
        if not isinstance(self.how, Noted):
            return self.how
        now = [state.arrays[piece.tensor][piece.begin : piece.end] for piece in self.span.pieces]
        room = self.span.num_bytes + self.span.num_bytes // 8 + 64  # the total size is checked at the end
        stream = kernels.code(now, self.how, FORMS[self.span.dtype], room)
        return None if stream is None else stream.copy()


@dataclass(kw_only=True)
class Changes:
    """The changes of a state that `take` found.

    They are coded when `parts` are first requested. That may happen in any thread, but before the state changes again;
    if it fails, the next request codes them again. Until then the object holds one bit for each element, and the old
    bits of the changed elements, at most NOTED of all: for 16-bit weights 3/16 of the state's size."""

    state: ServedState
    old: str
    """Digest of the state before the changes."""
    old_digests: dict[str, str]
    taken: list[_Taken]
    whole: list[str]
    """Changed tensors that are stored whole."""

    @functools.cached_property
    def parts(self) -> list[tuple[ByteRange, Buffer]] | None:
        """Return the parts of the delta's file; None if they would be no smaller than the weights."""
        state = self.state
        parts: list[tuple[ByteRange, Buffer]] = []
        room = sum(map(len, state.arrays.values()))
        streams = state.in_threads([functools.partial(one.coded, state) for one in self.taken])
        for span, stream in zip((one.span for one in self.taken), streams, strict=True):
            if stream is None or (room := room - len(stream)) < 0:
                self.taken = []
                return None
            part = ByteRange(dtype=span.dtype, num_elements=span.num_elements, tensor=None, num_bytes=len(stream))
            parts.append((part, stream.data))
        for name in self.whole:
            tensor, packed = state.tensors[name], zstandard.compress(state.arrays[name].data, 3)
            num_elements = math.prod(tensor.shape)
            part = ByteRange(dtype=tensor.dtype, num_elements=num_elements, tensor=name, num_bytes=len(packed))
            parts.append((part, packed))
        self.taken = []  # no longer needed
        return parts


def take(state: ServedState, tensors: Mapping[str, RawTensor], *, span_elements: int = LANE_ELEMENTS) -> Changes:
    """Copy `tensors` into the state, and return the changes.

    Each tensor is requested once, in order of names, and held no longer than needed. WeightsError if names, dtypes or
    shapes differ; the state is unusable then."""
    old, old_digests = state.digest(), state.digests()
    source = NewTensors(state, tensors)
    with state.of_no_use_after_errors():
        taken = state.in_threads(_take_jobs(state, source, span_elements))
    whole = [*source.whole, *(name for one in taken for name in one.whole)]
    return Changes(state=state, old=old, old_digests=old_digests, taken=taken, whole=whole)


def _forms(state: ServedState) -> Forms:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in state.tensors.items()}


def _take_jobs(state: ServedState, source: NewTensors, span_elements: int) -> Iterator[Callable[[], _Taken]]:
    forms = _forms(state)
    name, new = "", None
    for span in cut(forms, lengths_of(forms, span_elements)):
        news = []
        for piece in span.pieces:
            if new is None or piece.tensor != name:
                name, new = piece.tensor, source.get(piece.tensor)
            news.append(NewBytes(new.of(piece, FORMS[span.dtype].width), new.way))
        yield functools.partial(_take_span, state, span, news)
    del new
    for name, (dtype, _) in forms.items():
        if dtype not in FORMS:
            source.replace(name)


def _take_span(state: ServedState, span: StreamSpan, news: list[NewBytes]) -> _Taken:
    old = [state.arrays[piece.tensor][piece.begin : piece.end] for piece in span.pieces]
    noted = kernels.take(old, [one.array for one in news], FORMS[span.dtype], [one.way for one in news])
    changed = tuple(piece.tensor for piece, total in zip(span.pieces, noted.totals, strict=True) if total)
    state.touched(changed)
    taken = _Taken(span, noted)
    if sum(noted.totals) <= NOTED * span.num_elements:
        return taken
    if 2 * sum(noted.totals) > span.num_elements and _may_lie_whole(state, span):
        return _Taken(span, kernels.without_changes(noted), changed)
    return _Taken(span, taken.coded(state))


def _may_lie_whole(state: ServedState, span: StreamSpan) -> bool:
    """Return whether the span is small, and contains its tensors completely. Tensors stored whole come first in the
    file."""
    return span.num_bytes <= WHOLE_BYTES and all(
        piece.end - piece.begin == len(state.arrays[piece.tensor]) for piece in span.pieces
    )


# ------------------------------------------------------------------------------------------ the file


def head_of(
    changes: Changes,
    parts: Sequence[ByteRange],
    state: ServedState,
    *,
    model: str,
    name: VersionName,
    parent: VersionName,
) -> bytes:
    """Return the bytes of the file before the parts, for the changes that made this state."""
    digests = state.digests()
    header = {
        "model": model,
        "name": [name.trainer_epoch, name.version],
        "parent": [parent.trainer_epoch, parent.version],
        "old": changes.old,
        "new": state.digest(),
        "tensors": [
            [key, tensor.dtype, list(tensor.shape), changes.old_digests[key][:SHORT], digests[key][:SHORT]]
            for key, tensor in state.tensors.items()
        ],
        "parts": [[part.dtype, part.num_elements, part.tensor, part.num_bytes] for part in parts],
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    packed = zstandard.compress(text, 19)
    return MAGIC + FORMAT.to_bytes(4, "little") + len(packed).to_bytes(4, "little") + packed


def read_header(data: Buffer, *, where: str) -> tuple[DeltaHeader, int]:
    """Return the header, and the position where the parts begin. WeightsError unless the data is a complete delta of
    this format."""
    view = memoryview(data).cast("B")
    if view.nbytes < 16 or view[:8] != MAGIC:
        raise _damaged(where, f"{view.nbytes} bytes that begin with {bytes(view[:8])!r}", f"a delta ({MAGIC!r} ...)")
    if (found := int.from_bytes(view[8:12], "little")) != FORMAT:
        raise WeightsError(f"{where}: found format {found}, expected {FORMAT}; update this worker")
    length = int.from_bytes(view[12:16], "little")
    if length > min(MAX_HEADER_BYTES, view.nbytes - 16):
        raise _damaged(where, f"a header of {length} bytes", f"at most {min(MAX_HEADER_BYTES, view.nbytes - 16)}")
    try:
        text = _unpack(view[16 : 16 + length], MAX_HEADER_BYTES)
        header = _parse_header(json.loads(text))
    except (zstandard.ZstdError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(where, f"a header that cannot be read ({error})", "JSON, compressed, as it is written") from None
    end = 16 + length + sum(part.num_bytes for part in header.parts)
    if end != view.nbytes:
        raise _damaged(where, f"{view.nbytes} bytes", f"{end}")
    return header, 16 + length


def apply(state: ServedState, data: Buffer, *, where: str) -> DeltaHeader:
    """Turn the parent's state into the next one, and return the header. A state that already is the next one is left
    unchanged.

    WeightsError if the state is neither of the two, or if the delta is damaged. The state's digest then tells whether
    it is still usable."""
    return apply_chain(state, [(data, where)])


def apply_chain(state: ServedState, deltas: Iterable[tuple[Buffer, str]]) -> DeltaHeader:
    """Apply several deltas to a state, and return the header of the last one. Each delta comes with its name for
    messages (`where`), and is fetched after the previous ones were applied.

    The conditions of `apply` hold. Only the first and the last state are digested: each delta in between names the
    result of the one before it. ValueError without deltas."""
    last: tuple[DeltaHeader, str] | None = None
    for data, where in deltas:
        header, start = read_header(data, where=where)
        state.check_same_tensors(header.tensors, where)
        if last is not None and header.old != last[0].new:
            raise _other_parent(header, where, f"{last[0].new}, which {last[1]} makes")
        if last is not None or _is_parent(state, header, where):
            with state.changing():
                _change(state, header, memoryview(data).cast("B")[start:], where)
        last = header, where
    if last is None:
        raise ValueError("no deltas to apply")
    _check_made(state, *last)
    return last[0]


def _is_parent(state: ServedState, header: DeltaHeader, where: str) -> bool:
    """Return whether the delta must still be applied. WeightsError if the state is neither its old nor its new
    state."""
    found = state.digest()
    if found not in (header.old, header.new):
        mine = state.digests()
        odd = next((name for name, one in header.old_digests.items() if not mine[name].startswith(one)), "none")
        raise _other_parent(header, where, f"{found} (the first tensor that differs: {odd})")
    return found != header.new


def _other_parent(header: DeltaHeader, where: str, found: str) -> WeightsError:
    return WeightsError(
        f"{where}: applies to the state {header.old} of {text_of(header.parent)}, found {found}; go back to an anchor"
    )


def _change(state: ServedState, header: DeltaHeader, view: memoryview, where: str) -> None:
    """Change the state by the parts in `view`. The caller compares the digests."""
    streams, position = [], 0
    for part in header.parts:
        stream = np.frombuffer(view[position : position + part.num_bytes], np.uint8)
        position += part.num_bytes
        if part.tensor is None:
            streams.append(stream)
        else:
            _put_whole(state, part.tensor, stream, where)
    try:
        spans = list(cut(header.tensors, ((p.dtype, p.num_elements) for p in header.parts if p.tensor is None)))
    except ValueError as error:
        raise _damaged(where, str(error), "a stream for each element") from None
    jobs = (functools.partial(_apply_span, state, span, stream) for span, stream in zip(spans, streams, strict=True))
    with state.of_no_use_after_errors():
        for span, changed in zip(spans, state.in_threads(jobs), strict=True):
            if changed is None:
                raise _damaged(where, f"a stream of {span.dtype} that does not come out", "one as it is written")
            state.touched(piece.tensor for piece, count in zip(span.pieces, changed, strict=True) if count)


def _apply_span(state: ServedState, span: StreamSpan, stream: np.ndarray) -> list[int] | None:
    arrays = [state.arrays[piece.tensor][piece.begin : piece.end] for piece in span.pieces]
    return kernels.apply(arrays, FORMS[span.dtype], stream)


def _put_whole(state: ServedState, tensor: str, stream: np.ndarray, where: str) -> None:
    array = state.arrays[tensor]
    try:
        found = _unpack(stream.data, len(array))
    except zstandard.ZstdError as error:
        raise _damaged(where, f"tensor {tensor!r} that cannot be unpacked ({error})", "zstd") from None
    if len(found) != len(array):
        raise _damaged(where, f"tensor {tensor!r} of {len(found)} bytes", f"{len(array)}")
    state.touched([tensor])
    array[:] = np.frombuffer(found, np.uint8)


def _check_made(state: ServedState, header: DeltaHeader, where: str) -> None:
    digests = state.digests()
    for name, digest in header.new_digests.items():
        if not digests[name].startswith(digest):
            raise WeightsError(
                f"{where}: tensor {name!r} became {digests[name][:SHORT]}, expected {digest}; go back to an anchor"
            )
    if state.digest() != header.new:
        raise WeightsError(f"{where}: made the state {state.digest()}, expected {header.new}; go back to an anchor")


# ------------------------------------------------------------------------------------------ the header


def _parse_header(value: Any) -> DeltaHeader:
    """Return the header for a JSON value. ValueError or TypeError if the value is not a header."""
    if not isinstance(value, dict) or set(value) != {"model", "name", "parent", "old", "new", "tensors", "parts"}:
        raise ValueError("other fields")
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    old: dict[str, str] = {}
    new: dict[str, str] = {}
    for name, dtype, shape, before, after in value["tensors"]:
        if dtype not in ITEM_BYTES or len(shape) > 64 or not all(map(_is_size, shape)):
            raise ValueError(f"tensor {name!r} of {dtype} {shape}")
        forms[_text(name)] = (dtype, tuple(shape))
        old[name], new[name] = _text(before), _text(after)
    if list(forms) != sorted(forms) or len(forms) != len(value["tensors"]):
        raise ValueError("tensors out of order")
    parts = tuple(
        ByteRange(dtype=_text(dtype), num_elements=num_elements, tensor=tensor, num_bytes=num_bytes)
        for dtype, num_elements, tensor, num_bytes in value["parts"]
    )
    for part in parts:
        if not (_is_size(part.num_elements) and _is_size(part.num_bytes)):
            raise ValueError(f"a part of {part.num_elements} elements, {part.num_bytes} bytes")
        if part.tensor is None and (part.dtype not in FORMS or part.num_elements > MAX_LANE_ELEMENTS):
            raise ValueError(f"a stream of {part.num_elements} elements of {part.dtype}")
        if part.tensor is not None and (part.tensor not in forms or part.dtype != forms[part.tensor][0]):
            raise ValueError(f"a tensor {part.tensor!r} of {part.dtype}")
    return DeltaHeader(
        model=_text(value["model"]),
        name=_version(value["name"]),
        parent=_version(value["parent"]),
        old=_text(value["old"]),
        new=_text(value["new"]),
        tensors=forms,
        old_digests=old,
        new_digests=new,
        parts=parts,
    )


def _version(value: Any) -> VersionName:
    epoch, version = value
    if not (_is_size(epoch) and _is_size(version)):
        raise ValueError(f"a version {value}")
    return VersionName(trainer_epoch=epoch, version=version)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} in the place of a text")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _unpack(data: memoryview, limit: int) -> bytes:
    """Unpack a frame. ZstdError if the data is not a frame, or declares more than `limit` bytes."""
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= limit:
        raise zstandard.ZstdError(f"{size} bytes, expected at most {limit}")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit, allow_extra_data=False)


def text_of(name: VersionName) -> str:
    """Return a version as epoch/version, the form in messages."""
    return f"{name.trainer_epoch}/{name.version}"


def _damaged(where: str, found: str, expected: str) -> WeightsError:
    return WeightsError(f"{where}: found {found}, expected {expected}; the delta is damaged")
