"""Finds the function that a test of assertions checks, such as one of MBPP's."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence

from rftstream.sandbox.imports import USUAL_IMPORTS

_BUILTIN = frozenset(dir(builtins))
_PLAIN = frozenset(name for kind in (str, bytes, int, float, complex, list, tuple, dict, set) for name in dir(kind))
"""Attributes of the plain values that a sandbox returns."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def find_entry_point(test: str, context: str, *, known: set[str], also: str = "") -> str:
    """Return the name of the function under test: one that the test calls and does not define.

    `context` runs before the test. `known`: names that a right program or the prompt defines. `also`: further
    assertions about the same function. ValueError if there is no such function, or if several are possible."""
    tree, more = ast.parse(test), ast.parse(also)
    given = _BUILTIN | _bound(tree) | (defined_in(context) - known)
    called: list[str] = []
    for places in (_assertions(tree), _assertions(more), [tree]):
        called = called or [name for name in _called(places) if name not in given]
    if known & set(called):
        called = [name for name in called if name in known]
    elif len(called) > 1:
        helpers = defined_in(USUAL_IMPORTS)
        called = [name for name in called if name not in helpers] or called
    if not called:
        raise ValueError("no entry_point, and no assertion that calls a function")
    if len(called) > 1:
        raise ValueError(f"no entry_point, and the assertions call {', '.join(called)}; name one as entry_point")
    _check_mappable(tree, called[0])
    return called[0]


def defined_in(text: str) -> set[str]:
    """Return the names that the statements of a text define or import. Empty if the text is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return _bound(tree)


def _bound(tree: ast.Module) -> set[str]:
    """Return the names that a module's own statements bind."""
    return {name for statement in _statements(tree) for name in _names_of(statement)}


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield a module's statements, including those inside conditions, loops and blocks."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case) and not isinstance(child, _SCOPES):
            yield from _statements(child)


def _names_of(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case node if isinstance(node, _SCOPES):
            yield statement.name
            if isinstance(statement, ast.ClassDef) and statement.name == "Solution":
                yield from (one.name for one in statement.body if isinstance(one, ast.FunctionDef))
        case ast.ImportFrom() if any(alias.name == "*" for alias in statement.names):
            yield from _star(statement.module or "")
        case ast.Import() | ast.ImportFrom():
            yield from ((alias.asname or alias.name.partition(".")[0]) for alias in statement.names)
        case ast.Assign() | ast.AnnAssign() | ast.For():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))


def _star(module: str) -> set[str]:
    """Return the names that `import *` brings from a usual module of the standard library."""
    if f"from {module} import *" not in USUAL_IMPORTS:
        return set()
    import importlib

    found = importlib.import_module(module)
    return set(getattr(found, "__all__", [name for name in dir(found) if not name.startswith("_")]))


def _assertions(tree: ast.Module) -> list[ast.AST]:
    return [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def _called(places: Sequence[ast.AST]) -> list[str]:
    """Return the called names, each once."""
    calls = (node for place in places for node in ast.walk(place) if isinstance(node, ast.Call))
    return list(dict.fromkeys(call.func.id for call in calls if isinstance(call.func, ast.Name)))


def _check_mappable(tree: ast.Module, name: str) -> None:
    """Raise ValueError if a test uses an attribute of the function's value that no plain value has: the value would be
    an object."""
    values = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_call_of(node.value, name)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr in _PLAIN:
            continue
        if _is_call_of(node.value, name) or (isinstance(node.value, ast.Name) and node.value.id in {name, *values}):
            raise ValueError(f"the test is about {name}.{node.attr}, and only plain values can be handed over")


def _is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
