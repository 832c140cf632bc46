"""Reads how a training script of TRL makes its datasets: what is loaded, and what its methods change in rows.

A dataset becomes settings under the names of TRL's command line (`dataset_name`, `load_dataset.data_files`), and of the
methods that change it (`dataset.select`, `dataset.columns`).
"""

from __future__ import annotations

import ast
from typing import Any

from rftstream.integrations.foreign_configs.trl.scripts.beside import Values
from rftstream.integrations.foreign_configs.trl.scripts.maps import (
    PLACE,
    UNKNOWN_COLUMNS,
    Column,
    Cut,
    FixedValue,
    Listed,
    Row,
    Text,
    Unproven,
    Value,
    mapped,
)
from rftstream.integrations.foreign_configs.trl.scripts.scopes import (
    DEFINITIONS,
    Scope,
    UnreadableExpression,
    last_name,
    named,
)

UNCHANGED = ("remove_columns", "select_columns", "flatten_indices", "with_format", "cast_column")
"""Methods of a dataset that do not change which problems it has."""
MAPS = ("fn_kwargs", "num_proc", "remove_columns", "desc", "load_from_cache_file", "batch_size", "keep_in_memory")
"""Arguments of `map` with which each row is given to its function, alone."""
PLACES = {"prompt": ["messages"], "messages": ["prompt", "completion"], "completion": ["completion"]}
"""Column of messages -> the columns that these are made of here."""
ROLES = {"messages": "user", "prompt": "user", "completion": "assistant"}
Settings = dict[str, Any]


class DatasetReader:
    """Reads the datasets of one script, for its ScriptReader."""

    def __init__(self, reader: Values) -> None:
        self._reader = reader

    def read(self, node: ast.AST, scope: Scope) -> Settings:
        """Return a dataset as settings. UnreadableExpression if nothing says where its rows come from."""
        settings, rows = self._read(node, scope)
        return {**settings, **_written(rows)}

    def _read(self, node: ast.AST, scope: Scope) -> tuple[Settings, Row]:
        """Return how a dataset is loaded, and what its columns are made of."""
        used = node
        node, scope = self._reader.resolved(node, scope)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            raise UnreadableExpression(used, "which is imported")
        if isinstance(node, ast.Subscript):
            return self._part(node, scope)
        if not isinstance(node, ast.Call):
            raise UnreadableExpression(node)
        name = last_name(node.func)
        whole = Row(is_whole=True)
        if name in ("from_json", "from_csv", "from_parquet") and len(node.args) == 1:
            return {"dataset_name": name[5:], "load_dataset.data_files": self._reader.value(node.args[0], scope)}, whole
        function = named(node.func, scope)
        if name in ("load_dataset", "load_from_disk") and not isinstance(function, DEFINITIONS):
            return self._loaded(node, scope), whole
        is_own = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self"
        if isinstance(node.func, ast.Attribute) and not is_own and not name.startswith("from_"):
            before, rows = self._read(node.func.value, scope)
            if name == "map":
                return before, self._mapped(node, scope, rows)
            if name in ("rename_column", "rename_columns"):
                given = [self._reader.value(one, scope) for one in node.args]
                pairs = given[0] if name == "rename_columns" else {given[0]: given[1]}
                return before, rows.merged({new: rows.get(old) for old, new in pairs.items()})
            return {**before, **self._changed(name, node, scope, before)}, rows
        if (made := self._returned(node, scope)) is not None:
            return self._read(*made)
        raise UnreadableExpression(node)

    def _returned(self, node: ast.expr, scope: Scope) -> tuple[ast.expr, Scope] | None:
        """Return what a call of a function returns, of the script or of a module beside it, if that is one expression,
        and the scope in which to evaluate it."""
        try:
            call, around = self._reader.resolved(node, scope)
            function, home = self._reader.resolved(call.func, around) if isinstance(call, ast.Call) else (call, around)
        except UnreadableExpression:
            return None
        if not isinstance(call, ast.Call) or not isinstance(function, ast.FunctionDef):
            return None
        found = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
        return (found[0], home.inside(function, call, around)) if len(found) == 1 else None

    def _part(self, node: ast.Subscript, scope: Scope) -> tuple[Settings, Row]:
        """Return a dataset of several: by the name of its split, or by its place in a list of splits."""
        if (bound := scope.set_before(node)) is not None:  # rows["train"] = rows["train"].select(...)
            self._reader.read_statements.add(id(bound.statement))
            return self._read(bound.value, bound.scope)
        part = self._reader.value(node.slice, scope)
        if (made := self._returned(node.value, scope)) is not None and isinstance(made[0], ast.Tuple):
            return self._read(made[0].elts[part], made[1])
        found, rows = self._read(node.value, scope)
        if "dataset.train_test_split" in found and "dataset.part" not in found:
            return {**found, "dataset.part": part}, rows
        splits = found.get("dataset_train_split")
        return {**found, "dataset_train_split": splits[part] if isinstance(splits, list) else part}, rows

    def _loaded(self, call: ast.Call, scope: Scope) -> dict[str, Any]:
        keys = ("dataset_name", "dataset_config", "load_dataset.data_dir", "load_dataset.data_files")
        words = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
        given = dict(zip(keys, call.args, strict=False))
        given |= {words.get(str(one.arg), f"load_dataset.{one.arg}"): one.value for one in call.keywords}
        found = {name: self._reader.value(value, scope) for name, value in given.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _changed(self, method: str, call: ast.Call, scope: Scope, before: Settings) -> Settings:
        """Return the changes that a method of a dataset makes."""
        if method in UNCHANGED:
            return {}
        given = {str(one.arg): one.value for one in call.keywords}
        if method == "shuffle":
            seed = call.args[0] if call.args else given.get("seed", ast.Constant(0))
            return {} if "dataset.select" in before else {"dataset.shuffle_seed": self._reader.value(seed, scope)}
        select = "dataset.select_of_part" if "dataset.part" in before else "dataset.select"
        size = call.args[0] if call.args else None
        is_first = select not in before
        is_range = isinstance(size, ast.Call) and last_name(size.func) == "range" and len(size.args) < 3
        if method == "select" and is_first and is_range and isinstance(size, ast.Call):
            return {select: [self._reader.value(one, scope) for one in size.args]}
        if method in ("take", "skip") and is_first and len(call.args) == 1:
            end = self._reader.value(call.args[0], scope)
            return {select: [end] if method == "take" else [end, None]}
        if method == "train_test_split":
            given |= dict(zip(("test_size", "train_size"), call.args, strict=False))
            sizes = {name: self._reader.value(one, scope) for name, one in given.items() if name.endswith("_size")}
            seed = self._reader.value(given.get("seed", ast.Constant(0)), scope)
            is_random = self._reader.value(given.get("shuffle", ast.Constant(True)), scope)
            of_all = is_random and "dataset.select" not in before
            return {f"dataset.{method}": sizes, **({"dataset.shuffle_seed": seed} if of_all else {})}
        key = f"dataset.{method} of rows"
        return {key: "; ".join([*([before[key]] if key in before else []), str(UnreadableExpression(call))])}

    def _mapped(self, call: ast.Call, scope: Scope, rows: Row) -> Row:
        """Return rows after a function was called with each of them."""
        given = {str(one.arg): one.value for one in call.keywords}
        try:
            function, around = self._reader.resolved(call.args[0] if call.args else given.pop("function"), scope)
            if not isinstance(function, (ast.FunctionDef, ast.Lambda)) or not set(given) <= set(MAPS):
                raise UnreadableExpression(function if not isinstance(function, ast.FunctionDef) else call)
            if function.lineno and (name := _bound_anew(function, around, call)):
                raise UnreadableExpression(call, f"after which {name} is bound anew")
            more = self._reader.value(given["fn_kwargs"], scope) if "fn_kwargs" in given else {}
            return rows.merged(mapped(self._reader, function, around, rows, more))
        except UnreadableExpression as error:
            return Row({UNKNOWN_COLUMNS: Unproven(str(error))}, is_whole=True)


def _bound_anew(function: ast.FunctionDef | ast.Lambda, scope: Scope, call: ast.Call) -> str | None:
    """Return a name that a function uses and that is bound before and after this call of `map`, which ran it. None if
    there is none."""
    used, around = {one.id for one in ast.walk(function) if isinstance(one, ast.Name)}, scope
    while around.outer is not None:
        around = around.outer
    for name in used:
        lines = [one.statement.lineno > call.lineno for one in around.named(name)]
        if True in lines and False in lines:
            return name
    return None


def _written(rows: Row) -> Settings:
    """Return what the columns of rows are made of as settings: columns of the source, a system prompt, a template and
    an answer's marker; and the text of each that is more than that."""
    if isinstance(whole := rows.columns.get(UNKNOWN_COLUMNS), Unproven):  # a function that could not be followed
        return {"dataset.map": whole.text}
    found: Settings = {"dataset.columns": {}} if rows.columns else {}
    for name, value in rows.columns.items():
        found |= _column(name, value, found["dataset.columns"])
    return found


def _column(name: str, value: Value, columns: dict[str, str]) -> Settings:
    """Note what a column is made of. Return what else is to be set for it."""
    match value:
        case Column():
            columns[name] = value.path
            return {}
        case Text() if name == "prompt":
            return {"dataset.template": value.template}
        case Cut(is_end=True) if name != "prompt":
            columns[name] = value.column
            return {"dataset.answer_after": value.marker}
        case Listed():
            return _chat(name, value, columns)
    if name != "prompt":
        columns.setdefault(name, name)  # that of the rows that the user writes
    return {f"dataset.map: {name}": _said(value)}


def _chat(name: str, chat: Listed, columns: dict[str, str]) -> Settings:
    """Note what messages are made of: a system prompt, what a user asks, and of demonstrations what is answered."""
    unread = {f"dataset.map: {name}": _said(chat)}
    system = [one.content for one in chat.elements[:1] if one.role == "system"]
    said = chat.elements[len(system) :]
    places = dict(zip(PLACES.get(name, ["messages"]), [one.content for one in said], strict=False))
    expected = [ROLES[place] for place in places]
    if [one.role for one in said] != expected or len(said) != len(PLACES.get(name, ["messages"])):
        return unread
    found: Settings = {}
    for one in system:
        if not isinstance(one, FixedValue):
            return unread
        found["dataset.system"] = one.value
    for place, content in places.items():
        if isinstance(content, Text) and name == "prompt":
            columns[place] = PLACE.findall(content.template)[0][1:-1]
            found["dataset.template"] = content.template
        elif isinstance(content, Column):
            columns[place] = content.path
        else:
            return unread
    if any(one.with_image for one in said):
        columns.setdefault("images", "image")  # what TRL looks for
    return found


def _said(value: Value) -> str:
    """Return a value as a script may write it."""
    match value:
        case Unproven():
            return value.text
        case Column():
            return f"row[{value.path!r}]"
        case Text():
            return f"f{value.template!r}"
        case FixedValue():
            return repr(value.value)
        case Listed():
            said = ("..." if one.role == "part" else f"{one.role}: {_said(one.content)}" for one in value.elements)
            return f"[{', '.join(said)}]"
    return "a value that no setting makes"
