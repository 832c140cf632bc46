"""Builds the log of a run with people's judgements as verdicts. Rollouts that nobody judged keep their recorded
verdict. The run's own buffer decides all groups again."""

from __future__ import annotations

from rftstream.contracts import codec
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import ContractError
from rftstream.replay.regrouped import VerdictImport
from rftstream.roles.buffer.people.judged_rewards import JudgedRewards
from rftstream.runs.writes.additions import Say
from rftstream.transport.base import Transport


class JudgedImport(VerdictImport):
    """Copies tasks, rollouts and verdicts, with the scorer's rewards replaced by those that people gave."""

    def __init__(self, source: Transport, target: Transport, run_id: str, say: Say, rewards: JudgedRewards) -> None:
        super().__init__(source, target, run_id, say)
        self._rewards = rewards
        self.num_judged = 0
        """Number of verdicts that people gave."""

    def _rollout(self, record: Record, put_back: set[str]) -> NewRecord | None:
        copied = super()._rollout(record, put_back)
        if copied is None or record.topic != "verified":
            return copied
        try:
            verified = codec.from_record(record)
        except ContractError:
            return copied
        assert isinstance(verified, VerifiedRollout)
        changed = self._rewards.changed(verified)
        if changed is verified:
            return copied
        self.num_judged += 1
        return codec.to_record(changed, "verified", record.partition, run=self._run_id)
