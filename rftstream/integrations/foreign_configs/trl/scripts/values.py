"""The values of a script's expressions, as far as they are known without running it.

Constants, names that are bound once or in a row, arithmetic, f-strings and defaults of argparse are resolved; anything
else is an UnreadableExpression, with its line.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftstream.integrations.foreign_configs.reading import COMPARED, OPERATORS, read_python
from rftstream.integrations.foreign_configs.trl.scripts import loaded, rest
from rftstream.integrations.foreign_configs.trl.scripts.beside import ModulesBeside, attribute_of
from rftstream.integrations.foreign_configs.trl.scripts.scopes import (
    UNKNOWN,
    Scope,
    UnreadableExpression,
    fields_of,
    last_name,
)

PARSED_DEFAULTS = {"dataset_train_split": "train", "dataset_test_split": "test", "eval_strategy": "no"}
"""Defaults of TRL's command line that scripts read."""
PARSED = ("parse_args_and_config", "parse_args_into_dataclasses")
CASTS = {"int": int, "float": float, "str": str}
ARGUMENTS = ("Config", "Arguments")
"""Ends of the names of classes of settings."""
TEXTS = ("split", "replace", "lower", "upper", "strip", "rstrip", "lstrip")
"""String methods that can be evaluated."""


class ScriptValues:
    """The values of the expressions in one script. ScriptReader is made of it."""

    def __init__(
        self,
        path: Path,
        parsed: Mapping[str, Any] | None,
        known: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`parsed`: the settings of the command line and of its YAML, if they are given. `known`: the names of all
        settings that a command line has. `environment`: variables that the shell gives to the script."""
        text, self._tree = read_python(path)
        self._path, self._lines = path, text.splitlines()
        self._given = parsed or {}
        self._parsed = None if parsed is None else {**PARSED_DEFAULTS, **parsed}
        if self._parsed and self._parsed["eval_strategy"] is False:  # YAML's no
            self._parsed["eval_strategy"] = "no"
        self._known = known
        self._loops = rest.take_first_turns(self._tree)
        self.scope = Scope(decide=self.holds).add(self._tree.body)
        self.read_statements: set[int] = set()
        """Ids of statements, beside those that bind a name, that a rule has read."""
        self.beside = ModulesBeside(self._tree, path.parent, self.holds)
        self._configs = loaded.ConfigFiles(self, self._tree, path.parent)
        self._exported = environment or {}
        self._environment: dict[str, Any] = {}
        self._arguments_taken: set[str] = set()
        self._classes = classes = [node for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)]
        classes = [
            *classes,
            *(one for tree in self.beside.trees for one in ast.walk(tree) if isinstance(one, ast.ClassDef)),
        ]
        self._own = {name: default for one in classes for name, default in fields_of(one)}
        """Fields of the script's own dataclasses, which its command line has beside TRL's, and their defaults."""
        derived = (one for one in classes if any(last_name(base).endswith(ARGUMENTS) for base in one.bases))
        defaults = dict(field for one in derived for field in fields_of(one))
        self._changed = [ast.keyword(name, one) for name, one in defaults.items() if one is not None and name in known]
        """Other defaults of TRL's settings, which a class of the script gives to them."""
        self._own_taken: set[str] = set()

    def resolved(self, node: ast.AST, scope: Scope) -> tuple[ast.AST, Scope]:
        """Follow names to their value, and choices whose condition is known. Return the node with the scope in which
        to evaluate it."""
        while isinstance(node, (ast.Name, ast.IfExp, ast.Attribute)):
            if isinstance(node, ast.IfExp):
                node = node.body if self.holds(node.test, scope) else node.orelse
            elif isinstance(node, ast.Name):
                name, (node, scope) = node.id, scope.find(node)
                node, scope = self.beside.find(node, name, scope)
            elif (found := self.beside.attribute(node, scope)) is not None:
                node, scope = found
            elif ast.unparse(node.value) == "self" and (bound := scope.set_before(node)) is not None:
                node, scope = bound.value, bound.scope
            else:
                break
        return node, scope

    def holds(self, test: ast.expr, scope: Scope) -> bool:
        """Return whether a condition holds. UnreadableExpression if running the script would be needed."""
        return bool(self.value(test, scope))

    # ------------------------------------------------------------------------------------------ values

    def value(self, node: ast.AST, scope: Scope) -> Any:
        """Return the value of an expression. UnreadableExpression if running the script would be needed."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self.value(one, scope) for one in node.elts]
        if isinstance(node, ast.Dict):
            made: dict[Any, Any] = {}
            for key, one in zip(node.keys, node.values, strict=True):
                made |= self.value(one, scope) if key is None else {self.value(key, scope): self.value(one, scope)}
            return made
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand, scope)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.value(node.operand, scope)
        if isinstance(node, ast.BoolOp):
            ends, found = isinstance(node.op, ast.Or), None
            for one in node.values:
                if bool(found := self.value(one, scope)) is ends:
                    break
            return found
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.value(node.left, scope), self.value(node.comparators[0], scope)
            return COMPARED[type(node.ops[0])](left, right)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self.value(node.left, scope), self.value(node.right, scope))
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(self.value(one.value if isinstance(one, ast.FormattedValue) else one, scope)) for one in node.values
            )
        if isinstance(node, ast.Call) and last_name(node.func) in CASTS and len(node.args) == 1:
            return CASTS[last_name(node.func)](self.value(node.args[0], scope))
        if isinstance(node, ast.Call) and last_name(node.func) in loaded.ANSWERED:
            return loaded.answer_of(self, node, scope, self._parsed or {})
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("environ.get", "getenv")):
            return self._of_environment(node, scope)
        if isinstance(node, ast.Call) and self._configs.is_loaded(node):
            return self._configs.load(node, scope)
        if isinstance(node, ast.Call) and last_name(node.func) == "to_container" and node.args:  # of OmegaConf
            return self.value(node.args[0], scope)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            key, *default = (self.value(one, scope) for one in node.args)
            return self.value(node.func.value, scope).get(key, *default)
        if isinstance(node, ast.Call) and last_name(node.func) == "dict":
            parts = [self.value(one, scope) for one in node.args]
            keywords: list[ast.expr | None] = [ast.Constant(one.arg) if one.arg else None for one in node.keywords]
            return dict(*parts) | self.value(ast.Dict(keywords, [one.value for one in node.keywords]), scope)
        if isinstance(node, ast.Call) and last_name(node.func) in ("vars", "asdict") and len(node.args) == 1:
            fields = self._fields(node, scope)
            return {name: self._attribute(ast.Attribute(node.args[0], name), scope) for name in fields}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXTS:
            said = str(self.value(node.func.value, scope))
            return getattr(said, node.func.attr)(*(self.value(one, scope) for one in node.args))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            name = str(self.value(node.slice, scope))
            with contextlib.suppress(KeyError):
                return self._set_as_environment(name, node, scope)
            return self._exported_as(name, node)
        if isinstance(node, ast.Subscript):
            with contextlib.suppress(*UNKNOWN):
                of, around = self.resolved(node.value, scope)
                if isinstance(of, ast.Call) and last_name(of.func) == "vars":
                    return self._attribute(ast.Attribute(of.args[0], self.value(node.slice, scope)), around)
            return self.value(node.value, scope)[self.value(node.slice, scope)]
        if isinstance(node, ast.Name):
            found, around = scope.find(node)
            found, around = self.beside.find(found, node.id, around)
            held = self.value(found, around)
            return loaded.changed(self, held, node, scope) if isinstance(held, (dict, list)) else held
        if isinstance(node, ast.IfExp):
            return self.value(*self.resolved(node, scope))
        if isinstance(node, ast.Attribute):
            found, around = self.resolved(node, scope)
            return self._attribute(node, scope) if found is node else self.value(found, around)
        raise UnreadableExpression(node)

    def _fields(self, node: ast.Call, scope: Scope) -> list[str]:
        """Return the names in `vars(...)` or `asdict(...)`: all of a command line, or the fields of a dataclass."""
        made, around = self.resolved(node.args[0], scope)
        if isinstance(made, ast.Call) and last_name(made.func) == "parse_args":
            every = [one for tree in (self._tree, *self.beside.trees) for one in ast.walk(tree)]
            added = [one for one in every if isinstance(one, ast.Call) and last_name(one.func) == "add_argument"]
            flags = [[str(each.value) for each in one.args if isinstance(each, ast.Constant)] for one in added]
            longest = [max(one, key=len) for one in flags if one]
            if any(word.arg == "dest" for one in added for word in one.keywords):
                raise UnreadableExpression(node)
            return [one.lstrip("-").replace("-", "_") for one in longest]
        if isinstance(made, ast.Call) and isinstance(kind := self.resolved(made.func, around)[0], ast.ClassDef):
            return [name for name, _ in fields_of(kind)]
        raise UnreadableExpression(node)

    def _of_environment(self, node: ast.Call, scope: Scope) -> Any:
        """Return an environment variable as the launch gives it, or its default."""
        given = [*node.args, *(one.value for one in node.keywords if one.arg == "default")]
        name = str(self.value(given[0], scope))
        with contextlib.suppress(KeyError):
            return self._set_as_environment(name, node, scope)
        if name in self._exported:
            return self._exported_as(name, node)
        if len(given) < 2:
            raise UnreadableExpression(node, "which has no default")
        self._environment[name] = default = self.value(given[1], scope)
        return default

    def _set_as_environment(self, name: str, node: ast.expr, scope: Scope) -> Any:
        """Return an environment variable that the script sets before. KeyError if it does not."""
        place = ast.parse(f"os.environ[{name!r}]", mode="eval").body
        if isinstance(place, ast.Subscript) and (bound := scope.set_before(ast.copy_location(place, node))) is not None:
            self.read_statements.add(id(bound.statement))
            return self.value(bound.value, bound.scope)
        changes = (one for one in (*scope.changed, *self.scope.changed) if one.name == "os.environ")
        for one in changes:
            call = one.value
            if isinstance(call, ast.Call) and name in ast.unparse(call):
                if last_name(call.func) != "setdefault" or not one.is_known():
                    raise UnreadableExpression(call)
                self.read_statements.add(id(one.statement))
                return self._exported_as(name, node) if name in self._exported else self.value(call.args[1], one.scope)
        raise KeyError(name)

    def _exported_as(self, name: str, node: ast.AST) -> str:
        """Return an environment variable as the launch gives it."""
        if name not in self._exported or "$" in self._exported[name]:
            raise UnreadableExpression(node, "which only the shell knows" if name in self._exported else "")
        return self._exported[name]

    def _is_parsed(self, node: ast.AST, scope: Scope) -> bool:
        """Return whether a value comes from TRL's command line, whose settings are given."""
        return self._parsed is not None and self._is_of_dataclasses(node, scope)

    def _is_of_dataclasses(self, node: ast.AST, scope: Scope) -> bool:
        """Return whether a value is one of the dataclasses that the script's command line becomes."""
        with contextlib.suppress(UnreadableExpression):
            node, scope = self.resolved(node, scope)
            if isinstance(node, ast.Subscript):
                return self._is_of_dataclasses(node.value, scope)
            return isinstance(node, ast.Call) and last_name(node.func) in PARSED
        return False

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        """Return a setting of the command line, an argument of argparse as it is given or by default, or the last part
        of a constant such as torch.bfloat16."""
        if (bound := scope.set_before(node)) is not None:
            self.read_statements.add(id(bound.statement))
            return self.value(bound.value, bound.scope)
        if self._is_of_dataclasses(node.value, scope):
            if node.attr in self._own and node.attr not in self._given:
                return self.value(self._own[node.attr] or node.value, self.scope)
            if self._parsed is not None and node.attr in self._known:
                return self._parsed.get(node.attr)
            if node.attr in self._own:
                self._own_taken.add(node.attr)
                return self._given[node.attr]
        if ast.unparse(node.value) in ("torch", "TaskType", "jnp"):
            return node.attr
        trees = (self._tree, *self.beside.trees)
        loaded.refuse_own_words(trees, node)
        for call in (one for tree in trees for one in ast.walk(tree)):
            if isinstance(call, ast.Call) and last_name(call.func) == "add_argument":
                flags = [
                    str(one.value).lstrip("-").replace("-", "_") for one in call.args if isinstance(one, ast.Constant)
                ]
                if node.attr not in flags:
                    continue
                if taken := [one for one in flags if one in self._given]:
                    self._arguments_taken.update(taken)
                    return self._given[taken[0]]
                said = {one.arg: one.value for one in call.keywords}
                if "default" in said:
                    return self.value(said["default"], scope)
                if "action" in said and (action := str(self.value(said["action"], scope))).startswith("store_"):
                    return {"store_true": False, "store_false": True}[action]
        with contextlib.suppress(*UNKNOWN):
            return attribute_of(self, node, scope)
        raise UnreadableExpression(node)
