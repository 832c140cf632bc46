"""A moment of a run, for pages: now, or an earlier one given by version or by time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from rftstream.errors import ConfigError
from rftstream.queries.curves.history import HistoryReader

FORMS = "a version (v12), a time (2026-01-31T12:00:00Z), or seconds since 1970"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment at which a run is shown. `find_moment` makes it; every query of the catalog takes one."""

    at_s: float = math.inf
    """Log time in seconds; later records are left out. Infinite: now."""
    version: int = 0
    """The version in force at that time. Batches below it are trained."""
    text: str = ""
    """The moment as the user gave it, which links repeat; empty for now."""

    @property
    def is_now(self) -> bool:
        """Whether nothing is left out."""
        return math.isinf(self.at_s)


LATEST_S = 250_000_000_000.0
"""A time after all others, in the year 9892."""


def find_moment(text: str, reader: HistoryReader) -> Moment:
    """Return the moment that a text names. An empty text is now. ConfigError lists the valid forms."""
    text = text.strip()
    if not text:
        return Moment(version=reader.history().version)
    at_s = _version_time(text, reader) if text[:1] in "vV" else _time(text)
    return Moment(at_s=at_s, version=reader.history(at_s).version, text=text)


def _version_time(text: str, reader: HistoryReader) -> float:
    """Return the time at which the version in force was recorded. If it was trained again, the newest record counts."""
    number = text[1:]
    steps = {step.name.version: at for at, step in reader.steps}
    if not number.isdecimal() or not number.isascii() or len(number) > 12:
        raise ConfigError(f"as_of: got {text[:40]!r}, expected {FORMS}")
    if int(number) not in steps:
        range_ = f"v{min(steps)} to v{max(steps)}" if steps else "no version yet"
        raise ConfigError(f"as_of: v{int(number)}: no such version; the run has {range_}")
    return steps[int(number)]


def _time(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            given = datetime.fromisoformat(text)
            seconds = (given if given.tzinfo is not None else given.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            seconds = math.nan
    if 0 <= seconds < LATEST_S:
        return seconds
    raise ConfigError(f"as_of: got {text[:40]!r}, expected {FORMS}")
