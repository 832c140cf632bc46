"""Builds the log of a run that decides again about another run's recorded groups. Tasks, rollouts and verdicts are
copied unchanged, and the run's own buffer makes the batches."""

from __future__ import annotations

from collections.abc import Collection

from rftstream.contracts.records import NewRecord, Record
from rftstream.replay.branch import unscored_rollouts
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.making.imported import RolloutImport, skipped_rollouts
from rftstream.runs.writes.additions import Say
from rftstream.transport.base import Transport


class VerdictImport(RolloutImport):
    """Copies tasks, rollouts and verdicts. A task without a rollout or a verdict in the source gets a record that says
    so, and its group is decided without it."""

    copied = ("rollouts", "verified")

    def __init__(
        self, source: Transport, target: Transport, run_id: str, say: Say, *, unscored: Collection[str] = ()
    ) -> None:
        """`unscored`: rollouts that are left without their verdict."""
        super().__init__(source, target, run_id, say)
        self._unscored = unscored

    def _rollout(self, record: Record, put_back: set[str]) -> NewRecord | None:
        if record.topic == "verified" and record.text("rollout_id") in self._unscored:
            return None
        return super()._rollout(record, put_back)

    def fill(self) -> None:
        """Write the missing records. After that all work before the buffer is done."""
        self.commit_all(skipped_rollouts(self._into, self._run_id))
        if missing := self.commit_all(unscored_rollouts(self._into, self._run_id)):
            self._say(f"verified: {missing:,} rollouts were not there, not scored, put back or by --scorer not wanted")
        self.pass_over(VERIFIER.name, "rollouts")
