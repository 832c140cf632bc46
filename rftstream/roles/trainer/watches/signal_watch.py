"""Says so when steps have no learning signal, and ends a run that has had none for too long."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rftstream.algorithms.learning_signal import STEPS_WITHOUT_SIGNAL, WARN_AFTER_STEPS, likely_cause
from rftstream.config.sections import RunConfig
from rftstream.errors import StopRule

log = logging.getLogger(__name__)


class SignalWatch:
    """Warns when steps have no learning signal, and again when there are twice as many of them; ends the run by
    `trainer.max_steps_without_signal`. The trainer's UpdateCycle makes it and calls `look` once for each trained
    batch."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._most = config.trainer.max_steps_without_signal
        self._warns_at = WARN_AFTER_STEPS

    def look(self, values: Mapping[str, float]) -> StopRule | None:
        """Check a step. `values`: its metrics. Returns the rule if the run is to end by it: at each multiple of the
        setting, so that a resumed run has as many steps again before it ends for the second time."""
        steps = int(values.get(STEPS_WITHOUT_SIGNAL, 0))
        if steps and self._most and steps % self._most == 0:
            return StopRule(
                "no_signal",
                f"trainer: {steps:,} steps in a row without a learning signal, expected fewer than {self._most:,} "
                f"(trainer.max_steps_without_signal): {likely_cause(values, self._config)}. Look at some by "
                "`rftstream inspect RUN verified --last 5`; mend it and `rftstream resume`, or take the weights as "
                "they are by `rftstream weights export`",
            )
        if steps < WARN_AFTER_STEPS:
            self._warns_at = WARN_AFTER_STEPS
        elif steps >= self._warns_at:
            self._warns_at = 2 * steps
            log.warning("no signal for %d steps: %s", steps, likely_cause(values, self._config))
        return None
