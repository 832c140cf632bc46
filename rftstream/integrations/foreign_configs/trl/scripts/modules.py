"""What was read of a training script: lists of functions, and copies of these with what they use. Nothing is run."""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftstream.integrations.foreign_configs.trl.scripts.beside import Values
from rftstream.integrations.foreign_configs.trl.scripts.scopes import (
    DEFINITIONS,
    UNKNOWN,
    Binding,
    Scope,
    UnreadableExpression,
    imported,
    last_name,
    named,
)

RUNS = ("parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "load_dataset", "train")
"""Calls that a copy leaves out: they belong to the script's own run."""
UNREAD = "could not be read"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CLASSIFIERS = tuple(f"{at}AutoModelForSequenceClassification.from_pretrained" for at in ("", "transformers."))
"""Calls that load a reward model."""


class ScriptCode:
    """The text of one script, with the scope that its trainer is made in."""

    def __init__(self, name: str, lines: Sequence[str], scope: Scope, reader: Values) -> None:
        self.name = name
        self._lines, self._scope, self._reader = lines, scope, reader
        self._lambdas: dict[str, ast.Lambda | ast.Call | ast.Attribute] = {}
        self.renamed: dict[str, str] = {}
        """Columns that the copied functions read, and what they are called in the copy."""
        self._readers: set[str] = set()
        self._is_copied = False

    def name_lambda(self, node: ast.Lambda) -> str:
        """Return a name for a function that has none. `copy` takes it."""
        name = "reward" if not self._lambdas else f"reward_{len(self._lambdas) + 1}"
        self._lambdas[name] = node
        return name

    def name_call(self, node: ast.Call) -> str | None:
        """Return a name for what a call makes: an object of a class of the script, what a function of the script
        returns, or a partial of one. `copy` takes it. None if the call uses what only the script's run makes."""
        of_partial = last_name(node.func) == "partial" and node.args
        made = node.args[0] if of_partial else node.func
        missing: list[str] = []
        self._collect(names_in(node), {}, missing)
        bound = [one.value for one in self._bindings(made.id)] if isinstance(made, ast.Name) else []
        own = any(isinstance(one, (*DEFINITIONS, ast.ImportFrom)) for one in bound)
        if missing or not own:
            return None
        return self._named(made, node)

    def name_method(self, node: ast.Attribute) -> str | None:
        """Return a name for a method of an object of a class of the script. `copy` takes it. None for anything else."""
        owner = node.value
        made = named(owner, self._scope) if isinstance(owner, ast.Name) else owner
        kind = named(made.func, self._scope) if isinstance(made, ast.Call) else made
        missing: list[str] = []
        self._collect(names_in(node), {}, missing)
        if missing or not isinstance(kind, ast.ClassDef) or ast.unparse(owner) == "self":
            return None
        return self._named(ast.Name(node.attr), node)

    def _named(self, made: ast.expr, node: ast.Call | ast.Attribute) -> str:
        base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", ast.unparse(made)).lower()
        name = next(one for one in (f"{base}_{number}" for number in itertools.count(1)) if one not in self._lambdas)
        self._lambdas[name] = node
        return name

    def copy(self, names: Sequence[str]) -> tuple[str, list[str]]:
        """Return a module with these functions and all that they use, and the names that could not be copied."""
        self._is_copied = True
        found: dict[tuple[int, str], tuple[int, str]] = {}
        missing: list[str] = []
        self._collect([name for name in names if name not in self._lambdas], found, missing)
        made = []
        for name in names:
            if (node := self._lambdas.get(name)) is not None:
                self._collect(names_in(node), found, missing)
                if not isinstance(node, ast.Lambda):
                    made.append(f"{name} = {ast.unparse(node)}")
                else:
                    made.append(f"def {name}({ast.unparse(node.args)}):\n    return {ast.unparse(node.body)}")
        texts = [(text, text.startswith(("import ", "from "))) for _, text in sorted(found.values())]
        imports = [text for text, is_import in texts if is_import]
        rest = [*(text for text, is_import in texts if not is_import), *made]
        given = {name: one for name in missing if (one := self._given("\n".join(rest), name)) is not None}
        missing = [name for name in missing if name not in given]
        imports += ["from types import SimpleNamespace"] if given else []
        rest = [*given.values(), *rest]
        head = f'"""Copied from {self.name} by `rftstream convert-config`."""'
        return "\n\n".join([head, *(["\n".join(imports)] if imports else []), spaced(rest)]) + "\n", missing

    def _given(self, text: str, name: str) -> str | None:
        """Return a statement that gives a name the arguments of the command line that this text reads of it, as they
        are given or by default. None if they are not all known."""
        every = list(ast.walk(ast.parse(text)))
        read = [one for one in every if isinstance(one, ast.Attribute) and ast.unparse(one.value) == name]
        if len(read) != sum(isinstance(one, ast.Name) and one.id == name for one in every):
            return None
        found: dict[str, Any] = {}
        for one in read:
            try:
                last = ast.Name(name, ast.Load(), lineno=sys.maxsize)
                found[one.attr] = self._reader.value(ast.Attribute(last, one.attr, ast.Load()), self._scope)
            except UNKNOWN:
                return None
        return f"{name} = SimpleNamespace({', '.join(f'{key}={value!r}' for key, value in found.items())})"

    def words_of(self, names: Sequence[str]) -> set[str]:
        """Return the parameters and the texts in these functions."""
        nodes = [self._lambdas[name] for name in names if name in self._lambdas]
        names = [*names, *(used for node in nodes if not isinstance(node, ast.Lambda) for used in names_in(node))]
        every: list[ast.AST] = [*nodes, *(one.value for name in names for one in self._bindings(name))]
        inside = [one for node in every for one in ast.walk(node)]
        return {one.arg for one in inside if isinstance(one, ast.arg)} | {
            one.value for one in inside if isinstance(one, ast.Constant) and isinstance(one.value, str)
        }

    def rename(self, names: Sequence[str], column: str, ours: str) -> bool:
        """Let the copies of these functions read a column by our name. Return False, and change nothing, if a word or a
        text there may mean something else."""
        if self._is_copied or column in self.renamed:
            return self.renamed.get(column) == ours
        readers = [name for name in names if column in self.words_of([name])]
        bound = [one.value for name in readers for one in self._bindings(name)]
        if set(readers) & set(self._lambdas) or not all(isinstance(node, FUNCTIONS) for node in bound):
            return False
        for node in bound:
            documented = isinstance(node, FUNCTIONS) and ast.get_docstring(node, clean=False)
            for one in ast.walk(node):
                words = {getattr(one, field, None) for field in ("id", "arg", "attr", "name")}
                text = one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else ""
                is_bound = column in words and isinstance(one, (ast.Attribute, ast.keyword))
                if ours in words or is_bound or (text != documented and re.search(rf"\b{column}\b", text)):
                    return False
        self.renamed[column] = ours
        self._readers.update(readers)
        return True

    def _collect(self, names: Sequence[str], found: dict[tuple[int, str], tuple[int, str]], missing: list[str]) -> None:
        """Add the statements that bind these names, and those that they use in turn."""
        waiting, seen = list(names), set(names)
        while waiting:
            name = waiting.pop()
            bindings = self._bindings(name)
            if not bindings or any(map(_runs, bindings)):
                if name not in vars(builtins) and name not in missing:
                    missing.append(name)
                continue
            for one in self._changes(name, bindings):
                if one.is_known() is None:
                    missing.append(name)
                    break
                bindings = [*bindings, one]
            if any(isinstance(one.value, ast.Name) and one.value.id == name for one in bindings):
                missing.append(name)  # a parameter, given under its own name
                continue
            for one in bindings:
                if (model := self._tokenized(one)) is not None:
                    text = f"{name} = AutoTokenizer.from_pretrained({model!r})"
                    found.setdefault((id(one.statement), name), (one.statement.lineno, text))
                    found.setdefault((0, ""), (0, "from transformers import AutoTokenizer"))
                    continue
                text, used = self._statement(one)
                if name in self._readers:
                    for column, ours in self.renamed.items():
                        text = re.sub(rf"\b{column}\b", ours, text)
                is_import = isinstance(one.statement, (ast.Import, ast.ImportFrom))
                found.setdefault((id(one.statement), name if is_import else ""), (one.statement.lineno, text))
                new = [other for other in used if other not in seen]
                waiting += new
                seen.update(new)

    def _tokenized(self, one: Binding) -> str | None:
        """Return the model of a tokenizer that a script loads together with it, as unsloth's scripts do."""
        call = one.value.value if isinstance(one.value, ast.Subscript) else None
        if not isinstance(call, ast.Call) or last_name(call.func) != "from_pretrained":
            return None
        named = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "model_name")]
        try:
            place = self._reader.value(one.value.slice, one.scope) if isinstance(one.value, ast.Subscript) else 0
            return str(self._reader.value(named[0], one.scope)) if place == 1 else None
        except UNKNOWN:
            return None

    def _bindings(self, name: str) -> list[Binding]:
        """Return what binds a name, in the innermost scope that has it; nothing if a branch decides it."""
        scope: Scope | None = self._scope
        while scope is not None:
            if bound := scope.named(name):
                return bound if all(one.is_known() for one in bound) else []
            scope = scope.outer
        return []

    def _changes(self, name: str, bindings: Sequence[Binding]) -> list[Binding]:
        """Return what changes the value of a name that a statement of the script binds: `words.append(one)`,
        `weights["short"] = 2`."""
        of_values = [one for one in bindings if isinstance(one.statement, (ast.Assign, ast.AnnAssign, ast.ClassDef))]
        if len(of_values) != len(bindings) or any(self._tokenized(one) is not None for one in bindings):
            return []
        every = [one for scope in {id(one.scope): one.scope for one in bindings}.values() for one in scope.bound]
        made = [one for one in every if one.name.startswith((f"{name}[", f"{name}."))]
        called = [one for scope in {id(one.scope): one.scope for one in bindings}.values() for one in scope.changed]
        return [one for one in (*made, *(one for one in called if one.name == name)) if one.is_known() is not False]

    def _statement(self, one: Binding) -> tuple[str, list[str]]:
        """Return the text of the statement that binds a name, and the names that the statement uses."""
        node = one.statement
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self._import(node, one.name), []
        if isinstance(node, ast.FunctionDef) and node.name != one.name:  # a parameter, with its value
            return f"{one.name} = {ast.unparse(one.value)}", names_in(one.value)
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        return textwrap.dedent("\n".join(self._lines[first - 1 : node.end_lineno])), names_in(node)

    def _import(self, node: ast.Import | ast.ImportFrom, name: str) -> str:
        names = [each for each in node.names if (each.asname or each.name.partition(".")[0]) == name]
        copied = type(node)(**{**dict(ast.iter_fields(node)), "names": names})
        return ast.unparse(copied)


def names_in(node: ast.AST) -> list[str]:
    """Return the names that a node reads and does not bind itself."""
    if isinstance(node, ast.ClassDef):
        parts = [*node.decorator_list, *node.bases, *node.body]
        return list(dict.fromkeys(name for one in parts for name in names_in(one)))
    every = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    shared = {name for one in ast.walk(node) if isinstance(one, ast.Global) for name in one.names}
    own = {one.id for one in every if isinstance(one.ctx, ast.Store)} - shared | {
        one.arg for one in ast.walk(node) if isinstance(one, ast.arg)
    }
    inner = {one.name for one in ast.walk(node) if isinstance(one, (*DEFINITIONS, ast.ExceptHandler)) and one.name}
    imported = {
        (each.asname or each.name).partition(".")[0]
        for one in ast.walk(node)
        if isinstance(one, (ast.Import, ast.ImportFrom))
        for each in one.names
    }
    inner |= {
        name.id
        for one in ast.walk(node)
        if isinstance(one, ast.comprehension)
        for name in ast.walk(one.target)
        if isinstance(name, ast.Name)
    }
    inner |= {arg.arg for one in ast.walk(node) if isinstance(one, ast.Lambda) for arg in one.args.args}
    read = dict.fromkeys([*sorted(shared), *(one.id for one in every if isinstance(one.ctx, ast.Load))])
    is_function = isinstance(node, (*FUNCTIONS, ast.Lambda))
    return [name for name in read if name not in (own if is_function else ()) and name not in inner | imported]


def _runs(one: Binding) -> bool:
    """Return whether a statement belongs to the script's own run: it reads the command line, or trains."""
    if isinstance(one.statement, DEFINITIONS):
        return False
    calls = [last_name(node.func) for node in ast.walk(one.statement) if isinstance(node, ast.Call)]
    return any(name in RUNS or name.endswith("Trainer") for name in calls)


def spaced(texts: Sequence[str]) -> str:
    """Return statements with two empty lines around definitions."""
    made = ""
    for number, text in enumerate(texts):
        beside = texts[max(number - 1, 0) : number + 1]
        is_defined = any(one.startswith(("def ", "async def ", "class ", "@")) for one in beside)
        made += ("" if not number else "\n\n\n" if is_defined else "\n") + text
    return made


@dataclass
class Script:
    """The settings of a script, the arguments that could not be read, and the names of its own functions."""

    trainer: str
    settings: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Setting -> the expression of its value."""
    unread_statements: list[str] = field(default_factory=list)
    """Statements that may change the training, which no rule reads."""
    functions: set[str] = field(default_factory=set)
    environment: dict[str, Any] = field(default_factory=dict)
    """Environment variable -> the script's default, which was taken."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of what the script calls."""
    code: ScriptCode | None = None
    rows: dict[str, str | None] = field(default_factory=dict)
    """`train_dataset` or `eval_dataset` -> a script that writes its rows, if one can."""
    arguments: set[str] = field(default_factory=set)
    """Arguments of the script's own argparse whose given values were taken."""
    own: set[str] = field(default_factory=set)
    """Fields of the script's own dataclasses."""
    own_taken: set[str] = field(default_factory=set)
    """Those, unknown to TRL, whose given values were taken."""
    configs: set[Path] = field(default_factory=set)
    """Files of settings that the script loads itself."""
    makes_chats: bool = False
    """Whether messages are written in the script."""
    images: str = ""
    """Column of the images, if a message that is written in the script shows one."""

    def reads(self, column: str) -> bool:
        """Return whether a reward reads a column of this name. An imported reward may do so."""
        own, imported = self._rewards()
        return bool(imported) or (self.code is not None and column in self.code.words_of(own))

    def rename(self, column: str, ours: str) -> bool:
        """Let the copies of the rewards read a column by our name. Return whether all that may read it do."""
        own, imported = self._rewards()
        return not imported and self.code is not None and self.code.rename(own, column, ours)

    def _rewards(self) -> tuple[list[str], list[str]]:
        """Return the rewards that the script defines, and those that it imports from elsewhere than TRL."""
        rewards = [one for one in self.settings.get("reward_funcs", ()) if isinstance(one, str)]
        return [one for one in rewards if ":" not in one], [
            one for one in rewards if ":" in one and not one.startswith("trl.")
        ]


class FunctionReader:
    """Reads lists of functions of one script, for its ScriptReader."""

    def __init__(self, reader: Values, code: ScriptCode) -> None:
        """`code`: the copies of the script's functions, which give names to those that have none."""
        self._reader, self._code = reader, code

    def read(self, node: ast.AST, scope: Scope) -> list[Any]:
        """Return the names of functions, in the order of a list; a dict says what became of one that is no function
        with a name."""
        found = self._listed(node, scope)
        for one in scope.changes(node):
            found = self._changed(found, one)
        return found

    def _listed(self, node: ast.AST, scope: Scope) -> list[Any]:
        found, around = self._reader.resolved(node, scope) if isinstance(node, ast.Name) else (node, scope)
        if isinstance(found, ast.BinOp) and isinstance(found.op, ast.Add):  # also made by +=
            return [*self.read(found.left, around), *self.read(found.right, around)]
        if isinstance(found, ast.Call) and isinstance(made := named(found.func, around), ast.FunctionDef):
            returned = [one.value for one in ast.walk(made) if isinstance(one, ast.Return) and one.value]
            if len(returned) == 1:
                inside = self._reader.scope.inside(made, found, around)
                with contextlib.suppress(*UNKNOWN):
                    listed, _ = self._reader.resolved(returned[0], inside)
                    if isinstance(listed, (ast.List, ast.Tuple, ast.ListComp)):
                        return self.read(returned[0], inside)
        if isinstance(found, (ast.List, ast.Tuple)):
            parts = (
                self.read(one.value, around) if isinstance(one, ast.Starred) else [self._function_or_text(one, around)]
                for one in found.elts
            )
            return [one for part in parts for one in part]
        if isinstance(found, ast.ListComp) and isinstance(found.elt, ast.Subscript):
            with contextlib.suppress(*UNKNOWN):
                return self._looked_up(found, found.elt, around)
        return [self._function_or_text(node, scope)]

    def _changed(self, listed: list[Any], change: Binding) -> list[Any]:
        """Return a list after a call of one of its methods."""
        self._reader.read_statements.add(id(change.statement))
        call = change.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and change.is_known():
            method, given = call.func.attr, [ast.unparse(one) for one in call.args]
            if method == "extend" and len(given) == 1:
                return [*listed, *self.read(call.args[0], change.scope)]
            if method == "append" and len(given) == 1:
                return [*listed, self._function_or_text(call.args[0], change.scope)]
            if method == "insert" and given[0] == "0":
                return [self._function_or_text(call.args[1], change.scope), *listed]
        why = "" if change.is_known() else "which a branch decides"
        return [*listed, {UNREAD: str(UnreadableExpression(call, why))}]

    def _looked_up(self, listed: ast.ListComp, found: ast.Subscript, scope: Scope) -> list[Any]:
        """Return the functions of `[TABLE[name] for name in names]`. UnreadableExpression if it is more than that."""
        loop = listed.generators[0]
        table, around = self._reader.resolved(found.value, scope)
        if len(listed.generators) > 1 or loop.ifs or ast.unparse(loop.target) != ast.unparse(found.slice):
            raise UnreadableExpression(listed)
        if not isinstance(table, ast.Dict):
            raise UnreadableExpression(table)
        keys = [key.value for key in table.keys if isinstance(key, ast.Constant)]
        functions = dict(zip(keys, table.values, strict=True))
        return [self._function_or_text(functions[name], around) for name in self._reader.value(loop.iter, scope)]

    def _function_or_text(self, node: ast.AST, scope: Scope) -> Any:
        try:
            return self._function(node, scope)
        except UnreadableExpression as error:
            return {UNREAD: str(error)}

    def _function(self, node: ast.AST, scope: Scope) -> Any:
        """Return the name of a function, with the module if it is imported. A string is the name of a model."""
        if isinstance(node, ast.Constant):
            return {"model": node.value}
        if isinstance(node, ast.Attribute) and (module := self._reader.beside.module(node.value, scope)) is not None:
            return f"{module}:{node.attr}"
        if isinstance(node, ast.Attribute) and (module := imported(node.value, scope)):
            return f"{module}:{node.attr}"
        if isinstance(node, ast.Attribute) and (name := self._code.name_method(node)) is not None:
            return name
        if isinstance(node, ast.Lambda) and not scope.module:
            return self._code.name_lambda(node)
        if isinstance(node, ast.Name):
            found, around = scope.find(node)
            if isinstance(found, ast.ImportFrom):
                names = {one.asname or one.name: one.name for one in found.names}
                return f"{self._reader.beside.whole_name(found, around.module)}:{names[node.id]}"
            is_here = isinstance(found, (*DEFINITIONS, ast.Lambda))
            if is_here and around.module:
                return f"{around.module.removesuffix('.__init__')}:{node.id}"
            return node.id if is_here else self._function(found, around)
        is_made = isinstance(node, ast.Call) and not isinstance(named(node.func, scope), DEFINITIONS)
        if is_made and isinstance(node, ast.Call) and last_name(node.func) == "get_soft_overlong_punishment":
            return {last_name(node.func): {one.arg: self._reader.value(one.value, scope) for one in node.keywords}}
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in CLASSIFIERS:
            return {"model": self._reader.value(node.args[0], scope)}
        if isinstance(node, ast.Call) and (name := self._code.name_call(node)) is not None:
            return name
        raise UnreadableExpression(node)
