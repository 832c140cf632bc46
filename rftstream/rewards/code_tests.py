"""The tests of a programming problem, read from the columns that data sets have them in.

APPS and TACO: `input_output`, JSON with inputs, outputs and fn_name. LiveCodeBench: `public_test_cases` and
`private_test_cases` (packed), and fn_name in `metadata`. HumanEval: `test` with `entry_point` and `prompt`. MBPP:
`test_list` with `test_setup_code`. One's own: `tests`, in any of these forms.
"""

from __future__ import annotations

import ast
import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.errors import RewardError

MAX_UNPACKED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTests:
    """Pairs of stdin and the stdout that is expected."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTests:
    """Calls of a function, and the values that are expected."""

    function: str
    calls: tuple[list[Any], ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTests:
    """A test that asserts, on a function."""

    test: str
    entry_point: str
    context: str


ProblemTests = StdioTests | FunctionTests | CheckTests


def read_tests(columns: Mapping[str, Any], answer: str | None, prompt: str, *, column: str = "") -> ProblemTests:
    """Return the tests of a problem. RewardError if it has none that can be read."""
    for name in (column,) if column else ("tests", "input_output", "public_test_cases", "test", "test_list"):
        if columns.get(name) not in (None, "", [], {}):
            return _read(name, columns[name], columns, prompt)
    if answer and not column:
        return _read("answer", answer, columns, prompt)
    raise RewardError(
        f"code: the problem has no tests{f' in the column {column!r}' if column else ''}; name their column as "
        "rewards.code.tests, or call it tests in the taskset's columns"
    )


def _read(name: str, value: Any, columns: Mapping[str, Any], prompt: str) -> ProblemTests:
    try:
        data = _loaded(value)
        if name == "public_test_cases":
            data = [*data, *_unpacked(columns.get("private_test_cases") or [])]
        if isinstance(data, Mapping) and "inputs" in data:
            return _pairs(data["inputs"], data["outputs"], data.get("fn_name") or None)
        if isinstance(data, list) and data and all(isinstance(one, Mapping) for one in data):
            return _cases(data, _loaded(columns.get("metadata") or {}))
        if isinstance(data, list) and data and all(isinstance(one, str) for one in data):
            return _asserts("\n".join(data), columns)
        if isinstance(data, str) and data.strip():
            return _asserts(data, columns, prompt)
    except (ValueError, TypeError, LookupError, SyntaxError, zlib.error, RecursionError) as error:
        raise RewardError(f"code: the tests in {name!r} cannot be read: {type(error).__name__}: {error}") from None
    raise RewardError(f"code: the tests in {name!r} have a form that is not known, or there are none")


def _loaded(value: Any) -> Any:
    """Return JSON as its value, and other text as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _pairs(inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> ProblemTests:
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if function is None:
        return StdioTests(pairs=tuple((_text(one), _text(two)) for one, two in zip(inputs, outputs, strict=True)))
    return FunctionTests(function=function, calls=tuple(list(one) for one in inputs), expected=tuple(outputs))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _cases(cases: Sequence[Mapping[str, Any]], metadata: Any) -> ProblemTests:
    function = (metadata or {}).get("func_name") or (metadata or {}).get("fn_name")
    if function and all(one.get("testtype", "functional") == "functional" for one in cases):
        calls = tuple([json.loads(line) for line in one["input"].split("\n") if line.strip()] for one in cases)
        return FunctionTests(function=function, calls=calls, expected=tuple(json.loads(one["output"]) for one in cases))
    return StdioTests(pairs=tuple((_text(one["input"]), _text(one["output"])) for one in cases))


def _asserts(test: str, columns: Mapping[str, Any], prompt: str = "") -> CheckTests:
    entry_point = columns.get("entry_point") or _called(test)
    context = _as_context(columns.get("prompt")) or columns.get("test_setup_code") or _as_context(prompt)
    imports = columns.get("test_imports") or []
    return CheckTests(test="\n".join([*imports, test]), entry_point=entry_point, context=str(context))


def _as_context(prompt: Any) -> str:
    """Return a prompt that is Python text, and nothing for any other. A lone word, which Python reads, is not."""
    try:
        statements = ast.parse(prompt).body if isinstance(prompt, str) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return str(prompt) if any(not isinstance(one, ast.Expr) for one in statements) else ""


def _called(test: str) -> str:
    """Return the first function that an assertion calls and that is not built in. ValueError if there is none."""
    tree = ast.parse(test)
    known = set(dir(__builtins__)) if not isinstance(__builtins__, dict) else set(__builtins__)
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assert):
            for node in ast.walk(statement.test):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in known:
                    return node.func.id
    raise ValueError("no entry_point, and no assertion that calls a function")


def _unpacked(value: Any) -> list[Any]:
    """Return LiveCodeBench's private tests: JSON, or JSON in a pickled string, packed by zlib, in base64."""
    loaded = _loaded(value)
    if isinstance(loaded, list):
        return loaded
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(loaded), MAX_UNPACKED_BYTES)
    cases: list[Any] = json.loads(_pickled_text(data))
    return cases


def _pickled_text(data: bytes) -> str:
    """Return the string in a pickle that holds nothing but one string. Nothing of it is run."""
    position = 2 if data[:1] == b"\x80" else 0
    if data[position : position + 1] == b"\x95":  # a frame and its length
        position += 9
    lengths = {b"\x8c": 1, b"X": 4, b"\x8d": 8}  # strings, by the bytes of their length
    code = data[position : position + 1]
    if code not in lengths:
        raise ValueError("a pickle that is no string")
    start = position + 1 + lengths[code]
    length = int.from_bytes(data[position + 1 : start], "little")
    return data[start : start + length].decode("utf-8")
