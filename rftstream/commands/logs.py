"""The command `logs` shows what the processes of a run logged on this machine."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rftstream.commands.options import command, json_option, layers_argument, run_here_argument, say
from rftstream.error_kinds import rough_kind_of
from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from rftstream.launch.log_files import LogEvent

MOST_TOLD = 1000
"""Newest warnings and errors that are remembered, so that none is shown twice."""
MOST_FOLDED = 2000
"""Newest events of each process among which alike ones are found."""
FEW = 3
"""Alike events that are shown one by one."""
LOOK_EVERY_S = 0.5


@command(
    "rftstream logs examples/runs/arithmetic",
    "rftstream logs examples/runs/arithmetic --role trainer --last 100",
    "rftstream logs examples/runs/arithmetic --troubles",
    "rftstream logs examples/runs/arithmetic --follow",
)
@run_here_argument
@layers_argument
@click.option("--role", "roles", metavar="ROLE", multiple=True, help="Only processes of this role; `run`: the command.")
@click.option("--last", type=click.IntRange(1), default=40, show_default=True, help="Number of newest events.")
@click.option("--troubles", is_flag=True, help="Only warnings and errors.")
@click.option("--follow", is_flag=True, help="Go on with what comes, until ctrl-C.")
@json_option
def logs(
    run: Path,
    layers: tuple[Path, ...],
    roles: tuple[str, ...],
    last: int,
    troubles: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Show the logs of the run's processes on this machine, all roles together, in the order of time.

    Of more than 3 events that differ only in ids and numbers the newest is shown, with the number of the others;
    `--json` shows each. The files are in RUN/logs, one for each process. A process on another host has its file there.
    """
    from rftstream.config.parts import registry
    from rftstream.launch.log_files import TROUBLES, LogFile, find_logs, in_order, told_once
    from rftstream.queries.formatting import plural
    from rftstream.runs.folder import find_run

    folder = find_logs(run, layers) or find_run(run, layers)[0].logs
    opened: dict[Path, LogFile] = {}
    told: deque[str] = deque(maxlen=MOST_TOLD)

    def new_events(newest: int | None = None) -> list[LogEvent]:
        for path in sorted(folder.glob("*.log")):
            if path not in opened and (not roles or path.stem.partition("-")[0] in roles):
                opened[path] = LogFile(path, newest)
        events = told_once(in_order(list(opened.values())), told)
        return [event for event in events if not troubles or event.level in TROUBLES]

    def show(event: LogEvent) -> None:
        click.echo(
            json.dumps({"time": event.moment, "level": event.level, "text": event.text}) if as_json else event.text
        )

    events = new_events(None if troubles else last if as_json else max(last, MOST_FOLDED))
    newest = (events if as_json else folded(events))[-last:]
    for event in newest:
        show(event)
    if troubles and opened and not newest:
        say(f"no warning or error in {plural(len(opened), 'log')}")
    if not opened:
        found = sorted({path.stem.partition("-")[0] for path in folder.glob("*.log")} - {"zygote"})
        asked = f" of {', '.join(roles)} ({registry.suggest(roles[0], found)})" if roles and found else ""
        raise ConfigError(
            f"{folder}: no logs{asked}, expected those of a process that ran on this machine; processes of other hosts "
            "have theirs there, and `rftstream status RUN` names these"
        )
    with suppress(KeyboardInterrupt):
        while follow:
            time.sleep(LOOK_EVERY_S)
            for event in new_events():
                show(event)


def folded(events: Sequence[LogEvent]) -> list[LogEvent]:
    """Return the events, of more than FEW alike ones the newest alone, which says how many they are since when."""
    kinds: dict[tuple[str, str, str], list[LogEvent]] = {}
    for event in events:
        kinds.setdefault(kind_of_event(event), []).append(event)
    shown: list[LogEvent] = []
    for event in events:
        alike = kinds[kind_of_event(event)]
        if len(alike) <= FEW:
            shown.append(event)
        elif event is alike[-1]:
            more = f" ({len(alike) - 1:,} more like it since {alike[0].moment})"
            first, *rest = event.text.split("\n")
            shown.append(replace(event, text="\n".join([first + more, *rest])))
    return shown


def kind_of_event(event: LogEvent) -> tuple[str, str, str]:
    """Return what alike events have in common: the process, the level, and the text without ids and numbers."""
    return event.process, event.level, rough_kind_of(event.message)
