"""The curves of a run as one page for a browser: all panels over steps and over time, with values to point at, to zoom
into and to switch off. It stands by itself: nothing is fetched when it is opened, and it can be sent to somebody.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from rftstream.queries.evaluations import mean_text
from rftstream.queries.history import History
from rftstream.queries.page_facts import ShownSample
from rftstream.queries.panels import COLORS, MAX_LINES, Axis, Line, Panel, over_steps, over_time, panels
from rftstream.queries.plot import NUM_MARKED, above, goes_wide, log_view, smoothed_by_stage, subtitle, view, window

FILE = "index.html"

MAX_POINTS = 2_000
"""Of a line. A longer one is drawn by the means of equal parts: a page of a long run opens in a moment, too."""
MAX_MARKS = 100
"""Resumes and ends of stages, the last ones."""

PAGE = jinja2.Environment(autoescape=True).from_string("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ run }}</title>
<style>
:root { color-scheme: light dark; --ink: #333; --faint: #767676; --face: #fff; --rule: #ccc; --link: #0072B2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --faint: #999; --face: #16181c; --rule: #444; --link: #6cb8e6; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--face); max-width: 1500px;
  margin: 0 auto; padding: 1.2rem; }
h1 { margin: 0; font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p { color: var(--faint); margin: .2rem 0; }
nav a { color: var(--link); margin-right: 1.2rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(27rem, 100%), 1fr)); gap: 1rem; }
.panels > div:first-child { grid-column: span 2; }
.panels > div { min-width: 0; }
@media (max-width: 60rem) { .panels > div:first-child { grid-column: auto; } }
.table { max-height: 26rem; overflow: auto; display: inline-block; }
table { border-collapse: collapse; } th, td { padding: .15rem .9rem; text-align: right; white-space: nowrap; }
th { position: sticky; top: 0; background: var(--face); border-bottom: 1px solid var(--rule); font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: .1rem 2rem;
  margin: 0; }
dl div { display: flex; justify-content: space-between; gap: 1rem; border-bottom: 1px solid var(--rule); }
dt { color: var(--faint); } dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(30rem, 100%), 1fr)); gap: 0 2rem; }
.sample { border-bottom: 1px solid var(--rule); padding: .3rem 0; } .special { color: var(--faint); }
</style>
<script>{{ library }};
{{ theme }}</script>
</head>
<body>
<h1>{{ run }}</h1>
<p>{{ subtitle }}</p>
<nav>{% for section in sections %}<a href="#{{ section.id }}">{{ section.title }}</a>{% endfor %}
{%- if rows %}<a href="#evaluations">Evaluations</a>{% endif %}
{%- if samples %}<a href="#samples">Samples</a>{% endif %}
{%- if settings %}<a href="#settings">Settings</a>{% endif %}</nav>
{% for section in sections %}
<h2 id="{{ section.id }}">{{ section.title }}</h2>
<div class="panels">
{% for figure in section.figures %}<div>{{ figure }}</div>
{% endfor %}</div>
{% endfor %}
{% if rows %}
<h2 id="evaluations">Evaluations</h2>
<p>Mean reward.</p>
<div class="table"><table>
<tr><th>version</th>{% for name in names %}<th>{{ name }}</th>{% endfor %}</tr>
{% for version, values in rows %}<tr><td>{{ version }}</td>
{%- for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}
{% if samples %}
<h2 id="samples">Samples</h2>
<p>The first and the last that were scored, with the special tokens that were sampled.</p>
<div class="samples">
{% for sample in samples %}<div class="sample"><p>version {{ sample.version }}, {{ sample.reward }},
{{ sample.rollout_id }}</p>
{% for who, pieces in sample.turns %}<pre><span class="special">{{ who }}: </span>
{%- for text, special in pieces %}<span{% if special %} class="special"{% endif %}>{{ text }}</span>{% endfor %}</pre>
{% endfor %}</div>
{% endfor %}</div>
{% endif %}
{% if settings %}
<h2 id="settings">Settings</h2>
<p>Those that are not as they are by default; config.toml in the run folder has all.</p>
<dl>
{% for name, value in settings %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
{% endif %}
</body>
</html>
""")


THEME = """
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function paint() {
  const [ink, rule] = dark.matches ? ["#ddd", "#3a3d42"] : ["#333", "#e3e3e3"];
  for (const figure of document.querySelectorAll(".plotly-graph-div")) {
    if (!figure.data) continue;
    const change = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink,
                    "hoverlabel.bgcolor": dark.matches ? "#26292e" : "#fff"};
    for (const axis of ["xaxis", "yaxis", "yaxis2"])
      for (const line of ["gridcolor", "zerolinecolor", "linecolor"])
        if (figure.layout[axis]) change[axis + "." + line] = rule;
    const inked = figure.data.flatMap((line, place) =>
      ["#333333", "#dddddd"].includes(line.line.color) ? [place] : []);
    if (inked.length) Plotly.restyle(figure, {"line.color": dark.matches ? "#dddddd" : "#333333"}, inked);
    Plotly.relayout(figure, change);
  }
}
dark.addEventListener("change", paint);
window.addEventListener("load", paint);
"""
"""Light or dark, as the reader's system is; lines in INK change with it."""


def write_page(
    history: History,
    *,
    run: str,
    folder: Path,
    settings: Sequence[tuple[str, str]] = (),
    samples: Sequence[ShownSample] = (),
) -> Path:
    """index.html in the folder, a few megabytes, most of them the library that draws it."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    names = sorted({result.evaluation for result in history.evaluations})
    page = PAGE.render(
        run=run,
        subtitle=subtitle(history),
        library=Markup(get_plotlyjs()),
        names=names,
        theme=Markup(THEME),
        settings=settings,
        samples=samples,
        sections=[
            {"id": "steps", "title": "Over steps", "figures": [*_figures(history, over_steps(history), "steps")]},
            {"id": "time", "title": "Over time", "figures": [*_figures(history, over_time(history), "time")]},
        ],
        rows=_rows(history, names),
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


def _rows(history: History, names: Sequence[str]) -> list[tuple[int, list[str]]]:
    results = {(one.name.version, one.evaluation): one for one in history.evaluations}
    return [
        (version, [mean_text(results[version, name]) if (version, name) in results else "-" for name in names])
        for version in sorted({version for version, _ in results})
    ]


def _figures(history: History, axis: Axis, section: str) -> Iterator[Any]:
    from markupsafe import Markup
    from plotly.io import to_html

    for place, panel in enumerate(panels(history, axis)):
        if panel.lines or not panel.optional:
            yield Markup(
                to_html(  # which writes no < of ours into its script
                    _figure(panel, axis),
                    full_html=False,
                    include_plotlyjs=False,
                    div_id=f"{section}-{place}",
                    config={"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]},
                )
            )


def _figure(panel: Panel, axis: Axis) -> Any:
    from plotly.graph_objects import Figure

    left = [line for line in panel.lines if not line.right][:MAX_LINES]
    right = [line for line in panel.lines if line.right]
    values = np.concatenate([line.y for line in left]) if left else np.empty(0)
    is_log = panel.log_if_wide and goes_wide(values)
    least = log_view(values)[0] if is_log else -math.inf
    figure = Figure()
    for place, line in enumerate([*left, *right]):
        for drawn, style in _drawn(line, axis, -math.inf if line.right else least):
            figure.add_scatter(
                x=drawn.x,
                y=drawn.y,
                name=line.label or panel.title,
                yaxis="y2" if line.right else "y",
                line={"color": line.color or COLORS[place % len(COLORS)], "dash": line.dash, "width": 1.8},
                fillcolor=_pale(line.color) if line.area and line.color else None,
                **style,
            )
    for places, dash in ((axis.resumes, "dot"), (axis.stages, "solid")):
        for x in places[-MAX_MARKS:]:
            figure.add_vline(x=float(x), line={"color": "#bbbbbb", "width": 1, "dash": dash})
    limits = [math.log10(one) for one in log_view(values)] if is_log else view(left)
    rest = sum(not line.right for line in panel.lines) - len(left)
    title = panel.title + (f" (+{rest} more lines)" if rest else "" if panel.lines else f": {panel.empty}")
    figure.update_layout(
        template="plotly_white",
        height=320,
        margin={"l": 55, "r": 55, "t": 45, "b": 40},
        hovermode="x unified",
        title={"text": title, "font": {"size": 15}, "x": 0.01},
        showlegend=len(panel.lines) > 1,
        legend={"orientation": "h", "y": -0.2},
        xaxis={"title": {"text": axis.label, "font": {"size": 11}}},
        yaxis={
            "title": {"text": panel.unit, "font": {"size": 11}},
            "type": "log" if is_log else "linear",
            "rangemode": "tozero" if panel.from_zero else "normal",
            "range": limits,
        },
        yaxis2={
            "title": {"text": panel.right_unit, "font": {"size": 11}},
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
            "tickmode": "auto",
            "automargin": True,
        },
    )
    if not panel.lines:
        figure.update_xaxes(visible=False).update_yaxes(visible=False)
    return figure


def _pale(color: str) -> str:
    """As the pictures fill areas, on light and on dark."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.45)"


def _drawn(line: Line, axis: Axis, least: float) -> Iterator[tuple[Line, dict[str, Any]]]:
    """A line, or its running mean with the values themselves faintly behind it; of an area the mean alone. Values below
    `least` are left out."""
    width = window(len(line.y)) if line.smooth else 1
    if line.area:
        line = replace(line, y=smoothed_by_stage(line, line.y, width, axis.stages))
        yield thinned(line), {"mode": "none", "stackgroup": "areas"}
        return
    if width > 1:
        yield above(thinned(line), least), {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip", "mode": "lines"}
        line = replace(line, y=smoothed_by_stage(line, line.y, width, axis.stages))
    yield above(thinned(line), least), {"mode": "lines+markers" if len(line.x) <= NUM_MARKED else "lines"}


def thinned(line: Line) -> Line:
    """Itself, or the means of MAX_POINTS equal parts."""
    if len(line.x) <= MAX_POINTS:
        return line
    x, y = (np.asarray([part.mean() for part in np.array_split(values, MAX_POINTS)]) for values in (line.x, line.y))
    return replace(line, x=x, y=y)
