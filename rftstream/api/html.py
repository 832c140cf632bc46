"""HTML for notebooks. Every text is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rftstream.queries.formatting import moment, number

CELL_CHARACTERS = 120
"""Most characters of a cell."""


def html_table(rows: Sequence[Mapping[str, Any]], *, more: bool = False) -> str:
    """Return rows as a table. `more`: there are further ones, which are not shown."""
    if not rows:
        return "<p>no rows</p>"
    names = dict.fromkeys(name for row in rows for name in row)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(name, row.get(name)))}</td>' for name in names)}</tr>" for row in rows
    )
    rest = "<p>and more rows</p>" if more else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return moment(value) if name == "at" or name.endswith("_at") else number(value)
    text = str(value)
    return text if len(text) <= CELL_CHARACTERS else f"{text[:CELL_CHARACTERS]}…"
