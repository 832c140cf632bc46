"""The tests of a programming problem, read from the columns of known data sets.

APPS and TACO: `input_output`, JSON with inputs, outputs and fn_name. LiveCodeBench: `public_test_cases` and
`private_test_cases` (packed), and the function's name in `metadata` or `starter_code`. DeepCoder: `tests`, in one of
these forms. HumanEval: `test` with `entry_point` and `prompt`. MBPP: `test_list` with `test_setup_code`. Your own data:
`tests`, in any of these forms.

If the mapping is not certain, that is an error, and the problem is unscorable: a guess would give right programs 0.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rftstream.errors import RewardError
from rftstream.rewards.code_asserts import defined_in, find_entry_point

MAX_UNPACKED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTests:
    """Pairs of stdin and the expected stdout."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTests:
    """Calls of a function, and their expected values."""

    function: str
    calls: tuple[list[Any], ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTests:
    """A test with assertions on a function."""

    test: str
    entry_point: str
    context: str
    """Text that runs before the test: definitions of the prompt, and the setup."""
    stub: str = ""
    """The prompt, if it is Python text that the answer may continue."""


ProblemTests = StdioTests | FunctionTests | CheckTests


_DECIMAL = re.compile(r"\d\.\d")


def holds_decimals(tests: ProblemTests) -> bool:
    """Return whether a compared output contains decimals. A test with assertions compares by itself."""
    match tests:
        case StdioTests():
            return any(_DECIMAL.search(stdout) for _, stdout in tests.pairs)
        case FunctionTests():
            return any(_has_fraction(value) for value in tests.expected)
    return False


def _has_fraction(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_has_fraction, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and not value.is_integer()


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
        if isinstance(data, Mapping):
            plural = "inputs" in data
            inputs, outputs = data["inputs" if plural else "input"], data["outputs" if plural else "output"]
            return _pairs(_list(inputs), _list(outputs), data.get("fn_name") or None, columns)
        if isinstance(data, list) and data and all(isinstance(one, Mapping) for one in data):
            return _cases(data, columns)
        if isinstance(data, list) and data and all(isinstance(one, str) for one in data):
            return _asserts("\n".join(data), columns, prompt)
        if isinstance(data, str) and data.strip():
            return _asserts(data, columns, prompt)
    except (ValueError, TypeError, LookupError, SyntaxError, zlib.error, RecursionError) as error:
        raise RewardError(f"code: the tests in {name!r} cannot be read: {type(error).__name__}: {error}") from None
    raise RewardError(f"code: the tests in {name!r} have a form that is not known, or there are none")


def _loaded(value: Any) -> Any:
    """Return the value of JSON text, and any other text unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return _json(value)
    except ValueError:
        return value


def _json(text: str) -> Any:
    """Return the value of JSON text. Its numbers may have more digits than Python reads by default."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=lambda digits: int(Decimal(digits)))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"inputs and outputs are lists, got {type(value).__name__}")
    return list(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    loaded = _loaded(value)
    return loaded if isinstance(loaded, Mapping) else {}


# ---------------------------------------------------------------------------------------- pairs of input and output


def _pairs(
    inputs: Sequence[Any], outputs: Sequence[Any], function: str | None, columns: Mapping[str, Any]
) -> ProblemTests:
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if function is None:
        return StdioTests(pairs=tuple((_text(one), _text(two)) for one, two in pairs))
    _check_plain(columns)
    called = [_call(one, two) for one, two in pairs]
    return FunctionTests(
        function=function, calls=tuple(call for call, _ in called), expected=tuple(value for _, value in called)
    )


def _text(value: Any) -> str:
    """Return a program's input or output: a text, or joined lines."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise ValueError(f"text or lines are expected of a program that reads and prints, got {str(value)[:80]!r}")
    return "\n".join(map(str, lines))


def _call(arguments: Any, expected: Any) -> tuple[list[Any], Any]:
    """Return the arguments of a call and the expected value. APPS and TACO store them directly, LiveCodeBench as lines
    of JSON."""
    if isinstance(arguments, str):
        call = [_value(line) for line in arguments.split("\n") if line.strip()]
        return call, _value(expected) if isinstance(expected, str) else expected
    return [int_keys(one) for one in _list(arguments)], expected


def _value(text: str) -> Any:
    """Return the value of a line: JSON, or a literal of Python."""
    try:
        return _json(text)
    except ValueError:
        return ast.literal_eval(text.strip())


def int_keys(value: Any) -> Any:
    """Return a JSON map with numbers as keys if all its keys are numbers, as the graders of APPS do."""
    if not isinstance(value, dict) or not value or not all(re.fullmatch(r"-?\d{1,18}", str(key)) for key in value):
        return value
    return {int(key): item for key, item in value.items()}


def _cases(cases: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> ProblemTests:
    """Read a list of tests in which each says whether it calls a function: DeepCoder's, LiveCodeBench's,
    SYNTHETIC-1's."""
    kinds = {str(case.get("testtype") or case.get("type") or "") for case in cases}
    names = {name for case in cases if (name := _function_name(case))}
    shared = _function_name({"metadata": columns.get("metadata")})
    calls = kinds & {"functional", "function_call"} or (not kinds - {""} and (names or shared))
    if not calls:
        kinds = kinds - {"", "stdin", "stdin_stdout"}
    elif len(kinds) == 1:
        kinds = set()
    if kinds or len(names) > 1:
        raise ValueError(f"tests of several or unknown kinds: {', '.join(sorted(kinds | names))}")
    function = None
    if calls:
        function = next(iter(names), "") or shared or _last_function(columns.get("starter_code"))
        if not function:
            raise ValueError("they call a function, whose name stands neither in metadata nor in starter_code")
    return _pairs([case["input"] for case in cases], [case["output"] for case in cases], function, columns)


def _function_name(case: Mapping[str, Any]) -> str:
    metadata = _mapping(case.get("metadata") or {})
    return str(case.get("fn_name") or metadata.get("func_name") or metadata.get("fn_name") or "")


def _last_function(starter: Any) -> str:
    """Return the name of the function in a LeetCode stub, which has no body."""
    found = re.findall(r"^\s*def\s+(\w+)", starter, re.MULTILINE) if isinstance(starter, str) else []
    return found[-1] if found else ""


def _check_plain(columns: Mapping[str, Any]) -> None:
    """Raise ValueError if a function takes or returns something that JSON cannot represent: linked lists and trees of
    LeetCode."""
    starter = columns.get("starter_code")
    if isinstance(starter, str) and (found := re.search(r"\b(ListNode|TreeNode|Node)\b", starter)):
        raise ValueError(f"the function is about {found[1]}, and only plain values can be handed over")


# ---------------------------------------------------------------------------------------- tests that assert


def _asserts(test: str, columns: Mapping[str, Any], prompt: str = "") -> CheckTests:
    told = next((text for text in (columns.get("prompt"), prompt) if _as_context(text)), "")
    context = _as_context(told)
    setup = str(columns.get("test_setup_code") or "")
    imports = columns.get("test_imports") or []
    whole = "\n".join([*([imports] if isinstance(imports, str) else imports), test])
    entry_point = str(columns.get("entry_point") or "").rpartition(".")[2]
    if not entry_point:
        known = {name for text in reference_solutions(columns) for name in defined_in(text)} | defined_in(context)
        listed = columns.get("test_list")
        listed = "\n".join(listed) if isinstance(listed, list) else ""
        entry_point = find_entry_point(whole, f"{setup}\n{context}", known=known, also=listed)
    return CheckTests(
        test=whole, entry_point=entry_point, context="\n".join(filter(None, (context, setup))), stub=str(told)
    )


def _as_context(prompt: Any) -> str:
    """Return a prompt that is Python text, and an empty text for others. A single word, which Python can parse, does
    not count. A function without a body gets one."""
    if not isinstance(prompt, str):
        return ""
    for text in (prompt, f"{prompt.rstrip()}\n    pass\n"):
        try:
            statements = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return text if any(not isinstance(statement, ast.Expr) for statement in statements) else ""
    return ""


SOLUTION_COLUMNS = (
    "canonical_solution",
    "solutions",
    "solution",
    "code",
    "reference_solution",
    "gold_standard_solution",
)
"""Columns in which data sets keep right programs, in the order of the search."""


def reference_solutions(columns: Mapping[str, Any], column: str = "") -> list[str]:
    """Return the problem's right programs, in the order of its columns; empty if it has none."""
    for name in (column,) if column else SOLUTION_COLUMNS:
        found = columns.get(name)
        if isinstance(found, str) and found.lstrip().startswith("["):
            found = _loaded(found)
        texts = [found] if isinstance(found, str) else found if isinstance(found, list) else []
        if texts := [text for text in texts if isinstance(text, str) and text.strip()]:
            return texts
    return []


def _unpacked(value: Any) -> list[Any]:
    """Return LiveCodeBench's private tests: JSON, or JSON in a pickled string, compressed with zlib, in base64."""
    loaded = _loaded(value)
    if isinstance(loaded, list):
        return loaded
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(loaded), MAX_UNPACKED_BYTES)
    cases: list[Any] = _json(_pickled_text(data))
    return cases


def _pickled_text(data: bytes) -> str:
    """Return the string in a pickle that contains only one string. No code of it is run."""
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
