"""The curves of a run as one page for a browser: the studio's charts over steps and over time. The reader can point at
values, zoom, and switch curves off. The page loads nothing else, so it can be sent to others as one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rftstream.queries.curves.evaluations import mean_text
from rftstream.queries.curves.history import History
from rftstream.queries.curves.page_facts import ShownSample
from rftstream.queries.curves.plot import subtitle
from rftstream.studio.charts import by_theme, run_charts
from rftstream.studio.rendering import render

FILE = "index.html"
STATIC = Path(__file__).parent / "static"
STYLES = ("vendor/uPlot-1.6.32.min.css", "studio.css")
SCRIPTS = ("vendor/uPlot-1.6.32.min.js", "charts.js")


def write_page(
    history: History,
    *,
    run: str,
    folder: Path,
    settings: Sequence[tuple[str, str]] = (),
    samples: Sequence[ShownSample] = (),
) -> Path:
    """Write index.html into the folder: about 100 kB plus the run's curves."""
    names = sorted({result.evaluation for result in history.evaluations})
    page = render(
        "plot.html",
        title=run,
        facts=subtitle(history),
        styles=_inlined(STYLES),
        scripts=_inlined(SCRIPTS),
        sections=[_section(history, by_time=by_time) for by_time in (False, True)],
        names=names,
        rows=_rows(history, names),
        settings=settings,
        samples=samples,
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def _section(history: History, *, by_time: bool) -> dict[str, Any]:
    charts = run_charts(history, by_time=by_time)
    panels = json.dumps([chart.data for chart in charts]).replace("<", "\\u003c")  # names may contain </script>
    place, title = ("time", "Over time") if by_time else ("steps", "Over steps")
    return {"id": place, "title": title, "themes": by_theme(charts), "panels": Markup(panels)}


def _inlined(files: Sequence[str]) -> Markup:
    return Markup("\n".join((STATIC / file).read_text(encoding="utf-8") for file in files))


def _rows(history: History, names: Sequence[str]) -> list[tuple[int, list[str]]]:
    results = {(result.name.version, result.evaluation): result for result in history.evaluations}
    return [
        (version, [mean_text(results[version, name]) if (version, name) in results else "-" for name in names])
        for version in sorted({version for version, _ in results})
    ]
