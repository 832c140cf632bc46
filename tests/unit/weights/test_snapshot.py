"""Snapshots: what is written is safetensors, what is read is checked, and the digest says what it says."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from rftstream.errors import WeightsError
from rftstream.weights.snapshot import RawTensor, decode_snapshot, state_digest
from tests.suite.each import each
from tests.unit.weights_samples import encode_snapshot


def tensors() -> dict[str, RawTensor]:
    return {
        "b.weight": RawTensor("BF16", (3,), np.arange(3, dtype=np.uint16)),
        "a.weight": RawTensor("BF16", (2, 2), bytes(range(8))),
        "c.scale": RawTensor("F32", (), memoryview(b"\x00\x00\x80\x3f")),
        "d.empty": RawTensor("F32", (0, 4), np.zeros((0, 4), dtype=np.float32)),
    }


def raw(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_decode_gives_back_what_was_encoded() -> None:
    data = encode_snapshot(tensors(), {"version": "3"})
    decoded = decode_snapshot(data)
    assert list(decoded) == ["a.weight", "b.weight", "c.scale", "d.empty"]
    for name, tensor in tensors().items():
        assert (decoded[name].dtype, decoded[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(decoded[name].data) == bytes(memoryview(tensor.data))
    assert encode_snapshot(decoded, {"version": "3"}) == data


def test_the_order_of_the_mapping_does_not_matter() -> None:
    assert encode_snapshot(tensors()) == encode_snapshot(dict(reversed(tensors().items())))
    assert state_digest(tensors()) == state_digest(dict(reversed(tensors().items())))


def test_decoded_tensors_are_views() -> None:
    data = bytearray(encode_snapshot(tensors()))
    view = memoryview(decode_snapshot(data)["a.weight"].data)
    data[data.index(bytes(range(8)))] = 77
    assert view[0] == 77


@pytest.mark.law("no-pickle")
def test_the_safetensors_library_reads_it(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors")
    torch = pytest.importorskip("torch")
    path = tmp_path / "model.safetensors"
    path.write_bytes(encode_snapshot(tensors(), {"version": "3"}))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "3"}
        assert sorted(file.keys()) == sorted(tensors())
        assert file.get_tensor("b.weight").view(torch.int16).tolist() == [0, 1, 2]
        assert file.get_tensor("c.scale").item() == 1.0
        assert file.get_tensor("d.empty").shape == (0, 4)


def test_it_reads_what_the_safetensors_library_writes() -> None:
    numpy_file = pytest.importorskip("safetensors.numpy")
    values = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.arange(3, dtype=np.int8)}
    decoded = decode_snapshot(numpy_file.save(values, metadata={"who": "they"}))
    assert (decoded["x"].dtype, decoded["x"].shape, decoded["y"].dtype) == ("F32", (2, 3), "I8")
    assert bytes(decoded["x"].data) == values["x"].tobytes()


@pytest.mark.law("lineage")
def test_state_digest_by_hand() -> None:
    one = hashlib.sha256(b"\x01\x02").hexdigest()
    two = hashlib.sha256(b"").hexdigest()
    lines = f'["a","BF16",[1],"{one}"]\n["b","F32",[0],"{two}"]\n'
    state = {"b": RawTensor("F32", (0,), b""), "a": RawTensor("BF16", (1,), b"\x01\x02")}
    assert state_digest(state) == f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


@pytest.mark.law("lineage")
@each(
    "other",
    [
        {"a": RawTensor("F16", (2,), b"1234")},
        {"a": RawTensor("BF16", (2, 1), b"1234")},
        {"a": RawTensor("BF16", (2,), b"1235")},
        {"b": RawTensor("BF16", (2,), b"1234")},
        {},
    ],
)
def test_state_digest_sees_every_difference(other: dict[str, RawTensor]) -> None:
    assert state_digest({"a": RawTensor("BF16", (2,), b"1234")}) != state_digest(other)


@pytest.mark.law("no-pickle")
@each(
    "data",
    [
        b"",
        b"\x01",
        raw(b"{", b""),
        raw(b"[" * 100_000),
        raw(b"[]"),
        raw(b"\xff\xfe"),
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        raw({}, b"left over"),
        raw({"a": entry()}, b"123"),
        raw({"a": entry()}, b"12345"),
        raw({"a": entry(shape=[5])}, b"1234"),
        raw({"a": entry(shape=[-4])}, b"1234"),
        raw({"a": entry(shape=[True, 4])}, b"1234"),
        raw({"a": entry(shape=[4.0])}, b"1234"),
        raw({"a": entry(shape=[1 << 70])}, b"1234"),
        raw({"a": entry(shape=[1 << 40] * 60)}, b"1234"),
        raw({"a": entry(shape="4")}, b"1234"),
        raw({"a": entry(dtype="U4")}, b"1234"),
        raw({"a": entry(dtype=None)}, b"1234"),
        raw({"a": entry(offsets=[4, 0])}, b"1234"),
        raw({"a": entry(offsets=[0, 4, 8])}, b"1234"),
        raw({"a": entry(offsets=[4, 8])}, b"12345678"),
        raw({"a": entry(), "b": entry()}, b"1234"),
        raw({"a": entry(), "b": entry(offsets=[2, 6])}, b"123456"),
        raw({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
        raw({"a": {**entry(), "more": 1}}, b"1234"),
        raw(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", b"1234"),
    ],
)
def test_decode_refuses(data: bytes) -> None:
    with pytest.raises(WeightsError, match="damaged or not a snapshot"):
        decode_snapshot(data)


def test_every_truncation_and_growth_is_refused() -> None:
    data = encode_snapshot(tensors())
    for length in range(len(data)):
        with pytest.raises(WeightsError):
            decode_snapshot(data[:length])
    with pytest.raises(WeightsError):
        decode_snapshot(data + b"\0")


@pytest.mark.parametrize("tensor", [RawTensor("U4", (1,), b"1"), RawTensor("F32", (1,), b"123")])
def test_encode_refuses(tensor: RawTensor) -> None:
    with pytest.raises(WeightsError, match="tensor 'a'"):
        encode_snapshot({"a": tensor})
