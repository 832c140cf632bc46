"""The progress of a run for people: the kinds of views, and the plain view of lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.error_kinds import kind_of
from rftstream.launch.display.live_progress import LiveProgress
from rftstream.launch.display.progress_text import evaluation_line, paused_line, sample_line, status_line
from rftstream.launch.display.watch import Sample, Watch
from rftstream.queries.state.standstill import FailingTaskset, Standstill

PLAIN_EVERY_S = 5.0
SIGNS_AFTER_STEPS = 20
"""Steps before a sign gets a line, since many runs begin with completions that are cut off. `status`, the live view and
the studio show signs from the first step on."""


class ProgressView(Protocol):
    """The display of a run's progress. `open_progress` makes it. A session calls `update` often, `note` for single
    events, and `close` at the end."""

    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """Take the news since the last call. The session calls this often; the view draws no more often than it needs
        to."""

    def note(self, text: str) -> None:
        """Show a message to the person who watches."""

    def close(self) -> None:
        """Show the final state, and end the view."""


class Onlooker:
    """A stream that a person may watch. If its reader is gone or its disk is full, the run continues.

    Text that cannot be written is dropped, and `say` is called once.
    """

    def __init__(self, stream: TextIO, say: Callable[[str], None]) -> None:
        self._stream = stream
        self._say: Callable[[str], None] | None = say

    def write(self, text: str) -> int:
        """Write the text if possible, and return the number of characters."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> None:
        if (say := self._say) is not None:
            self._say = None
            say(f"progress cannot be shown: {error.strerror or error}; the run goes on, `rftstream status` shows it")


class PlainProgress:
    """A ProgressView that prints lines, for logs and files."""

    def __init__(self, watch: Watch, stream: TextIO) -> None:
        self._watch = watch
        self._stream = stream
        self._next_at = 0.0
        self._version, self._line = -1, ""
        self._studio: str | None = None
        self._sample: Sample | None = None
        self._paused: str | None = None
        self._still_said_s = 0.0
        self._signs_said: set[tuple[str, str]] = set()
        self._edited_said: frozenset[str] = frozenset()
        self._failing_said: dict[str, str] = {}
        """Taskset -> the kind of error that was last reported for it."""

    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """Print results of evaluations at once, and the state of the run at intervals."""
        self._watch.absorb(news)
        for message in news:
            if isinstance(message, EvalResult):
                self._print(evaluation_line(message))
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + PLAIN_EVERY_S
            self._watch.look()
            moved = self._say_status()
            self._say_pause()
            if moved and self._watch.sample != self._sample:
                self._sample = self._watch.sample
                if self._sample is not None:
                    self._print(sample_line(self._sample))
            self._say_standstill(self._watch.standstill)
            self._say_signs()
            self._say_edited()
            self._say_failing(self._watch.failing)

    def _say_status(self) -> bool:
        """Print a line if there is a new step or, before the first step, if a phase has moved. Return whether so."""
        version = self._watch.observer.curve.version
        line = status_line(self._watch)
        moved = version != self._version or (not version and line != self._line)
        if version < self._version:
            self._print(f"from the newest checkpoint: batches up to version {self._version:,} are trained again")
        if moved:
            self._version, self._line = version, line
            self._print(line)
        if self._watch.studio not in (None, self._studio):
            self._studio = self._watch.studio
            self._print(f"studio: {self._studio}")
        return moved

    def _say_pause(self) -> None:
        """Print that the run was paused, and that it goes on."""
        paused = paused_line(self._watch)
        if paused != self._paused:
            self._print(paused or "not paused any more")
            self._paused = paused

    def _say_signs(self) -> None:
        """Print each sign once while it holds."""
        if self._watch.observer.curve.num_steps < SIGNS_AFTER_STEPS:
            return
        signs = {(sign.kind, sign.subject): sign for sign in self._watch.signs}
        for key, sign in signs.items():
            if key not in self._signs_said:
                self._print(f"{sign.heading}: {sign.text}")
        self._signs_said = set(signs)

    def _say_edited(self) -> None:
        """Print once that the code of a module was edited."""
        for line in self._watch.edited:
            if line not in self._edited_said:
                self._print(f"edited: {line}")
        self._edited_said = frozenset(self._watch.edited)

    def _say_failing(self, failing: Sequence[FailingTaskset]) -> None:
        """Print that rollouts of a taskset fail, once for each kind of error."""
        for one in failing:
            if self._failing_said.get(one.taskset) != kind_of(one.error):
                self._failing_said[one.taskset] = kind_of(one.error)
                self._print(one.to_text())

    def _say_standstill(self, found: Standstill | None) -> None:
        """Print a standstill at once, and again each time its duration has doubled."""
        if found is None:
            self._still_said_s = 0.0
        elif (lasts_s := max(found.still_s or 0.0, found.behind_s or 0.0)) >= 2 * self._still_said_s:
            self._still_said_s = lasts_s
            self._print(found.to_text())

    def note(self, text: str) -> None:
        """Print a line."""
        self._print(text)

    def close(self) -> None:
        """Print the final state, unless it was printed already."""
        if self._watch.observer.curve.version != self._version:
            self._print(status_line(self._watch))

    def _print(self, line: str) -> None:
        print(self._watch.named(line), file=self._stream, flush=True)


class NoProgress(PlainProgress):
    """A ProgressView that prints only what a person must know."""

    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_progress(kind: str, watch: Watch, stream: TextIO) -> ProgressView:
    """Make the view that `kind` names; `auto` is live in a terminal and plain elsewhere."""
    if kind == "auto":
        kind = "live" if stream.isatty() else "plain"
    if kind == "live":
        return LiveProgress(watch, stream)
    return (PlainProgress if kind == "plain" else NoProgress)(watch, stream)
