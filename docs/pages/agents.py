"""docs/coding-agents.md: what becomes of each setting of a request, from the tables of the gateway's dialects."""

from __future__ import annotations

from itertools import groupby

from pages.markdown import table
from rftstream.gateway.dialects import DIALECTS


def settings() -> str:
    """A table for each dialect. Settings that stand together and have the same note share a line."""
    parts = []
    for path, dialect in DIALECTS.items():
        rows = []
        ordered = sorted(dialect.settings.items(), key=lambda item: list(type(item[1].fate)).index(item[1].fate))
        for (fate, note), group in groupby(ordered, key=lambda item: (item[1].fate, item[1].note)):
            rows.append((", ".join(f"`{name}`" for name, _ in group), str(fate), note))
        rows.append(("any other", "recorded", "it has no other effect"))
        parts.append(f"`POST /v1/{path}`:\n\n{table(('setting', 'it is', 'how, or why'), rows)}")
    return "\n\n".join(parts)
