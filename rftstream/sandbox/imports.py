"""Imports that graders put before a Python program, so that a solution with `List[int]` runs unchanged."""

from __future__ import annotations

_NAMES = """
string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json
"""
_MODULES = tuple(_NAMES.split())
_STARRED = (*_MODULES, "typing", "builtins")

USUAL_IMPORTS = "\n".join(
    [
        *(f"from {name} import *" for name in _STARRED),  # builtins last: `pow` and `open` must be Python's own
        f"import os, time, typing, {', '.join(_MODULES)}",
        "sys.setrecursionlimit(50_000)",
    ]
)
"""Imports that LiveCodeBench's grader puts before a program, and the recursion limit that it sets. Source:
LiveCodeBench, lcb_runner/evaluation/testing_util.py."""
