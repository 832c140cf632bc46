"""Builds the log of a run that decides again about another run's recorded groups. Tasks, rollouts and verdicts are
copied unchanged, and the run's own buffer makes the batches."""

from __future__ import annotations

from rftstream.replay.branch import unscored_rollouts
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.making.imported import RolloutImport, skipped_rollouts


class VerdictImport(RolloutImport):
    """Copies tasks, rollouts and verdicts. A task without a rollout or a verdict in the source gets a record that says
    so, and its group is decided without it."""

    copied = ("rollouts", "verified")

    def fill(self) -> None:
        """Write the missing records. After that all work before the buffer is done."""
        self.commit_all(skipped_rollouts(self._into, self._run_id))
        if missing := self.commit_all(unscored_rollouts(self._into, self._run_id)):
            self._say(f"verified: {missing:,} rollouts were not there, not scored or put back; they are left out")
        self.pass_over(VERIFIER.name, "rollouts")
