"""The end of a run by `run.stop_on`: signs of a hacked reward in its steps and evaluations."""

from __future__ import annotations

from collections.abc import Mapping

from rftstream.algorithms.reward_signs import find_reward_signs
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import StopRule

WATCHED = ("reward", "kl", "length_mean", "unscored_share")
WATCHED_PREFIXES = ("part/", "metric/")
"""Metrics that signs are made of. Others are not held."""


class HackedRewardWatch:
    """Ends the run when a sign appears that `run.stop_on` names. The trainer's UpdateCycle makes it. The step calls
    `forget` at each recovery, passes on steps and evaluations as they come to the log, and calls `look` for each
    trained batch before its step is there."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._kinds = frozenset(config.run.stop_on)
        self.forget()

    def forget(self) -> None:
        """Forget the state from the log, which is read again."""
        self._steps: dict[int, Mapping[str, float]] = {}
        self._evaluations: dict[tuple[str, int], EvalResult] = {}

    def record(self, step: StepRecord) -> None:
        """Take a step of the log. It takes back the later versions."""
        if not self._kinds:
            return
        version = step.name.version
        for later in [one for one in self._steps if one >= version + step.resumed]:
            del self._steps[later]
        if not step.resumed:
            self._steps[version] = _watched(step.metrics)

    def evaluate(self, result: EvalResult) -> None:
        """Take an evaluation of the log."""
        if self._kinds:
            self._evaluations[result.evaluation, result.name.version] = result

    def look(self, version: int, values: Mapping[str, float]) -> StopRule | None:
        """Return the rule by which the run is to end after the step to `version`, which has these metrics."""
        if not self._kinds:
            return None
        steps = [*((one, self._steps[one]) for one in sorted(self._steps) if one < version), (version, values)]
        evaluations = [self._evaluations[one] for one in sorted(self._evaluations, key=lambda one: one[1])]
        for sign in find_reward_signs(steps, evaluations, self._config):
            if sign.kind in self._kinds:
                return StopRule(
                    "hacked_reward",
                    f"trainer: a sign of a hacked reward at version {version:,}, {sign.to_text()} (run.stop_on). Read "
                    "some by `rftstream inspect RUN verified --last 5`; mend the reward, or `rftstream resume RUN "
                    "--set run.stop_on=[]` if all is well",
                )
        return None


def _watched(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name in WATCHED or name.startswith(WATCHED_PREFIXES)}
