"""What graders put before a Python program, so that one written into a stub with `List[int]` runs as it is."""

from __future__ import annotations

_NAMES = """
string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json
"""
_MODULES = tuple(_NAMES.split())
_STARRED = (*_MODULES, "typing", "builtins")

USUAL_IMPORTS = "\n".join(
    [
        *(f"from {name} import *" for name in _STARRED),  # builtins last: `pow` and `open` are Python's own
        f"import os, time, typing, {', '.join(_MODULES)}",
        "sys.setrecursionlimit(50_000)",
    ]
)
"""Imports that LiveCodeBench's grader puts before a program, and the depth of recursion that it allows. Source:
LiveCodeBench, lcb_runner/evaluation/testing_util.py."""
