"""Classes stay small enough to be read in one sitting: read off the source."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

MOST_METHODS = 20


def methods_by_class() -> dict[str, int]:
    """Return how many methods each class of the package has, nested classes included."""
    return {
        node.name: sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
        for package in ("rftstream", "workers")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name != "Config"
    }


def test_classes_are_small() -> None:
    large = {name: count for name, count in methods_by_class().items() if count > MOST_METHODS}
    assert not large, f"more than {MOST_METHODS} methods; hand over to an object what is not the class's own: {large}"
