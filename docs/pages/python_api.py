"""docs/python-reference.md and tests/docs/public_api.txt: what is public of the Python API, from its docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rftstream
from rftstream.api.looking import COLUMNS

FILE = Path(__file__).resolve().parent.parent.parent / "tests" / "docs" / "public_api.txt"
HIDDEN = ("index", "limit", "name", "order", "read", "texts", "to_row", "wanted")
"""Fields of public classes that only their makers set."""


def public_lines() -> list[str]:
    """Each public name with its signature, each public member of a public class with its own."""
    return sorted(line for name in rftstream.PUBLIC for line, _ in _described(name))


def kept_lines() -> str:
    """The file of signatures with new lines added. Lines of what is gone or changed stay: only a person removes them,
    and tests/docs/test_python.py fails until somebody has."""
    before = FILE.read_text(encoding="utf-8").splitlines() if FILE.is_file() else []
    return "\n".join(sorted({*before, *public_lines()})) + "\n"


def reference() -> str:
    """Every public name with its signature and docstring."""
    parts = []
    for name in rftstream.PUBLIC:
        (line, said), *members = _described(name)
        parts.append(f"## {name}\n\n```\n{line}\n```\n\n{said}")
        lines = [
            f"- `{member.removeprefix(f'{name}.')}`  \n  {' '.join(text.split())}".rstrip() for member, text in members
        ]
        parts += ["\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def _described(name: str) -> Iterator[tuple[str, str]]:
    found = getattr(rftstream, name)
    if not inspect.isclass(found):
        yield f"{name}{_signature(found)}", _said(found)
        return
    yield f"class {name}", _said(found)
    if issubclass(found, Exception):
        return
    annotated = {key: value for one in reversed(found.__mro__) for key, value in inspect.get_annotations(one).items()}
    for member in sorted({*dir(found), *annotated}):
        if member in HIDDEN or (member.startswith("_") and member not in ("__iter__", "__enter__")):
            continue
        value = inspect.getattr_static(found, member, None)
        if isinstance(value, property):
            yield f"{name}.{member}: {_type(inspect.signature(value.fget).return_annotation)}", _said(value)  # type: ignore[arg-type]
        elif inspect.isfunction(value):
            columns = ", ".join(f"`{one}`" for one in COLUMNS.get(member, ())) if name == "Run" else ""
            yield (
                f"{name}.{member}{_signature(value, bound=True)}",
                _said(value) + (columns and f" Columns: {columns}."),
            )
        elif member in annotated:
            yield f"{name}.{member}: {_type(annotated[member])}", ""


def _signature(function: Any, *, bound: bool = False) -> str:
    signature = inspect.signature(function)
    values = list(signature.parameters.values())[1 if bound else 0 :]
    shown = [
        one.replace(annotation=_Text(_type(one.annotation))) for one in values
        if one.name != "unknown"  # it catches names of filters that there are not
    ]  # fmt: skip
    return str(signature.replace(parameters=shown, return_annotation=_Text(_type(signature.return_annotation))))


class _Text(str):
    """A type as it stands in the source, which a signature shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _type(annotation: Any) -> str:
    return str(annotation)


def _said(thing: Any) -> str:
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    return "\n\n".join(f"```python\n{one}\n```" if "\n    " in one else " ".join(one.split()) for one in paragraphs)
