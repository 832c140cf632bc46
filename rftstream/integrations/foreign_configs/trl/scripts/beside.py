"""Modules that lie beside a training script of TRL, from which it imports functions and values; and the values of its
expressions, as the parts that read it ask for them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from rftstream.integrations.foreign_configs.trl.scripts.scopes import (
    Scope,
    UnreadableExpression,
    attributes_of,
    fields_of,
)

DEEPEST = 10
"""Modules that a name may be handed through."""


class ModulesBeside:
    """The modules that one script imports from its own folder. They are read and never run."""

    def __init__(self, tree: ast.Module, folder: Path, decide: Callable[[ast.expr, Scope], bool]) -> None:
        self._folder, self._decide = folder, decide
        self._scopes: dict[str, Scope | None] = {}
        self.trees: list[ast.Module] = []
        """The modules' trees, as far as the script or another of them imports from them."""
        self._load_imported(tree, "")

    def find(self, node: ast.AST, name: str, scope: Scope) -> tuple[ast.AST, Scope]:
        """Return what a name stands for that a statement imports, with the scope in which to evaluate it; the statement
        itself if its module is not beside the script."""
        for _ in range(DEEPEST):
            if not isinstance(node, ast.ImportFrom):
                break
            name = {one.asname or one.name: one.name for one in node.names}.get(name, name)
            inner = self._scope(self.whole_name(node, scope.module))
            if inner is None or not inner.named(name):
                break
            node, scope = inner.seen_from_inside(ast.Name(name, ast.Load()))
        return node, scope

    def module(self, node: ast.expr, scope: Scope) -> str | None:
        """Return the module that an expression names, as in `lib.rewards` or, imported, `rewards`; None if it is not
        beside the script."""
        owner, _, rest = ast.unparse(node).partition(".")
        for one in reversed(scope.outermost().named(owner)):
            if isinstance(one.value, ast.ImportFrom):
                names = {alias.asname or alias.name: alias.name for alias in one.value.names}
                found = f"{self.whole_name(one.value, one.scope.module)}.{names[owner]}"
            elif isinstance(one.value, ast.Import):
                names = {alias.asname or owner: alias.name if alias.asname else owner for alias in one.value.names}
                found = names.get(owner, owner)
            else:
                return None
            found = f"{found}.{rest}" if rest else found
            return found if self._scope(found) is not None else None
        return None

    def attribute(self, node: ast.Attribute, scope: Scope) -> tuple[ast.AST, Scope] | None:
        """Return what `module.name` stands for, and the scope in which to evaluate it."""
        module = self.module(node.value, scope) if isinstance(node.value, (ast.Name, ast.Attribute)) else None
        inner = self._scope(module) if module is not None else None
        if inner is None or not inner.named(node.attr):
            return None
        value, around = inner.seen_from_inside(ast.Name(node.attr, ast.Load()))
        return self.find(value, node.attr, around)

    def whole_name(self, node: ast.ImportFrom, module: str) -> str:
        """Return the whole name of a module that `from ... import` names in a module."""
        around = module.split(".")[: -node.level] if node.level else []
        return ".".join([*around, *([node.module] if node.module else [])])

    def _scope(self, module: str) -> Scope | None:
        if module not in self._scopes:
            self._scopes[module] = None
            parts = module.split(".")
            above = (one.parent for one in self._folder.resolve().parents if one.name == parts[0])
            own = [self._folder.resolve().parent] if self._folder.resolve().name == parts[0] else []
            places = [one.joinpath(*parts) for one in (self._folder, *own, *above)]  # also src/package/train.py
            files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
            file = next((one for one in files if one.is_file()), None)
            if module and file is not None:
                self._scopes[module] = self._read(module, file)
        return self._scopes[module]

    def _read(self, module: str, file: Path) -> Scope | None:
        try:
            tree = ast.parse(file.read_text(encoding="utf-8-sig"))
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None
        for node in ast.walk(tree):
            node.source = file.name  # type: ignore[attr-defined]
        self.trees.append(tree)
        scope = Scope(decide=self._decide)
        scope.module = f"{module}.__init__" if file.name == "__init__.py" else module
        self._load_imported(tree, scope.module)
        return scope.add(tree.body)

    def _load_imported(self, tree: ast.Module, module: str) -> None:
        for name in self._imported(tree, module):
            self._scope(name)

    def _imported(self, tree: ast.Module, module: str) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                named = self.whole_name(node, module)
                yield named
                yield from (
                    f"{named}.{one.name}" for one in node.names if (self._folder / named.replace(".", "/")).is_dir()
                )
            elif isinstance(node, ast.Import):
                yield from (one.name for one in node.names)


class Values(Protocol):
    """The values of a script's expressions. ScriptReader is one."""

    scope: Scope
    """The scope of the module."""
    read_statements: set[int]
    """Ids of statements, beside those that bind a name, that a rule has read."""

    beside: ModulesBeside
    """The modules that the script imports from its folder."""

    def value(self, node: ast.AST, scope: Scope) -> Any:
        """Return the value of an expression. UnreadableExpression if running the script would be needed."""

    def resolved(self, node: ast.AST, scope: Scope) -> tuple[ast.AST, Scope]:
        """Follow names to their value, and return the node with the scope in which to evaluate it."""

    def holds(self, test: ast.expr, scope: Scope) -> bool:
        """Return whether a condition holds. UnreadableExpression if running the script would be needed."""


def attribute_of(reader: Values, node: ast.Attribute, scope: Scope) -> Any:
    """Return an attribute of a class of the script, of an object of one as it is made, or of a loaded config.
    LookupError if it has none."""
    found, around = reader.resolved(node.value, scope)
    made, home = reader.resolved(found.func, around) if isinstance(found, ast.Call) else (found, around)
    if not isinstance(made, ast.ClassDef):
        return reader.value(found, around)[node.attr]
    later = (one for one in made.body if isinstance(one, ast.FunctionDef) and one.name == "__post_init__")
    if any(ast.unparse(one) == f"self.{node.attr}" for each in later for one in _stored(each)):
        raise UnreadableExpression(node, "which __post_init__ sets")
    given: dict[str | None, ast.expr] = {}
    if isinstance(found, ast.Call):
        given = dict(zip((name for name, _ in fields_of(made)), found.args, strict=False))
        given |= {one.arg: one.value for one in found.keywords}
    if node.attr in given:
        return reader.value(given[node.attr], around)
    return reader.value(attributes_of(made)[node.attr], home)


def _stored(node: ast.AST) -> Iterator[ast.Attribute]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
