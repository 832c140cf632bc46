"""Configs that a training script of TRL loads itself, as in `yaml.safe_load(open("config.yaml"))`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rftstream.integrations.foreign_configs.reading import read_yaml
from rftstream.integrations.foreign_configs.trl.maps import Values
from rftstream.integrations.foreign_configs.trl.scopes import UNKNOWN, Scope, UnreadableExpression, last_name

LOADERS = {"yaml": ("safe_load", "full_load", "load"), "json": ("load", "loads"), "OmegaConf": ("load",)}


class ConfigFiles:
    """The files of settings that one script loads, for its ScriptReader."""

    def __init__(self, reader: Values, tree: ast.Module, folder: Path) -> None:
        self._reader, self._folder = reader, folder
        every = [one for one in ast.walk(tree) if isinstance(one, ast.With)]
        self._opened = [(one, item) for one in every for item in one.items if item.optional_vars is not None]
        self.read: set[Path] = set()

    def is_loaded(self, call: ast.Call) -> bool:
        """Return whether a call loads a config."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        return bool(call.args) and owner is not None and last_name(call.func) in LOADERS.get(last_name(owner), ())

    def load(self, call: ast.Call, scope: Scope) -> dict[str, Any]:
        """Return the settings in a file. UnreadableExpression if it is not there."""
        parts = list(self._parts(self._named(call.args[0]), scope))
        places = [self._folder.joinpath(*parts), Path(*parts)] if parts else []
        if (found := next((one for one in places if one.is_file()), None)) is None:
            raise UnreadableExpression(call, f"and {'/'.join(parts) or 'the file'} is not beside the script")
        self.read.add(found.resolve())
        return read_yaml(found, nested=True)

    def _named(self, node: ast.expr) -> ast.expr:
        """Return the path of a file that is open, or was read."""
        if isinstance(node, ast.Name):
            before = [
                item.context_expr
                for one, item in self._opened
                if ast.unparse(item.optional_vars or node) == node.id and one.lineno <= node.lineno
            ]
            return self._named(before[-1]) if before else node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open" and node.args:
            return node.args[0]
        owner = node.func if isinstance(node, ast.Call) else None
        is_read = isinstance(owner, ast.Attribute) and owner.attr in ("open", "read_text", "read_bytes", "read")
        return self._named(owner.value) if is_read and isinstance(owner, ast.Attribute) else node

    def _parts(self, node: ast.AST, scope: Scope) -> Iterator[str]:
        """Yield the parts of a path, without those that say where the script lies."""
        try:
            node, scope = self._reader.resolved(node, scope)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                yield from self._parts(node.left, scope)
                yield from self._parts(node.right, scope)
            elif isinstance(node, ast.Call) and last_name(node.func) in ("Path", "join"):
                for one in node.args:
                    yield from self._parts(one, scope)
            else:
                yield str(self._reader.value(node, scope))
        except UNKNOWN:
            return
