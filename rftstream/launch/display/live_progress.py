"""The progress of a run as a live view in a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rftstream.algorithms.learning_signal import find_no_signal
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.launch.display.phases import PhaseLine
from rftstream.launch.display.progress_text import (
    SPARKLINE_WIDTH,
    evaluation_line,
    paused_line,
    phases_of,
    rate_parts,
    sample_line,
    sparkline,
)
from rftstream.launch.display.watch import Watch
from rftstream.launch.supervisor import Slot
from rftstream.queries.formatting import duration, plural

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

REFRESH_S = 0.5
BAR_WIDTH = 40
_LABEL_WIDTH = len("evaluation")


class LiveProgress:
    """A ProgressView that redraws a table in a terminal, at most every REFRESH_S seconds."""

    def __init__(self, watch: Watch, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._watch = watch
        self._live = Live(console=Console(file=stream), auto_refresh=False, transient=False)
        self._live.start()
        self._next_at = 0.0

    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """Take the news, and redraw the table if it is due."""
        self._watch.absorb(news)
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + REFRESH_S
            self._watch.look()
            self._draw()

    def note(self, text: str) -> None:
        """Print a line above the table."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draw the table a last time, and leave it on the terminal."""
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._live.update(live_view(self._watch, self._live.console.width), refresh=True)


def live_view(watch: Watch, width: int = 120) -> Table:
    """Return the table that a LiveProgress draws. `width` is the terminal's, in columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _live_rows(watch, width - max(len(watch.title), _LABEL_WIDTH) - 2):
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


def _live_rows(watch: Watch, width: int) -> list[tuple[str, Text | str]]:
    from rich.text import Text

    curve = watch.observer.curve
    metrics = curve.last.metrics if curve.last else {}
    rows: list[tuple[str, Text | str]] = [(watch.title, _head(watch))]
    rows += [(phase.name, _bar(phase, width)) for phase in phases_of(watch)]
    rewards = curve.rewards()
    if rewards:
        drawn = sparkline(rewards, max(1, min(SPARKLINE_WIDTH, width - 8)))
        rows.append(("reward", Text.assemble((f"{rewards[-1]:.3f} ", "bold"), (drawn, "green"))))
    shown = [
        ("staleness", "staleness_mean", ".1f"),
        ("loss", "loss", ".4f"),
        ("entropy", "entropy", ".3f"),
        ("length", "length_mean", ".0f"),
        ("grad norm", "grad_norm", ".3g"),
    ]
    if parts := [f"{text} {metrics[name]:{form}}" for text, name, form in shown if name in metrics]:
        rows.append(("batch", "   ".join(parts)))
    if (no_signal := find_no_signal(metrics, watch.config)) is not None:
        rows.append(("warning", Text(no_signal.to_text(), "yellow")))
    rows += [("look at", Text(f"{sign.subject or 'rewards'}: {sign.text}", "yellow")) for sign in watch.signs]
    rows += [("edited", Text(line, "yellow")) for line in watch.edited]
    if (paused := paused_line(watch)) is not None:
        rows.append(("warning", Text(paused, "yellow")))
    if watch.standstill is not None:
        rows.append(("warning", Text(watch.standstill.to_text(), "yellow")))
    rows += [("warning", Text(one.to_text(), "yellow")) for one in watch.failing]
    if rates := watch.rates():
        rows.append(("rates", "   ".join(rate_parts(rates))))
    for _, result in watch.observer.evaluations.values():
        rows.append(("evaluation", evaluation_line(result).removeprefix("evaluation ")))
    rows.append(("workers", _workers(watch.slots)))
    if watch.sample is not None:
        rows.append(("sample", sample_line(watch.sample).removeprefix("sample ")))
    return rows


def _head(watch: Watch) -> str:
    """Return how long the run has been watched, how long it will take, and where it can be seen."""
    text = duration(time.monotonic() - watch.began, exact=True)
    if left := watch.seconds_left():
        text += f", {duration(left, exact=True)} left"
    return f"{text}   {watch.studio}" if watch.studio else text


def _bar(phase: PhaseLine, width: int) -> Text:
    """Return a phase with a bar of the room that its words leave."""
    from rich.text import Text

    if phase.total is None:
        return Text(phase.text)
    room = max(0, min(BAR_WIDTH, width - len(phase.text) - 2))
    done = min(room, room * phase.done // max(1, phase.total))
    return Text.assemble(("━" * done, "cyan"), ("━" * (room - done), "dim"), "  " if room else "", phase.text)


def _workers(slots: Sequence[Slot]) -> Text:
    from rich.text import Text

    styles = {"running": "green", "to start": "yellow", "failed": "red", "fenced": "yellow"}
    text = Text()
    for slot in slots:
        restarts = f" ({plural(slot.restarts, 'restart')})" if slot.restarts else ""
        state = "" if slot.state == "running" else f" {slot.state}"
        text.append(f"{slot.process}{state}{restarts}", styles.get(slot.state, "dim"))
        text.append("  ")
    return text
