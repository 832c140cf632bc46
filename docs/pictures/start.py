"""Draws start.svg: the way of a config through the start of a run, process by process, with the modules passed."""

from __future__ import annotations

from pictures.flow import GREY, LEFT, ROW, SANS, STRIP, WIDTH, Role, draw_arrow, draw_row, draw_strip, draw_text

PROCESSES = (
    Role(
        "run",
        "#4d7cc3",
        (
            ("config/", "loader"),
            ("launch/", "start"),
            ("preflight/", "plan"),
            ("preflight/", "folder_choice"),
            ("launch/", "session"),
            ("launch/", "supervisor"),
        ),
        "request",
        "command line, modules and log file of a worker",
    ),
    Role(
        "zygote",
        "#7a6cc4",
        (("launch/", "zygote"),),
        "fork",
        "an interpreter with everything imported",
    ),
    Role(
        "worker",
        "#2f8f83",
        (
            ("launch/", "host"),
            ("preflight/", "plan"),
            ("runs/", "services"),
            ("workers/", "explorer"),
            ("service/loops/", "concurrent"),
        ),
    ),
)
"""Each process with its modules, in the order in which a start enters them. Under `out` stands what it gives to the
next one."""


def draw() -> str:
    """Return the picture as SVG."""
    top = 30
    tops = [top + index * (ROW + STRIP) for index in range(len(PROCESSES))]
    height = tops[-1] + ROW + 14
    parts = [
        draw_text(LEFT + 4, 18, "run files, environment and --set come in here", size=11, colour=GREY),
        draw_arrow([(LEFT + 56, 22), (LEFT + 56, top)]),
    ]
    for process, y in zip(PROCESSES, tops, strict=True):
        parts += draw_row(process, y)
        if process.out:
            parts += draw_strip(process, y + ROW, hop="another process")
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{SANS}" role="img">\n<title>From the run file to the loop of a role: three processes</title>\n'
        f"{body}\n</svg>\n"
    )
