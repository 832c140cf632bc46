"""Several deltas in one go, and many elements at once: the same as one after another, and as looking at each."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rftstream.contracts.versions import VersionName
from rftstream.errors import WeightsError
from rftstream.weights import state
from rftstream.weights.deltas import delta, kernels
from rftstream.weights.deltas.kernels import AS_IT_IS, FORMS
from rftstream.weights.snapshot import RawTensor, state_digest
from rftstream.weights.state import ServedState

pytestmark = pytest.mark.law("lineage")

Tensors = dict[str, RawTensor]


def tensors(version: int) -> Tensors:
    bits = np.arange(4096, dtype="<u2") % 512 + 0x3C00
    for one in range(1, version + 1):
        bits[one::97] += 1
    return {
        "a": RawTensor("BF16", (64, 64), bits.tobytes()),
        "b": RawTensor("BF16", (8,), bytes(16)),
        "c": RawTensor("U8", (1,), bytes([version])),
    }


def name(version: int) -> VersionName:
    return VersionName(trainer_epoch=1, version=version)


def step(version: int, new: Tensors | None = None) -> tuple[bytes, str]:
    """The delta that makes this version, and what messages call it."""
    held = ServedState(tensors(version - 1), copy=True, threads=1)
    changes = delta.take(held, new or tensors(version))
    assert changes.parts is not None
    parts = [part for part, _ in changes.parts]
    head = delta.head_of(changes, parts, held, model="m", name=name(version), parent=name(version - 1))
    return b"".join([head, *(bytes(part) for _, part in changes.parts)]), f"step {version}"


def held(version: int) -> ServedState:
    return ServedState(tensors(version), copy=True, threads=1)


def test_a_chain_makes_the_last_state_and_digests_none_between(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[int] = []
    sha256 = state._sha256
    mine = held(0)
    deltas = [step(version) for version in range(1, 6)]

    def noted(array: np.ndarray) -> str:
        digested.append(len(array))
        return sha256(array)

    monkeypatch.setattr(state, "_sha256", noted)
    header = delta.apply_chain(mine, iter(deltas))
    assert digested == [8192, 16, 1, 8192, 1], "all before, and what changed after"
    assert header.name == name(5)
    assert mine.digest() == header.new == state_digest(tensors(5))


def test_a_chain_begins_where_the_state_is() -> None:
    mine = held(1)
    assert delta.apply_chain(mine, [step(1), step(2)]).name == name(2)
    assert mine.digest() == state_digest(tensors(2))
    with pytest.raises(ValueError, match="no deltas"):
        delta.apply_chain(mine, [])


def test_a_gap_in_a_chain_is_refused_and_leaves_what_was_made() -> None:
    mine = held(0)
    with pytest.raises(WeightsError, match=r"step 4: applies to the state .* of 1/3, found .*, which step 2 makes"):
        delta.apply_chain(mine, [step(1), step(2), step(4)])
    assert mine.digest() == state_digest(tensors(2))


def test_a_chain_from_another_state_is_refused_before_anything_changes() -> None:
    mine = held(0)
    with pytest.raises(WeightsError, match="step 2: applies to the state"):
        delta.apply_chain(mine, [step(2), step(3)])
    assert mine.digest() == state_digest(tensors(0))


def test_a_wrong_state_on_the_way_is_found_at_the_end() -> None:
    """A delta whose header says what it should, and whose parts make something else."""
    good, bad = step(2)[0], step(2, new={**tensors(2), "c": RawTensor("U8", (1,), b"\x99")})[0]
    start, begin = (delta.read_header(one, where="it")[1] for one in (good, bad))
    mine, third = held(1), {**tensors(3), "c": RawTensor("U8", (1,), b"\2")}
    with pytest.raises(WeightsError, match=r"step 3: tensor 'c' became \w+, expected"):
        delta.apply_chain(mine, [(good[:start] + bad[begin:], "step 2"), step(3, new=third)])
    assert mine.digest() not in (state_digest(tensors(2)), state_digest(third))


# ------------------------------------------------------------------------------------------ blocks


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library without its passes for wide vectors, as it is on other processors."""
    target = tmp_path_factory.mktemp("narrow") / "narrow.so"
    command = ["cc", *kernels.FLAGS, "-DRFT_NARROW", "-o", str(target), *map(str, kernels.SOURCES)]
    subprocess.run(command, check=True, timeout=120)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.05, 0.6])
def test_blocks_are_the_same_as_element_by_element(
    narrow: Path, dtype: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng(7)
    values = chance.standard_normal(50_000).astype("<f4") * 0.02
    old = (values.view("<u4") >> 16).astype("<u2") if dtype == "BF16" else values.astype("<f2").view("<u2")
    new = np.where(chance.random(len(old)) < share, chance.integers(0, 1 << 16, len(old)), old).astype("<u2")
    new = np.where(chance.random(len(old)) < 0.5, new, np.where(old == new, old, old + 1)).astype("<u2")
    cuts = [0, 7, 64 * 300, 64 * 300 + 1, 40_000, len(old)]  # pieces begin anywhere

    def pieces(bits: np.ndarray) -> list[np.ndarray]:
        whole = bits.copy().view(np.uint8)
        return [whole[2 * begin : 2 * end] for begin, end in itertools.pairwise(cuts)]

    def both() -> tuple[bytes, bytes]:
        now, form = pieces(old), FORMS[dtype]
        noted = kernels.take(now, pieces(new), form, [AS_IT_IS] * len(now))
        stream = kernels.code(now, noted, form, 400_000)
        assert stream is not None
        made = pieces(old)
        assert kernels.apply(made, form, stream) == noted.totals
        return bytes(stream), b"".join(map(bytes, made))

    streams = [both()]
    wide = kernels._library()
    library = ctypes.CDLL(str(narrow))
    for function in ("rft_take", "rft_code", "rft_apply"):
        getattr(library, function).argtypes = getattr(wide, function).argtypes
        getattr(library, function).restype = getattr(wide, function).restype
    monkeypatch.setattr(kernels, "_library", lambda: library)
    streams.append(both())
    assert streams[0] == streams[1]
    assert streams[0][1] == new.tobytes()
