"""The templates and their common functions: words for numbers and times, and addresses of pages."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import quote, urlencode

import jinja2

from rftstream.queries.catalog.finding import GroupRow
from rftstream.queries.curves.evaluations import trust_text, unscored_text
from rftstream.queries.formatting import duration, number, plural, size, staleness_text
from rftstream.studio.table_heads import HEADS

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
        "plural": plural,
        "count": lambda value: f"{value:,}",
        "moment": moment,
        "iso": iso,
        "percent": percent,
        "json_text": json_text,
        "excerpt": excerpt,
        "aligned": aligned,
        "precise": precise,
        "unscored": unscored_text,
        "trust": trust_text,
        "why": why,
    }
    found.globals |= {"signs": SIGNS, "heads": HEADS, "address": address, "shade": shade}
    return found


def render(template: str, **values: Any) -> str:
    """Return a page."""
    return environment().get_template(template).render(**values)


def address(*parts: object, **query: object) -> str:
    """Return the address of a page, with its parts escaped. Empty fields of the query are left out."""
    path = "/" + "/".join(quote(str(part), safe="/") for part in parts)
    asked = {name: value for name, value in query.items() if value not in (None, "", [])}
    return f"{path}?{urlencode(asked, doseq=True)}" if asked else path


def excerpt(text: str, wanted: str = "", width: int = 170) -> tuple[str, str, str]:
    """Return a text on one line in three parts, of which the second is the wanted one. A long text is shown around the
    wanted one, or else with its beginning and its end, since answers often stand last."""
    line = " ".join(text.split())
    wanted = " ".join(wanted.split())
    place = line.lower().find(wanted.lower()) if wanted else -1
    if place >= 0:
        begin, end = max(0, place - width // 2), place + len(wanted)
        before = line[begin:place]
        return "… " + before.partition(" ")[2] if begin else before, line[place:end], line[end : end + width // 2]
    if len(line) > width:
        tail = width // 3
        line = f"{line[: width - tail].rpartition(' ')[0]} … {line[-tail:].partition(' ')[2]}"
    return line, "", ""


def aligned(value: float) -> str:
    """Return a number with three decimals, as its neighbours in a column have; very small and large ones as
    elsewhere."""
    return f"{value:.3f}" if value == 0 or 0.0005 <= abs(value) < 10_000 else number(value)


def precise(value: float) -> str:
    """Return a number that stands alone: with up to six decimals, and without zeros at its end."""
    text = number(value, 6)
    return text.rstrip("0") if "." in text and "e" not in text else text


def why(group: GroupRow) -> str:
    """Return the reason of a group's decision; of one without a spread, trained or not, the rewards that it had."""
    rewards = [sibling.reward for sibling in group.siblings if sibling.reward is not None]
    least, most = (number(min(rewards)), number(max(rewards))) if rewards else ("", "")
    if group.reason == "complete" and len(rewards) > 1 and least == most:
        return f"all {len(rewards)} rewards are {least}: nothing to compare"
    if group.reason != "zero_variance" or not rewards:
        return group.reason or ""
    said = f"all {len(rewards)} rewards are {least}" if least == most else f"rewards are {least} to {most}"
    return f"{group.reason}: {said}"


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
