"""The format of deltas: bit for bit there and back, as the document says, and nothing from damage but an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.contracts.versions import VersionName
from rftstream.errors import WeightsError
from rftstream.weights.deltas import delta, kernels
from rftstream.weights.snapshot import RawTensor, decode_snapshot, state_digest
from rftstream.weights.state import ServedState
from tests.suite.each import each
from tests.unit import weights_reader
from tests.unit.weights_samples import DELTA, NAME, NEW, OLD, PARENT, sample_delta, sample_states

pytestmark = pytest.mark.law("lineage")

BITS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}
ODD = {"<u2": [0, 0x8000, 1, 0x8001, 0x7FA5, 0xFFFF, 0x7F80, 0x3F80], "<u4": [0, 1 << 31, 1, 0x7FA00001, 2**32 - 1]}


def stored(path: Path) -> dict[str, RawTensor]:
    return decode_snapshot(path.read_bytes(), where=path.name)


def plain(tensors: dict[str, RawTensor]) -> weights_reader.Tensors:
    return {name: (one.dtype, list(one.shape), bytes(one.data)) for name, one in tensors.items()}


def encode(old: dict[str, RawTensor], new: dict[str, RawTensor], threads: int = 2, **options: Any) -> bytes:
    state = ServedState(old, copy=True, threads=threads)
    changes = delta.take(state, new, **options)
    assert state.digest() == state_digest(new), "the state is the new one now"
    assert changes.parts is not None
    head = delta.head_of(changes, [part for part, _ in changes.parts], state, model="m", name=NAME, parent=PARENT)
    return b"".join([head, *(bytes(part) for _, part in changes.parts)])


def sample_state() -> ServedState:
    return ServedState(stored(OLD), copy=True, threads=1)


# ------------------------------------------------------------------------------------------ the document


def test_the_sample_reads_as_the_document_says() -> None:
    assert weights_reader.apply_delta(plain(stored(OLD)), DELTA.read_bytes()) == plain(stored(NEW))


def test_the_sample_is_what_we_read_and_write() -> None:
    state = sample_state()
    header = delta.apply(state, DELTA.read_bytes(), where="sample")
    assert (header.model, header.name, header.parent) == ("sample", NAME, PARENT)
    assert plain(state.tensors) == plain(stored(NEW))
    assert [part.tensor for part in header.parts].count(None) == 5
    ours, theirs = sample_delta(), DELTA.read_bytes()
    assert delta.read_header(ours, where="ours")[0] == delta.read_header(theirs, where="theirs")[0]
    assert ours[delta.read_header(ours, where="ours")[1] :] == theirs[delta.read_header(theirs, where="theirs")[1] :]


def test_a_foreign_snapshot_of_the_sample_is_the_same() -> None:
    assert [plain(one) for one in sample_states()] == [plain(stored(OLD)), plain(stored(NEW))]


# ------------------------------------------------------------------------------------------ there and back


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, np.ndarray, np.ndarray]:
    """A dtype, and bit patterns before and after."""
    dtype = draw(st.sampled_from(sorted(BITS)))
    form = BITS[dtype]
    most = 2 ** (8 * np.dtype(form).itemsize) - 1
    pattern = st.one_of(st.sampled_from(ODD[form]), st.integers(0, most), st.integers(0x3C00, 0x3C10))
    old = draw(st.lists(pattern, max_size=120))
    new = [draw(pattern) if draw(st.booleans()) else one for one in old]
    return dtype, np.array(old, form), np.array(new, form)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(pairs(), st.integers(1, 50))
def test_any_bit_patterns_come_back(pair: tuple[str, np.ndarray, np.ndarray], span_elements: int) -> None:
    dtype, old, new = pair
    before = {"w": RawTensor(dtype, old.shape, old.tobytes()), "z": RawTensor("U8", (1,), b"\0")}
    after = {"w": RawTensor(dtype, new.shape, new.tobytes()), "z": RawTensor("U8", (1,), b"\1")}
    state = ServedState(before, copy=True)
    changes = delta.take(state, after, span_elements=span_elements)
    assert plain(state.tensors) == plain(after)
    if changes.parts is None:
        return
    head = delta.head_of(changes, [part for part, _ in changes.parts], state, model="m", name=NAME, parent=PARENT)
    data = b"".join([head, *(bytes(part) for _, part in changes.parts)])
    again = ServedState(before, copy=True, threads=1)
    delta.apply(again, data, where="it")
    assert plain(again.tensors) == plain(after)
    assert weights_reader.apply_delta(plain(before), data) == plain(after)


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_many_elements_in_many_spans(dtype: str) -> None:
    chance = np.random.default_rng(1)
    old, new = {}, {}
    for name, size in (("a", 70_001), ("b", 1), ("c", 30_000)):
        values = (chance.standard_normal(size) * 0.02).astype("<f4").view("<u4")
        bits = values if dtype == "F32" else (values >> 16).astype("<u2")
        changed = bits + (chance.random(size) < 0.02).astype(bits.dtype) * chance.integers(1, 3)
        old[name] = RawTensor(dtype, (size,), bits.tobytes())
        new[name] = RawTensor(dtype, (size,), changed.astype(bits.dtype).tobytes())
    data = encode(old, new, span_elements=20_000)
    assert data[200:] == encode(old, new, threads=1, span_elements=20_000)[200:], "however many threads"
    assert len(data) < sum(one.num_bytes for one in old.values()) / 30
    state = ServedState(old, copy=True)
    delta.apply(state, data, where="it")
    assert state.digest() == state_digest(new)


def test_nothing_changed_is_next_to_nothing() -> None:
    old = {"w": RawTensor("BF16", (1 << 16,), (np.arange(1 << 16) % 500 + 0x3C00).astype("<u2").tobytes())}
    assert len(encode(old, old)) < 400


def test_each_tensor_is_asked_for_once() -> None:
    old, new = sample_states()
    asked = []

    class Asked(dict[str, RawTensor]):
        def __getitem__(self, name: str) -> RawTensor:
            asked.append(name)
            return super().__getitem__(name)

    delta.take(ServedState(old, copy=True), Asked(new), span_elements=100)
    assert sorted([*asked, "e.empty"]) == sorted(new), "but for one in which nothing can change"


# ------------------------------------------------------------------------------------------ what is refused


def test_twice_is_once_and_the_wrong_state_is_refused() -> None:
    state = sample_state()
    for _ in range(2):
        delta.apply(state, DELTA.read_bytes(), where="it")
        assert plain(state.tensors) == plain(stored(NEW))
    other = stored(OLD)
    other["b.weight"] = RawTensor("BF16", (30, 20), bytes(1200))
    wrong = ServedState(other, copy=True)
    with pytest.raises(WeightsError, match=r"it: applies to the state sha256:\w+ of 2/56, found .*differs: b\.weight"):
        delta.apply(wrong, DELTA.read_bytes(), where="it")
    assert plain(wrong.tensors) == plain(other), "and left as it was"


def test_another_model_is_refused() -> None:
    other = stored(OLD)
    del other["g.mask"]
    with pytest.raises(WeightsError, match=r"tensor 'g.mask': found BOOL \[3\], expected none"):
        delta.apply(ServedState(other, copy=True), DELTA.read_bytes(), where="it")


def test_any_truncation_is_refused() -> None:
    data, state = DELTA.read_bytes(), sample_state()
    for length in range(len(data)):
        with pytest.raises(WeightsError):
            delta.apply(state, data[:length], where="it")
    with pytest.raises(WeightsError, match="857 bytes, expected 856"):
        delta.apply(state, data + b"\0", where="it")
    assert plain(state.tensors) == plain(stored(OLD))


@pytest.mark.slow
def test_any_flipped_bit_is_refused() -> None:
    """Also without the digest of the object, which is compared before."""
    data = DELTA.read_bytes()
    state = sample_state()
    for place in range(0, 8 * len(data), 7):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        try:
            delta.apply(state, bytes(damaged), where="it")
        except WeightsError:
            if plain(state.tensors) != plain(stored(OLD)):
                assert state.digest() != state_digest(stored(OLD)), "a state that is of no use says so"
                state = sample_state()
        else:
            assert state.digest() == state_digest(stored(NEW)), "a bit that nothing depends on"
            state = sample_state()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(sorted(kernels.FORMS)), st.integers(0, 400), st.integers(0, 2**32 - 1))
def test_no_stream_writes_elsewhere(data: bytes, dtype: str, size: int, seed: int) -> None:
    form = kernels.FORMS[dtype]
    guarded = np.full(64 + size * form.width + 64, 0xA5, np.uint8)
    inside = guarded[64 : 64 + size * form.width]
    inside[:] = np.random.default_rng(seed).integers(0, 256, len(inside))
    half = size // 2 * form.width
    stream = np.frombuffer(b"\0" + data, np.uint8)
    kernels.apply([inside[:half], inside[half:]], form, stream)
    assert (guarded[:64] == 0xA5).all()
    assert (guarded[64 + len(inside) :] == 0xA5).all()


def rewritten(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The sample with another header."""
    data = DELTA.read_bytes()
    _, start = delta.read_header(data, where="it")
    header = json.loads(zstandard.decompress(data[16:start]))
    change(header)
    packed = zstandard.compress(json.dumps(header).encode())
    return data[:12] + len(packed).to_bytes(4, "little") + packed + data[start:]


HUGE = 1 << 62


@each(
    "change",
    [
        lambda h: h.update(extra=1),
        lambda h: h.pop("old"),
        lambda h: h.update(model=3),
        lambda h: h.update(name=[1]),
        lambda h: h.update(parent=[-1, 2]),
        lambda h: h.update(tensors={"a": 1}),
        lambda h: h.update(tensors=h["tensors"][::-1]),
        lambda h: h.update(tensors=h["tensors"] * 2),
        lambda h: h["tensors"][0].__setitem__(1, "F99"),
        lambda h: h["tensors"][0].__setitem__(2, [HUGE, HUGE]),
        lambda h: h["tensors"][0].__setitem__(2, [-40, -50]),
        lambda h: h["tensors"][0].__setitem__(3, None),
        lambda h: h["tensors"][0].__setitem__(4, "0" * 16),
        lambda h: h.update(new="sha256:" + "0" * 64),
        lambda h: h.update(parts=None),
        lambda h: h.update(parts=[]),
        lambda h: h["parts"].pop(),
        lambda h: h["parts"].reverse(),
        lambda h: h["parts"][0].__setitem__(1, HUGE),
        lambda h: h["parts"][0].__setitem__(1, -1),
        lambda h: h["parts"][0].__setitem__(1, 1 << 31),
        lambda h: h["parts"][0].__setitem__(1, h["parts"][0][1] - 1),
        lambda h: h["parts"][0].__setitem__(3, HUGE),
        lambda h: h["parts"][0].__setitem__(3, h["parts"][0][3] - 1),
        lambda h: h["parts"][0].__setitem__(0, "F16"),
        lambda h: h["parts"][0].__setitem__(0, "I64"),
        lambda h: h["parts"][0].__setitem__(2, "a.weight"),
        lambda h: h["parts"][-1].__setitem__(2, "no such"),
        lambda h: h["parts"][-1].__setitem__(2, ["f.steps"]),
        lambda h: h["parts"][-1].__setitem__(2, "g.mask"),
    ],
)
def test_a_header_that_lies_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(WeightsError, match="it: "):
        delta.apply(sample_state(), rewritten(change), where="it")


@pytest.mark.law("bounded")
def test_a_header_is_bounded() -> None:
    bomb = zstandard.compress(b" " * 200_000_000)
    data = b"RFTDELTA" + (1).to_bytes(4, "little") + len(bomb).to_bytes(4, "little") + bomb
    with pytest.raises(WeightsError, match="200000000 bytes, expected at most 100000000"):
        delta.read_header(data, where="it")
    deep = zstandard.compress(b"[" * 1_000_000)
    with pytest.raises(WeightsError, match="a header that cannot be read"):
        delta.read_header(b"RFTDELTA\1\0\0\0" + len(deep).to_bytes(4, "little") + deep, where="it")
    with pytest.raises(WeightsError, match="format 2, expected 1; update this worker"):
        delta.read_header(b"RFTDELTA\2\0\0\0" + bytes(4), where="it")


def test_names_of_versions() -> None:
    assert delta.text_of(VersionName(trainer_epoch=2, version=57)) == "2/57"
