"""Columns of bodies are those of the whole messages, and what no message can be read from has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import pytest

from rftstream.contracts import codec
from rftstream.contracts.records import Headers, Record
from rftstream.contracts.rollouts import Rollout
from rftstream.queries.decoding import decoded
from rftstream.queries.records.body_columns import BODIES, body_values
from tests.contracts.samples import SAMPLES

ROLLOUTS = {name: one for name, one in SAMPLES.items() if isinstance(one, Rollout)}


def record(one: Rollout, change: Callable[[dict[str, Any]], object] = lambda fields: None, *more: Any) -> Record:
    fields = msgpack.unpackb(codec.encode(one))
    change(fields)
    headers: Headers = tuple(dict([*codec.headers_of(one, "run"), *more]).items())
    return Record("rollouts", 0, 7, 0.0, b"key", msgpack.packb(fields), headers)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_values_are_those_of_the_message(name: str) -> None:
    one = ROLLOUTS[name]
    found = dict(zip(BODIES, body_values(record(one), BODIES) or (), strict=True))
    assert found["completion"] == "\n".join(turn.content for turn in one.turns if turn.role == "assistant")
    assert [message["content"] for message in found["messages"]] == [
        *(said.content for said in (() if one.problem is None else one.problem.messages)),
        *(turn.content for turn in one.turns),
    ]
    assert found["segment_lengths"] == [len(segment.token_ids.numpy()) for segment in one.segments]
    for column, field in (("token_ids", "token_ids"), ("logprobs", "behavior_logprobs"), ("loss_mask", "loss_mask")):
        assert found[column] == b"".join(getattr(segment, field).numpy().tobytes() for segment in one.segments)
    assert {column: body_values(record(one), [column]) for column in BODIES} == {key: [found[key]] for key in found}


@pytest.mark.parametrize(
    ("what", "damaged"),
    [
        ("token_ids", lambda one: record(one, lambda fields: fields["segments"][0]["token_ids"].update(dtype="int64"))),
        ("token_ids", lambda one: record(one, lambda fields: fields["segments"][0]["token_ids"].update(shape=[9]))),
        ("completion", lambda one: record(one, lambda fields: fields["turns"][0].update(content=3))),
        ("prompt", lambda one: record(one, lambda fields: fields.pop("problem"))),
        ("logprobs", lambda one: record(one, lambda fields: None, ("contract", b"task"))),
        (
            "logprobs",
            lambda one: record(one, lambda fields: None, ("contract_version", b"99"), ("readable_since", b"99")),
        ),
        ("logprobs", lambda one: Record("rollouts", 0, 7, 0.0, b"key", b"\xc1", record(one).headers)),
        ("logprobs", lambda one: Record("rollouts", 0, 7, 0.0, b"key", None, record(one).headers)),
    ],
)
def test_what_cannot_be_read_has_none(what: str, damaged: Callable[[Rollout], Record]) -> None:
    one = next(one for one in ROLLOUTS.values() if one.segments and one.turns and one.problem is not None)
    assert (decoded(damaged(one), Rollout), body_values(damaged(one), [what])) == (None, None)
