"""The pages of curves: charts by theme, one chart at full size, and its values as JSON and as CSV."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from rftstream.queries.curves.timeline import NUM_SLOTS, Lane, read_timeline
from rftstream.queries.state.flow_map import what_is_wrong
from rftstream.service.control_view import read_control
from rftstream.studio.charts import by_theme, run_charts, shown_panels, table_text
from rftstream.studio.pages.page import PageOfRun, Values
from rftstream.studio.plot_page import report_text

SMOOTHINGS = {"": "usual", "1": "none", "5": "5 values", "20": "20 values", "100": "100 values"}
"""Running means to choose from: number of values -> words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartChoice:
    """The choice in the address of a page of charts. `of` makes it."""

    by_time: bool
    smooth: str
    """One of SMOOTHINGS."""
    titles: tuple[str, ...]
    """Titles of the chosen panels; empty for all."""

    @staticmethod
    def of(page: PageOfRun) -> ChartChoice:
        """Return the choice in the address."""
        smooth = page.asked("smooth")
        return ChartChoice(
            by_time=page.asked("over") == "time",
            smooth=smooth if smooth in SMOOTHINGS else "",
            titles=tuple(page.request.query_params.getlist("show")[:50]),
        )

    @property
    def width(self) -> int | None:
        """Return the number of values in the running means; None for the usual one."""
        return int(self.smooth) if self.smooth else None

    def query(self, *titles: str) -> dict[str, object]:
        """Return the query of an address with the same choice, but of these panels."""
        return {"over": "time" if self.by_time else "", "smooth": self.smooth, "show": list(titles)}


def charts(page: PageOfRun) -> Values:
    """The curves of the run, over versions or over time: the main ones large, the others folded by theme."""
    chosen = ChartChoice.of(page)
    _, panels = shown_panels(page.charted, by_time=chosen.by_time)
    found = run_charts(page.charted, by_time=chosen.by_time, titles=chosen.titles, width=chosen.width)
    known = [panel.title for panel in panels]
    return {
        "themes": by_theme(found),
        "chosen": chosen,
        "titles": [title for title in chosen.titles if title in known],
        "known": known,
        "smoothings": SMOOTHINGS,
    }


def chart_data(page: PageOfRun) -> Response:
    """The curves as data, for the browser's own drawing."""
    chosen = ChartChoice.of(page)
    found = run_charts(page.charted, by_time=chosen.by_time, titles=chosen.titles, width=chosen.width)
    return JSONResponse([chart.data for chart in found])


STRETCHES = (5, 20, 100)
"""Numbers of versions to choose from on a timeline, beside all."""
LANE_HEIGHT = 40
"""Height of a lane in the units of its picture; a slot is one wide."""


def timeline(page: PageOfRun) -> Values:
    """A lane for each role over the newest versions of the moment: who was busy when, and what waited for what."""
    asked = page.asked("versions", str(STRETCHES[1]))
    wanted = int(asked) if asked in map(str, STRETCHES) else None
    control = page.run.look(lambda run, _: read_control(run.transport, until_s=page.moment.at_s))
    found = read_timeline(page.history, page.catalog, control.claims, num_versions=wanted)
    lanes = [] if found is None else [(lane, _areas(lane)) for lane in found.lanes]
    marks = [] if found is None else (NUM_SLOTS * found.made).tolist()
    return {"found": found, "lanes": lanes, "marks": marks, "wanted": wanted, "stretches": STRETCHES}


def _areas(lane: Lane) -> list[str]:
    """Return the path of each activity, stacked on those before it."""
    below, paths, peak = np.zeros(NUM_SLOTS), [], lane.peak or 1.0
    for activity in lane.activities:
        above = below + activity.values
        edges = [np.round(LANE_HEIGHT * (1 - np.minimum(1.0, values / peak)), 1) for values in (above, below)]
        there = " ".join(f"V{y:g}H{x}" for x, y in enumerate(edges[0], 1))
        back = " ".join(f"V{y:g}H{NUM_SLOTS - x}" for x, y in enumerate(edges[1][::-1], 1))
        paths.append(f"M0 {LANE_HEIGHT}{there}{back}Z")
        below = above
    return paths


def report(page: PageOfRun) -> Response:
    """The report of the run as one file to send."""
    status, catalog, moment = page.snapshot.status, page.catalog, page.moment
    is_known = moment.is_now and status is not None
    wrong = what_is_wrong(status, now=time.time()) if is_known else None
    text = page.run.look(lambda run, reader: report_text(run, page.charted, catalog, moment, reader, wrong))
    return Response(
        text,
        headers={"content-disposition": f'attachment; filename="{page.run.name}-report.html"'},
        media_type="text/html",
    )


def chart_table(page: PageOfRun) -> Response:
    """The values of one panel as a CSV file, of every version and without running means."""
    chosen = ChartChoice.of(page)
    axis, panels = shown_panels(page.history, by_time=chosen.by_time)
    panel = next((panel for panel in panels if panel.title in chosen.titles), None)
    if panel is None:
        known = ", ".join(panel.title for panel in panels)
        raise HTTPException(404, f"show: got {', '.join(chosen.titles)[:100]!r}, expected one of {known}")
    name = "-".join(f"{page.run.name} {panel.title}".lower().split())
    return PlainTextResponse(
        table_text(panel, axis),
        headers={"content-disposition": f'attachment; filename="{name}.csv"'},
        media_type="text/csv",
    )
