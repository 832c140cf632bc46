"""Draws the dashboards without Grafana: each panel where Grafana has it, with what a Prometheus answers to its queries.

    python -m deploy.grafana.draw http://localhost:9090 --run sums --minutes 30 --to build/boards

A picture for each file in dashboards/. Needs matplotlib (`pip install 'rftstream[plots]'`). Units, legends and stacking
are Grafana's; colours, tooltips and the choice of another run are not there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

FOLDER = Path(__file__).parent / "dashboards"
WIDTH_IN, ROW_IN = 18.0, 0.42
"""Inches of a board's 24 columns, and of one row of its grid."""
POINTS = 240
"""As many as a panel of a third of the screen asks for."""
SECONDS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"))
SHORT = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
UNITS: dict[str, Callable[[float], str]] = {
    "short": lambda value: scaled(value, SHORT),
    "s": lambda value: scaled(value, SECONDS, " "),
    "bytes": lambda value: scaled(value, BYTES, " "),
    "Bps": lambda value: scaled(value, BYTES, " ") + "/s",
    "cps": lambda value: scaled(value, SHORT) + " c/s",
    "cpm": lambda value: scaled(value, SHORT) + " c/m",
    "percentunit": lambda value: f"{100 * value:.3g}%",
}
"""How Grafana writes a number of a unit."""

Series = tuple[str, list[float], list[float]]
"""Its name, times and values."""


def scaled(value: float, steps: tuple[tuple[float, str], ...], gap: str = "") -> str:
    """Return a number by the largest step that it reaches."""
    for size, name in steps:
        if abs(value) >= size:
            return f"{value / size:.3g}{gap}{name}"
    return f"{value:.3g}"


def ask(url: str, panel: dict[str, Any], run: str, minutes: float, end: float) -> list[Series]:
    """Return what a Prometheus answers to the queries of a panel over minutes that lead up to a moment."""
    step = max(1.0, 60 * minutes / POINTS)
    found: list[Series] = []
    for target in panel["targets"]:
        expr = target["expr"].replace("$run", run).replace("$__rate_interval", f"{max(60, int(4 * step))}s")
        query = urllib.parse.urlencode({"query": expr, "start": end - 60 * minutes, "end": end, "step": step})
        with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}", timeout=60) as answer:
            for one in json.load(answer)["data"]["result"]:
                labels = one["metric"]
                name = re.sub(r"\{\{(\w+)\}\}", lambda word, of=labels: of.get(word[1], ""), target["legendFormat"])
                values = [float(value) for _, value in one["values"]]
                found.append((name.strip(), [moment for moment, _ in one["values"]], values))
    return found


def draw_chart(axes: Axes, panel: dict[str, Any], series: list[Series]) -> None:
    custom = panel["fieldConfig"]["defaults"]["custom"]
    if custom["stacking"]["mode"] == "normal" and series:
        times = sorted({moment for _, moments, _ in series for moment in moments})
        rows = [dict(zip(moments, values, strict=True)) for _, moments, values in series]
        heights = [
            [0.0 if math.isnan(row.get(moment, 0.0)) else row.get(moment, 0.0) for moment in times] for row in rows
        ]
        axes.stackplot(days(times), *heights, labels=[name for name, _, _ in series], alpha=0.5)
    else:
        for name, moments, values in series:
            axes.plot(days(moments), values, label=name, linewidth=1)
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: UNITS[panel["fieldConfig"]["defaults"]["unit"]](value))
    )
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.2)
    if series:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=6, frameon=False)
    else:
        axes.text(0.5, 0.5, "No data", ha="center", transform=axes.transAxes, color="gray")


def draw_number(axes: Axes, panel: dict[str, Any], series: list[Series]) -> None:
    unit = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
    newest = [(name, [value for value in values if not math.isnan(value)]) for name, _, values in series]
    lines = [f"{name}\n{unit(values[-1])}" for name, values in newest if values]
    axes.text(0.5, 0.45, "\n".join(lines) or "No data", ha="center", va="center", fontsize=9, transform=axes.transAxes)
    axes.set_axis_off()


def days(moments: list[float]) -> list[float]:
    """Return times as matplotlib counts them."""
    return [moment / 86400 for moment in moments]


def draw(board: dict[str, Any], url: str, run: str, minutes: float) -> Figure:
    """Return a picture of a board."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    end = time.time()
    figure = Figure(figsize=(WIDTH_IN, rows * ROW_IN + 0.5), layout="none")
    figure.suptitle(f"{board['title']}: {board['description']}", fontsize=11, x=0.01, ha="left")
    height = rows + 0.5 / ROW_IN
    for panel in board["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - (place["y"] + 0.5 / ROW_IN) / height
        if panel["type"] == "row":
            figure.text(0.01, top - 0.7 / height, panel["title"], fontsize=10, weight="bold")
            continue
        box = (left + 0.035, top - (place["h"] - 1.9) / height, place["w"] / 24 - 0.045, (place["h"] - 3.1) / height)
        axes = figure.add_axes(box)
        axes.set_title(textwrap.shorten(panel["title"], 60), fontsize=9)
        series = ask(url, panel, run, minutes, end)
        (draw_number if panel["type"] == "stat" else draw_chart)(axes, panel, series)
        axes.set_xlim(*days([end - 60 * minutes, end]))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--run", default=".*")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--to", type=Path, default=Path("build/boards"))
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    for file in sorted(FOLDER.glob("*.json")):
        picture = draw(json.loads(file.read_text(encoding="utf-8")), asked.url, asked.run, asked.minutes)
        picture.savefig(asked.to / f"{file.stem}.png", dpi=80)
        print(asked.to / f"{file.stem}.png")


if __name__ == "__main__":
    main()
