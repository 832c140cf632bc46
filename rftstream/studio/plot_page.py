"""A run as one page for a browser, with the studio's charts over steps and over time. The reader can point at values,
zoom, and switch curves off. The page loads nothing else, so it can be sent to others as one file.

`plot` writes it beside its pictures, from the log alone. The report of a run is the same page with the result, the best
and the worst rollouts and the lineage, which the run's index knows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rftstream.config.secrets import hidden
from rftstream.errors import ConfigError
from rftstream.queries.catalog.counts import count_fates
from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.curves.evaluations import mean_text
from rftstream.queries.curves.history import History
from rftstream.queries.curves.page_facts import (
    ShownSample,
    choose_samples,
    lineage_facts,
    own_settings,
    result_facts,
)
from rftstream.queries.curves.plot import subtitle
from rftstream.queries.curves.smoothing import MAX_POINTS
from rftstream.queries.records.shown import CompletionReader, open_reader
from rftstream.queries.state.flow_map import Trouble, what_is_wrong
from rftstream.queries.state.following import RunFollower
from rftstream.runs.folder import OpenRun, naming
from rftstream.service.control_view import read_control
from rftstream.studio.charts import by_theme, run_charts
from rftstream.studio.rendering import render

FILE = "index.html"
STATIC = Path(__file__).parent / "static"
STYLES = ("vendor/uPlot-1.6.32.min.css", "studio.css")
MAX_REPORT_BYTES = 2_000_000
"""A report stays below this size, so that it can be sent by mail."""
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
    text = page_text(history, run=run, settings=settings, samples=samples)
    folder.mkdir(parents=True, exist_ok=True)
    return _write(folder / FILE, text)


def write_report(run: OpenRun, file: Path) -> int:
    """Write the report of a run, and return its size in bytes. The index of the run is brought up to date first."""
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}, expected one that exists")
    follower = RunFollower(run)
    try:
        wrong = what_is_wrong(follower.look_at_all().status, now=time.time())
        catalog = follower.updater.open_catalog()
        if catalog is None:
            raise ConfigError(f"{run.folder.path}: the run has not begun, expected one with rollouts to report of")
        with catalog:
            history = follower.history.charted()
            moment = Moment(version=history.version)
            text = report_text(run, history, catalog, moment, open_reader(run, dims=False), wrong)
        with naming(file):
            return _write(file, text).stat().st_size
    finally:
        follower.close()


def report_text(
    run: OpenRun,
    history: History,
    catalog: CatalogReader,
    moment: Moment,
    reader: CompletionReader,
    wrong: Sequence[Trouble] | None,
) -> str:
    """Return the report of a run at a moment as one page, of fewer than MAX_REPORT_BYTES. It fetches nothing, and the
    values of secrets are left out. `wrong`: the run's problems; None if they are not known, as of a past moment."""
    control = read_control(run.transport, until_s=moment.at_s)
    counts = count_fates(catalog, moment)
    facts = {
        "settings": own_settings(run.config),
        "samples": choose_samples(run, catalog, moment, reader),
        "result": result_facts(history, counts, control.finished),
        "lineage": lineage_facts(control.manifest, history, counts),
        "wrong": None if wrong is None else [replace(one, text=hidden(one.text)) for one in wrong],
    }
    most_points = 400
    while True:
        text = page_text(history, run=run.run_id, most_points=most_points, **facts)  # type: ignore[arg-type]
        if len(text.encode()) < MAX_REPORT_BYTES or most_points < 20:
            return text
        most_points //= 2


def page_text(
    history: History,
    *,
    run: str,
    settings: Sequence[tuple[str, str]] = (),
    samples: Sequence[ShownSample] = (),
    result: Sequence[tuple[str, str, str]] = (),
    lineage: Sequence[tuple[str, str]] = (),
    wrong: Sequence[Trouble] | None = None,
    most_points: int = MAX_POINTS,
) -> str:
    """Return the page with these facts. `most_points`: most values of a line."""
    names = sorted({result.evaluation for result in history.evaluations})
    return render(
        "plot.html",
        title=run,
        facts=subtitle(history),
        styles=_inlined(STYLES),
        scripts=_inlined(SCRIPTS),
        sections=[_section(history, by_time=by_time, most_points=most_points) for by_time in (False, True)],
        names=names,
        rows=_rows(history, names),
        settings=settings,
        samples=samples,
        result=result,
        lineage=lineage,
        wrong=wrong,
    )


def _write(file: Path, text: str) -> Path:
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def _section(history: History, *, by_time: bool, most_points: int) -> dict[str, Any]:
    charts = run_charts(history, by_time=by_time, most_points=most_points)
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
