"""The topic `evals` in memory: which evaluation of which version has its result."""

from __future__ import annotations

from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.weights.follower import WeightsFollower


class EvalResults:
    """Results of evaluations by evaluation and version. Its owner calls `note` for every record of `evals`, in log
    order, and `find` at any time."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[EvalResult]] = {}

    def note(self, result: EvalResult) -> None:
        """Take in the next record."""
        self._found.setdefault((result.evaluation, result.name.version), []).append(result)

    def find(self, evaluation: str, name: VersionName, follower: WeightsFollower) -> EvalResult | None:
        """Return the newest result in force of this version, or None.

        A result of an older trainer counts too, if the newer trainer began with that state. `follower` must have been
        told of the announcements."""
        known = self._found.get((evaluation, name.version), ())
        return next(
            (result for result in reversed(known) if result.name == name or follower.find(result.name) is not None),
            None,
        )
