"""Draws weights.svg: how many times smaller than the weights a version is, beside the form that others publish.

The figures are those of docs/weights-format.md; `make bench ONLY=weights` measures them again.
"""

from __future__ import annotations

MEASURED = {
    "1e-6": (621, 207),
    "5e-6": (335, 89),
    "2e-5": (122, 30),
}
"""Learning rate -> times smaller: ours, gaps and new values."""
WIDTH, LEFT, BAR, GAP = 640, 150, 22, 26
SCALE = 400 / 700
OURS, OTHERS, GREY, INK = "#0969da", "#8c959f", "#78818b", "#57606a"
SANS = "-apple-system,'Segoe UI','Helvetica Neue','DejaVu Sans',Arial,sans-serif"


def draw() -> str:
    y, shapes = 34, []
    for lr, values in MEASURED.items():
        shapes.append(f'<text x="16" y="{y + BAR + 5}" fill="{INK}" font-weight="600">lr {lr}</text>')
        for value, colour, name in zip(values, (OURS, OTHERS), ("delta", "gaps + values"), strict=True):
            width = value * SCALE
            shapes.append(f'<rect x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR}" rx="3" fill="{colour}"/>')
            shapes.append(f'<text x="{LEFT + width + 8:.0f}" y="{y + 16}" fill="{INK}">{value}x {name}</text>')
            y += BAR + 3
        y += GAP
    title = (
        f'<text x="16" y="20" fill="{GREY}">times smaller than the full weights; SmolLM2-135M, bfloat16, AdamW</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="{SANS}" font-size="13">'
        + "".join([title, *shapes])
        + "</svg>\n"
    )
