"""What a function over rows makes of them, as far as a run file can say it.

The function is interpreted with columns in the place of their values: what it returns for a row is then a column of the
source, a text with columns in it, messages, or the end of a column after a marker. Anything else is `Unproven`.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftstream.integrations.foreign_configs.trl.scripts.beside import Values
from rftstream.integrations.foreign_configs.trl.scripts.scopes import (
    DEFINITIONS,
    UNKNOWN,
    Binding,
    Scope,
    UnreadableExpression,
    last_name,
)

Function = ast.FunctionDef | ast.Lambda
PLACE = re.compile(r"\{[\w.]+\}")
"""A column in a template of ours."""
MARKER = "####"
"""The marker that a text has once at most, so that what follows the first one follows the last one."""
UNKNOWN_COLUMNS = ""
"""The name under which a row notes a function that could not be followed, after which each column may be another."""
SKIPPED = (*DEFINITIONS, ast.Import, ast.ImportFrom, ast.Pass, ast.Assert, ast.Global)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the source, or the path of a field in it."""

    path: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text with columns in it, `Sort {items}!`."""

    template: str


@dataclass(frozen=True, slots=True)
class FixedValue:
    """A value that is the same for each row."""

    value: Any


@dataclass(frozen=True, slots=True)
class Cut:
    """A column divided at a marker; with `is_end`, what comes after it."""

    column: str
    marker: str
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class SaidMessage:
    """One message, or with the role `part` one part of its content, which has an image beside it if `with_image`."""

    role: str
    content: Value
    with_image: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of messages, or of parts."""

    elements: tuple[SaidMessage, ...]


@dataclass(frozen=True, slots=True)
class Unproven:
    """A value that only running the function shows."""

    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """A row, or a dict that becomes one."""

    columns: Mapping[str, Value] = field(default_factory=dict)
    is_whole: bool = False
    """Whether its other columns are those of the source."""

    def get(self, name: str) -> Value:
        """Return a column. KeyError if there is none, or a function that could not be followed may have made it."""
        return Column(name) if self.is_whole and not {name, UNKNOWN_COLUMNS} & set(self.columns) else self.columns[name]

    def merged(self, columns: Mapping[str, Value]) -> Row:
        return Row({**self.columns, **columns}, self.is_whole)


Value = Column | Text | FixedValue | Cut | SaidMessage | Listed | Unproven | Row


def mapped(
    reader: Values, function: Function, scope: Scope, rows: Row, given: Mapping[str, Any] | None = None
) -> Mapping[str, Value]:
    """Return the columns that a function over rows makes. `given`: values of its other parameters.
    UnreadableExpression if they are not known."""
    names: dict[str, Value] = {name: FixedValue(value) for name, value in (given or {}).items()}
    names[function.args.args[0].arg] = rows
    made = _Frame(reader, function, scope, names).returned()
    if not isinstance(made, Row):
        raise UnreadableExpression(function)
    return made.columns


class _Frame:
    """One call of a function."""

    def __init__(self, reader: Values, function: Function, scope: Scope, names: dict[str, Value]) -> None:
        self._reader, self._function, self._names = reader, function, names
        self._guard: Cut | None = None
        """The end of a column to be returned: where the column lacks the marker, nothing is."""
        self._scope = scope.inside(function) if isinstance(function, ast.FunctionDef) else Scope(scope)
        values = ((name, one.value) for name, one in names.items() if isinstance(one, FixedValue))
        self._scope.bound[:0] = [Binding(name, ast.Constant(value), function, scope) for name, value in values]

    def returned(self) -> Value | None:
        """Return what the function returns."""
        if isinstance(self._function, ast.Lambda):
            return self.value(self._function.body)
        return self._run(self._function.body)

    # ------------------------------------------------------------------------------------ statements

    def _run(self, body: Sequence[ast.stmt]) -> Value | None:
        for node in body:
            if isinstance(node, ast.Return):
                made = self.value(node.value or ast.Constant(None))
                if self._guard is not None and made != self._guard:
                    raise UnreadableExpression(node)
                return made
            if (guard := _guarded(node)) is not None and isinstance(column := self.value(guard[1]), Column):
                self._guard = Cut(column.path, guard[0], is_end=True)  # a run refuses rows without the marker
            elif isinstance(node, ast.If):
                if (found := self._branch(node)) is not None:
                    return found
            elif isinstance(node, (ast.For, ast.While, ast.With, ast.Try)):
                self._blur(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, self.value(node.value))
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, self.value(node.value))
            elif isinstance(node, ast.AugAssign):
                self._assign(node.target, self.value(ast.BinOp(node.target, node.op, node.value)))
            elif isinstance(node, ast.Expr):
                self._call(node.value)
            elif not isinstance(node, SKIPPED):
                raise UnreadableExpression(node)
        return None

    def _branch(self, node: ast.If) -> Value | None:
        try:
            taken = node.body if self._reader.holds(node.test, self._scope) else node.orelse
        except UNKNOWN:
            self._blur(node)
            return None
        return self._run(taken)

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, ast.Subscript) and isinstance(name := target.value, ast.Name):
            row, key = self._names.get(name.id), self.value(target.slice)
            if not isinstance(row, Row) or not isinstance(key, FixedValue):
                raise UnreadableExpression(target)
            self._change(row, row.merged({str(key.value): value}))
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._assign(one, Unproven(_line(target)))
        else:
            raise UnreadableExpression(target)

    def _call(self, node: ast.expr) -> None:
        """Follow a statement that is a call: of a method that changes a list or a row, or of something else."""
        if not isinstance(node, ast.Call):
            return
        name, method = _owner(node), last_name(node.func)
        held, given = self._names.get(name), [self.value(one) for one in node.args]
        if isinstance(held, Listed) and method == "append" and given and isinstance(given[0], SaidMessage):
            self._change(held, Listed((*held.elements, given[0])))
        elif isinstance(held, Row) and method == "update" and given and isinstance(given[0], Row):
            self._change(held, held.merged(given[0].columns))
        elif method != "print":
            self._forget(node, _line(node))

    def _blur(self, node: ast.stmt) -> None:
        """Forget what a statement may change. UnreadableExpression if it may return, too."""
        for one in ast.walk(node):
            if isinstance(one, ast.Return):
                raise UnreadableExpression(node)
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                self._names[one.id] = Unproven(_line(node))
            elif isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store):
                self._assign(one, Unproven(_line(node)))
            elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
                self._forget(one.value, _line(node))

    def _change(self, before: Value, after: Value) -> None:
        """Change a list or a row, under each name that it has."""
        for name, value in self._names.items():
            if value is before:
                self._names[name] = after
            elif isinstance(value, Row) and any(one is before for one in value.columns.values()):
                columns = {key: after if one is before else one for key, one in value.columns.items()}
                self._names[name] = Row(columns, value.is_whole)

    def _forget(self, call: ast.Call, line: str) -> None:
        """Forget the values that a call may change: that whose method it is, and those that it gets."""
        given = [one.id for one in call.args if isinstance(one, ast.Name)]
        for name in [_owner(call), *given]:
            if name in self._names:
                self._change(self._names[name], Unproven(line))

    # ------------------------------------------------------------------------------------ expressions

    def value(self, node: ast.expr) -> Value:
        """Return the value of an expression, Unproven if it is more than a run file can say."""
        try:
            return self._proven(node)
        except UNKNOWN:
            return Unproven(ast.unparse(node))

    def _proven(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant():
                return FixedValue(node.value)
            case ast.Name() if node.id in self._names:
                return self._names[node.id]
            case ast.Subscript():
                return self._item(node)
            case ast.JoinedStr():
                return self._joined([self._proven(one) for one in node.values], node)
            case ast.FormattedValue() if node.format_spec is None and node.conversion in (-1, ord("s")):
                return self._proven(node.value)
            case ast.BinOp(op=ast.Add()):
                left, right = self._proven(node.left), self._proven(node.right)
                if isinstance(left, Listed) or isinstance(right, Listed):
                    return Listed((*_listed(left, node), *_listed(right, node)))
                is_text = any(
                    isinstance(one, Text) or isinstance(getattr(one, "value", 0), str) for one in (left, right)
                )
                if not is_text:  # two columns may be numbers
                    return self._known(node)
                return self._joined([left, right], node)
            case ast.IfExp():
                return self._proven(node.body if self._reader.holds(node.test, self._scope) else node.orelse)
            case ast.Dict():
                return self._dict(node)
            case ast.List():
                return Listed(tuple(_message(self._proven(one), node) for one in node.elts))
            case ast.Call():
                return self._called(node)
        return self._known(node)

    def _known(self, node: ast.expr) -> FixedValue:
        """Return a value that is known without a row."""
        inside = (one for one in ast.walk(node) if isinstance(one, ast.Name))
        if any(not isinstance(self._names.get(one.id, FixedValue(None)), FixedValue) for one in inside):
            raise UnreadableExpression(node)
        return FixedValue(self._reader.value(node, self._scope))

    def _item(self, node: ast.Subscript) -> Value:
        of = self._proven(node.value)
        key = self._proven(node.slice) if not isinstance(node.slice, ast.UnaryOp) else self._known(node.slice)
        if isinstance(key, FixedValue):
            if isinstance(of, Row):
                return of.get(key.value)
            if isinstance(of, Column):
                return Column(f"{of.path}.{key.value}")
            if isinstance(of, FixedValue):
                return FixedValue(of.value[key.value])
            if isinstance(of, Cut) and (key.value == -1 or (key.value == 1 and of.marker == MARKER)):
                return Cut(of.column, of.marker, is_end=True)
        raise UnreadableExpression(node)

    def _joined(self, parts: Sequence[Value], node: ast.expr) -> Value:
        """Return a text of several parts."""
        values = [one.value for one in parts if isinstance(one, FixedValue)]
        if len(values) == len(parts):
            return FixedValue(values[0] + values[1] if isinstance(node, ast.BinOp) else "".join(map(str, values)))
        made = ""
        for one in parts:
            if isinstance(one, Column) and PLACE.fullmatch(f"{{{one.path}}}"):
                made += f"{{{one.path}}}"
            elif isinstance(one, Text):
                made += one.template
            elif isinstance(one, FixedValue) and not PLACE.search(str(one.value)):
                made += str(one.value)
            else:  # also a fixed text whose braces a template would take for a column
                raise UnreadableExpression(node)
        return Text(made)

    def _dict(self, node: ast.Dict) -> Value:
        columns: dict[str, Value] = {}
        is_whole = False
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                spread = self._proven(value)
                if not isinstance(spread, Row):
                    raise UnreadableExpression(node)
                columns |= spread.columns
                is_whole = is_whole or spread.is_whole
            else:
                columns[str(self._known(key).value)] = self.value(value)
        if "role" in columns and columns.keys() <= {"role", "content"}:
            role, content = columns["role"], columns.get("content", FixedValue(""))
            parts = content.elements if isinstance(content, Listed) else ()
            texts = [one.content for one in parts if one.content != FixedValue(None)]
            if isinstance(role, FixedValue) and (len(texts) == 1 or not isinstance(content, Listed)):
                return SaidMessage(role.value, texts[0] if texts else content, any(one.with_image for one in parts))
            raise UnreadableExpression(node)
        if columns.get("type") in (FixedValue("text"), FixedValue("image")):
            return SaidMessage("part", columns.get("text", FixedValue(None)), columns["type"] == FixedValue("image"))
        return Row(columns, is_whole)

    def _called(self, node: ast.Call) -> Value:
        name, owner = last_name(node.func), node.func.value if isinstance(node.func, ast.Attribute) else None
        if name == "str" and owner is None and len(node.args) == 1:
            said = self._proven(node.args[0])
            return (
                FixedValue(str(said.value)) if isinstance(said, FixedValue) else said
            )  # what is no text becomes one here, too
        if name == "dict" and owner is None and not node.args:
            return self._dict(
                ast.Dict([None if one.arg is None else ast.Constant(one.arg) for one in node.keywords],
                         [one.value for one in node.keywords])
            )  # fmt: skip
        if owner is not None:
            return self._of_method(name, owner, node)
        function, scope = self._reader.resolved(node.func, self._scope)
        if not isinstance(function, (ast.FunctionDef, ast.Lambda)):
            return self._known(node)
        names = [one.arg for one in function.args.args]
        given = {**dict(zip(names, node.args, strict=False)), **{str(one.arg): one.value for one in node.keywords}}
        if len(node.args) > len(names) or any(name not in names for name in given):
            raise UnreadableExpression(node)
        values = {name: self._proven(one) for name, one in given.items()}
        inner = _Frame(self._reader, function, scope, dict(values))
        made = inner.returned()
        if made is None or isinstance(made, Unproven):
            raise UnreadableExpression(node)
        for name, one in values.items():
            if isinstance(one, (Row, Listed)) and inner._names[name] is not one:
                if made is not inner._names[name]:  # what else the function does with it is not followed
                    raise UnreadableExpression(node)
                self._change(one, made)
        return made

    def _of_method(self, name: str, owner: ast.expr, node: ast.Call) -> Value:
        of = self._proven(owner)
        if isinstance(of, Row) and name == "get" and len(node.args) == 1:
            return of.get(self._known(node.args[0]).value)
        if isinstance(of, Row) and name == "copy":
            return of.merged({})
        if isinstance(of, Column) and name == "split" and len(node.args) == 1:
            return Cut(of.path, str(self._known(node.args[0]).value))
        if isinstance(of, Cut) and of.is_end and name == "strip" and not node.args:
            return of
        if isinstance(of, FixedValue) and name == "format":
            given = {str(number): self._proven(one) for number, one in enumerate(node.args)}
            given |= {str(one.arg): self._proven(one.value) for one in node.keywords}
            return self._joined(_format(str(of.value), given, node), node)
        return self._known(node)


def _line(node: ast.AST) -> str:
    return str(UnreadableExpression(node))


def _owner(call: ast.Call) -> str:
    """Return the name whose method is called, or nothing."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner.id if isinstance(owner, ast.Name) else ""


def _guarded(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return marker and text of `if "####" not in text: return None`, or None for any other statement."""
    match node:
        case ast.If(
            test=ast.Compare(left=ast.Constant(value=str(marker)), ops=[ast.NotIn()], comparators=[text]),
            body=[ast.Return(value=None | ast.Constant(value=None))],
            orelse=[],
        ):
            return marker, text
    return None


def _format(text: str, given: Mapping[str, Value], node: ast.expr) -> list[Value]:
    """Return the parts of `text.format(...)`."""
    parts: list[Value] = []
    for number, (fixed, name, form, conversion) in enumerate(string.Formatter().parse(text)):
        if form or conversion:
            raise UnreadableExpression(node)
        parts += [FixedValue(fixed), *([] if name is None else [given[name or str(number)]])]
    return parts


def _listed(value: Value, node: ast.expr) -> tuple[SaidMessage, ...]:
    if isinstance(value, Listed):
        return value.elements
    if isinstance(value, FixedValue) and isinstance(value.value, list):
        return tuple(_message(FixedValue(one), node) for one in value.value)
    raise UnreadableExpression(node)


def _message(value: Value, node: ast.expr) -> SaidMessage:
    if isinstance(value, SaidMessage):
        return value
    if isinstance(value, FixedValue) and isinstance(value.value, dict) and value.value.keys() == {"role", "content"}:
        return SaidMessage(value.value["role"], FixedValue(value.value["content"]))
    raise UnreadableExpression(node)
