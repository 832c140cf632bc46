"""What is written can be read: `encode` and `decode` have the same limits, and what exceeds one is named where it is
made."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rftstream.contracts import codec
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.codec import decode, digest_of_experiences, encode, to_record
from rftstream.contracts.control import RunFinished
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.limits import LIMITS, MessageLimits, is_bounded
from rftstream.contracts.messages import MESSAGES, Message
from rftstream.contracts.rollouts import Rollout, Turn
from rftstream.contracts.topics import MAX_DEAD_BYTES, MAX_RECORD_BYTES
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName
from rftstream.errors import ContractError
from tests.contracts.samples import SAMPLES
from tests.contracts.strategies import messages

pytestmark = pytest.mark.law("bounded")


def containers(value: Any) -> list[Any]:
    if not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value] + [one for item in inner for one in containers(item)]


def measure(value: bytes) -> dict[str, int]:
    """Return what a value needs of each limit."""
    sizes = [len(one) for one in containers(msgpack.unpackb(value))]
    return {"items": max(sizes), "total_items": sum(sizes) + len(sizes), "num_bytes": len(value)}


def test_every_limit_is_measured() -> None:
    assert list(measure(b"\x80")) == [field.name for field in dataclasses.fields(MessageLimits)]


@pytest.mark.sampled(10)
@pytest.mark.slow
@pytest.mark.parametrize("contract", MESSAGES)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_encodes_decodes_and_what_is_one_over_a_limit_is_refused_by_both(
    contract: str, data: st.DataObject
) -> None:
    message = data.draw(messages(contract))
    value = encode(message)
    for limit, needed in measure(value).items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "LIMITS", dataclasses.replace(LIMITS, **{limit: needed}))
            assert encode(decode(encode(message), contract)) == value
            patch.setattr(codec, "LIMITS", dataclasses.replace(LIMITS, **{limit: needed - 1}))
            with pytest.raises(ContractError, match=rf"\$.*: got {needed} .*expected at most {needed - 1}"):
                encode(message)
            with pytest.raises(ContractError):
                decode(value, contract)


NAME = VersionName(trainer_epoch=1, version=1)
METRICS = {f"metric/{number}": 1.0 for number in range(LIMITS.items + 1)}


LONG = 40_000
"""Tokens of a rollout whose value alone does not show that it is within the limits."""


@pytest.mark.parametrize("name", ["rollout.v6", "verified_rollout.v6", "experience.v6", "partial_rollout.v7"])
def test_a_long_rollout_is_decoded_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = long_one(SAMPLES[name])
    value = encode(message)
    assert not LIMITS.holds(len(value))
    monkeypatch.setattr(codec, "unpack", None)  # the way for what may exceed a limit, or is another writer's
    assert encode(message) == value
    assert decode(value, name.partition(".")[0]) == message


def long_one(message: Any) -> Any:
    """Return a message with long arrays and a long text in it."""
    if isinstance(getattr(message, "rollout", None), Rollout):
        return dataclasses.replace(message, rollout=long_one(message.rollout))
    arrays = {"token_ids": "int32", "behavior_logprobs": "float32", "loss_mask": "uint8"}
    segment = dataclasses.replace(
        message.segments[0], **{field: Array.of([1] * LONG, dtype) for field, dtype in arrays.items()},
        versions=(), images=(), beside={},
    )  # fmt: skip
    turns = {"turns": (Turn(role="assistant", content="x" * LONG),)} if hasattr(message, "turns") else {}
    return dataclasses.replace(message, segments=(segment,), **turns)


@pytest.mark.parametrize(
    ("fields", "bounded"),
    [
        ({"segments": [{"token_ids": {"data": bytes(100_000)}}]}, True),
        ({"turns": [{"content": "x" * 50_000}] * 2}, True),
        ({"problem": {"answer": "x" * 100_000}}, True),
        ({"turns": [{"content": [[]] * 100_000}]}, False),
        ({"segments": [{"token_ids": {"data": {"a": [[]] * 100_000}}}]}, False),
        ({"segments": [{}] * 100_000}, False),
        ({"segments": [{"images": [{}] * 60_000}] * 10}, False),
        ({"metrics": {str(number): 0.0 for number in range(20_000)}}, False),
        ({"unknown": [[]] * 100_000}, False),
    ],
)
def test_only_texts_and_bytes_make_a_long_value_that_is_surely_within_the_limits(
    fields: dict[str, Any], bounded: bool
) -> None:
    assert is_bounded(msgpack.packb(fields), Rollout, LIMITS) is bounded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "named"),
    [
        (
            BatchManifest(
                batch_sequence=0, share=0, num_shares=1, count=0, digest=digest_of_experiences([]), groups=(),
                num_groups=0, total_groups=0, metrics=METRICS,
            ),
            r"\$\.metrics: got 65537 items, expected at most 65536",
        ),
        (
            BatchManifest(
                batch_sequence=0, share=0, num_shares=1, count=0, digest=digest_of_experiences([]),
                groups=tuple(f"t/0/{number}/0" for number in range(65_537)), num_groups=65_537, total_groups=65_537,
            ),
            r"\$\.groups: got 65537 items, expected at most 65536",
        ),
        (
            StepRecord(
                name=NAME, batch_sequence=0, positions=(1,), trained_groups=1, trained_rollouts=1, weights_digest=None,
                metrics=METRICS,
            ),
            r"\$\.metrics: got 65537 items",
        ),
        (
            EvalResult(
                evaluation="e", name=NAME, num_tasks=1, num_samples=1, num_unscored=0, metrics=METRICS, generations=None
            ),
            r"\$\.metrics: got 65537 items",
        ),
        (
            RunFinished(reason="r" * (MAX_RECORD_BYTES - 300), name=NAME, finished_at=0.0),
            r"\$\.reason: got \d+ bytes, expected at most 8388608 with key and headers; most are here",
        ),
    ],
)  # fmt: skip
def test_what_no_reader_would_take_is_refused_and_named_where_it_is_made(message: Message, named: str) -> None:
    with pytest.raises(ContractError, match=named):
        encode(message)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dead_letter.v1", "verified_rollout.v1"])
def test_what_encodes_fits_a_record_of_its_topic_with_the_longest_name_of_a_run(name: str) -> None:
    """A dead letter holds more than any other record. To the byte: what is one byte longer is refused by `encode`."""

    def of_size(size: int) -> Message:
        sample: Any = SAMPLES[name]
        if isinstance(sample, DeadLetter):
            return dataclasses.replace(sample, value=bytes(size))
        rollout = dataclasses.replace(sample.rollout, error="e" * size)
        return dataclasses.replace(sample, rollout=rollout)

    spec = MESSAGES[name.partition(".")[0]]
    most = MAX_DEAD_BYTES if spec.topic == "dead" else MAX_RECORD_BYTES

    def num_bytes(size: int) -> int:
        run = "r" * 249
        return to_record(of_size(size), spec.topic, 0, run=run, writer_epoch=2**31, value=bytes(size)).num_bytes

    size = 7 << 20
    size += most - len(encode(of_size(size))) - (num_bytes(size) - size)
    assert decode(encode(of_size(size)), spec.contract) == of_size(size)
    with pytest.raises(ContractError, match=rf"got {most + 1} bytes, expected at most {most} with"):
        encode(of_size(size + 1))
