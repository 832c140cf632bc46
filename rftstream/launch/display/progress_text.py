"""The words and numbers of the progress views."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rftstream.algorithms.learning_signal import find_no_signal
from rftstream.contracts.control import DesiredState
from rftstream.contracts.versions import EvalResult
from rftstream.launch.display.phases import PhaseLine, find_phases
from rftstream.launch.display.watch import Rates, Sample, Watch
from rftstream.queries.curves.evaluations import unscored_text
from rftstream.queries.formatting import duration, plural
from rftstream.queries.records.shown import LINE_END

SPARKLINE_WIDTH = 48
MANY_BATCHES = 4
"""Groups of so many batches that were decided before the first step: nearly all of them are filtered."""

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_CHARACTERS = 160


def status_line(watch: Watch) -> str:
    """Return the state of the run in one line: step, reward, staleness, loss, rates."""
    curve, steps = watch.observer.curve, watch.steps
    parts = [f"step {curve.version}" + (f"/{steps}" if steps else "")]
    if curve.last is None:
        imported = watch.config.run.imported_from is not None  # such a run decides about all groups at once
        if watch.num_decided > MANY_BATCHES * watch.config.feeder.groups_per_batch and not imported:
            parts.append(f"some {watch.num_decided:,} groups decided and none trained yet")
            return watch.named(f"{'  '.join(parts)}: `rftstream status RUN` says what is filtered")
        waiting = [f"{phase.name} {phase.text}" for phase in phases_of(watch) if phase.name != "training"]
        return "  ".join([*parts, *(waiting or ["waiting for the first batch"])])
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
        parts += rate_parts(rates)
    if (left := watch.seconds_left()) is not None:
        parts.append(f"{duration(left, exact=True)} left")
    return "  ".join(parts)


def phases_of(watch: Watch) -> list[PhaseLine]:
    """Return the phases of the run as it is now."""
    return find_phases(
        watch.observer.curve,
        watch.lags,
        steps=watch.steps,
        workers=len(watch.slots),
        num_loaded=watch.num_loaded,
        imported=watch.config.run.imported_from is not None,
    )


def rate_parts(rates: Rates) -> list[str]:
    """Return the rates as words, each with its unit."""
    rollouts = [f"{_shown(rates.rollouts_per_s)} rollouts/s"] if rates.rollouts_per_s else []
    tokens = f"{_shown(rates.tokens_per_s)} trained tokens/s"
    return [*rollouts, tokens, f"{rates.steps_per_s * 60:.1f} steps/min"]


def _shown(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def paused_line(watch: Watch) -> str | None:
    """Return who paused the run, and why; None if it is not paused."""
    asked = watch.observer.control.state
    if asked is None or asked.state is not DesiredState.paused or watch.observer.control.finished is not None:
        return None
    why = f" ({asked.reason})" if asked.reason else ""
    return watch.named(f"paused by {asked.by}{why}: `rftstream unpause RUN` goes on")


def evaluation_line(result: EvalResult) -> str:
    """Return the result of an evaluation as one line."""
    shown = {name: value for name, value in result.metrics.items() if name == "mean" or name.startswith("pass@")}
    metrics = "  ".join(f"{name} {value:.3f}" for name, value in shown.items()) or "mean -"
    unscored = unscored_text(result)
    metrics += f"  of {plural(result.num_tasks, 'problem')}" + (f"  ({unscored})" if unscored else "")
    best = "  (best so far)" if result.best else ""
    return f"evaluation {result.evaluation} of version {result.name.version}: {metrics}{best}"


def sample_line(sample: Sample) -> str:
    """Return a sampled completion as one line."""
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    prompt, completion = (shortened(text.replace("\n", LINE_END)) for text in (sample.prompt, sample.completion))
    return f"sample ({reward}): {prompt!r} -> {completion!r}"


def shortened(text: str) -> str:
    """Return the text, with the middle left out if it is long."""
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Draw the values as bars: the mean of each of `width` parts, scaled between the smallest and the largest."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
