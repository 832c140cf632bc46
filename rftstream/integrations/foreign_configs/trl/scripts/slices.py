"""The part of a training script that makes a dataset, as a script of its own that writes its rows."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rftstream.integrations.foreign_configs.trl.scripts.modules import RUNS, names_in, spaced
from rftstream.integrations.foreign_configs.trl.scripts.scopes import DEFINITIONS, last_name, root_name

RANDOM = frozenset(("random", "np", "numpy", "rng"))
"""Names whose draws depend on those before."""
NOT_COPIED = frozenset(RUNS) - {"load_dataset"}


def rows_script(
    script: Path,
    lines: Sequence[str],
    bodies: Sequence[Sequence[ast.stmt]],
    trainer: ast.Call,
    dataset: ast.expr,
    file: str,
    others: Sequence[ast.expr] = (),
) -> str | None:
    """Return a script that writes the rows of a dataset of the trainer to a file beside it, as JSON lines: the
    statements of these bodies that make the dataset. Where these draw at random, also those that make `others`, as
    they may draw before. None if they need what only the whole script has, as its command line."""
    every = list(_before(bodies, trainer))
    taken, needed = _taken(every, set(names_in(dataset)))
    if needed & RANDOM and others:
        taken, needed = _taken(every, {name for one in (dataset, *others) for name in names_in(one)})
    called = {last_name(one.func) for part in taken for one in ast.walk(part) if isinstance(one, ast.Call)}
    made = {name for one in taken for name in _changed_by(one)} | set(vars(builtins)) | {"__file__", "__name__"}
    if called & NOT_COPIED or needed - made:
        return None
    taken.sort(key=lambda one: (not isinstance(one, (ast.Import, ast.ImportFrom)), one.lineno))
    head = f'"""Writes {file}, the rows that {script.name} trains on. Copied from it by `rftstream convert-config`."""'
    own = repr(str(script.resolve()))
    texts = [re.sub(r"\b__file__\b", lambda _: own, _text(one, lines)) for one in taken]
    if (rows := _as_dataset(dataset, taken)) != ast.unparse(dataset):
        texts.insert(0, "from datasets import Dataset, concatenate_datasets")
    texts.insert(0, "from pathlib import Path")
    written = f"{rows}.to_json(str(Path(__file__).with_name({file!r})))"
    return f"{head}\n\n{spaced([*texts, written])}\n"


def _as_dataset(node: ast.expr, taken: Sequence[ast.stmt]) -> str:
    """Return the expression of a dataset that has a method to write it: of a list of rows, of an object of a class of
    the script, and of a dict of datasets, which become one."""
    text, value = ast.unparse(node), node
    if isinstance(node, ast.Name):
        bound = [one.value for one in taken if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == node.id]
        value = bound[-1] if bound else node
    own = {one.name for one in taken if isinstance(one, ast.ClassDef)}
    if isinstance(value, ast.Dict):
        return f"concatenate_datasets(list({text}.values()))"
    if isinstance(value, (ast.List, ast.ListComp)):
        return f"Dataset.from_list({text})"
    if isinstance(value, ast.Call) and last_name(value.func) in own:
        return f"Dataset.from_list([{text}[number] for number in range(len({text}))])"
    return text


def _taken(statements: Sequence[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
    """Return the statements that names are made by, and all names that these need."""
    taken, waiting = list[ast.stmt](), list(statements)
    while new := [one for one in waiting if _changed_by(one) & needed]:
        taken += new
        waiting = [one for one in waiting if one not in new]
        needed = needed | {name for one in new for name in names_in(one)}
    return taken, needed


def _before(bodies: Sequence[Sequence[ast.stmt]], trainer: ast.Call) -> Iterator[ast.stmt]:
    """Yield definitions, and the statements before the one that makes the trainer."""
    for body in bodies:
        for one in body:
            if isinstance(one, ast.If) and "__name__" in ast.unparse(one.test):
                yield from _before([one.body], trainer)
            elif (one.end_lineno or 0) < trainer.lineno or (
                one.lineno > trainer.lineno and isinstance(one, DEFINITIONS)
            ):
                yield one


def _changed_by(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds, or whose values it may change."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(one.asname or one.name).partition(".")[0] for one in node.names}
    changed = set()
    for one in ast.walk(node):
        if isinstance(one, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(one.ctx, ast.Store):
            changed.add(root_name(one))
        elif isinstance(one, ast.Expr) and isinstance(call := one.value, ast.Call):
            changed |= {root_name(call.func)} | {root_name(given) for given in call.args}
    return changed - {"", "print"}


def _text(node: ast.stmt, lines: Sequence[str]) -> str:
    if node.col_offset:  # inside a function, or below `if __name__`
        return ast.unparse(node)
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return "\n".join(lines[first - 1 : node.end_lineno])
