"""Draws scale.svg: how busy brokers are with 100 to 10,000 explorers, by the model that is fitted to what was measured.

The model is benchmarks/_scale_model.py, what was measured is docs/measured/scale-large.json (`make bench ONLY=scale`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from benchmarks._scale_model import HEADROOM, PLAN, Load, costs, load

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 330, 62, 470, 40, 280
COUNTS = (100, 200, 500, 1_000, 2_000, 5_000, 10_000)
LOW, HIGH = 0.1, 1_000.0
"""Cores, at the ends of the vertical axis."""
GREY, LINE, INK = "#78818b", "#d0d7de", "#57606a"
SANS = "-apple-system,'Segoe UI','Helvetica Neue','DejaVu Sans',Arial,sans-serif"
LINES: dict[str, tuple[str, Callable[[Load], float]]] = {
    "all brokers": ("#0969da", lambda found: found.busy_cores),
    "... members that wait": ("#2f8f83", lambda found: found.waiting_cores),
    "... commits": ("#b0742b", lambda found: found.busy_cores - found.waiting_cores),
    "the group's coordinator": ("#bb5570", lambda found: found.coordinator_cores),
}


def draw() -> str:
    found = [load(replace(PLAN, explorers=count, partitions=2 * count), costs()) for count in COUNTS]
    shapes = [
        f'<text x="{LEFT}" y="20" fill="{GREY}">cores that are busy; {PLAN.places} rollouts of {PLAN.rollout_s:g} s '
        "at once in each explorer</text>"
    ]
    for power in range(round(math.log10(LOW)), round(math.log10(HIGH)) + 1):
        y = _y(10.0**power)
        shapes.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{LINE}"/>')
        shapes.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" fill="{INK}" text-anchor="end">{10.0**power:g}</text>')
    for count in (100, 1_000, 10_000):
        shapes.append(f'<text x="{_x(count):.1f}" y="{BOTTOM + 20}" fill="{INK}" text-anchor="middle">{count:,}</text>')
    shapes.append(
        f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 40}" fill="{GREY}" text-anchor="middle">explorers</text>'
    )
    limit = _y(PLAN.cores * HEADROOM)
    shapes.append(f'<path d="M{LEFT} {limit:.1f}H{RIGHT}" stroke="{GREY}" stroke-dasharray="5 4"/>')
    shapes.append(f'<text x="{RIGHT + 8}" y="{limit + 4:.1f}" fill="{GREY}">half of one broker</text>')
    ends: list[float] = []
    for name, (colour, value) in LINES.items():
        shapes.append(_line(found, colour, value))
        y = _y(value(found[-1])) + 4
        while any(abs(y - other) < 14 for other in ends):
            y += 1
        ends.append(y)
        shapes.append(f'<text x="{RIGHT + 8}" y="{y:.1f}" fill="{colour}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{SANS}" font-size="13">'
        + "".join(shapes)
        + "</svg>\n"
    )


def _line(found: list[Load], colour: str, value: Callable[[Load], float]) -> str:
    points = " ".join(f"{_x(count):.1f},{_y(value(one)):.1f}" for count, one in zip(COUNTS, found, strict=True))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _x(count: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log10(count / COUNTS[0]) / math.log10(COUNTS[-1] / COUNTS[0])


def _y(cores: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log10(max(LOW, cores) / LOW) / math.log10(HIGH / LOW)
