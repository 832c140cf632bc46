"""What dashboards are made of: panels in rows, and the queries that many of them ask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

COLUMNS = 3
WIDTH = 24 // COLUMNS
HEIGHT = 8
STATS = 6
"""Numbers that stand side by side in a row of numbers."""
STAT_HEIGHT = 4
SCHEMA_VERSION = 39
RUN = 'run=~"$run"'
RATE = "[$__rate_interval]"
ROLES = "feeder|explorer|verifier|buffer|trainer|evaluator|synthesiser"


class Unit(StrEnum):
    """Units by Grafana's names."""

    count = "short"
    seconds = "s"
    bytes = "bytes"
    bytes_per_s = "Bps"
    per_s = "cps"
    per_min = "cpm"
    share = "percentunit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A question to Prometheus, and how its answers are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart, or with `is_number` the newest value of each of its queries."""

    title: str
    about: str
    """What it tells, and what to do about it."""
    queries: tuple[Query, ...]
    unit: Unit = Unit.count
    is_stacked: bool = False
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Panels by the rows that they stand in."""

    name: str
    about: str
    rows: dict[str, tuple[Panel, ...]]

    def to_text(self) -> str:
        """Return the JSON that Grafana loads."""
        return json.dumps(self._to_json(), indent=1) + "\n"

    def _to_json(self) -> dict[str, Any]:
        panels: list[dict[str, Any]] = []
        y = 0
        for title, members in self.rows.items():
            place = {"x": 0, "y": y, "w": 24, "h": 1}
            panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
            y += 1
            numbers = [panel for panel in members if panel.is_number]
            charts = [panel for panel in members if not panel.is_number]
            for several, columns, height in ((numbers, STATS, STAT_HEIGHT), (charts, COLUMNS, HEIGHT)):
                width = 24 // columns
                for index, panel in enumerate(several):
                    row, column = divmod(index, columns)
                    place = {"x": column * width, "y": y + row * height, "w": width, "h": height}
                    panels.append({"id": len(panels) + 1, "gridPos": place, **_panel_to_json(panel)})
                y += -(-len(several) // columns) * height
        return {
            "uid": f"rftstream-{self.name}",
            "title": f"rftstream: {self.name}",
            "description": self.about,
            "tags": ["rftstream"],
            "links": [_OTHER_DASHBOARDS],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": [_datasource_choice(), _run_choice()]},
            "panels": panels,
        }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OTHER_DASHBOARDS = {
    "type": "dashboards", "tags": ["rftstream"], "title": "rftstream", "asDropdown": True, "includeVars": True,
    "keepTime": True,
}  # fmt: skip


def _panel_to_json(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": str(panel.unit)}
    options: dict[str, Any]
    if panel.is_number:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "textMode": "auto"}
    else:
        defaults["custom"] = {
            "lineWidth": 1, "fillOpacity": 20 if panel.is_stacked else 0, "showPoints": "auto",
            "stacking": {"mode": "normal" if panel.is_stacked else "none"},
        }  # fmt: skip
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"},
        }  # fmt: skip
    return {
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }


def _datasource_choice() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _run_choice() -> dict[str, Any]:
    """The runs that workers or an exporter tell of."""
    query = 'label_values({__name__=~"rftstream_run_up|rftstream_step_seconds_count"}, run)'
    return {
        "name": "run", "type": "query", "label": "Run", "refresh": 2, "includeAll": True, "allValue": ".*",
        "multi": False, "current": {"text": "All", "value": "$__all"}, "query": {"query": query, "refId": "run"},
        "datasource": _SOURCE,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- queries


def newest(metric: str, *by: str, where: str = "", legend: str = "") -> Query:
    """Return the largest value of a gauge for each run, and for each value of the labels `by`."""
    labels = ", ".join(("run", *by))
    return Query(expr=f"max by ({labels}) ({metric}{_select(where)})", legend=_legend(legend, by))


def total(metric: str, *by: str, where: str = "", legend: str = "") -> Query:
    """Return the sum of a gauge or counter over all workers."""
    labels = ", ".join(("run", *by))
    return Query(expr=f"sum by ({labels}) ({metric}{_select(where)})", legend=_legend(legend, by))


def rate(counter: str, *by: str, where: str = "", legend: str = "", times: int = 1) -> Query:
    """Return how fast a counter grows, a second, or a minute with `times=60`."""
    labels = ", ".join(("run", *by))
    factor = "" if times == 1 else f"{times} * "
    return Query(expr=f"{factor}sum by ({labels}) (rate({counter}{_select(where)}{RATE}))", legend=_legend(legend, by))


def age(timestamp: str, *by: str, legend: str = "") -> Query:
    """Return the seconds since a moment that a gauge gives."""
    labels = ", ".join(("run", *by))
    return Query(expr=f"time() - max by ({labels}) ({timestamp}{_select('')})", legend=_legend(legend, by))


def quantiles(histogram: str, *by: str, where: str = "") -> tuple[Query, Query]:
    """Return the median and the 95th percentile of what a histogram has seen of late."""
    labels = ", ".join(("run", *by, "le"))
    buckets = f"sum by ({labels}) (rate({histogram}_bucket{_select(where)}{RATE}))"
    half, most = (
        Query(expr=f"histogram_quantile({share}, {buckets})", legend=_legend("", by, f"p{share * 100:.0f}"))
        for share in (0.5, 0.95)
    )
    return half, most


def train(metric: str, legend: str = "") -> Query:
    """Return a metric of the newest step, as docs/operations.md lists them."""
    return newest("rftstream_train", where=f'metric="{metric}"', legend=legend or metric)


def _select(where: str) -> str:
    return f"{{{where}, {RUN}}}" if where else f"{{{RUN}}}"


def _legend(legend: str, by: tuple[str, ...], last: str = "") -> str:
    if legend:
        return legend
    words = (*(f"{{{{{label}}}}}" for label in by), *((last,) if last else ()))
    return " ".join(words) or "{{run}}"
