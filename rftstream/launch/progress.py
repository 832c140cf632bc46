"""The progress of a run as people see it: a live view in a terminal, plain lines elsewhere. Reads the log only."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rftstream.algorithms.learning_signal import find_no_signal
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import DesiredState
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import ContractError, TransportError
from rftstream.launch.supervisor import Slot
from rftstream.models.rendering import Renderer, joined, pieces_of_turns
from rftstream.queries.standstill import Standstill, find_standstill, look_at_movement
from rftstream.queries.workers import ask_workers
from rftstream.roles.buffer import BUFFER
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.folder import RunFolder
from rftstream.runs.observer import Observer
from rftstream.transport.base import Transport

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

REFRESH_S = 0.5
LAG_EVERY_S = 2.0
SAMPLE_EVERY_S = 20.0
STANDSTILL_EVERY_S = 30.0
PLAIN_EVERY_S = 5.0
RATE_OVER_S = 60.0
SPARKLINE_WIDTH = 48
BAR_WIDTH = 40
LAGS = {topic: spec.name for spec in (EXPLORER, VERIFIER, BUFFER) for topic in spec.consumes}
"""Topic -> the group whose lag is shown; `verified` holds the open groups, too."""

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_CHARACTERS = 160
_LABEL_WIDTH = len("evaluation")


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion as somebody reads it."""

    prompt: str
    completion: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """Over the last steps."""

    steps_per_s: float
    rollouts_per_s: float
    tokens_per_s: float


class ProgressView(Protocol):
    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """Called often; draws as seldom as it needs to."""

    def note(self, text: str) -> None:
        """Something happened that a person should know."""

    def close(self) -> None: ...


class Onlooker:
    """A stream that somebody may look at: that nobody reads it any more, or that its disk is full, ends no run. What
    cannot be written is left out, and `say` is told so once."""

    def __init__(self, stream: TextIO, say: Callable[[str], None]) -> None:
        self._stream = stream
        self._say: Callable[[str], None] | None = say

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
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


class Watch:
    """What both views show, looked up no more often than it is worth."""

    def __init__(
        self,
        config: RunConfig,
        transport: Transport,
        observer: Observer,
        slots: Sequence[Slot],
        *,
        folder: RunFolder,
        renderer: Renderer | None = None,
    ) -> None:
        """`renderer`: shows completions with their special tokens."""
        self.config = config
        self.observer = observer
        self.slots = slots
        self.title = folder.run_id
        self.began = time.monotonic()
        self.evaluations: dict[str, EvalResult] = {}
        self.sample: Sample | None = None
        self.lags: dict[str, int] = {}
        self.standstill: Standstill | None = None
        self._folder = folder
        self._moving_since = time.time()
        """Before it, it was not to move: it had not been begun here, or it was paused."""
        self._standstill_at = time.monotonic() + STANDSTILL_EVERY_S
        self._transport = transport
        self._renderer = renderer
        self._lag_at = 0.0
        self._sample_at = time.monotonic() + 1.0
        self._partition = 0

    @property
    def steps(self) -> int | None:
        """Of the whole run, where that is known."""
        ended = self.observer.control.ended
        counted = ended.batches if ended is not None else None
        return min(filter(None, (self.config.steps, counted)), default=None)

    def absorb(self, news: Sequence[StepRecord | EvalResult]) -> None:
        for one in news:
            if isinstance(one, EvalResult):
                self.evaluations[one.evaluation] = one

    def look(self) -> None:
        now = time.monotonic()
        try:
            if now >= self._lag_at:
                self._lag_at = now + LAG_EVERY_S
                admin = self._transport.admin
                self.lags = {topic: sum(admin.lag(group, topic).values()) for topic, group in LAGS.items()}
            if now >= self._sample_at:
                self._sample_at = now + SAMPLE_EVERY_S
                self.sample = self._newest_completion() or self.sample
            if now >= self._standstill_at:
                self._standstill_at = now + STANDSTILL_EVERY_S
                self.standstill = self._look_for_standstill()
        except TransportError:
            pass  # the next look may do better; looking on must not end a run

    def rates(self) -> Rates | None:
        recent = self.observer.curve.recent
        if len(recent) < 2:
            return None
        since = recent[-1].recorded_at - RATE_OVER_S
        steps = [step for step in recent if step.recorded_at >= since]
        seconds = steps[-1].recorded_at - steps[0].recorded_at
        if seconds <= 0:
            return None
        counted = steps[1:]
        return Rates(
            len(counted) / seconds,
            sum(step.metrics.get("rollouts", 0.0) for step in counted) / seconds,
            sum(step.metrics.get("tokens", 0.0) for step in counted) / seconds,
        )

    def seconds_left(self) -> float | None:
        if self.observer.control.finished is not None:
            return None
        run, curve, rates = self.config.run, self.observer.curve, self.rates()
        left = []
        if self.steps and rates:
            left.append(max(0, self.steps - curve.version) / rates.steps_per_s)
        if run.hours and (manifest := self.observer.control.manifest):
            left.append(max(0.0, manifest.created_at + run.hours * 3600 - time.time()))
        return min(left) if left else None

    def _look_for_standstill(self) -> Standstill | None:
        control = self.observer.control
        paused = control.state is not None and control.state.state is DesiredState.paused
        if paused or control.finished is not None:
            self._moving_since = time.time()
            return None
        return find_standstill(
            look_at_movement(
                self.config,
                self._transport,
                steps=tuple(self.observer.curve.recent),
                lag=self.lags,
                workers=ask_workers(self._folder),
                now=time.time(),
                began_at=self._moving_since,
            )
        )

    def _newest_completion(self) -> Sample | None:
        """Of one partition after the other, the last record of `verified`."""
        ends = {place: end for place, end in self._transport.admin.end_offsets("verified").items() if end > 0}
        if not ends:
            return None
        self._partition += 1
        place = sorted(ends)[self._partition % len(ends)]
        reader = self._transport.reader({place: max(0, ends[place] - 3)})  # some offsets may be gaps
        try:
            for record in reversed(reader.poll(3)):
                message = codec.from_record(record) if record.value is not None else None
                if isinstance(message, VerifiedRollout) and message.rollout is not None and message.rollout.problem:
                    rollout = message.rollout
                    shown = pieces_of_turns(self._renderer, rollout.turns, rollout.segments)
                    said = [
                        joined(one) for one, turn in zip(shown, rollout.turns, strict=True) if turn.role == "assistant"
                    ]
                    return Sample(
                        prompt=message.rollout.problem.messages[-1].content,
                        completion="\n".join(said),
                        reward=message.verdict.reward if message.verdict else None,
                    )
        except ContractError:
            pass
        finally:
            reader.close()
        return None


# ------------------------------------------------------------------------------------------------ plain lines


class PlainProgress:
    def __init__(self, watch: Watch, stream: TextIO) -> None:
        self._watch = watch
        self._stream = stream
        self._next_at = 0.0
        self._version = -1
        self._sample: Sample | None = None
        self._still_said_s = 0.0

    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        self._watch.absorb(news)
        for one in news:
            if isinstance(one, EvalResult):
                self._print(evaluation_line(one))
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + PLAIN_EVERY_S
            self._watch.look()
            if self._watch.observer.curve.version != self._version:
                self._version = self._watch.observer.curve.version
                self._print(status_line(self._watch))
            if self._watch.sample is not self._sample:
                self._sample = self._watch.sample
                if self._sample is not None:
                    self._print(sample_line(self._sample))
            self._say_standstill(self._watch.standstill)

    def _say_standstill(self, found: Standstill | None) -> None:
        """At once, and whenever it has lasted twice as long."""
        if found is None:
            self._still_said_s = 0.0
        elif (lasts_s := max(found.still_s or 0.0, found.behind_s or 0.0)) >= 2 * self._still_said_s:
            self._still_said_s = lasts_s
            self._print(found.to_text())

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        if self._watch.observer.curve.version != self._version:
            self._print(status_line(self._watch))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class NoProgress:
    """Only what a person must know."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


def status_line(watch: Watch) -> str:
    curve, steps = watch.observer.curve, watch.steps
    parts = [f"step {curve.version}" + (f"/{steps}" if steps else "")]
    if curve.last is None:
        return f"{parts[0]}  waiting for the first batch"
    metrics = curve.last.metrics
    for name, text in (
        ("reward", "reward {:.3f}"),
        ("staleness_mean", "staleness {:.1f}"),
        ("loss", "loss {:.4f}"),
        ("held_out_loss", "held out {:.4f}"),
    ):
        if name in metrics:
            parts.append(text.format(metrics[name]))
    if (no_signal := find_no_signal(metrics, watch.config)) is not None:
        parts.append(no_signal.headline)
    if rates := watch.rates():
        parts += _rate_parts(rates)
    if (left := watch.seconds_left()) is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def _rate_parts(rates: Rates) -> list[str]:
    rollouts = [f"{rates.rollouts_per_s:.0f} rollouts/s"] if rates.rollouts_per_s else []
    return [*rollouts, f"{rates.tokens_per_s:.0f} tokens/s", f"{rates.steps_per_s * 60:.1f} steps/min"]


def evaluation_line(result: EvalResult) -> str:
    shown = {name: value for name, value in result.metrics.items() if name == "mean" or name.startswith("pass@")}
    metrics = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
    best = "  (best so far)" if result.best else ""
    return f"evaluation {result.evaluation} of version {result.name.version}: {metrics}{best}"


def sample_line(sample: Sample) -> str:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    return f"sample ({reward}): {shortened(sample.prompt)!r} -> {shortened(sample.completion)!r}"


def shortened(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Means over `width` stretches, drawn between the smallest and the largest."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


# ------------------------------------------------------------------------------------------------ live


class LiveProgress:
    def __init__(self, watch: Watch, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._watch = watch
        self._live = Live(console=Console(file=stream), auto_refresh=False, transient=False)
        self._live.start()
        self._next_at = 0.0

    def update(self, news: Sequence[StepRecord | EvalResult]) -> None:
        self._watch.absorb(news)
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + REFRESH_S
            self._watch.look()
            self._draw()

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._live.update(live_view(self._watch, self._live.console.width), refresh=True)


def live_view(watch: Watch, width: int = 120) -> Table:
    """`width`: columns of the terminal."""
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
    rows: list[tuple[str, Text | str]] = [(watch.title, _bar(watch, width))]
    rewards = curve.rewards()
    if rewards:
        rows.append(
            (
                "reward",
                Text.assemble(
                    (f"{rewards[-1]:.3f} ", "bold"),
                    (sparkline(rewards, max(1, min(SPARKLINE_WIDTH, width - 8))), "green"),
                ),
            )
        )
    shown = [
        ("staleness", "staleness_mean", ".1f"),
        ("loss", "loss", ".4f"),
        ("entropy", "entropy", ".3f"),
        ("length", "length_mean", ".0f"),
        ("grad norm", "grad_norm", ".3g"),
    ]
    if parts := [f"{text} {metrics[name]:{form}}" for text, name, form in shown if name in metrics]:
        rows.append(("training", "   ".join(parts)))
    if (no_signal := find_no_signal(metrics, watch.config)) is not None:
        rows.append(("warning", Text(no_signal.to_text(), "yellow")))
    if watch.standstill is not None:
        rows.append(("warning", Text(watch.standstill.to_text(), "yellow")))
    if rates := watch.rates():
        rows.append(("rates", "   ".join(_rate_parts(rates))))
    if watch.lags:
        rows.append(("waiting", "   ".join(f"{topic} {lag}" for topic, lag in watch.lags.items())))
    for result in watch.evaluations.values():
        rows.append(("evaluation", evaluation_line(result).removeprefix("evaluation ")))
    rows.append(("workers", _workers(watch.slots)))
    if watch.sample is not None:
        rows.append(("sample", sample_line(watch.sample).removeprefix("sample ")))
    return rows


def _bar(watch: Watch, width: int) -> Text:
    from rich.text import Text

    curve, steps = watch.observer.curve, watch.steps
    took = f"  {duration(time.monotonic() - watch.began)}"
    if left := watch.seconds_left():
        took += f", {duration(left)} left"
    text = Text.assemble((f"step {curve.version}", "bold"))
    if steps:
        text.append(f" of {steps} ")
        room = max(0, min(BAR_WIDTH, width - len(text) - len(took)))
        done = min(room, room * curve.version // steps)
        text.append("━" * done, "cyan").append("━" * (room - done), "dim")
    return text.append(took)


def _workers(slots: Sequence[Slot]) -> Text:
    from rich.text import Text

    styles = {"running": "green", "to start": "yellow", "failed": "red", "fenced": "yellow"}
    text = Text()
    for slot in slots:
        restarts = f" ({slot.restarts} restarts)" if slot.restarts else ""
        state = "" if slot.state == "running" else f" {slot.state}"
        text.append(f"{slot.process}{state}{restarts}", styles.get(slot.state, "dim"))
        text.append("  ")
    return text


def open_progress(kind: str, watch: Watch, stream: TextIO) -> ProgressView:
    """auto: live where somebody watches a terminal."""
    if kind == "auto":
        kind = "live" if stream.isatty() else "plain"
    return (
        LiveProgress(watch, stream)
        if kind == "live"
        else (PlainProgress(watch, stream) if kind == "plain" else NoProgress(stream))
    )
