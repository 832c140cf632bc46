"""Tables of Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def escaped(text: str) -> str:
    """Outside of code, `<` would begin a tag."""
    parts = re.split("(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def _cell(text: str) -> str:
    """Bars would end the cell."""
    return escaped(text.replace("|", r"\|"))
