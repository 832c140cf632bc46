"""docs/extending.md: the kinds of parts, where their tables and protocols are."""

from __future__ import annotations

import importlib

from pages.source import table
from rftstream.config.registry import KINDS
from rftstream.queries.listing import SETTINGS

FOLDERS = {"policy": "policies"}


def kinds() -> str:
    rows = []
    for kind, where in KINDS.items():
        module, _, name = where.partition(":")
        folder = module.replace(".", "/")
        names = ", ".join(f"`{one}`" for one in getattr(importlib.import_module(module), name))
        rows.append(
            (
                kind,
                f"`{SETTINGS[kind]}`",
                names,
                f"[`{folder}/base.py`](../{folder}/base.py)",
                f"`{name}` in [`{folder}/__init__.py`](../{folder}/__init__.py)",
            )
        )
    return table(("kind", "named by", "built in", "what it must be", "one line in"), rows)
