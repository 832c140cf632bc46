"""What a message promises beyond the types of its fields: one table, checked at every encode and decode.

`RULES` holds what only a person can know (a verdict xor a reason). What follows from the types alone is derived from
them once, at import: every int is non-negative; every float is finite, except in `metrics`; every value of type Any
is plain (None, bool, int, float, str, list, dict with string keys), not nested deeper than MAX_DEPTH, and none of its
lists and maps is longer than MAX_ITEMS.

A rule returns (path below the part, what is wrong), or None when all is well.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Segment
from rftstream.contracts.tasks import RolloutIds, Task
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.contracts.versions import StepRecord, WeightsAnnounced, WeightsKind

MAX_DEPTH = 32
"""The deepest nesting of lists and maps in a value of type Any; the types fix the depth of everything else."""

MAX_ITEMS = 65_536
"""The most items of one list or map. (Tokens are not lists but bytes.)"""

MAX_RANK = 4
"""The most dimensions of an Array."""

ITEM_BYTES = {
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""dtype of an Array -> bytes of one element."""

Violation = tuple[str, str]
"""Path below the part it was found in (`.segments[0].versions`), and what is wrong there."""

Check = Callable[[Any], Violation | None]

_TASKSET = re.compile(r"[a-z0-9_-]+")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


# --------------------------------------------------------------------------------------------- rules by hand


def _array(array: Array) -> Violation | None:
    item_bytes = ITEM_BYTES.get(array.dtype)
    if item_bytes is None:
        return ".dtype", f"got {show(array.dtype)}, expected one of {', '.join(ITEM_BYTES)}"
    num_bytes = item_bytes
    for length in array.shape:
        if length < 0:
            return ".shape", f"got the length {length}, expected none below 0"
        num_bytes *= length
    if len(array.shape) > MAX_RANK:
        return ".shape", f"got {len(array.shape)} dimensions, expected at most {MAX_RANK}"
    if num_bytes != len(array.data):
        return ".data", f"got {len(array.data)} bytes, expected {num_bytes} for {array.dtype} {list(array.shape)}"
    return None


def _segment(segment: Segment) -> Violation | None:
    shape = segment.token_ids.shape
    for name, dtype, array in (
        ("token_ids", "int32", segment.token_ids),
        ("behavior_logprobs", "float32", segment.behavior_logprobs),
        ("loss_mask", "uint8", segment.loss_mask),
    ):
        if array.dtype != dtype:
            return f".{name}.dtype", f"got {show(array.dtype)}, expected {dtype}"
        if len(array.shape) != 1 or array.shape != shape:
            return f".{name}.shape", f"got {list(array.shape)}, expected one dimension, as long as token_ids"
    if segment.loss_mask.data.translate(None, b"\0\1"):
        return ".loss_mask.data", "got other values, expected only 0 and 1"
    end = 0
    for i, span in enumerate(segment.versions):
        if span.start < end:
            return f".versions[{i}].start", f"got {span.start}, expected at least {end}, the end of the span before"
        if span.count <= 0:
            return f".versions[{i}].count", f"got {span.count}, expected at least 1"
        end = span.start + span.count
    if shape and end > shape[0]:
        return ".versions", f"got spans up to position {end}, expected at most {shape[0]}, the tokens of the segment"
    return None


def _rollout_ids(ids: RolloutIds) -> Violation | None:
    if not _TASKSET.fullmatch(ids.taskset):
        return ".taskset", f"got {show(ids.taskset)}, expected only a-z, 0-9, _ and -"
    if not ids.group_id or ids.rollout_id != f"{ids.group_id}/{ids.sibling}":
        return ".rollout_id", f"got {show(ids.rollout_id)}, expected group_id/sibling"
    if ids.sibling >= ids.group_size:
        return ".sibling", f"got {ids.sibling}, expected less than the group_size {ids.group_size}"
    return None


def _task(task: Task) -> Violation | None:
    if task.seed >= 2**63:
        return ".seed", f"got {task.seed}, expected less than 2**63"
    return None


def _rollout(rollout: Rollout) -> Violation | None:
    undecodable = rollout.status is RolloutStatus.undecodable
    if (rollout.problem is None) is not undecodable:
        return ".problem", (
            f"got {_presence(rollout.problem)} with status {rollout.status}, "
            "expected none exactly for an undecodable task"
        )
    return None


def _verified_rollout(verified: VerifiedRollout) -> Violation | None:
    if (verified.verdict is None) is (verified.reason is None):
        return ".reason", (
            f"got {_presence(verified.reason)} beside {_presence(verified.verdict)} verdict, "
            "expected exactly one of reason and verdict"
        )
    undecodable = verified.reason is UnscorableReason.undecodable
    if (verified.rollout is None) is not undecodable:
        return ".rollout", f"got {_presence(verified.rollout)}, expected none exactly when the reason is undecodable"
    if verified.rollout is not None and verified.rollout.ids != verified.ids:
        return ".rollout.ids", f"got those of {show(verified.rollout.ids.rollout_id)}, expected the record's own ids"
    return None


def _demonstration(demonstration: Demonstration) -> Violation | None:
    if bool(demonstration.messages) is (demonstration.preference is not None):
        return ".preference", (
            f"got {_presence(demonstration.preference)} beside {len(demonstration.messages)} "
            "messages, expected exactly one of chat and preference pair"
        )
    return None


def _experience(experience: Experience) -> Violation | None:
    if experience.pair not in (None, "chosen", "rejected"):
        return ".pair", f"got {show(experience.pair)}, expected chosen, rejected or none"
    return None


def _batch_manifest(manifest: BatchManifest) -> Violation | None:
    if manifest.share >= manifest.num_shares:
        return ".share", f"got {manifest.share}, expected less than the num_shares {manifest.num_shares}"
    if not _DIGEST.fullmatch(manifest.digest):
        return ".digest", f"got {show(manifest.digest)}, expected sha256:<64 hex digits>"
    return None


def _group_outcome(outcome: GroupOutcome) -> Violation | None:
    if (outcome.batch_sequence is not None) is not (outcome.result is GroupResult.batched):
        return ".batch_sequence", (
            f"got {_presence(outcome.batch_sequence)} with result {outcome.result}, "
            "expected one exactly for batched groups"
        )
    if outcome.late and not outcome.rollouts:
        return ".rollouts", "got none, expected at least one in a late record"
    return None


def _weights_announced(weights: WeightsAnnounced) -> Violation | None:
    if (weights.parent is not None) is not (weights.kind is WeightsKind.delta):
        return ".parent", f"got {_presence(weights.parent)} with kind {weights.kind}, expected one exactly for a delta"
    if weights.delta is not None and weights.kind is not WeightsKind.full:
        return ".delta", f"got one with kind {weights.kind}, expected none but with a full snapshot"
    return None


def _step_record(step: StepRecord) -> Violation | None:
    if (step.batch_sequence is None) is not step.resumed:
        return ".batch_sequence", f"got {_presence(step.batch_sequence)}, expected none exactly when resumed"
    for i, position in enumerate(step.positions):
        if position < 0:
            return f".positions[{i}]", f"got {position}, expected at least 0"
    return None


RULES: dict[type, Check] = {
    Array: _array,
    Segment: _segment,
    RolloutIds: _rollout_ids,
    Task: _task,
    Rollout: _rollout,
    VerifiedRollout: _verified_rollout,
    Demonstration: _demonstration,
    Experience: _experience,
    BatchManifest: _batch_manifest,
    GroupOutcome: _group_outcome,
    WeightsAnnounced: _weights_announced,
    StepRecord: _step_record,
}
"""Type of a message or of a part -> the rule for what it promises beyond its types. Its parts have rules of their
own."""


# --------------------------------------------------------------------------------------------- rules from types


def first_violation(message: object) -> Violation | None:
    """Return the first promise that a message or a part of a message does not keep; None if it keeps all."""
    check = _CHECKS[type(message)]
    return None if check is None else check(message)


@functools.cache
def _check_part(cls: type) -> Check | None:
    """The whole check of a message or part, found from its annotations; None if there is nothing to be checked."""
    hints = get_type_hints(cls)
    kinds = {field.name: _without_none(hints[field.name]) for field in dataclasses.fields(cls)}
    inside = tuple((name, check) for name, kind in kinds.items() if name != "metrics" and (check := _check_of(kind)))
    numbers = _check_numbers(
        tuple(name for name, kind in kinds.items() if kind is int),
        tuple(name for name, kind in kinds.items() if kind is float),
    )
    own = tuple(check for check in (numbers, RULES.get(cls)) if check is not None)
    if not inside and len(own) < 2:
        return own[0] if own else None

    def check_part(part: object) -> Violation | None:
        for check in own:
            if (found := check(part)) is not None:
                return found
        for name, check in inside:
            if (value := getattr(part, name)) and (found := check(value)) is not None:
                return f".{name}{found[0]}", found[1]
        return None

    return check_part


def _check_numbers(ints: tuple[str, ...], floats: tuple[str, ...]) -> Check | None:
    """Return a check of numbers. Where all is well it takes two passes in C; in Python it would take half the time of
    all checks."""
    if not ints and not floats:
        return None
    get_ints = operator.attrgetter(*ints, *ints[:1]) if ints else lambda part: (0,)
    get_floats = operator.attrgetter(*floats, *floats[:1]) if floats else lambda part: (0.0,)

    def check_numbers(part: object) -> Violation | None:
        try:
            if min(get_ints(part)) >= 0 and math.isfinite(sum(get_floats(part))):
                return None
        except TypeError:  # None among them
            pass
        for name in ints:
            number = getattr(part, name)
            if number is not None and number < 0:
                return f".{name}", f"got {number}, expected at least 0"
        for name in floats:
            number = getattr(part, name)
            if number is not None and not math.isfinite(number):
                return f".{name}", f"got {number}, expected a finite number"
        return None

    return check_numbers


def _check_of(kind: Any) -> Check | None:
    """The check of what is inside a value of this type; None if there is nothing to be checked."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _check_part(kind)  # type: ignore[arg-type]  # a class, as annotations hold no instances
    if origin is dict and arguments[1] is Any:
        return _plain
    if origin is dict and arguments[1] is float:
        return _finite_values
    if origin is dict and (check := _check_of(arguments[1])) is not None:
        return functools.partial(_each_value, check)
    if origin is tuple and get_origin(arguments[0]) is dict:
        return _plain
    if origin is tuple and arguments[-1] is ... and (check := _check_of(arguments[0])) is not None:
        return functools.partial(_each_item, check)
    return None


def _each_item(check: Check, parts: tuple[object, ...]) -> Violation | None:
    for i, part in enumerate(parts):
        if (found := check(part)) is not None:
            return f"[{i}]{found[0]}", found[1]
    return None


def _each_value(check: Check, parts: dict[str, object]) -> Violation | None:
    for name, part in parts.items():
        if (found := check(part)) is not None:
            return f"[{show(name)}]{found[0]}", found[1]
    return None


def _finite_values(numbers: dict[str, float]) -> Violation | None:
    for name, number in numbers.items():
        if not math.isfinite(number):
            return f"[{show(name)}]", f"got {number}, expected a finite number"
    return None


def _plain(value: Any, depth: int = 0) -> Violation | None:
    """Any is a place for data, not for objects: what comes back must be what went in."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return None
    if kind is not list and kind is not tuple and kind is not dict:
        return "", f"got {kind.__name__}, expected a plain value (none, bool, int, float, str, list, map)"
    if depth == MAX_DEPTH:
        return "", f"got more than {MAX_DEPTH} levels of lists and maps, expected at most that"
    if len(value) > MAX_ITEMS:
        return "", f"got {len(value)} items, expected at most {MAX_ITEMS}"
    if kind is not dict:
        for i, item in enumerate(value):
            if (found := _plain(item, depth + 1)) is not None:
                return f"[{i}]{found[0]}", found[1]
        return None
    for name, item in value.items():
        if type(name) is not str:
            return "", f"got a key of type {type(name).__name__}, expected str"
        if (found := _plain(item, depth + 1)) is not None:
            return f"[{show(name)}]{found[0]}", found[1]
    return None


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (argument for argument in get_args(kind) if argument is not NoneType)
    return kind


def _presence(value: object) -> str:
    return "no" if value is None else "a"


def show(value: object) -> str:
    """Return a foreign value as an error text shows it: readable and of bounded length."""
    text = repr(value[:80]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 90 else text[:87] + "..."


def parts_of(classes: list[type]) -> list[type]:
    """Return these dataclasses and every dataclass inside them, each once, in order of first use."""
    found: dict[type, None] = {}
    queue = list(classes)
    while queue:
        cls = queue.pop(0)
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and not issubclass(cls, Enum) and cls not in found:
            found[cls] = None
            for hint in get_type_hints(cls).values():
                queue.extend(_inside(hint))
    return list(found)


def _inside(hint: Any) -> list[Any]:
    arguments = get_args(hint)
    return [kind for argument in arguments for kind in _inside(argument)] if arguments else [hint]


_CHECKS = {cls: _check_part(cls) for cls in parts_of(list(MESSAGES.values()))}
