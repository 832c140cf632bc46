"""Reading the code as text: docstrings of fields, and classes of parts that would take seconds to import."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
from collections.abc import Sequence
from pathlib import Path


@functools.cache
def tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"{module}: no such module")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def find_class(body: Sequence[ast.stmt], name: str) -> ast.ClassDef | None:
    return next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)


def field_docs(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Field, or value of an enumeration -> what stands under it."""
    docs = {}
    for item, following in itertools.pairwise(body):
        targets = [item.target] if isinstance(item, ast.AnnAssign) else getattr(item, "targets", [])
        if targets and isinstance(targets[0], ast.Name) and (text := _text(following)):
            docs[targets[0].id] = text
    return docs


def first_paragraph(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Bars would end the cell; outside of code, `<` would begin a tag."""
    parts = re.split("(`[^`]*`)", text.replace("|", r"\|"))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def _text(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""
