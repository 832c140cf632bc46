"""Kinds of errors. Two errors are of one kind if only numbers and addresses differ between them, and what they quote if
that makes many kinds. And the line of a user's code that raised an error, since the error's text alone seldom tells."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

MAX_KINDS = 1000
"""Most kinds that are remembered. One more, and all are forgotten."""

MANY_QUOTED = 6
"""From so many kinds on that differ in quoted parts alone, these are data, such as completions, and not names of
columns or attributes: the kinds are shown as one."""

PACKAGE = Path(__file__).parent
LIBRARIES = tuple(Path(sysconfig.get_path(one)) for one in ("stdlib", "purelib", "platlib"))

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_QUOTED = re.compile(r"""(?<!\w)(['"`])(?:(?!\1)[^\n]){0,1000}\1(?!\w)""")
_VARYING = re.compile(f"{_QUOTED.pattern}|{_NUMBER.pattern}")


def kind_of(text: str) -> str:
    """Return the text without its numbers and addresses. It is the same for all errors of one kind."""
    return _NUMBER.sub("0", text)


def rough_kind_of(text: str) -> str:
    """Return the text without its numbers, addresses and quoted parts, which errors about data often bring."""
    return kind_of(_QUOTED.sub("''", text))


def common_text(texts: Collection[str]) -> str:
    """Return what to show for different errors of one kind: N stands for each number and address that differs, and dots
    for each quoted part, if they are alike only without these."""
    varying = _NUMBER if len({kind_of(text) for text in texts}) == 1 else _VARYING
    found = [[match[0] for match in varying.finditer(text)] for text in texts]
    places = iter([len(set(parts)) > 1 for parts in zip(*found, strict=False)])

    def shown(match: re.Match[str]) -> str:
        quote = match[0][0] if match[0][0] in "'\"`" else ""
        return (f"{quote}...{quote}" if quote else "N") if next(places, True) else match[0]

    return varying.sub(shown, min(texts))


def counted_kinds(errors: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return what to show for each kind of errors, and how many there are, the most frequent first. `errors` are texts,
    each with how often it is there."""
    kinds: dict[str, Counter[str]] = {}
    for text, count in errors:
        kinds.setdefault(kind_of(text), Counter())[text] += count
    alike: dict[str, list[Counter[str]]] = {}
    for texts in kinds.values():
        alike.setdefault(rough_kind_of(next(iter(texts))), []).append(texts)
    shown: list[tuple[str, int]] = []
    for group in alike.values():
        if len(group) >= MANY_QUOTED:
            whole: Counter[str] = Counter()
            for texts in group:
                whole.update(texts)
            group = [whole]
        shown += [(common_text(texts), texts.total()) for texts in group]
    return sorted(shown, key=lambda one: -one[1])


def last_line(detail: str) -> str:
    """Return the last line of an error's text. For a traceback this is the error itself."""
    return detail.strip().rpartition("\n")[2].strip()


class Kinds:
    """The kinds of errors that this process has reported. Its owner calls `is_new` for each error, and shows the
    traceback only of new ones."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def is_new(self, text: str) -> bool:
        """Return whether this is the first error of its kind."""
        kind = kind_of(text)
        if kind in self._seen:
            return False
        if len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen.add(kind)
        return True


def raised_at(error: BaseException) -> str:
    """Return the line that raised the error, the user's if there is one: `rewards.py:3, in score`. Lines of rftstream
    that checked a returned value are skipped."""
    frames = [
        frame
        for frame in traceback.extract_tb((error.__cause__ or error).__traceback__)
        if PACKAGE not in Path(frame.filename).parents and not frame.filename.startswith("<")
    ]
    own = [one for one in frames if not any(root in Path(one.filename).parents for root in LIBRARIES)]
    last = (own or frames)[-1:]
    return "".join(f"{Path(one.filename).name}:{one.lineno}, in {one.name}" for one in last)
