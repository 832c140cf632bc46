"""Reads how a training script of TRL makes its datasets: what is loaded, and what its methods change in rows.

A dataset becomes settings under the names of TRL's command line (`dataset_name`, `load_dataset.data_files`), and of the
methods that change it (`dataset.select`, `dataset.columns`).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rftstream.integrations.foreign_configs.trl.scopes import (
    DEFINITIONS,
    UNKNOWN,
    Scope,
    UnreadableExpression,
    last_name,
    named,
)

Function = ast.FunctionDef | ast.Lambda
UNCHANGED = ("shuffle", "remove_columns", "select_columns", "flatten_indices", "with_format")
"""Methods of a dataset that do not change which problems it has."""
PLACE = re.compile(r"\{[\w.]+\}")
"""A column in a template of ours."""
CHANGES = re.compile(r"\.(replace|translate|lower|upper)\(|\b(sub|int|float)\(")
"""Calls in a script that change an answer beside cutting it out."""


class Values(Protocol):
    """The values of a script's expressions. ScriptReader is one."""

    scope: Scope
    """The scope of the module."""
    read_statements: set[int]
    """Ids of statements, beside those that bind a name, that a rule has read."""

    def value(self, node: ast.AST, scope: Scope) -> Any:
        """Return the value of an expression. UnreadableExpression if running the script would be needed."""

    def resolved(self, node: ast.AST, scope: Scope) -> tuple[ast.AST, Scope]:
        """Follow names to their value, and return the node with the scope in which to evaluate it."""

    def holds(self, test: ast.expr, scope: Scope) -> bool:
        """Return whether a condition holds. UnreadableExpression if running the script would be needed."""


class DatasetReader:
    """Reads the datasets of one script, for its ScriptReader."""

    def __init__(self, reader: Values) -> None:
        self._reader = reader

    def read(self, node: ast.AST, scope: Scope) -> dict[str, Any]:
        """Return a dataset as settings. UnreadableExpression if nothing says where its rows come from."""
        used = node
        node, scope = self._reader.resolved(node, scope)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            raise UnreadableExpression(used, "which is imported")
        if isinstance(node, ast.Subscript):
            return self._part(node, scope)
        if not isinstance(node, ast.Call):
            raise UnreadableExpression(node)
        name = last_name(node.func)
        if name in ("from_json", "from_csv", "from_parquet") and len(node.args) == 1:
            return {"dataset_name": name[5:], "load_dataset.data_files": self._reader.value(node.args[0], scope)}
        function = named(node.func, scope)
        if name in ("load_dataset", "load_from_disk") and not isinstance(function, DEFINITIONS):
            return self._loaded(node, scope)
        if isinstance(node.func, ast.Attribute) and not name.startswith("from_"):
            before = self.read(node.func.value, scope)
            changed = self._changed(name, node, scope, "dataset.part" in before)
            columns = {**before.get("dataset.columns", {}), **changed.get("dataset.columns", {})}
            return {**before, **changed, **({"dataset.columns": columns} if columns else {})}
        if isinstance(function, ast.FunctionDef):
            inside = self._reader.scope.inside(function, node, scope)
            returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
            if len(returned) == 1:
                return self.read(returned[0], inside)
        raise UnreadableExpression(node)

    def _part(self, node: ast.Subscript, scope: Scope) -> dict[str, Any]:
        """Return a dataset of several: by the name of its split, or by its place in a list of splits."""
        found, part = self.read(node.value, scope), self._reader.value(node.slice, scope)
        if "dataset.train_test_split" in found and "dataset.part" not in found:
            return {**found, "dataset.part": part}
        splits = found.get("dataset_train_split")
        return {**found, "dataset_train_split": splits[part] if isinstance(splits, list) else part}

    def _loaded(self, call: ast.Call, scope: Scope) -> dict[str, Any]:
        keys = ("dataset_name", "dataset_config", "load_dataset.data_dir", "load_dataset.data_files")
        words = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
        given = dict(zip(keys, call.args, strict=False))
        given |= {words.get(str(one.arg), f"load_dataset.{one.arg}"): one.value for one in call.keywords}
        found = {name: self._reader.value(value, scope) for name, value in given.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _changed(self, method: str, call: ast.Call, scope: Scope, is_part: bool) -> dict[str, Any]:
        """Return the changes that a method of a dataset makes."""
        if method in UNCHANGED:
            return {}
        if (
            method == "select"
            and call.args
            and isinstance(size := call.args[0], ast.Call)
            and last_name(size.func) == "range"
        ):
            selected = [self._reader.value(one, scope) for one in size.args]
            return {"dataset.select_of_part" if is_part else "dataset.select": selected}
        if method == "take" and len(call.args) == 1:
            size = self._reader.value(call.args[0], scope)
            return {"dataset.select_of_part" if is_part else "dataset.select": [size]}
        if method == "train_test_split":
            given = {**dict(zip(("test_size", "train_size"), call.args, strict=False))}
            given |= {str(one.arg): one.value for one in call.keywords if one.arg in ("test_size", "train_size")}
            return {f"dataset.{method}": {name: self._reader.value(one, scope) for name, one in given.items()}}
        if method == "rename_column" and len(call.args) == 2:
            old, new = (self._reader.value(one, scope) for one in call.args)
            return {"dataset.columns": {new: old}}
        if method == "rename_columns" and len(call.args) == 1:
            return {"dataset.columns": {new: old for old, new in self._reader.value(call.args[0], scope).items()}}
        if method == "map" and call.args:
            try:
                function, around = self._reader.resolved(call.args[0], scope)
            except UnreadableExpression as error:
                return {f"dataset.{method}": str(error)}
            if isinstance(function, (ast.FunctionDef, ast.Lambda)) and function.args.args:
                return self._mapped(function, around)
        return {f"dataset.{method}": str(UnreadableExpression(call))}

    # -------------------------------------------------------------------------------- functions over rows

    def _mapped(self, function: Function, scope: Scope) -> dict[str, Any]:
        """Return the columns, system prompt, template and answer marker that a function over rows produces."""
        row, whole = function.args.args[0].arg, function
        if isinstance(function, ast.Lambda) and isinstance(call := function.body, ast.Call):
            if isinstance(called := named(call.func, scope), ast.FunctionDef):  # lambda row: made(row["question"])
                function, scope = called, self._reader.scope.inside(called, call, scope)
        elif isinstance(function, ast.FunctionDef):
            written_out: ast.FunctionDef = copy.deepcopy(function)
            _ColumnsByName(self._reader, row, scope.inside(function)).visit(written_out)
            function, scope = written_out, scope.inside(written_out)
        made: dict[str, ast.AST] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Dict) and not any(
                isinstance(key, ast.Constant) and key.value in ("role", "type") for key in node.keys
            ):
                pairs = zip(node.keys, node.values, strict=True)
                made |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
            elif isinstance(node, ast.Assign) and (target := _column(node.targets[0], row)):
                made[target] = node.value
        found: dict[str, Any] = {"dataset.columns": {}} if made else {"dataset.map": str(UnreadableExpression(whole))}
        for name, written in made.items():
            value = self._followed(written, scope)
            if isinstance(value, ast.List) and isinstance(written, ast.Name) and isinstance(function, ast.FunctionDef):
                try:
                    value = ast.List(self._listed(function.body, written.id, scope))
                except UNKNOWN as error:
                    found[f"dataset.map: {name}"] = f"made in {error}"
                    continue
            if isinstance(value, ast.List):
                found |= self._chat(value, row, scope, found["dataset.columns"], name)
            else:
                found |= self._text(value, row, scope, found["dataset.columns"], name)
        return found

    def _listed(self, body: Sequence[ast.stmt], name: str, scope: Scope) -> list[ast.expr]:
        """Return the elements that a list has after statements that make it and append to it, also under conditions
        that are known. UnreadableExpression if they do more."""
        elements: list[ast.expr] = []
        for node in body:
            if not any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node)):
                continue
            if isinstance(node, ast.If):
                taken = node.body if self._reader.holds(node.test, scope) else node.orelse
                elements += self._listed(taken, name, scope)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                if not isinstance(node.value, ast.List):
                    raise UnreadableExpression(node)
                elements = list(node.value.elts)
            elif isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
                if ast.unparse(call.func) != f"{name}.append":
                    raise UnreadableExpression(node)
                elements.append(call.args[0])
            elif not isinstance(node, (ast.Return, ast.Assign)):
                raise UnreadableExpression(node)
        return elements

    def _followed(self, value: ast.AST, scope: Scope) -> ast.AST:
        """Return the node of a name's value, or the node itself if nothing in the script says it."""
        try:
            return self._reader.resolved(value, scope)[0]
        except UNKNOWN:
            return value

    def _text(self, value: ast.AST, row: str, scope: Scope, columns: dict[str, str], name: str) -> dict[str, Any]:
        """Note the column that a value of a row is made of. Return what else the value says."""
        is_cast = isinstance(value, ast.Call) and last_name(value.func) == "str" and len(value.args) == 1
        if column := _column(value.args[0] if isinstance(value, ast.Call) and is_cast else value, row):
            columns[name] = column  # what is no text becomes one here, too
            return {}
        if name == "prompt" and (template := self._template_or_none(value, row, scope)):
            return {"dataset.template": template}
        if made_of := _columns_inside(value, row):
            called = last_name(value.func) if isinstance(value, ast.Call) else ""
            text = ast.unparse(value) + "".join(
                ast.unparse(one.value) for one in self._reader.scope.bound if one.name == called
            )
            columns[name] = made_of[0] if name == "prompt" or len(made_of) == 1 else name
            if "####" in text:
                rest = {f"dataset.map: {name}": ast.unparse(value)} if CHANGES.search(text) else {}
                return {"dataset.answer_after": "####", **rest}
        return {f"dataset.map: {name}": ast.unparse(value)}

    def _chat(self, chat: ast.List, row: str, scope: Scope, columns: dict[str, str], name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for message in chat.elts:
            parts = (
                dict(zip((ast.unparse(key) if key else "" for key in message.keys), message.values, strict=True))
                if isinstance(message, ast.Dict)
                else {}
            )
            role, content = ast.unparse(parts.get("'role'", ast.Constant(""))), parts.get("'content'", ast.Constant(""))
            if isinstance(content, ast.List) and (text := _text_of_parts(content)) is not None:
                if "'image'" in ast.unparse(content) and "image" not in columns:
                    columns.setdefault("images", "image")  # what TRL looks for
                content = text
            column, template = _column(content, row), self._template_or_none(content, row, scope)
            if role == "'system'" and not _columns_inside(content, row):
                found["dataset.system"] = self._reader.value(content, scope)
            elif role == "'user'" and (column or template):
                columns["messages" if name == "prompt" else name] = column or PLACE.findall(template or "")[0][1:-1]
                found |= {} if column else {"dataset.template": template}
            else:
                found[f"dataset.map: {name}"] = ast.unparse(chat)
        return found

    def _template_or_none(self, node: ast.AST, row: str, scope: Scope) -> str | None:
        """Return a text with columns of the row in it as a template of ours. None if it is more than that."""
        try:
            template = self._template(node, row, scope)
        except UNKNOWN:
            return None
        return template if PLACE.search(template) else None

    def _template(self, node: ast.AST, row: str, scope: Scope) -> str:
        if (column := _column(node, row)) and PLACE.fullmatch(f"{{{column}}}"):
            return f"{{{column}}}"
        if isinstance(node, ast.JoinedStr):
            return "".join(self._template(one, row, scope) for one in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion in (-1, ord("s")):
            return self._template(node.value, row, scope)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._template(node.left, row, scope) + self._template(node.right, row, scope)
        if isinstance(node, ast.Call) and last_name(node.func) == "format" and isinstance(node.func, ast.Attribute):
            words = {str(number): one for number, one in enumerate(node.args)}
            words |= {str(one.arg): one.value for one in node.keywords if one.arg is not None}
            filled = {name: self._template(one, row, scope) for name, one in words.items()}
            return _formatted(str(self._reader.value(node.func.value, scope)), filled, node)
        if isinstance(node, ast.Name) and node.id != row:
            found, around = self._reader.resolved(node, scope)
            return self._template(found, row, around)
        text = str(self._reader.value(node, scope))
        if PLACE.search(text):
            raise UnreadableExpression(node, "whose braces a template would take for a column")
        return text


class _ColumnsByName(ast.NodeTransformer):
    """Writes the names of columns into a function over rows: `row["question"]` for `row[column]`."""

    def __init__(self, reader: Values, row: str, scope: Scope) -> None:
        self._reader, self._row, self._scope = reader, row, scope

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Write a column's name where its value is known."""
        if isinstance(node.value, ast.Name) and node.value.id == self._row:
            with contextlib.suppress(*UNKNOWN):
                name = ast.Constant(self._reader.value(node.slice, self._scope))
                return ast.copy_location(ast.Subscript(node.value, name, node.ctx), node)
        return self.generic_visit(node)


def _text_of_parts(content: ast.List) -> ast.expr | None:
    """Return the one text among the parts of a message, beside which there may be images."""
    parts = [one for one in content.elts if isinstance(one, ast.Dict)]
    texts = [
        value
        for part in parts
        for key, value in zip(part.keys, part.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "text"
    ]
    return texts[0] if len(texts) == 1 and len(parts) == len(content.elts) else None


def _formatted(text: str, words: Mapping[str, str], node: ast.AST) -> str:
    """Return what `text.format(...)` makes of texts that are templates."""
    made = ""
    for number, (fixed, name, form, conversion) in enumerate(string.Formatter().parse(text)):
        if form or conversion or PLACE.search(fixed):
            raise UnreadableExpression(node)
        made += fixed + ("" if name is None else words[name or str(number)])
    return made


def _column(node: ast.AST, row: str) -> str | None:
    """Return the column in `row["column"]`, or the path of a field in it."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return None
    if isinstance(node.value, ast.Name) and node.value.id == row:
        return str(node.slice.value)
    above = _column(node.value, row)
    return None if above is None else f"{above}.{node.slice.value!s}"


def _columns_inside(node: ast.AST, row: str) -> list[str]:
    return list(dict.fromkeys(column for one in ast.walk(node) if (column := _column(one, row))))
