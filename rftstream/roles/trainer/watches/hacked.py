"""The end of a run by `run.stop_on`: signs of a hacked reward in its steps and evaluations."""

from __future__ import annotations

from collections.abc import Mapping

from rftstream.algorithms.reward_changes import Scorers, changed_at, find_reward_changes
from rftstream.algorithms.reward_signs import find_reward_signs
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import StopRule
from rftstream.weights.lineage import Lineage

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

    @property
    def is_on(self) -> bool:
        """Return whether there is a sign to look for. Then the watch needs every step of the run."""
        return bool(self._kinds)

    def forget(self) -> None:
        """Forget the state from the log, which is read again."""
        self._lineage = Lineage()
        self._steps: dict[int, tuple[Mapping[str, float], Scorers]] = {}
        self._evaluations: dict[tuple[int, str], EvalResult] = {}

    def record(self, step: StepRecord) -> None:
        """Take a step of the log. The first of a new trainer puts later versions out of force."""
        epoch, version = self._lineage.epoch, step.name.version
        if not self.is_on or not self._lineage.take(step.name, resumed=step.resumed):
            return
        if self._lineage.epoch > epoch:
            self._steps = {one: values for one, values in self._steps.items() if one < version + step.resumed}
            self._evaluations = {key: one for key, one in self._evaluations.items() if self._lineage.in_force(one.name)}
        if not step.resumed:
            self._steps[version] = _watched(step.metrics), step.scorers

    def evaluate(self, result: EvalResult) -> None:
        """Take an evaluation of the log."""
        if self.is_on and self._lineage.in_force(result.name):
            self._evaluations[result.name.version, result.evaluation] = result

    def look(self, version: int, values: Mapping[str, float], scorers: Scorers) -> StopRule | None:
        """Return the rule by which the run is to end after the step to `version`, which has these metrics and was
        scored by `scorers`. Steps before a change of the reward do not count."""
        if not self.is_on:
            return None
        known = {**self._steps, version: (values, scorers)}
        since = changed_at(find_reward_changes((one, scored) for one, (_, scored) in known.items()))
        steps = [(one, measured) for one, (measured, _) in known.items() if one >= since]
        evaluations = [self._evaluations[one] for one in sorted(self._evaluations)]
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
