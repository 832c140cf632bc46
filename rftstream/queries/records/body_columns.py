"""Columns of rollouts that stand on the log alone, read without the rest of each record.

Most of the time that a message takes goes into parts that a frame does not ask for, and into the rules of the whole.
Here only the parts of the chosen columns are read. A record in which one of them is not as its contract says is left to
the decoder of messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rftstream.contracts import codec
from rftstream.contracts.arrays import ITEM_BYTES
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout
from rftstream.queries.decoding import decoded
from rftstream.queries.records.problem_list import text_of


class _Said(msgspec.Struct):
    role: str
    content: str


class _Problem(msgspec.Struct):
    messages: tuple[_Said, ...]


class _Array(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


_ARRAYS = {"token_ids": "int32", "behavior_logprobs": "float32", "loss_mask": "uint8"}
"""Array of a segment -> its dtype."""


def body_values(record: Record, names: Sequence[str]) -> list[Any] | None:
    """Return the values of these columns in a record of a rollout; None if it cannot be read."""
    found: Any = codec.read_parts(record, _parts_of(tuple(names)))
    try:
        return [_VALUES[name][1](found) for name in names]
    except (AttributeError, ValueError):
        message = decoded(record, Rollout)
        return None if message is None else [_VALUES[name][1](message) for name in names]


@functools.cache
def _parts_of(names: tuple[str, ...]) -> type[msgspec.Struct]:
    """Return the parts of a rollout that these columns need."""
    needed = [part for name in names for part in _VALUES[name][0]]
    arrays: list[Any] = [(name, _Array) for name in _ARRAYS if name in needed]
    kinds: dict[str, Any] = {"problem": _Problem | None, "turns": tuple[_Said, ...]}
    if arrays:
        kinds["segments"] = tuple[msgspec.defstruct("Segment", arrays), ...]  # type: ignore[misc]
    return msgspec.defstruct("Parts", [(name, kind) for name, kind in kinds.items() if name in (*needed, "segments")])


def _array(segment: Any, name: str) -> Any:
    """Return an array of a segment. ValueError if it is not as its contract says."""
    array, dtype = getattr(segment, name), _ARRAYS[name]
    if array.dtype != dtype or array.shape != (len(array.data) // ITEM_BYTES[dtype],):
        raise ValueError(name)
    return array


def _tokens(name: str) -> Callable[[Any], bytes]:
    def joined(found: Any) -> bytes:
        return b"".join([_array(segment, name).data for segment in found.segments])

    return joined


def _messages(found: Any) -> list[dict[str, str]]:
    asked = () if found.problem is None else found.problem.messages
    return [{"role": str(one.role), "content": one.content} for one in (*asked, *found.turns)]


_VALUES: Mapping[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "prompt": (("problem",), lambda found: "" if found.problem is None else text_of(found.problem)),
    "completion": (
        ("turns",), lambda found: "\n".join([turn.content for turn in found.turns if turn.role == "assistant"]),
    ),
    "messages": (("problem", "turns"), _messages),
    "token_ids": (("token_ids",), _tokens("token_ids")),
    "logprobs": (("behavior_logprobs",), _tokens("behavior_logprobs")),
    "loss_mask": (("loss_mask",), _tokens("loss_mask")),
    "segment_lengths": (
        ("token_ids",), lambda found: [_array(segment, "token_ids").shape[0] for segment in found.segments],
    ),
}  # fmt: skip
"""Column -> the parts of a record that it needs, and its value in them or in the whole message. Tokens are the bytes of
all segments, one after the other."""

BODIES = tuple(_VALUES)
"""The columns."""
