"""Builds the log of a run that decides anew about the groups that another run recorded: its tasks, rollouts and
verdicts as they are. Its own buffer makes the batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rftstream.contracts import codec
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.replay.branch import as_verified
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.making.imported import RolloutImport, skipped_rollouts, without


class VerdictImport(RolloutImport):
    """Copies tasks, rollouts and verdicts. A task that has no rollout or no verdict in the source gets one that says
    so, and its group is decided without it."""

    def bounds(self) -> Mapping[TopicPartition, tuple[int, int]]:
        """Return bounds that hold no verdict without its rollout, and no rollout without its task."""
        self.check_whole("tasks", "rollouts", "verified")
        topics = ("verified", "rollouts", "tasks", "experts")
        return {place: (0, end) for topic in topics for place, end in self._from.ends(topic).items()}

    def copy(self) -> None:
        """Copy the records, and let everything up to the buffer be done."""
        self.copy_topic("experts", self.as_it_is)
        self.copy_topic("tasks", self._of_a_rollout)
        put_back = self._put_back()
        for topic in ("rollouts", "verified"):
            self.copy_topic(topic, lambda record: self._rollout(record, put_back))
        self.commit_all(skipped_rollouts(self._into, self._run_id))
        if missing := self.commit_all(self._unscored()):
            self._say(f"verified: {missing:,} rollouts were not there, not scored or put back; they are left out")
        self.pass_over(EXPLORER.name, "tasks")
        self.pass_over(VERIFIER.name, "rollouts")
        self.end()

    def _unscored(self) -> Iterator[NewRecord]:
        for record in without(self._into, "rollouts", "verified"):
            yield codec.to_record(as_verified(record), "verified", record.partition, run=self._run_id)
