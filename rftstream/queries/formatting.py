"""Formats text for people: columns, times, sizes."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence

from rftstream.contracts.tasks import Media
from rftstream.contracts.versions import STALENESS_COUNTS


def columns(rows: Sequence[Sequence[object]], *, left: int = 1, indent: str = "") -> list[str]:
    """Return lines with aligned cells. The first `left` columns are left-aligned, the others right-aligned. None is an
    empty cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells), default=0))]
    lines = []
    for row in cells:
        aligned = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        lines.append((indent + "  ".join(aligned)).rstrip())
    return lines


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], *, left: int = 1, indent: str = "") -> list[str]:
    """Return an empty line and a table with its heads; no lines if the table has no rows."""
    found = list(rows)
    return ["", *columns([heads, *found], left=left, indent=indent)] if found else []


def run_named(text: str, run: object) -> str:
    """Return a text whose commands in backticks name a run where they say RUN: `rftstream resume RUN`."""
    name = shlex.quote(str(run))
    return re.sub(r"`rftstream [^`]*`", lambda found: re.sub(r"\bRUN\b", lambda _: name, found[0]), text)


def listed(counts: Mapping[str, int], word: str = "") -> str:
    """Return counts in a row, such as `3 dead, 1 expired`, or `3 of tasks` with the word `of`."""
    return ", ".join(f"{count:,} {word}{' ' if word else ''}{name}" for name, count in counts.items())


def rates_text(steps: Sequence[Mapping[str, float]], seconds: float) -> list[str]:
    """Return rollouts, if there are any, and trained tokens in a second, by the metrics of steps that took so long. The
    progress line of `run` has the same numbers."""
    if seconds <= 0:
        return []
    parts = []
    for name, unit in (("rollouts", "rollouts/s"), ("tokens", "trained tokens/s")):
        rate = sum(metrics.get(name, 0.0) for metrics in steps) / seconds
        if rate or name == "tokens":  # demonstrations alone are no rollouts
            parts.append(f"{rate:,.0f} {unit}" if rate >= 10 else f"{rate:.2g} {unit}")
    return [f"{', '.join(parts)} (last {duration(seconds)} of steps)"]


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as short text that is readable at any magnitude: 0.512, 12.340, 1,600, 3.1e-06."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    if 0.001 <= abs(value) < 1000:
        return f"{value:.{digits}f}"
    return f"{value:.1e}"


def size(num_bytes: float) -> str:
    """Return bytes as text like 12.3 MB, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def image_text(image: Media) -> str:
    """Return the text shown in place of an image: its digest, its size in pixels and bytes, its type."""
    pixels = f", {image.width} x {image.height} pixels" if image.width else ""
    return f"[image {image.digest[:19] or image.url[:60]}{pixels}, {size(image.num_bytes)} {image.kind}]".replace(
        " ]", "]"
    )


def duration(seconds: float, *, exact: bool = False) -> str:
    """Return a duration as 45 s, 12 min, 3 h 20 min, 2 d 4 h; `exact`: 45 s, 12 min 05 s, 3 h 20 min, 52 h 00 min."""
    if exact:
        minutes, rest_s = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        if hours:
            return f"{hours} h {minutes:02d} min"
        return f"{minutes} min {rest_s:02d} s" if minutes else f"{rest_s} s"
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours, days = int(seconds / 3600), int(seconds / 86400)
    if seconds < 36 * 3600:
        return f"{hours} h {int(seconds / 60) % 60} min"
    return f"{days} d {hours % 24} h"


def moment(timestamp_s: float) -> str:
    """Return the local date and time of a timestamp in seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp_s))


def plural(count: int, noun: str) -> str:
    """Return the count with the noun, which gets an s unless the count is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def staleness_text(counts: Sequence[int]) -> str:
    """Return a histogram of staleness, in the form of StepRecord, as `412 at 0, 96 at 1`. Empty entries are left
    out."""
    last = STALENESS_COUNTS - 1
    return ", ".join(
        f"{count:,} at {staleness}{' or more' if staleness == last else ''}"
        for staleness, count in enumerate(counts)
        if count
    )
