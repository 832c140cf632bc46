"""Steps without a learning signal: how they are detected and reported.

An algorithm that compares siblings learns nothing from groups whose rewards are all equal. The trainer counts
consecutive steps with only such groups, and records the count in each step. So the progress line, `status` and the
metrics agree, even after restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rftstream.algorithms.base import Spread
from rftstream.config.sections import RunConfig

STEPS_WITHOUT_SIGNAL = "steps_without_signal"
"""Name of a step's metric: the number of consecutive steps without a learning signal, this one included."""
WARN_AFTER_STEPS = 10
"""Consecutive steps before a report. Fewer are not reported, since hard tasks begin like that."""
MANY_CUT = 0.1
"""Share of completions cut off by a token limit from which the limit is named as a cause."""
COLLAPSED = 1e-3
"""Entropy in nats per token below which siblings are the same completion."""
COLD = 0.2
"""Temperature up to which siblings are nearly the same."""
FLAT = 1e-6
"""A standard deviation below this share of the mean is rounding."""


@dataclass(frozen=True, slots=True)
class NoSignal:
    """The finding that a run's newest steps had no learning signal."""

    steps: int
    """Number of consecutive steps without a signal so far."""
    cause: str
    """Description of the rewards, and their likely causes."""

    def to_json(self) -> dict[str, Any]:
        """Return steps and cause as plain values, for `--json`."""
        return asdict(self)

    @property
    def headline(self) -> str:
        """First clause of the report: the number of steps without a signal."""
        return f"no signal for {self.steps:,} steps"

    def to_text(self) -> str:
        """Return the report, with the cause."""
        return f"{self.headline}: {self.cause}"


def is_without_signal(values: Mapping[str, float], spread: Spread) -> bool:
    """Return whether a step gave its algorithm nothing to learn from. `values` are the step's metrics, and `spread`
    tells which rewards must differ for the algorithm."""
    if spread == "none" or values.get("zero_variance_share") != 1.0:
        return False
    return spread == "group" or _is_flat(values)


def find_no_signal(values: Mapping[str, float], config: RunConfig) -> NoSignal | None:
    """Return the report after a step with these metrics; None if there is nothing to report."""
    steps = int(values.get(STEPS_WITHOUT_SIGNAL, 0))
    return NoSignal(steps, likely_cause(values, config)) if steps >= WARN_AFTER_STEPS else None


def likely_cause(values: Mapping[str, float], config: RunConfig) -> str:
    """Describe the rewards of a step without signal and the possible causes, the likeliest first."""
    reward, temperature = values.get("reward", 0.0), config.sampling.temperature
    how = "" if temperature == 0 else "nearly "
    cold = [f"sampling.temperature is {temperature:.4g}, which makes siblings {how}the same"]
    causes = []
    if not _is_flat(values):
        found = "rewards differ between problems, and never inside a group"
        if config.feeder.group_size == 1:
            causes.append("feeder.group_size is 1, and a group of one has no spread")
        elif temperature <= COLD:
            causes += cold
        causes.append("the reward does not look at the completion")
        causes.append("each problem is solved always or never: others, or a larger feeder.group_size")
    elif reward == 0:
        found = "every reward is 0"
        causes.append("the reward never matches: it looks for another form of answer, or in another column")
        causes.append("the problems are too hard for this model")
    elif reward == 1:
        found = "every reward is 1"
        causes.append("all is solved, and the tasks are too easy by now")
        causes.append("the reward does not look at the completion")
    else:
        parts = {name.partition("/")[2]: mean for name, mean in values.items() if name.startswith("part/")}
        by = f" ({', '.join(f'{name} {mean:.4g}' for name, mean in parts.items())})" if len(parts) > 1 else ""
        found = f"every reward is {reward:.4g}{by}"
        causes.append("the reward does not look at the completion")
    if (cut := values.get("truncated_share", 0.0)) >= MANY_CUT:
        at = 0 if not _is_flat(values) else 1
        causes.insert(at, f"{cut:.0%} of the completions are cut off at sampling.max_tokens, perhaps before the answer")
    if _is_flat(values) and reward != 1 and temperature <= COLD:
        causes += cold
    if reward != 1 and values.get("entropy", 1.0) < COLLAPSED:
        causes.insert(0, "the policy says one thing alone, as after a too high trainer.lr: begin anew with a lower one")
    return f"{found}. Likely causes: {'; or '.join(causes)}"


def _is_flat(values: Mapping[str, float]) -> bool:
    """Whether all rewards of a step are the same number."""
    return values.get("reward_std", 0.0) <= FLAT * abs(values.get("reward", 0.0))
