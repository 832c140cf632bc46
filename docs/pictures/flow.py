"""Draws flow.svg: the way of a message from taskset to weights, role by role, with the modules that it passes.

The colours are readable on light and on dark pages, so there is one picture for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 900
LEFT, RIGHT = 86, 814
"""Sides of the roles' rows; outside run the topics that lead back."""
ROW, STRIP = 66, 48
"""Heights of a role's row and of the strip of log between two of them."""
GREY, LINE, PAPER, INK = "#78818b", "#8c959f", "#f3f5f8", "#1f2328"
HOP = "service, codec, transport"
"""What every message passes between two roles."""
SANS = "-apple-system,'Segoe UI','Helvetica Neue','DejaVu Sans',Arial,sans-serif"
MONO = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"


@dataclass(frozen=True)
class Role:
    name: str
    colour: str
    modules: tuple[tuple[str, str], ...]
    """Folder and name, in the order in which a message passes them."""
    out: str = ""
    """The topic that it writes for the next role."""
    said: str = ""
    """What travels there."""


ROLES = (
    Role(
        "feeder",
        "#4d7cc3",
        (
            ("roles/feeder/", "admission"),
            ("data/tasksets/", "files"),
            ("models/", "rendering"),
            ("roles/feeder/", "step"),
        ),
        "tasks",
        "a problem, its group, sampling, seed",
    ),
    Role(
        "explorer",
        "#2f8f83",
        (
            ("roles/explorer/", "step"),
            ("roles/explorer/", "turn_loop"),
            ("environments/", "single_turn"),
            ("models/", "rendering"),
            ("policies/hf/", "policy"),
            ("policies/", "sampling"),
        ),
        "rollouts",
        "turns, tokens, logprobs, versions",
    ),
    Role(
        "verifier",
        "#7a6cc4",
        (("roles/verifier/", "step"), ("rewards/", "scorer"), ("rewards/", "child"), ("rewards/", "simple")),
        "verified",
        "the rollout and its verdict, or why it has none",
    ),
    Role(
        "buffer",
        "#b0742b",
        (
            ("roles/buffer/", "step"),
            ("roles/buffer/", "groups"),
            ("roles/buffer/", "bodies"),
            ("roles/buffer/", "tally"),
        ),
        "batches",
        "experiences, and a manifest that closes the batch",
    ),
    Role(
        "trainer",
        "#bb5570",
        (
            ("roles/trainer/", "assembly"),
            ("roles/trainer/", "step"),
            ("algorithms/", "grpo, core/"),
            ("backends/torch/", "backend"),
            ("weights/", "publisher"),
            ("weights/stores/", "store"),
        ),
        "weights",
        "a version is in the object store",
    ),
    Role(
        "evaluator",
        "#5c7a99",
        (
            ("weights/", "follower"),
            ("roles/evaluator/", "step"),
            ("roles/explorer/", "turn_loop"),
            ("policies/hf/", "policy"),
            ("rewards/", "scorer"),
        ),
    ),
)


def draw() -> str:
    top = 30
    tops = [top + index * (ROW + STRIP) for index in range(len(ROLES))]
    height = tops[-1] + ROW + 14
    middle = {role.name: y + ROW / 2 for role, y in zip(ROLES, tops, strict=True)}
    strips = {role.out: y + ROW + STRIP / 2 for role, y in zip(ROLES, tops, strict=True) if role.out}
    parts = [
        draw_text(LEFT + 4, 18, "a taskset's problem comes in here", size=11, colour=GREY),
        draw_arrow([(LEFT + 56, 22), (LEFT + 56, top)]),
    ]
    for role, y in zip(ROLES, tops, strict=True):
        parts += draw_row(role, y)
        if role.out:
            parts += draw_strip(role, y + ROW)
    parts += _back(
        "outcomes",
        [(LEFT, middle["buffer"]), (54, middle["buffer"]), (54, middle["feeder"] + 8), (LEFT, middle["feeder"] + 8)],
        54,
        strips["rollouts"] + 6,
    )
    parts.append(draw_arrow([(54, middle["explorer"]), (LEFT, middle["explorer"])]))
    parts += _back(
        "steps",
        [
            (LEFT, middle["trainer"] - 8),
            (22, middle["trainer"] - 8),
            (22, middle["feeder"] - 8),
            (LEFT, middle["feeder"] - 8),
        ],
        22,
        strips["verified"],
    )
    parts += _back(
        "evals",
        [
            (LEFT, middle["evaluator"]),
            (40, middle["evaluator"]),
            (40, middle["trainer"] + 8),
            (LEFT, middle["trainer"] + 8),
        ],
        40,
        strips["weights"],
    )
    side = 852
    parts += _back(
        "weights",
        [
            (RIGHT, strips["weights"]),
            (side, strips["weights"]),
            (side, middle["explorer"]),
            (RIGHT, middle["explorer"]),
        ],
        side,
        strips["verified"],
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{SANS}" role="img">\n<title>From taskset to weights: six roles, and the log between them'
        f"</title>\n{body}\n</svg>\n"
    )


def draw_row(role: Role, y: float) -> list[str]:
    """Draw a role with its modules from left to right."""
    parts = [
        f'<rect x="{LEFT}" y="{y}" width="{RIGHT - LEFT}" height="{ROW}" rx="10" fill="{role.colour}" '
        f'fill-opacity="0.10" stroke="{role.colour}" stroke-width="1.4"/>',
        f'<rect x="{LEFT + 10}" y="{y + 17}" width="92" height="32" rx="7" fill="{role.colour}"/>',
        draw_text(LEFT + 56, y + 38, role.name, size=14, colour="#ffffff", anchor="middle", weight="600"),
    ]
    x, gap = LEFT + 128.0, 16.0 if len(role.modules) > 5 else 20.0
    width = (RIGHT - 12 - x - gap * (len(role.modules) - 1)) / len(role.modules)
    width = min(width, 140.0)
    for number, (folder, name) in enumerate(role.modules):
        if number:
            parts.append(draw_arrow([(x - gap + 2, y + ROW / 2), (x - 2, y + ROW / 2)], colour=role.colour))
        parts += [
            f'<rect x="{x:g}" y="{y + 13}" width="{width:g}" height="40" rx="6" fill="{PAPER}" '
            f'stroke="{role.colour}" stroke-opacity="0.55"/>',
        ]
        if folder:
            parts.append(draw_text(x + width / 2, y + 28, folder, size=10, colour=GREY, anchor="middle", mono=True))
        parts.append(
            draw_text(
                x + width / 2, y + (44 if folder else 37), name, size=11.5, colour=INK, anchor="middle", mono=True
            )
        )
        x += width + gap
    return parts


def draw_strip(role: Role, y: float, *, hop: str = HOP) -> list[str]:
    """Draw what leads from a role to the next one; `hop` stands at its right end."""
    centre, x = y + STRIP / 2, LEFT + 56
    return [
        f'<rect x="{LEFT}" y="{y + 11}" width="{RIGHT - LEFT}" height="{STRIP - 22}" fill="{LINE}" '
        'fill-opacity="0.16"/>',
        draw_arrow([(x, y), (x, y + STRIP)], colour=role.colour),
        *draw_pill(x, centre, role.out),
        draw_text(LEFT + 128, centre + 4, role.said, size=12, colour=GREY),
        draw_text(RIGHT - 12, centre + 4, hop, size=11, colour=GREY, anchor="end", mono=True),
    ]


def _back(topic: str, points: Sequence[tuple[float, float]], x: float, y: float) -> list[str]:
    """A topic that leads back, with its name written upwards beside the line."""
    width = 7.4 * len(topic) + 16
    return [
        draw_arrow(points),
        f'<g transform="translate({x:g} {y:g}) rotate(-90)">'
        f'<rect x="{-width / 2:g}" y="-11" width="{width:g}" height="22" rx="11" fill="{PAPER}" stroke="{LINE}"/>'
        f"{draw_text(0, 4, topic, size=12, colour=INK, anchor='middle', mono=True)}</g>",
    ]


def draw_pill(x: float, y: float, topic: str) -> list[str]:
    width = 7.4 * len(topic) + 20
    return [
        f'<rect x="{x - width / 2:g}" y="{y - 12:g}" width="{width:g}" height="24" rx="12" fill="{PAPER}" '
        f'stroke="{LINE}"/>',
        draw_text(x, y + 4, topic, size=12, colour=INK, anchor="middle", mono=True),
    ]


def draw_arrow(points: Sequence[tuple[float, float]], *, colour: str = LINE) -> str:
    """A line through the points with rounded corners and a head at its end."""
    (x0, y0), (x1, y1) = points[-2], points[-1]
    length = abs(x1 - x0) + abs(y1 - y0)
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    bx, by = x1 - 7 * dx, y1 - 7 * dy
    head = f"M{x1:g} {y1:g}L{bx - 4 * dy:g} {by - 4 * dx:g}L{bx + 4 * dy:g} {by + 4 * dx:g}Z"
    line = f"M{points[0][0]:g} {points[0][1]:g}"
    for before, corner, after in zip(points, points[1:-1], points[2:], strict=False):
        line += f"L{_toward(corner, before)}Q{corner[0]:g} {corner[1]:g} {_toward(corner, after)}"
    line += f"L{x1 - 5 * dx:g} {y1 - 5 * dy:g}"
    return f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/><path d="{head}" fill="{colour}"/>'


def _toward(corner: tuple[float, float], other: tuple[float, float], radius: float = 8.0) -> str:
    length = abs(other[0] - corner[0]) + abs(other[1] - corner[1])
    share = min(1.0, radius / length)
    return f"{corner[0] + (other[0] - corner[0]) * share:g} {corner[1] + (other[1] - corner[1]) * share:g}"


def draw_text(
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    colour: str,
    anchor: str = "start",
    mono: bool = False,
    weight: str = "400",
) -> str:
    family = f' font-family="{MONO}"' if mono else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}"{family}>{escape(text)}</text>'
    )
