"""Names in a script, by scope, and the nodes that they stand for."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.With)


class UnreadableExpression(Exception):
    """An expression whose value is known only by running the script."""

    def __init__(self, node: ast.AST, reason: str = "") -> None:
        file = f" of {node.source}" if hasattr(node, "source") else ""
        super().__init__(f"line {getattr(node, 'lineno', '?')}{file}: {shown(node)}{f', {reason}' if reason else ''}")


def shown(node: ast.AST) -> str:
    """Return the beginning of an expression or a statement, on one line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


UNKNOWN = (UnreadableExpression, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Errors of evaluating an expression that has no value unless the script runs."""


Test = tuple[ast.expr | None, bool]
"""A condition, None for one of a loop or a `try`, and whether it holds in the branch."""


class Binding(NamedTuple):
    """A name with the node of its value, the statement that binds it, and the scope in which the value is evaluated."""

    name: str
    value: ast.AST
    statement: ast.stmt | ast.expr
    scope: Scope
    tests: tuple[Test, ...] = ()
    """Conditions of the branches that it is in."""

    def is_known(self) -> bool | None:
        """Return whether the script gets there; None if only its run decides it."""
        try:
            return all(self.scope.holds(test) is wanted for test, wanted in self.tests)
        except UNKNOWN:
            return None


class Scope:
    """Names bound in a module or function, in order. A function's names hide those of the scope around it."""

    def __init__(self, outer: Scope | None = None, decide: Callable[[ast.expr, Scope], bool] | None = None) -> None:
        """`decide`: whether a condition holds; UnreadableExpression if only the script's run decides it."""
        self.outer = outer
        self._decide: Callable[[ast.expr, Scope], bool] | None = decide or (outer._decide if outer else None)
        self.module: str = outer.module if outer else ""
        """Name of the module that it is in; empty for the script."""
        self.bound: list[Binding] = []
        self.changed: list[Binding] = []
        """Calls of methods on names, `rewards.append(one)`: the name, and the call as its value."""
        self.set_by_functions: set[str] = set()
        """Names that functions set by `global`, when they are called."""
        self.changed_by_functions: set[str] = set()
        """Names whose items functions set that do not bind them."""

    def outermost(self) -> Scope:
        return self if self.outer is None else self.outer.outermost()

    def holds(self, test: ast.expr | None) -> bool:
        """Return whether a condition holds. UnreadableExpression if only the script's run decides it."""
        if test is None or self._decide is None:
            raise UnreadableExpression(test or ast.Constant(None))
        return self._decide(test, self)

    def named(self, name: str) -> list[Binding]:
        """Return what binds a name, in order, without what is in a branch that is not taken."""
        return [one for one in self.bound if one.name == name and one.is_known() is not False]

    def add(self, body: list[ast.stmt], tests: tuple[Test, ...] = ()) -> Scope:
        """Add the names that statements bind. `tests`: the conditions under which these run."""
        for node in body:
            if isinstance(node, ast.Assign):
                pairs = [pair for one in node.targets for pair in _targets(one, node.value)]
                self.bound += [Binding(name, value, node, self, tests) for name, value in pairs]
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self.bound.append(Binding(ast.unparse(node.target), node.value, node, self, tests))
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                before = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
                value = ast.copy_location(ast.BinOp(before, node.op, node.value), node)
                self.bound.append(Binding(node.target.id, value, node, self, tests))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                if isinstance(function := node.value.func, ast.Attribute):
                    self.changed.append(Binding(ast.unparse(function.value), node.value, node, self, tests))
            elif isinstance(node, ast.Delete):
                for item in (one for one in node.targets if isinstance(one, ast.Subscript)):
                    taken = ast.Call(ast.Attribute(item.value, "pop", ast.Load()), [item.slice], [])
                    call = ast.copy_location(taken, node)
                    self.changed.append(Binding(ast.unparse(item.value), call, node, self, tests))
            elif isinstance(node, DEFINITIONS):
                self.bound.append(Binding(node.name, node, node, self, tests))
                self.outermost().changed_by_functions |= _changed_outside(node)
                said = (one for one in ast.walk(node) if isinstance(one, ast.Global))
                self.outermost().set_by_functions |= {name for one in said for name in one.names}
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
                self.bound += [Binding(name, node, node, self) for name in names]
            elif isinstance(node, BRANCHES):
                self._add_branches(node, tests)
        return self

    def _add_branches(self, node: ast.stmt, tests: tuple[Test, ...]) -> None:
        is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        test = node.test if isinstance(node, ast.If) and not is_main else None
        always = is_main or isinstance(node, ast.With)
        self.add(getattr(node, "body", []), tests if always else (*tests, (test, True)))
        handlers = [one.body for one in getattr(node, "handlers", ())]
        for other in (getattr(node, "orelse", []), *handlers, getattr(node, "finalbody", [])):
            self.add(other, (*tests, (test, False)))

    def find(self, name: ast.Name) -> tuple[ast.AST, Scope]:
        """Return the node that a name stands for at the place of its use, and the scope in which to evaluate the
        node."""
        self._refuse_if_set_by_functions(name)
        found = [one for one in self.bound if one.name == name.id]
        before = [one for one in found if one.scope is not self or (one.statement.end_lineno or 0) < name.lineno]
        before = [one for one in before if one.is_known() is not False]
        if before and before[-1].is_known():
            return before[-1].value, before[-1].scope
        if before or self.outer is None:
            raise UnreadableExpression(name, "which is bound in a branch" if before else "")
        return self.outer.seen_from_inside(name)

    def set_before(self, node: ast.Attribute | ast.Subscript) -> Binding | None:
        """Return what sets an attribute or an item, `args.rate = 1`, before this use of it. UnreadableExpression if a
        branch decides."""
        last = getattr(node, "lineno", math.inf)
        found = [one for one in self.named(ast.unparse(node)) if one.statement.lineno < last]
        if not found and self.outer is not None:
            later = ast.Subscript(node.value, node.slice) if isinstance(node, ast.Subscript) else None
            return self.outer.set_before(later or ast.Attribute(node.value, node.attr))  # type: ignore[union-attr]
        if found and not found[-1].is_known():
            raise UnreadableExpression(node, "which is set in a branch")
        return found[-1] if found else None

    def changes(self, node: ast.AST) -> list[Binding]:
        """Return the calls of methods on what a name stands for, in order, between its binding and this use of it."""
        if not isinstance(node, ast.Name):
            return []
        try:
            value, around = self.find(node)
        except UnreadableExpression:
            return []
        owner = self
        while owner.outer is not None and all(one.name != node.id for one in owner.bound):
            owner = owner.outer
        end = node.lineno if owner is self else math.inf
        lines = [one.statement.lineno for one in owner.bound if one.name == node.id and one.statement.lineno < end]
        start = max(lines, default=0)
        own = [one for one in owner.changed if one.name == node.id and start < one.statement.lineno < end]
        return [*around.changes(value), *(one for one in own if one.is_known() is not False)]

    def seen_from_inside(self, name: ast.Name) -> tuple[ast.AST, Scope]:
        """Return the value of a name of this scope as a function sees it, which may be called later."""
        self._refuse_if_set_by_functions(name)
        found = self.named(name.id)
        if found and found[-1].is_known():
            return found[-1].value, found[-1].scope
        if found or self.outer is None:
            raise UnreadableExpression(name, "which is bound in a branch" if found else "")
        return self.outer.seen_from_inside(name)

    def _refuse_if_set_by_functions(self, name: ast.Name) -> None:
        if name.id in self.set_by_functions:
            raise UnreadableExpression(name, "which a function sets")

    def inside(self, node: ast.FunctionDef, call: ast.Call | None = None, caller: Scope | None = None) -> Scope:
        """Return the scope of a function that is bound in this one, with its parameters bound by a call, whose
        arguments the scope `caller` evaluates, or by their defaults."""
        scope = Scope(self)
        scope.bound += [Binding(name, value, node, self) for name, value in _given_by_decorators(node).items()]
        names = [one.arg for one in node.args.args if one.arg != "self"]
        given: dict[str, ast.expr] = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
        named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        given |= {one.arg: value for one, value in named if value is not None}
        names += [one.arg for one in node.args.kwonlyargs]
        if call is not None:
            given |= dict(zip(names, _unpacked(call.args, len(names)), strict=False))
            given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        scope.bound += [Binding(name, value, node, caller or self) for name, value in given.items()]
        if node.args.kwarg is not None:
            more = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg not in names} if call else {}
            rest = ast.Dict([None if name is None else ast.Constant(name) for name in more], list(more.values()))
            scope.bound.append(Binding(node.args.kwarg.arg, rest, node, caller or self))
        return scope.add(node.body)


def _changed_outside(node: ast.AST) -> set[str]:
    """Return the names whose items a function sets and that it does not bind."""
    every = list(ast.walk(node))
    own = {one.arg for one in every if isinstance(one, ast.arg)}
    own |= {one.id for one in every if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    stored = {root_name(one) for one in every if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store)}
    calls = (one for one in every if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
    updated = {root_name(one.func) for one in calls if last_name(one.func) in ("update", "append", "extend", "insert")}
    return (stored | updated) - own - {""}


def of_object(outer: Scope, node: ast.ClassDef, call: ast.Call | None) -> Scope:
    """Return the scope of the methods of an object that a call makes: `self.NAME` is what the class, its `__init__` or
    another method binds, or a method."""
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    first = methods.get("__init__")
    scope = outer.inside(first, call, outer) if first is not None else Scope(outer)
    fixed = {**attributes_of(node), **methods}
    scope.bound[:0] = [Binding(f"self.{name}", value, node, scope) for name, value in fixed.items()]
    known = {one.name for one in scope.bound}
    for one in methods.values():
        set_there = Scope(scope).add(one.body).bound if one is not first else []
        others = [each for each in set_there if each.name.startswith("self.") and each.name not in known]
        scope.bound += [each._replace(statement=node) for each in others]  # called before it is used
    return scope


def named(node: ast.AST, scope: Scope) -> ast.AST | None:
    """Return what a name stands for, or None if nothing in the script says it."""
    found = None
    try:
        while isinstance(node, ast.Name):
            found, scope = scope.find(node)
            node = found
    except UnreadableExpression:
        return None
    return found


def imported(node: ast.expr, scope: Scope) -> str:
    """Return the module that a name or `name.part` stands for, or nothing if it is none that is imported whole."""
    root = root_name(node)
    found = named(ast.Name(root, ast.Load(), lineno=node.lineno), scope) if root else None
    text = ast.unparse(node)
    for one in found.names if isinstance(found, ast.Import) else ():
        if (one.asname or one.name.partition(".")[0]) == root:
            return text.replace(root, one.name, 1) if one.asname else text
    return ""


def root_name(node: ast.AST | None) -> str:
    """Return the name at the beginning of `name.part["other"]`, or nothing."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _unpacked(arguments: list[ast.expr], most: int) -> list[ast.expr]:
    """Return the arguments of a call, with `*value` as its elements, as many as there are parameters."""
    found: list[ast.expr] = []
    for one in arguments:
        if isinstance(one, ast.Starred):
            rest = range(most - len(found))
            found += [ast.copy_location(ast.Subscript(one.value, ast.Constant(k), ast.Load()), one) for k in rest]
        else:
            found.append(one)
    return found


def _targets(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    """Return the names that an assignment binds, with their values: of several, the elements of the value."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return [(ast.unparse(target), value)]
    elements = (
        ast.copy_location(ast.Subscript(value, ast.Constant(place), ast.Load()), value)
        for place in range(len(target.elts))
    )
    return [(ast.unparse(one), element) for one, element in zip(target.elts, elements, strict=True)]


def _given_by_decorators(node: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return what decorators give to a function's parameters: the defaults of `@click.option`, and the config that
    `@hydra.main(config_path=..., config_name=...)` loads."""
    found: dict[str, ast.expr] = {}
    for one in node.decorator_list:
        if not isinstance(one, ast.Call):
            continue
        words = {word.arg: word.value for word in one.keywords}
        if ast.unparse(one.func) == "hydra.main" and node.args.args:
            texts = {name: str(word.value or "") for name, word in words.items() if isinstance(word, ast.Constant)}
            file = (
                f"{texts.get('config_path') or '.'}/{(texts.get('config_name') or 'config').removesuffix('.yaml')}.yaml"
            )
            call = ast.parse(f"OmegaConf.load({file!r})", mode="eval").body
            found[node.args.args[0].arg] = ast.copy_location(call, one)
        elif last_name(one.func) == "option" and ("default" in words or "is_flag" in words):
            flags = [str(flag.value) for flag in one.args if isinstance(flag, ast.Constant)]
            name = next((flag for flag in flags if not flag.startswith("-")), max(flags, key=len, default=""))
            found[name.lstrip("-").replace("-", "_")] = words.get("default", ast.Constant(False))
    return found


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the annotated fields of a class, each with its default if it has one that is an expression."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign):
            yield ast.unparse(one.target), _default_of(one.value)


def attributes_of(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the fields of a class that have defaults, and its other attributes."""
    plain = (one for one in node.body if isinstance(one, ast.Assign))
    found = {ast.unparse(target): one.value for one in plain for target in one.targets}
    return found | {name: value for name, value in fields_of(node) if value is not None}


def _default_of(field: ast.expr | None) -> ast.expr | None:
    """Return the default in what a field of a dataclass is assigned."""
    if not isinstance(field, ast.Call) or last_name(field.func) != "field":
        return field
    given = {one.arg: one.value for one in field.keywords}
    made = given.get("default_factory")
    return made.body if isinstance(made, ast.Lambda) else given.get("default")
