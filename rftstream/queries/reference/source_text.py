"""Reads classes from source text: the docstrings of fields, and the fields of a part's `Config`.

The text is parsed because an import may take seconds, or need packages that are missing. Nothing here imports a part.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SourceField:
    """A field of a class, as in the source. `config_fields` makes it."""

    name: str
    module: str
    """The module of the class that declares it: the part's own module, or that of a base class of the part's
    `Config`."""
    annotation: ast.expr
    default: ast.expr | None
    """The default. None: it has no default."""
    meaning: str
    """The docstring under the field, or that of its first declaration; empty if there is none."""


@functools.cache
def find_tree(module: str) -> ast.Module | None:
    """Return the syntax tree of a module, or None if it is missing or not written in Python."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def tree(module: str) -> ast.Module:
    """Return the syntax tree of a module. LookupError if there is none."""
    found = find_tree(module)
    if found is None:
        raise LookupError(f"{module}: no such module")
    return found


def find_class(body: Sequence[ast.stmt], name: str) -> ast.ClassDef | None:
    """Return the class of this name among statements, or None."""
    return next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)


def find_class_in(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Return a class and its module, which may be one that this module imports from. `Outer.Inner` is also found, in a
    base class of `Outer`, too."""
    source = find_tree(module)
    outer, _, inner = name.partition(".")
    if source is None:
        return None
    if inner:
        if (found_outer := find_class_in(module, outer)) is None:
            return None
        place, cls = found_outer
        if found_inner := find_class(cls.body, inner):
            return place, found_inner
        inherited = (find_class_in(place, f"{ast.unparse(base)}.{inner}") for base in cls.bases)
        return next((found for found in inherited if found), None)
    if found := find_class(source.body, name):
        return module, found
    for node in source.body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return find_class_in(node.module, name)
    return None


def first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((text or "").partition("\n\n")[0].split())


def part_doc(path: str) -> str | None:
    """Return the docstring of the part at `module:Class`: the module's, or the class's if the module holds several
    parts. LookupError if there is no such module."""
    module, _, thing = path.partition(":")
    body = tree(module).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    parts = {node.name for node in classes if find_class(node.body, "Config") is not None}
    inherited = [node for node in classes if any(getattr(base, "id", None) in parts for base in node.bases)]
    num_parts = max(len(parts), len(inherited))
    found = next((node for node in body if getattr(node, "name", None) == thing), None)
    text = None if num_parts > 1 else ast.get_docstring(tree(module))
    return ast.get_docstring(found) if text is None and isinstance(found, ast.ClassDef | ast.FunctionDef) else text


def field_docs(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Return the docstring under each field, or under each value of an enumeration."""
    docs = {}
    for item, following in itertools.pairwise(body):
        targets = [item.target] if isinstance(item, ast.AnnAssign) else getattr(item, "targets", [])
        if targets and isinstance(targets[0], ast.Name) and (text := _text(following)):
            docs[targets[0].id] = text
    return docs


def class_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of an imported class and its bases."""
    docs: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        source = None if one is object else find_tree(one.__module__)
        found = find_class(source.body, one.__name__) if source else None
        docs |= field_docs(found.body) if found else {}
    return docs


def config_fields(path: str) -> list[SourceField]:
    """Return the fields of the `Config` of the part at `module:Class`, in order; none if it has no `Config`. Inherited
    fields come first, from base classes in its module or in modules that it imports from. A redeclared field keeps its
    place, and keeps its docstring unless it has a new one."""
    module, _, thing = path.partition(":")
    found = find_class_in(module, f"{thing}.Config")
    return [] if found is None else list(_fields(*found).values())


def class_fields(module: str, cls: ast.ClassDef) -> list[SourceField]:
    """Return the fields that a class declares itself, in order."""
    docs = field_docs(cls.body)
    return [
        SourceField(item.target.id, module, item.annotation, item.value, docs.get(item.target.id, ""))
        for item in cls.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def evaluate(expression: ast.expr, module: str) -> Any:
    """Return the value of an annotation or a default in a module. Only the names in it are imported, from their own
    modules."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    known = {name: _named(name, module) for name in names if not hasattr(builtins, name)}
    return eval(ast.unparse(expression), known)


def _named(name: str, module: str) -> Any:
    """Return the object with this name in a module: imported there, assigned there, or its own class."""
    for node in tree(module).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return getattr(importlib.import_module(node.module), alias.name)
        if isinstance(node, ast.Assign) and name in [ast.unparse(target) for target in node.targets]:
            return evaluate(node.value, module)
    return getattr(importlib.import_module(module), name)


def _fields(module: str, cls: ast.ClassDef) -> dict[str, SourceField]:
    fields: dict[str, SourceField] = {}
    for base in cls.bases:
        if found := find_class_in(module, ast.unparse(base)):
            fields |= _fields(*found)
    for field in class_fields(module, cls):
        before = fields.get(field.name)
        meaning = field.meaning or (before.meaning if before else "")
        fields[field.name] = SourceField(field.name, module, field.annotation, field.default, meaning)
    return fields


def _text(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""
