"""Any message comes back as it was, byte for byte; older and newer writers are understood."""

from __future__ import annotations

import dataclasses
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import msgpack  # type: ignore[import-untyped]  # it has no stubs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import schemas
from rftstream.contracts.arrays import Array
from rftstream.contracts.codec import decode, digest_of_experiences, encode, from_record, headers_of, to_record
from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.records import Record
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import ContractError
from tests.contracts.samples import SAMPLES, contract_of, readable
from tests.contracts.strategies import messages
from tests.suite.each import each

UNKNOWN = [1, {"nested": [b"bytes", None, 2.5]}, "text"]


@pytest.mark.sampled(10)
@pytest.mark.slow
@pytest.mark.law("no-pickle")
@pytest.mark.parametrize("contract", MESSAGES)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_message_comes_back_byte_for_byte(contract: str, data: st.DataObject) -> None:
    message = data.draw(messages(contract))
    value = encode(message)
    decoded = decode(value, contract)
    assert encode(decoded) == value
    headers = dict(headers_of(message, "a-run", 3))
    assert all(text.isascii() for text in headers.values())
    assert len(headers) == len(headers_of(message, "a-run", 3)), "a header appears once"


@pytest.mark.sampled(10)
@pytest.mark.slow
@pytest.mark.parametrize("contract", MESSAGES)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_the_codec_takes_the_schema_takes(contract: str, data: st.DataObject) -> None:
    message = data.draw(messages(contract))
    jsonschema.Draft202012Validator(schemas.load(contract)).validate(readable(message))


@each("name", SAMPLES)
def test_fields_of_newer_writers_are_skipped(name: str) -> None:
    message = SAMPLES[name]
    fields = _with_unknown_fields(type(message), msgpack.unpackb(encode(message)))
    assert decode(msgpack.packb(fields), contract_of(name)) == decode(encode(message), contract_of(name))


def _with_unknown_fields(kind: Any, value: Any) -> Any:
    """The same on the wire, with fields from the future in front of and behind those of every part."""
    if value is None:
        return None
    if get_origin(kind) in (Union, UnionType):
        return _with_unknown_fields(get_args(kind)[0], value)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        known = {name: _with_unknown_fields(hints[name], item) for name, item in value.items()}
        return {"from_the_future": UNKNOWN, **known, "also_unknown": UNKNOWN}
    if get_origin(kind) is tuple and get_args(kind)[-1] is ...:
        return [_with_unknown_fields(get_args(kind)[0], item) for item in value]
    if get_origin(kind) is dict:
        return {name: _with_unknown_fields(get_args(kind)[1], item) for name, item in value.items()}
    return value


@each("name", SAMPLES)
def test_fields_that_older_writers_did_not_have_take_their_defaults(name: str) -> None:
    message = SAMPLES[name]
    contract = contract_of(name)
    fields = msgpack.unpackb(encode(message))
    for field in dataclasses.fields(message):
        without = msgpack.packb({key: value for key, value in fields.items() if key != field.name})
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required:
            with pytest.raises(ContractError, match=rf"\$: got no field {field.name}, which is required"):
                decode(without, contract)
        else:
            default = field.default if field.default is not dataclasses.MISSING else {}
            try:
                assert getattr(decode(without, contract), field.name) == default
            except ContractError as error:  # where the default contradicts the rest of this sample
                assert "expected" in str(error)


@each("name", SAMPLES)
def test_record_and_back(name: str) -> None:
    message = SAMPLES[name]
    topic = MESSAGES[contract_of(name)].topic
    extra = (("trace", b"1"),)
    new = to_record(message, topic, 3, run="gsm8k-grpo", writer_epoch=2, extra=extra)
    record = Record(topic, 3, 8172, 0.0, new.key, new.value, new.headers)
    assert from_record(record) == message
    assert record.header("run") == b"gsm8k-grpo"
    assert record.header("writer_epoch") == b"2"
    assert record.header("trace") == b"1"
    assert to_record(message, topic, 3, b"key", run="gsm8k-grpo").key == b"key"


@pytest.mark.law("lineage")
def test_digest_is_over_the_encoded_experiences_in_order() -> None:
    assert digest_of_experiences([]).startswith("sha256:e3b0c44298fc1c14")
    assert digest_of_experiences([b"a", b"b"]) == digest_of_experiences([b"ab"]) != digest_of_experiences([b"b", b"a"])


def test_arrays_are_views_of_the_value() -> None:
    value = encode(SAMPLES["verified_rollout.v1"])
    verified = decode(value, "verified_rollout")
    assert isinstance(verified, VerifiedRollout)
    assert verified.rollout is not None
    for segment in verified.rollout.segments:
        assert isinstance(segment.token_ids.data, memoryview)
        assert segment.token_ids.data.obj is value


def test_masks_of_any_length() -> None:
    for length in (3, 5000):
        mask = Array.of([0, 1] + [1] * (length - 2), "uint8")
        assert (mask.is_mask, mask.num_ones) == (True, length - 1)
        assert not Array.of([0, 1] + [2] * (length - 2), "uint8").is_mask
