"""Tool calls written as Python: `[store(text="a"), look(count=2)]`. They are parsed and never executed."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

_BEGUN = re.compile(r"\s*\[?\s*([A-Za-z_][\w.]*)\(")
_WORDS = {"true": True, "false": False, "null": None}
"""Names that models take from JSON."""


def begun_call(text: str) -> str | None:
    """Return the name of the first call if the text begins with calls in Python; else None."""
    begun = _BEGUN.match(text)
    return begun[1] if begun else None


def python_calls(text: str) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """Return the calls if the whole text consists of calls, each with its name and arguments; else no calls and
    the problem."""
    try:
        with warnings.catch_warnings():  # an unknown escape in a string
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
        found = [_call(node) for node in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return [], str(error).partition("(")[0].strip() or "it cannot be read"
    return found, "" if found else "nothing is there"


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)):
        raise ValueError("expected calls like name(key=value)")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("expected each argument with its name")
    return ast.unparse(node.func), {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(elt) for elt in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("expected texts as the keys of an object")
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)
