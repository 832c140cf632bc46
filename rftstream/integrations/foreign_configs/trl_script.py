"""Reads a training script of TRL without running it: the arguments of its trainer and its config, under TRL's own
names.

The script becomes settings of TRL's command line: `load_dataset(...)` becomes dataset_name and related settings,
`LoraConfig(...)` becomes lora_r and so on. Constants, names that are bound once or in a row, arithmetic, f-strings and
defaults of argparse are resolved; anything else is noted as unreadable, with its line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs.reading import OPERATORS, read_text

KINDS = ("GRPO", "RLOO", "SFT", "DPO", "Reward")
LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CASTS = {"int": int, "float": float, "str": str}
BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.With)
TEXTS = ("split", "replace", "lower", "upper", "strip", "rstrip", "lstrip")
"""String methods that can be evaluated."""
UNCHANGED = ("shuffle", "remove_columns", "select_columns", "flatten_indices", "with_format")
"""Methods of a dataset that do not change which problems it has."""


class UnreadableExpression(Exception):
    """An expression whose value is known only by running the script."""

    def __init__(self, node: ast.AST, reason: str = "") -> None:
        text = ast.unparse(node)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        super().__init__(f"line {getattr(node, 'lineno', '?')}: {shown}{f', {reason}' if reason else ''}")


UNKNOWN = (UnreadableExpression, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Errors of evaluating an expression that has no value unless the script runs."""


@dataclass
class Script:
    """The settings of a script, the arguments that could not be read, and the names of its own functions."""

    trainer: str
    settings: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Setting -> the expression of its value."""
    functions: set[str] = field(default_factory=set)
    environment: dict[str, Any] = field(default_factory=dict)
    """Environment variable -> the script's default, which was taken."""


class Binding(NamedTuple):
    """A name with the node of its value, the statement that binds it, and the scope in which the value is evaluated."""

    name: str
    value: ast.AST
    statement: ast.stmt | ast.expr
    scope: Scope
    in_branch: bool = False


class Scope:
    """Names bound in a module or function, in order. A function's names hide those of the scope around it."""

    def __init__(self, outer: Scope | None = None) -> None:
        self.outer = outer
        self.bound: list[Binding] = []

    def add(self, body: list[ast.stmt], in_branch: bool = False) -> Scope:
        """Add the names that statements bind."""
        for node in body:
            if isinstance(node, ast.Assign):
                self.bound += [Binding(ast.unparse(one), node.value, node, self, in_branch) for one in node.targets]
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self.bound.append(Binding(ast.unparse(node.target), node.value, node, self, in_branch))
            elif isinstance(node, DEFINITIONS):
                self.bound.append(Binding(node.name, node, node, self, in_branch))
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self.bound += [Binding(alias.asname or alias.name, node, node, self) for alias in node.names]
            elif isinstance(node, BRANCHES):
                is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
                self.add(node.body, in_branch or not (is_main or isinstance(node, ast.With)))
        return self

    def find(self, name: ast.Name) -> tuple[ast.AST, Scope]:
        """Return the node that a name stands for at the place of its use, and the scope in which to evaluate the
        node."""
        found = [one for one in self.bound if one.name == name.id]
        before = [one for one in found if one.scope is not self or (one.statement.end_lineno or 0) < name.lineno]
        if before and not before[-1].in_branch:
            return before[-1].value, before[-1].scope
        if before or self.outer is None:
            raise UnreadableExpression(name, "which is bound in a branch" if before else "")
        return self.outer.seen_from_inside(name)

    def seen_from_inside(self, name: ast.Name) -> tuple[ast.AST, Scope]:
        """Return the value of a name of this scope as a function sees it, which may be called later."""
        found = [one for one in self.bound if one.name == name.id]
        if found and not found[-1].in_branch:
            return found[-1].value, found[-1].scope
        raise UnreadableExpression(name, "which is bound in a branch" if found else "")


class ScriptReader:
    """Reads one script. `read` is called once."""

    def __init__(self, path: Path) -> None:
        try:
            self._tree = ast.parse(read_text(path))
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not Python: {error}; name a training script, or TRL's YAML config") from None
        self._path = path
        self._scope = Scope().add(self._tree.body)
        self._environment: dict[str, Any] = {}

    def read(self) -> Script:
        """Return the arguments of the script's trainer. ConfigError if there is none."""
        call, scope, kind = self._trainer()
        names = {
            node.name for node in ast.walk(self._tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        script = Script(kind.lower(), functions=names, environment=self._environment)
        positional = dict(
            zip(("model", "reward_funcs" if kind in ("GRPO", "RLOO") else "args"), call.args, strict=False)
        )
        given: dict[str, ast.expr] = {**positional, **{one.arg or "**": one.value for one in call.keywords}}
        readers = {"args": self._config, "train_dataset": self._dataset, "peft_config": self._lora}
        for name, node in given.items():
            try:
                if name in readers:
                    script.settings |= readers[name](node, scope, script)
                elif name in ("reward_funcs", "tools"):
                    script.settings[name] = self._functions(node, scope)
                elif name == "eval_dataset":
                    found = self._dataset(node, scope, script)
                    script.settings |= {f"eval_{key}": value for key, value in found.items()}
                elif name == "model":
                    script.settings["model_name_or_path"] = self._model(node, scope)
                else:
                    script.settings[name] = self.value(node, scope)
            except UNKNOWN as error:
                script.unreadable[name] = str(error)
        return script

    def _trainer(self) -> tuple[ast.Call, Scope, str]:
        for scope, body in self._bodies():
            for node in body:
                for call in ast.walk(node) if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) else ():
                    name = _last(call.func) if isinstance(call, ast.Call) else ""
                    if isinstance(call, ast.Call) and name.endswith("Trainer") and name[:-7] in KINDS:
                        return call, scope, name[:-7]
        known = ", ".join(f"{kind}Trainer" for kind in KINDS)
        raise ConfigError(f"{self._path}: no trainer in it that has a counterpart here; expected one of {known}")

    def _bodies(self) -> Iterator[tuple[Scope, list[ast.stmt]]]:
        yield self._scope, self._tree.body
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef):
                yield self._inside(node), node.body

    def _inside(self, node: ast.FunctionDef, call: ast.Call | None = None, caller: Scope | None = None) -> Scope:
        """Return the scope of a function, with its parameters bound by a call or by their defaults."""
        scope = Scope(self._scope)
        names = [one.arg for one in node.args.args]
        defaults = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
        given: dict[str, ast.expr] = {}
        if call is not None:
            given |= dict(zip(names, call.args, strict=False))
            given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        around = self._scope if caller is None else caller
        scope.bound += [Binding(name, value, node, around) for name, value in {**defaults, **given}.items()]
        return scope.add(node.body)

    def _resolved(self, node: ast.AST, scope: Scope) -> tuple[ast.AST, Scope]:
        """Follow names to their value, and return the node with the scope in which to evaluate it."""
        while isinstance(node, ast.Name):
            node, scope = scope.find(node)
        return node, scope

    # ------------------------------------------------------------------------------------------ values

    def value(self, node: ast.AST, scope: Scope) -> Any:
        """Return the value of an expression. UnreadableExpression if running the script would be needed."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self.value(one, scope) for one in node.elts]
        if isinstance(node, ast.Dict) and None not in node.keys:
            pairs = zip(node.keys, node.values, strict=True)
            return {self.value(key, scope): self.value(one, scope) for key, one in pairs if key is not None}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand, scope)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self.value(node.left, scope), self.value(node.right, scope))
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(self.value(one.value if isinstance(one, ast.FormattedValue) else one, scope)) for one in node.values
            )
        if isinstance(node, ast.Call) and _last(node.func) in CASTS and len(node.args) == 1:
            return CASTS[_last(node.func)](self.value(node.args[0], scope))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("environ.get", "getenv")):
            return self._of_environment(node, scope)
        if isinstance(node, ast.Call) and _last(node.func) == "dict" and not node.args:
            return {one.arg: self.value(one.value, scope) for one in node.keywords}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXTS:
            said = str(self.value(node.func.value, scope))
            return getattr(said, node.func.attr)(*(self.value(one, scope) for one in node.args))
        if isinstance(node, ast.Subscript) and not ast.unparse(node.value).endswith("environ"):
            return self.value(node.value, scope)[self.value(node.slice, scope)]
        if isinstance(node, ast.Name):
            return self.value(*self._resolved(node, scope))
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope)
        raise UnreadableExpression(node)

    def _of_environment(self, node: ast.Call, scope: Scope) -> Any:
        """Return the default of an environment variable."""
        given = [*node.args, *(one.value for one in node.keywords if one.arg == "default")]
        if len(given) < 2:
            raise UnreadableExpression(node, "which has no default")
        name, default = (self.value(one, scope) for one in given[:2])
        self._environment[str(name)] = default
        return default

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        """Return the default of an argparse argument, or the last part of a constant such as torch.bfloat16."""
        if ast.unparse(node.value) in ("torch", "TaskType", "jnp"):
            return node.attr
        for call in ast.walk(self._tree):
            if isinstance(call, ast.Call) and _last(call.func) == "add_argument":
                flags = [
                    str(one.value).lstrip("-").replace("-", "_") for one in call.args if isinstance(one, ast.Constant)
                ]
                default = next((one.value for one in call.keywords if one.arg == "default"), None)
                if node.attr in flags and default is not None:
                    return self.value(default, scope)
        raise UnreadableExpression(node)

    def _functions(self, node: ast.AST, scope: Scope) -> list[Any]:
        found, around = self._resolved(node, scope) if isinstance(node, ast.Name) else (node, scope)
        if isinstance(found, (ast.List, ast.Tuple)):
            return [self._function(one, around) for one in found.elts]
        return [self._function(node, scope)]

    def _function(self, node: ast.AST, scope: Scope) -> Any:
        """Return the name of a function, with the module if it is imported. A string is the name of a model."""
        if isinstance(node, ast.Constant):
            return {"model": node.value}
        if isinstance(node, ast.Name):
            found, around = scope.find(node)
            if isinstance(found, ast.ImportFrom):
                names = {one.asname or one.name: one.name for one in found.names}
                return f"{found.module}:{names[node.id]}"
            return node.id if isinstance(found, DEFINITIONS) else self._function(found, around)
        is_made = isinstance(node, ast.Call) and not isinstance(_named(node.func, scope), DEFINITIONS)
        if is_made and isinstance(node, ast.Call) and _last(node.func) == "get_soft_overlong_punishment":
            return {_last(node.func): {one.arg: self.value(one.value, scope) for one in node.keywords}}
        raise UnreadableExpression(node)

    # ------------------------------------------------------------------------------- arguments of a trainer

    def _arguments(self, call: ast.Call, scope: Scope, script: Script, prefix: str = "") -> dict[str, Any]:
        """Return the keyword arguments of a call. Unreadable ones are noted."""
        found: dict[str, Any] = {}
        for one in call.keywords:
            try:
                value = self.value(one.value, scope)
                found |= {str(key): item for key, item in value.items()} if one.arg is None else {one.arg: value}
            except UNKNOWN as error:
                script.unreadable[f"{prefix}{one.arg or '**'}"] = str(error)
        return found

    def _called(self, node: ast.AST, scope: Scope) -> tuple[ast.Call, Scope]:
        found, around = self._resolved(node, scope)
        if not isinstance(found, ast.Call):
            raise UnreadableExpression(node)
        return found, around

    def _config(self, node: ast.AST, scope: Scope, script: Script) -> dict[str, Any]:
        call, around = self._called(node, scope)
        if not _last(call.func).endswith(("Config", "Arguments")):
            raise UnreadableExpression(call, "its settings come from a command line or another place")
        found = self._arguments(call, around, script)
        if call.args:
            found.setdefault("output_dir", self.value(call.args[0], around))
        changed = re.compile(rf"{re.escape(ast.unparse(node))}\.(\w+)") if isinstance(node, ast.Name) else None
        for one in around.bound if changed is not None else ():
            if match := changed.fullmatch(one.name) if changed else None:
                if one.in_branch:
                    script.unreadable[match[1]] = str(UnreadableExpression(one.value, "which is set in a branch"))
                else:
                    found[match[1]] = self.value(one.value, around)
        return found

    def _lora(self, node: ast.AST, scope: Scope, script: Script) -> dict[str, Any]:
        found = self._arguments(*self._called(node, scope), script, "peft_config.")
        given = {"lora_r": 8, "lora_alpha": 8, **{LORA.get(name, name): value for name, value in found.items()}}
        return {name if "lora" in name else f"peft_config.{name}": value for name, value in given.items()}

    def _model(self, node: ast.AST, scope: Scope) -> Any:
        node, scope = self._resolved(node, scope)
        if isinstance(node, ast.Call) and _last(node.func) in ("from_pretrained", "get_peft_model") and node.args:
            return self._model(node.args[0], scope)
        return self.value(node, scope)

    # ------------------------------------------------------------------------------------------ datasets

    def _dataset(self, node: ast.AST, scope: Scope, script: Script) -> dict[str, Any]:
        """Return a dataset as settings of TRL's command line, with the changes that its methods make."""
        used = node
        node, scope = self._resolved(node, scope)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            raise UnreadableExpression(used, "which is imported")
        if isinstance(node, ast.Subscript):
            return {**self._dataset(node.value, scope, script), "dataset_train_split": self.value(node.slice, scope)}
        if not isinstance(node, ast.Call):
            raise UnreadableExpression(node)
        name = _last(node.func)
        if name in ("from_json", "from_csv", "from_parquet") and len(node.args) == 1:
            return {"dataset_name": name[5:], "load_dataset.data_files": self.value(node.args[0], scope)}
        function = _named(node.func, scope)
        if name in ("load_dataset", "load_from_disk") and not isinstance(function, DEFINITIONS):
            keys = ("dataset_name", "dataset_config", "load_dataset.data_dir", "load_dataset.data_files")
            found = dict(zip(keys, (self.value(one, scope) for one in node.args), strict=False))
            words = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
            for keyword in node.keywords:
                name_there = words.get(str(keyword.arg), f"load_dataset.{keyword.arg}")
                found[name_there] = self.value(keyword.value, scope)
            return found
        if isinstance(node.func, ast.Attribute) and not name.startswith("from_"):
            return {**self._dataset(node.func.value, scope, script), **self._changed(name, node, scope)}
        if isinstance(function, ast.FunctionDef):
            inside = self._inside(function, node, scope)
            returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
            if len(returned) == 1:
                return self._dataset(returned[0], inside, script)
        raise UnreadableExpression(node)

    def _changed(self, method: str, call: ast.Call, scope: Scope) -> dict[str, Any]:
        """Return the changes that a method of a dataset makes."""
        if method in UNCHANGED:
            return {}
        if (
            method == "select"
            and call.args
            and isinstance(size := call.args[0], ast.Call)
            and _last(size.func) == "range"
        ):
            return {"dataset.select": [self.value(one, scope) for one in size.args]}
        if method == "rename_column" and len(call.args) == 2:
            return {"dataset.columns": {self.value(call.args[1], scope): self.value(call.args[0], scope)}}
        if method == "map" and call.args:
            function, _ = self._resolved(call.args[0], scope)
            if isinstance(function, (ast.FunctionDef, ast.Lambda)):
                return self._mapped(function, scope)
        return {f"dataset.{method}": str(UnreadableExpression(call))}

    def _mapped(self, function: ast.FunctionDef | ast.Lambda, scope: Scope) -> dict[str, Any]:
        """Return the columns, the system prompt and the answer marker that a function over rows produces."""
        row = function.args.args[0].arg
        made: dict[str, ast.expr] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Dict) and not any(
                isinstance(key, ast.Constant) and key.value == "role" for key in node.keys
            ):
                pairs = zip(node.keys, node.values, strict=True)
                made |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
            elif isinstance(node, ast.Assign) and (target := _column(node.targets[0], row)):
                made[target] = node.value
        found: dict[str, Any] = {"dataset.columns": {}}
        for name, value in made.items():
            if isinstance(value, ast.Call) and (column := _column_inside(value, row)):
                text = ast.unparse(value) + "".join(
                    ast.unparse(one.value) for one in self._scope.bound if one.name == _last(value.func)
                )
                found["dataset.columns"][name] = column
                found |= (
                    {"dataset.answer_after": "####"} if "####" in text else {f"dataset.map: {name}": ast.unparse(value)}
                )
            elif isinstance(value, ast.List):
                found |= self._chat(value, row, scope, found["dataset.columns"], name)
            elif column := _column(value, row):
                found["dataset.columns"][name] = column
            else:
                found[f"dataset.map: {name}"] = ast.unparse(value)
        return found

    def _chat(self, chat: ast.List, row: str, scope: Scope, columns: dict[str, str], name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for message in chat.elts:
            parts = (
                dict(zip((ast.unparse(key) if key else "" for key in message.keys), message.values, strict=True))
                if isinstance(message, ast.Dict)
                else {}
            )
            role, content = ast.unparse(parts.get("'role'", ast.Constant(""))), parts.get("'content'", ast.Constant(""))
            if role == "'system'":
                found["dataset.system"] = self.value(content, scope)
            elif role == "'user'" and (column := _column(content, row)):
                columns["messages" if name == "prompt" else name] = column
            else:
                found[f"dataset.map: {name}"] = ast.unparse(chat)
        return found


def _named(node: ast.AST, scope: Scope) -> ast.AST | None:
    """Return what a name stands for, or None if nothing in the script says it."""
    found = None
    try:
        while isinstance(node, ast.Name):
            found, scope = scope.find(node)
            node = found
    except UnreadableExpression:
        return None
    return found


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _column(node: ast.AST, row: str) -> str | None:
    """Return the column in `row["column"]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == row:
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None
    return None


def _column_inside(node: ast.AST, row: str) -> str | None:
    return next((column for one in ast.walk(node) if (column := _column(one, row))), None)
