"""Reading the docs: pages, their blocks of code, headings and links, and what they mention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = tuple(sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]))
WRITTEN_BY_HAND = re.compile(r"<!-- generated: .+? -->.*?<!-- end -->", re.DOTALL)

_FENCE = re.compile(r"(?:<!-- (\w+): ([^\n]+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code."""

    page: Path
    language: str
    text: str
    kind: str
    """Of the comment before it: `run` or `file`; empty if there is none."""
    name: str

    @property
    def commands(self) -> list[str]:
        """Lines after a prompt."""
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]


def read(page: Path, *, by_hand: bool = False) -> str:
    """`by_hand`: without what docs/generate.py filled in."""
    text = page.read_text(encoding="utf-8")
    return WRITTEN_BY_HAND.sub("", text) if by_hand else text


def blocks(page: Path, *languages: str) -> list[Block]:
    found = [
        Block(page, language, body, kind or "", name or "") for kind, name, language, body in _FENCE.findall(read(page))
    ]
    return [block for block in found if not languages or block.language in languages]


def prose(text: str) -> str:
    """Without blocks of code."""
    return _FENCE.sub("", text)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", read(page))):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (name := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(name)
    return found


def links(page: Path) -> Iterator[str]:
    yield from _LINK.findall(prose(read(page)))


def code(page: Path) -> Iterator[str]:
    """What stands in backticks in the prose that was written by hand."""
    yield from _CODE.findall(prose(read(page, by_hand=True)))


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))
