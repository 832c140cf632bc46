"""Builds the log of a run that decides anew about the groups that another run recorded: its tasks, rollouts and
verdicts as they are. Its own buffer makes the batches."""

from __future__ import annotations

from rftstream.replay.branch import unscored_rollouts
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.making.imported import RolloutImport, skipped_rollouts


class VerdictImport(RolloutImport):
    """Copies tasks, rollouts and verdicts. A task that has no rollout or no verdict in the source gets one that says
    so, and its group is decided without it."""

    copied = ("rollouts", "verified")

    def fill(self) -> None:
        """Write what is missing; then everything up to the buffer is done."""
        self.commit_all(skipped_rollouts(self._into, self._run_id))
        if missing := self.commit_all(unscored_rollouts(self._into, self._run_id)):
            self._say(f"verified: {missing:,} rollouts were not there, not scored or put back; they are left out")
        self.pass_over(VERIFIER.name, "rollouts")
