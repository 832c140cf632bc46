"""What training waits for: the weights are taken over, rounded and noted; bits are made of it later, and the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.contracts.versions import VersionName, WeightsKind
from rftstream.errors import WeightsError
from rftstream.weights import state as states
from rftstream.weights.deltas import delta, kernels
from rftstream.weights.deltas.kernels import AS_IT_IS, FLOAT32_TO_F16, FORMS, Noted
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.snapshot import HasMasters, RawTensor, state_digest
from rftstream.weights.state import ServedState
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.tensors import SERVED, ServedTensors, rounded_nan
from tests.suite.each import each

TIES = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
"""Lower halves of a float32: nearest below, between and above, for both kinds of rounding."""


def name(version: int) -> VersionName:
    return VersionName(trainer_epoch=1, version=version)


def every_upper_half() -> np.ndarray:
    """float32 bits: all signs, exponents and what bfloat16 keeps of a mantissa; zeros, denormals, infinities, NaNs."""
    return (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | np.array(TIES, np.uint32)).reshape(-1)


def rounded_by_torch(bits: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(bits.view(np.float32)).to(SERVED[dtype]).view(torch.int16).numpy().view(np.uint16)


def way_of(dtype: str) -> int:
    nan = rounded_nan()
    assert nan is not None, "no processor is known where it depends"
    return {"bfloat16": nan, "float16": FLOAT32_TO_F16}[dtype]


def taken(old: np.ndarray, new: np.ndarray, dtype: str, way: int) -> Noted:
    return kernels.take([old.view(np.uint8)], [new.view(np.uint8)], FORMS[dtype], [way])


# ------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize(("dtype", "known"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_rounding_is_torchs_bit_for_bit(dtype: str, known: str) -> None:
    bits = every_upper_half()
    expected = rounded_by_torch(bits, dtype)
    held = ~expected
    assert taken(held, bits, known, way_of(dtype)).totals == [len(bits)]
    np.testing.assert_array_equal(held, expected)
    assert taken(held, bits, known, way_of(dtype)).totals == [0], "bits are compared, NaNs and zeros of both signs too"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=150), st.sampled_from(["bfloat16", "float16"]))
def test_any_float32_is_rounded_as_by_torch(values: list[int], dtype: str) -> None:
    bits = np.array(values, np.uint32)
    held = np.zeros(len(bits), np.uint16)
    taken(held, bits, {"bfloat16": "BF16", "float16": "F16"}[dtype], way_of(dtype))
    np.testing.assert_array_equal(held, rounded_by_torch(bits, dtype))


def test_a_nan_becomes_what_is_said() -> None:
    bits = np.array([0x7FC00000, 0xFF800001, 0x7F800000, 0x3F800000], np.uint32)
    for nan in (0x7FC0, 0xFFFF):
        held = np.zeros(4, np.uint16)
        taken(held, bits, "BF16", nan)
        assert held.tolist() == [nan, nan, 0x7F80, 0x3F80]


def masters(seed: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    found = {"a": torch.randn(33, 65, generator=chance), "b": torch.randn(7, generator=chance), "c": torch.empty(0, 3)}
    found["d"] = torch.randn(20, 30, generator=chance).T  # not as it would lie in a file
    found["e"] = torch.randn(9, generator=chance).double()
    found["b"][:5] = torch.tensor([float("nan"), -0.0, float("-inf"), 1e-45, -1e-39])
    return found


def moved(tensors: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    return {name: one + by * torch.randn(one.shape, generator=torch.Generator().manual_seed(3)).to(one.dtype)
            for name, one in tensors.items()}  # fmt: skip


@pytest.mark.parametrize("dtype", sorted(SERVED))
def test_masters_are_taken_as_what_is_served_of_them(dtype: str) -> None:
    """In one go and through a copy that torch rounds: the same state, the same bits."""
    old, new = ServedTensors(masters(), dtype), ServedTensors(moved(masters(), 1e-3), dtype)
    assert isinstance(new, HasMasters)
    assert [new.master(name) is not None for name in sorted(new)] == [True, True, True, False, False]
    found = []
    for tensors in (new, dict(new)):
        state = ServedState(old, copy=True, threads=2)
        parts = delta.take(state, tensors, span_elements=1000).parts
        assert state.digest() == state_digest(new)
        assert parts is not None
        found.append([bytes(part) for _, part in parts])
    assert found[0] == found[1]


def test_masters_of_another_shape_or_dtype_are_refused() -> None:
    state = ServedState(ServedTensors(masters(), "bfloat16"), copy=True)
    with pytest.raises(WeightsError, match=r"'a': found F16 \[33, 65\], expected BF16 \[33, 65\]"):
        delta.take(state, ServedTensors(masters(), "float16"))
    other = masters() | {"b": torch.zeros(8)}
    with pytest.raises(WeightsError, match=r"'b': found BF16 \[8\], expected BF16 \[7\]"):
        delta.take(state, ServedTensors(other, "bfloat16"))


# ------------------------------------------------------------------------------------------ what is noted


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(st.integers(0, 200), max_size=4),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_what_is_noted_says_what_was(dtype: str, sizes: list[int], share: float, seed: int) -> None:
    chance = np.random.default_rng(seed)
    unsigned = np.dtype(f"u{FORMS[dtype].width}")
    old = [chance.integers(0, 4, size).astype(unsigned) for size in sizes]
    new = [np.where(chance.random(len(one)) < share, one ^ 1, one) for one in old]
    held = [one.copy() for one in old]
    noted = kernels.take([one.view(np.uint8) for one in held], [one.view(np.uint8) for one in new], FORMS[dtype],
                         [AS_IT_IS] * len(old))  # fmt: skip
    assert [one.tolist() for one in held] == [one.tolist() for one in new]
    bits = np.unpackbits(noted.changed.view(np.uint8), bitorder="little")
    before, place = noted.before.view(unsigned), 0
    for was, now, total in zip(old, new, noted.totals, strict=True):
        words = -(-len(was) // kernels.BLOCK) * kernels.BLOCK
        changed, place = bits[place : place + words], place + words
        assert changed.tolist() == [*(was != now), *[0] * (words - len(was))]
        assert before[:total].tolist() == was[was != now].tolist()
        before = before[total:]
    assert len(before) == 0
    assert place == len(bits)


def states_that_differ(shares: dict[str, float]) -> tuple[dict[str, RawTensor], dict[str, RawTensor]]:
    """Tensors of 6,400 elements each, of which such a share changes."""
    chance = np.random.default_rng(1)
    old, new = {}, {}
    for one, share in shares.items():
        bits = ((chance.standard_normal(6400) * 0.02).astype("<f4").view("<u4") >> 16).astype("<u2")
        changed = bits + (chance.random(6400) < share)
        old[one], new[one] = (RawTensor("BF16", (6400,), value.astype("<u2").tobytes()) for value in (bits, changed))
    return old, new


@pytest.mark.law("bounded")
def test_no_more_is_held_than_is_said() -> None:
    """An eighth of old bits and a bit for each element; what changed more often is a stream at once."""
    old, new = states_that_differ({"a": 0.01, "b": 0.11, "c": 0.14, "d": 0.4})
    changes = delta.take(ServedState(old, copy=True, threads=1), new, span_elements=6400)
    assert [isinstance(one.how, Noted) for one in changes.taken] == [True, True, False, False]
    for one in changes.taken:
        if isinstance(one.how, Noted):
            held = [one.how.changed, one.how.before]
            assert all(array.base is None for array in held), "no larger array is behind it"
            assert sum(array.nbytes for array in held) <= 6400 * 2 * 3 / 16


@each(
    ("shares", "elements", "whole"),
    [
        ({"a": 0.9, "b": 0.0, "c": 0.8}, 1 << 20, ["a", "c"]),
        ({"a": 0.9, "b": 0.0, "c": 0.1}, 1 << 20, []),
        ({"a": 0.9, "b": 0.9, "c": 0.9}, 6400, ["a", "b", "c"]),
        ({"a": 0.9, "b": 0.9, "c": 0.9}, 5000, []),
    ],
    ids=["all over", "in places", "a tensor in each stream", "streams that share tensors"],
)
def test_what_is_small_and_changed_all_over_lies_whole(
    shares: dict[str, float], elements: int, whole: list[str]
) -> None:
    old, new = states_that_differ(shares)
    state = ServedState(old, copy=True, threads=2)
    changes = delta.take(state, new, span_elements=elements)
    assert changes.parts is not None
    assert [part.tensor for part, _ in changes.parts if part.tensor is not None] == whole
    parts = [part for part, _ in changes.parts]
    file = delta.head_of(changes, parts, state, model="m", name=name(2), parent=name(1))
    file += b"".join(bytes(stream) for _, stream in changes.parts)
    follower = ServedState(old, copy=True, threads=2)
    delta.apply(follower, file, where="d")
    assert {key: bytes(tensor.data) for key, tensor in follower.tensors.items()} == {
        key: bytes(tensor.data) for key, tensor in new.items()
    }


def test_what_is_large_is_coded_however_much_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "WHOLE_BYTES", 6400 * 2 - 1)
    old, new = states_that_differ({"a": 0.9})
    assert delta.take(ServedState(old, copy=True, threads=1), new).whole == []


@pytest.mark.law("lineage")
@pytest.mark.parametrize("share", [0.0, 0.004, 0.05, 0.3])
def test_sooner_or_later_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    old, new = states_that_differ({"a": share, "b": 0.01, "c": 0.0})
    found = []
    for noted in (-1.0, 1.0):
        monkeypatch.setattr(delta, "NOTED", noted)
        changes = delta.take(ServedState(old, copy=True, threads=2), new, span_elements=5000)
        assert {isinstance(one.how, Noted) for one in changes.taken} == {noted > 0}
        assert changes.parts is not None
        assert changes.taken == [], "and nothing is held twice"
        found.append([bytes(part) for _, part in changes.parts])
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------ between taking and writing


def publisher(folder: Path, **options: Any) -> WeightsPublisher:
    return WeightsPublisher(ObjectStore("file://weights", base=folder), "m", "bfloat16", anchor_every=100, **options)


def test_digests_are_computed_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = publisher(tmp_path)
    ours.publish(ServedTensors(masters(), "bfloat16"), name(0), resumed=True)

    def too_early(array: np.ndarray) -> str:
        raise AssertionError("a digest while training waits")

    with monkeypatch.context() as patched:
        patched.setattr(states, "_sha256", too_early)
        taken = ours.take(ServedTensors(moved(masters(), 1e-3), "bfloat16"), name(1))
    assert ours.write(taken).weights_digest == state_digest(ServedTensors(moved(masters(), 1e-3), "bfloat16"))


@pytest.mark.law("never-waits")
def test_training_may_go_on_before_it_is_written(tmp_path: Path) -> None:
    """Masters change in place as soon as they were taken; what is written is what they were."""
    ours, tensors = publisher(tmp_path), masters()
    served = ServedTensors(tensors, "bfloat16")
    follower = WeightsFollower(ObjectStore("file://weights", base=tmp_path), "m")
    follower.announced(ours.publish(served, name(0), resumed=True))
    for version in range(1, 4):
        tensors["a"].view(-1)[version::50] *= 1.01
        expected = state_digest(served)
        taken = ours.take(served, name(version))
        for one in tensors.values():
            one += 1.0
        announced = ours.write(taken)
        assert (announced.kind, announced.weights_digest) == (
            WeightsKind.delta if version == 1 else announced.kind,
            expected,
        )
        assert follower.announced(announced)
        assert state_digest(follower.fetch(announced)) == expected


@pytest.mark.parametrize("where", ["code", "store"])
def test_writing_that_failed_can_be_done_again_or_begins_with_an_anchor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    ours, tensors = publisher(tmp_path), masters()
    served = ServedTensors(tensors, "bfloat16")
    follower = WeightsFollower(ObjectStore("file://weights", base=tmp_path), "m")
    follower.announced(ours.publish(served, name(0), resumed=True))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no more")

    def take_and_fail(version: int) -> Any:
        tensors["a"].view(-1)[version::50] *= 1.01
        taken = ours.take(served, name(version))
        with monkeypatch.context() as patched:
            patched.setattr(*((kernels, "code", fail) if where == "code" else (ours._store, "write", fail)))
            with pytest.raises(MemoryError):
                ours.write(taken)
        return taken

    told = ours.write(take_and_fail(1))
    assert told.kind is WeightsKind.delta
    follower.announced(told)
    assert state_digest(follower.fetch(told)) == told.weights_digest == state_digest(served)
    take_and_fail(2)
    told = ours.publish(served, name(3))
    assert (told.kind, told.delta, told.weights_digest) == (WeightsKind.full, None, state_digest(served))
