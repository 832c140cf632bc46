"""What stands on `evals`: which evaluation of which version has its result."""

from __future__ import annotations

from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.weights.follower import WeightsFollower


class EvalResults:
    """Told of every record of `evals`, in log order."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[EvalResult]] = {}

    def note(self, result: EvalResult) -> None:
        self._found.setdefault((result.evaluation, result.name.version), []).append(result)

    def find(self, evaluation: str, name: VersionName, follower: WeightsFollower) -> EvalResult | None:
        """The newest in force of this version: of an older trainer too, if it is the state that the newer began with.
        `follower` has been told of the announcements."""
        known = self._found.get((evaluation, name.version), ())
        return next((one for one in reversed(known) if one.name == name or follower.find(one.name) is not None), None)
