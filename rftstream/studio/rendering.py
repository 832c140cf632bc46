"""The templates and their common functions: words for numbers and times, and addresses of pages."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import quote, urlencode

import jinja2

from rftstream.queries.curves.evaluations import unscored_text
from rftstream.queries.formatting import duration, number, size, staleness_text

SIGNS = {"trained": "✓", "batched": "▸", "pending": "…", "filtered": "∅", "expired": "⌛", "dead": "✕"}
"""Sign before the name of a fate, so that fates differ in more than their colour."""


@cache
def environment() -> jinja2.Environment:
    """Return the templates' environment. All values given to a template are escaped."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("rftstream.studio"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "number": number,
        "size": size,
        "duration": duration,
        "staleness": staleness_text,
        "count": lambda value: f"{value:,}",
        "moment": moment,
        "iso": iso,
        "percent": percent,
        "json_text": json_text,
        "unscored": unscored_text,
    }
    found.globals |= {"signs": SIGNS, "address": address, "shade": shade}
    return found


def render(template: str, **values: Any) -> str:
    """Return a page."""
    return environment().get_template(template).render(**values)


def address(*parts: object, **query: object) -> str:
    """Return the address of a page, with its parts escaped. Empty fields of the query are left out."""
    path = "/" + "/".join(quote(str(part), safe="/") for part in parts)
    asked = {name: value for name, value in query.items() if value not in (None, "", [])}
    return f"{path}?{urlencode(asked, doseq=True)}" if asked else path


def moment(at: float | None) -> str:
    """Return a time in UTC for people."""
    given = _time(at)
    return "" if given is None else f"{given:%Y-%m-%d %H:%M:%S}"


def iso(at: float | None) -> str:
    """Return a time for programs."""
    given = _time(at)
    return "" if given is None else given.isoformat(timespec="seconds")


def _time(at: float | None) -> datetime | None:
    """Return a time; None for an invalid one, or one outside the calendar."""
    try:
        return None if at is None else datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def shade(value: float | None, low: float, high: float, steps: int = 9) -> int:
    """Return the number, from 0, of the part of a range that holds a value, with the range cut into `steps` equal
    parts."""
    if value is None or not math.isfinite(value) or high <= low:
        return 0
    return min(steps - 1, max(0, int((value - low) / (high - low) * steps)))


def json_text(value: Any) -> str:
    """Return JSON in one line. Values that JSON does not have become text."""
    return json.dumps(value, default=str, ensure_ascii=False)
