"""The laws of docs/architecture.md and further rules, checked on the log of a simulated run while it is written."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from rftstream.algorithms.learning_signal import STEPS_WITHOUT_SIGNAL
from rftstream.config.data_pipelines.pipelines import has_operators
from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.beside import absent, columns_of
from rftstream.contracts.control import Claim, RunFinished, TasksEnded, Trimmed
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome, GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus, Segment, roles_of
from rftstream.contracts.tasks import RolloutIds, Task
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import StepRecord, VersionName, WeightsAnnounced
from rftstream.errors import TransportError
from rftstream.policies.fake_model import values_beside
from rftstream.testing import Simulation
from rftstream.testing.foreign import TRANSACTIONAL_ID
from rftstream.transport.memory.log import MemoryTransaction
from rftstream.weights.version_parts import objects_of
from tests.simulation.compared import ComparedLaws, compares
from tests.simulation.deletions import Deletions
from tests.simulation.demonstrations import Demonstrations
from tests.simulation.people import PeopleLaws
from tests.simulation.ranks import SimulatedRanks
from tests.simulation.reused import Reused
from tests.simulation.staged import batches_of
from tests.simulation.unfinished import Unfinished
from tests.unit.queries.naive_counts import check_counts

STEPS = TopicPartition("steps", 0)

ALL_THROUGH_S = 61.0
"""Whatever a dead process has left open ends within this time."""

AUDIT_EVERY = 64
"""Changes of the log between two audits of the live run, at least."""

AUDIT_SHARE = 0.25
"""... and as a share of those there were: an audit reads the whole log, so that a long run would mostly be audited."""

Judge = Callable[[Rollout], float | None]


class Laws:
    """Called after every commit; AssertionError at the first record that breaks a law."""

    def __init__(self, simulation: Simulation, judge: Judge | None = None) -> None:
        """`judge`: what the reward says of a rollout with a completion."""
        self.simulation = simulation
        self._judge = judge
        self.compared = ComparedLaws(simulation.config, judge) if judge and compares(simulation.config) else None
        self.config = simulation.config
        self.made = batches_of(self.config)
        """Of each batch, in a run with stages."""
        self._num_changes = -1
        self._audit_at = AUDIT_EVERY
        self._reads_again = False
        """After a loss of power: objects may be gone that were there."""
        self.ranks: SimulatedRanks | None = None
        """In runs whose versions have parts."""
        self._published_by: dict[int, str] = {}
        """Trainer epoch -> the process that published under it, also if the power took that from the log."""
        simulation.forgot = self._begin_anew
        self._begin()

    def _begin_anew(self) -> None:
        """What the log has lost was never there."""
        begins = {place: one.begin for place, one in self.simulation.log.partitions.items()}
        self._begin()
        self.deletions.begin_at(begins)
        self._reads_again = True
        for transaction in self.simulation.log.transactions.history:
            self._num_seen += 1
            self._transaction(transaction)
        self._reads_again = False

    def _begin(self) -> None:
        self._num_seen = 0
        """Of the committed transactions."""
        self._positions: dict[tuple[str, TopicPartition], int] = {}
        """By group, as they were committed."""
        self._twins: set[tuple[bytes, ...]] = set()
        self.tasks: dict[str, Task] = {}
        """By rollout_id."""
        self.admitted: dict[str, list[Task]] = {}
        """By group_id, in order of sequence."""
        self.outcomes: dict[str, GroupOutcome] = {}
        self.num_rejected = 0
        self.num_retried = 0
        self.num_copied = 0
        """Rollouts that were not sampled again."""
        self.sampled: dict[str, tuple[Record, Rollout]] = {}
        """By the place of the record."""
        self.letters: set[bytes | None] = set()
        self.rewards: dict[str, float] = {}
        self.roles: dict[str, tuple[tuple[str, ...], dict[str, float | None]]] = {}
        """Of a rollout in order: the role of each segment; and the rewards of roles."""
        self._verified_together: list[VerifiedRollout] = []
        """In one transaction."""
        self.steps: list[StepRecord] = []
        self.in_force: list[tuple[int, int, int]] = [(0, 0, 0)]
        """After so many StepRecords: epoch, version, trained groups."""
        self._step_offsets: list[int] = []
        self.digests: dict[int, str] = {}
        """Of the weights, by version."""
        self.without_signal: dict[int, float] = {0: 0.0}
        """By version: steps in a row without a learning signal."""
        self.announced: set[tuple[int, int]] = set()
        self.weights_digests: dict[VersionName, str] = {}
        """Of announced versions, as their announcements have them."""
        self.epoch_announced = 0
        self.claims: dict[str, int] = {}
        self._claimers: dict[str, list[str]] = defaultdict(list)
        """Processes, in the order in which they took the role."""
        self.manifests: dict[tuple[int, int], BatchManifest] = {}
        """By batch and share."""
        self.batched: dict[str, tuple[int, int]] = {}
        """Group -> batch and share."""
        self.ended: TasksEnded | None = None
        self.finished: RunFinished | None = None
        self.deletions = Deletions(self)
        self.demonstrations = Demonstrations(self)
        self.people = PeopleLaws(self)
        self.unfinished = Unfinished(self)
        self.reused = Reused(self)

    def __call__(self) -> None:
        log = self.simulation.log
        if log.num_changes == self._num_changes:
            return
        self._num_changes = log.num_changes
        for transaction in log.transactions.history[self._num_seen :]:
            self._num_seen += 1
            self._transaction(transaction)
        self.kept()
        if self._num_changes >= self._audit_at:
            with suppress(TransportError):  # the audit waits for positions that are being committed; here it asks later
                report = self.simulation.audit()
                assert report.fine, report.to_text()
                self._recompute()
                self._audit_at = self._num_changes + max(AUDIT_EVERY, int(AUDIT_SHARE * self._num_changes))

    def _recompute(self) -> None:
        """Every decision of operators is what the log says. While the run goes on, too: later much may be deleted."""
        if has_operators(self.config):
            found = self.simulation.recompute()
            assert found.fine, found.to_text()

    def _transaction(self, transaction: MemoryTransaction) -> None:
        """In the order in which they were committed; what a reader sees in which order is a matter of the marks."""
        new_tasks: list[Task] = []
        reuses: list[BatchReuse] = []
        manifests: list[BatchManifest] = []
        self._verified_together.clear()
        if transaction.transactional_id == TRANSACTIONAL_ID:
            return  # what somebody else writes changes nothing
        if transaction.group is not None:
            for place, position in transaction.positions.items():
                self._positions[transaction.group, place] = position.offset
        self.people.transaction(transaction)
        for records in transaction.records.values():
            for record in records:
                self._look(record, new_tasks, reuses, manifests)
        if self.compared is not None:
            self.compared.transaction(self._verified_together)
        for reuse in reuses:  # what it tells of is in this transaction
            self.reused.told(reuse)
        for batch, num_groups in {(one.batch_sequence, one.num_groups) for one in manifests}:
            self.reused.manifest(batch, num_groups)
        self.unfinished.transaction(transaction.transactional_id)
        if new_tasks:
            self._admission(new_tasks)

    def _look(
        self, record: Record, new_tasks: list[Task], reuses: list[BatchReuse], manifests: list[BatchManifest]
    ) -> None:
        self._twin(record)
        self.deletions.look(record)
        self.unfinished.look(record)
        if record.value is None or record.topic == "feedback":  # people may write what cannot be read
            return
        message = codec.from_record(record)
        match message:
            case Task():
                assert message.ids.rollout_id not in self.tasks
                assert record.partition == message.ids.sequence % self.config.transport.partitions
                self.tasks[message.ids.rollout_id] = message
                new_tasks.append(message)
            case Rollout():
                self._rollout(record, message)
            case PartialRollout():
                self.unfinished.piece(record, message)
            case VerifiedRollout():
                self._verified(message)
            case Demonstration():
                self.demonstrations.loaded(record, message)
            case Experience(expert=True):
                self.demonstrations.taken(message)
            case Experience(use=use) if use:
                self.reused.again(message)
            case Experience():
                self._experience(message)
                self.reused.first(message)
            case BatchReuse():
                reuses.append(message)
            case BatchManifest():
                self._manifest(message)
                manifests.append(message)
            case GroupOutcome():
                self._outcome(message)
            case StepRecord():
                self._step_offsets.append(record.offset)
                self._step(message)
            case WeightsAnnounced():
                self._announced(message)
            case DeadLetter():
                assert record.key not in self.letters, f"{record}: a second letter of {record.key!r}"
                self.letters.add(record.key)
            case Claim():
                assert message.epoch == self.claims.get(message.role, 0) + 1, "claims are dense"
                self.claims[message.role] = message.epoch
                claimers = self._claimers[message.role]
                assert message.process not in claimers[:-1], f"{message.process}: it was replaced and claims again"
                if message.process not in claimers:
                    claimers.append(message.process)
            case TasksEnded():
                assert self.ended is None
                assert message.admitted == len(self.admitted)
                self.ended = message
            case RunFinished():
                assert self.finished is None, "it is said once that a run is finished"
                self.finished = message
                assert self.simulation.folder.final.is_dir()
                name = (message.name.trainer_epoch, message.name.version)
                assert name in self.announced, "a run ends with a version that is published"

            case Trimmed():
                self.deletions.say(message)

    def kept(self) -> None:
        self.deletions.check()
        self.unfinished.kept()

    def _twin(self, record: Record) -> None:
        names = TOPICS[record.topic].twin
        if names is not None and record.headers:
            key = (record.topic.encode(), *(record.header(name) or b"" for name in names))
            assert key not in self._twins, f"{record}: a twin of {key}"
            self._twins.add(key)

    # ------------------------------------------------------------------------------------------ the flow

    def _admission(self, tasks: list[Task]) -> None:
        """From what the feeder had read when it admitted: its position on `steps` commits with the tasks."""
        feeder = self.config.feeder
        num_steps = bisect_left(self._step_offsets, self._positions.get(("feeder", STEPS), 0))
        _, version, trained = self.in_force[num_steps]
        groups: dict[str, list[Task]] = defaultdict(list)
        for task in sorted(tasks, key=lambda one: (one.ids.sequence, one.ids.sibling)):
            groups[task.ids.group_id].append(task)
        for group_id, siblings in groups.items():
            ids = siblings[0].ids
            assert group_id not in self.admitted
            assert ids.sequence == len(self.admitted), "sequences are dense"
            assert [one.ids.sibling for one in siblings] == list(range(ids.group_size))
            assert ids.group_size == feeder.group_size or has_operators(self.config)
            assert (ids.group_size, siblings[0].seen) == (siblings[-1].ids.group_size, siblings[-1].seen)
            self.admitted[group_id] = siblings
            self._attempt(group_id)
            batches = self._batches_of_rollouts(version)
            near = [one for one in batches if one <= version + feeder.max_staleness]
            limit = trained + len(near) * feeder.groups_per_batch + self.num_rejected
            assert len(self.admitted) <= limit, f"admitted {len(self.admitted)} groups, the limit is {limit}"
            ahead = ids.sequence - trained - self.num_rejected
            least = max(0, batches[ahead // feeder.groups_per_batch] - feeder.max_staleness)
            assert {one.ids.min_version for one in siblings} == {ids.min_version}
            assert ids.min_version >= least, f"{group_id}: min_version {ids.min_version}, expected at least {least}"
            assert ids.min_version <= version, "nobody has to wait for what is not trained yet"

    def _batches_of_rollouts(self, version: int) -> list[int]:
        """From this version on; without stages all, as many as may matter."""
        if not self.made:
            return list(range(version, version + self.config.feeder.max_staleness + 2 + self.num_rejected))
        return [one for one in range(version, len(self.made)) if self.made[one].explores]

    def _attempt(self, group_id: str) -> None:
        """Only what is dead is put back, and each attempt stands on the one before."""
        base, _, attempt = group_id.rpartition("/")
        if attempt == "0":
            return
        before = self.outcomes[f"{base}/{int(attempt) - 1}"]
        assert before.result is GroupResult.dead, f"{group_id}: put back, but {before.group_id} was {before.result}"
        self.num_retried += 1

    def _rollout(self, record: Record, rollout: Rollout) -> None:
        ids = rollout.ids
        assert ids == self.tasks[ids.rollout_id].ids
        assert record.partition == ids.sequence % self.config.transport.partitions
        self._copy(rollout)
        self.sampled[str(record)] = record, rollout
        self.unfinished.rollout(rollout)
        self.versions(ids, rollout.segments)
        self._beside(ids, rollout.segments)

    def _beside(self, ids: RolloutIds, segments: Sequence[Segment]) -> None:
        """Each token has its own values beside it, up to the last one that was sampled."""
        if not (most := self.config.policies.get("fake", {}).get("values_beside", 0)):
            return
        for segment in segments:
            wanted = values_beside(segment.token_ids.numpy(), most)
            made = columns_of(segment.beside).get("made", absent(0)).cut(0, bytes(segment.loss_mask.data).rfind(1) + 1)
            for name in ("counts_T", "values"):
                given, expected = getattr(made, name), getattr(wanted.cut(0, len(made)), name)
                assert given.tobytes() == expected.tobytes(), f"{ids.rollout_id}: other {name} beside its tokens"

    def versions(self, ids: RolloutIds, segments: Sequence[Segment]) -> None:
        for segment in segments:
            for span in segment.versions:
                assert (span.trainer_epoch, span.version) in self.announced
                assert span.version >= ids.min_version, f"{ids.rollout_id}: a token of version {span.version}"

    def _copy(self, rollout: Rollout) -> None:
        """A stored rollout that the task names is as it was, or was sampled again because it had become too old."""
        place = self.tasks[rollout.ids.rollout_id].stored_rollout
        if place is None or rollout.status is RolloutStatus.skipped:
            return
        record, then = self.sampled[place]
        oldest = min((span.version for segment in then.segments for span in segment.versions), default=None)
        same, deleted = replace(then, ids=rollout.ids) == rollout, self.deletions.is_deleted(record)
        if not (deleted and not same) and (oldest is None or oldest >= rollout.ids.min_version):
            assert same, "scored again, not sampled again"
            self.num_copied += 1

    def _verified(self, verified: VerifiedRollout) -> None:
        rollout, verdict = verified.rollout, verified.verdict
        self._verified_together.append(verified)
        assert verified.ids == self.tasks[verified.ids.rollout_id].ids
        if rollout is None or rollout.status not in (RolloutStatus.completed, RolloutStatus.truncated):
            assert verdict is None
        elif self._judge is not None and self.compared is None:
            expected = self._judge(rollout)
            assert (verdict.reward if verdict else None) == expected, "unscorable is not zero"
        if verdict is not None:
            self.rewards[verified.ids.rollout_id] = verdict.reward
            assert rollout is not None
            posted = {} if rollout.posted is None else rollout.posted.roles
            played = roles_of(rollout.segments)
            if posted and self.config.tasksets["sums"].reward == "environment":
                assert verdict.roles == {role: posted[role] for role in played}, "each role has what was posted for it"
                assert any(reward is not None for reward in verdict.roles.values())
            self.roles[verified.ids.rollout_id] = tuple(one.role for one in rollout.segments), verdict.roles

    def _experience(self, experience: Experience) -> None:
        batch, group = experience.batch_sequence, experience.ids.group_id
        assert self.batched.setdefault(group, (batch, experience.share)) == (batch, experience.share)
        reward = experience.reward if experience.verified_reward is None else experience.verified_reward
        assert reward == self.people.reward(experience, self.rewards.get(experience.ids.rollout_id))
        if experience.reward == self.rewards.get(experience.ids.rollout_id) and not experience.terms:
            roles = tuple(one.role for one in experience.segments), experience.roles
            assert roles == self.roles[experience.ids.rollout_id], "roles come to the trainer as they were verified"
        if not experience.expert:
            self._beside(experience.ids, experience.segments)
        versions = [span.version for segment in experience.segments for span in segment.versions]
        if versions:
            assert max(versions) <= batch
            assert batch - min(versions) <= self.config.feeder.max_staleness, f"batch {batch} has a token of {versions}"

    def _manifest(self, manifest: BatchManifest) -> None:
        place = manifest.batch_sequence, manifest.share
        assert place not in self.manifests
        assert manifest.batch_sequence == 0 or (manifest.batch_sequence - 1, manifest.share) in self.manifests
        self.manifests[place] = manifest
        self.demonstrations.manifest(manifest)
        held = [group for group, where in self.batched.items() if where == place]
        assert set(held) <= set(manifest.groups)
        explores = self.made[manifest.batch_sequence].explores if self.made else not self.config.without_tasks
        full = self.config.feeder.groups_per_batch if explores else 0
        assert manifest.last or manifest.num_groups == full
        if self.config.feeder.on_stale == "wait":
            before = [self.sequence(group) for (batch, share), one in self.manifests.items() for group in one.groups
                      if (batch, share) != place and (batch < place[0] or share < place[1])]  # fmt: skip
            mine = [self.sequence(group) for group in manifest.groups]
            assert mine == sorted(mine)
            assert not mine or max(before, default=-1) < mine[0], "batches take groups in order of sequence"

    def _outcome(self, outcome: GroupOutcome) -> None:
        size = len(self.admitted[outcome.group_id])
        named = {one.rollout_id for one in outcome.rollouts}
        assert named <= {task.ids.rollout_id for task in self.admitted[outcome.group_id]}
        if outcome.late:
            assert outcome.group_id in self.outcomes
            return
        assert outcome.group_id not in self.outcomes, f"{outcome.group_id}: a second outcome"
        self.outcomes[outcome.group_id] = outcome
        scored = [one.reward for one in outcome.rollouts if one.reward is not None]
        kept = [one for one in outcome.rollouts if one.reward is not None and one.rejected is None]
        enough = len(scored) >= min(self.config.buffer.min_siblings, size)
        if outcome.result is not GroupResult.batched:
            self.num_rejected += 1
        match outcome.result:
            case GroupResult.dead:
                assert not enough
                assert len(named) == size
            case GroupResult.filtered if outcome.reason == "flagged":
                assert len(kept) < min(self.config.buffer.min_siblings, size)
            case GroupResult.filtered:
                if not outcome.decisions:
                    assert self.config.buffer.zero_variance == "replace"
                    assert len(set(scored)) == 1
                elif outcome.decisions[-1].siblings:
                    assert len(kept) < min(self.config.buffer.min_siblings, size)
                assert enough
            case GroupResult.expired:
                assert self.config.feeder.on_stale == "drop" or self.config.buffer.group_deadline_s is not None
            case GroupResult.batched:
                assert len(kept) >= min(self.config.buffer.min_siblings, size)
                assert self.config.buffer.zero_variance == "keep" or len(set(scored)) > 1

    def _step(self, step: StepRecord) -> None:
        epoch, version, _ = self.in_force[-1]
        name = step.name
        self.steps.append(step)
        assert name.trainer_epoch >= epoch, "an older trainer wrote"
        self.deletions.step(step)
        if step.resumed:
            assert name.trainer_epoch > epoch
            assert name.version <= version
        else:
            assert (name.trainer_epoch, name.version) == (epoch, version + 1), "a version left out"
            assert step.batch_sequence == version
            self._signal(step)
        assert step.trained_groups == sum(
            one.num_groups for (batch, share), one in self.manifests.items() if share == 0 and batch < name.version
        )
        if step.weights_digest is not None:
            known = self.digests.setdefault(name.version, step.weights_digest)
            assert known == step.weights_digest, f"version {name} is not what it was before a restart"
        self.in_force.append((name.trainer_epoch, name.version, step.trained_groups))

    def _signal(self, step: StepRecord) -> None:
        """Counted from the batches alone, whoever was started anew meanwhile."""
        version, steps = step.name.version, step.metrics.get(STEPS_WITHOUT_SIGNAL, 0.0)
        flat = self.manifests[version - 1, 0].metrics.get("zero_variance_share") == 1.0
        counted = self.without_signal[version - 1] + 1 if flat else 0.0
        compares = not self.made and all(one.algorithm is None for one in self.config.tasksets.values())
        assert steps == counted or (steps == 0 and not compares)
        known = self.without_signal.setdefault(version, steps)
        assert known == steps, f"version {step.name} had {known} steps without signal before a restart, now {steps}"

    def _announced(self, message: WeightsAnnounced) -> None:
        name = message.name
        assert name.trainer_epoch >= self.epoch_announced, "an older trainer announced"
        assert name.trainer_epoch > self.epoch_announced or not message.resumed
        self.epoch_announced = name.trainer_epoch
        holder = self._claimers["trainer"][-1]
        first = self._published_by.setdefault(name.trainer_epoch, holder)
        assert first == holder, f"{holder} publishes under epoch {name.trainer_epoch}, which {first} has used"
        self.announced.add((name.trainer_epoch, name.version))
        self.weights_digests[name] = message.weights_digest
        self.deletions.announced(message, again=self._reads_again)
        there = self.simulation.store.objects
        assert self._reads_again or all(one.object in there for one in objects_of(message)), "the objects come first"

    # ------------------------------------------------------------------------------------------ at the end

    @property
    def version(self) -> int:
        """In force."""
        return self.in_force[-1][1]

    def sequence(self, group_id: str) -> int:
        return self.admitted[group_id][0].ids.sequence

    def batches(self) -> list[tuple[str, ...]]:
        """The groups of each batch."""
        count = 1 + max((batch for batch, _ in self.manifests), default=-1)
        return [
            tuple(group for share in range(self.config.trainer.shares) for group in self.manifests[batch, share].groups)
            for batch in range(count)
        ]

    def check_end(self) -> None:
        """Of a run that came to its end by itself."""
        self.simulation.clock.advance(ALL_THROUGH_S)
        report = self.simulation.audit()
        assert report.fine, report.to_text()
        check_counts(report, self.simulation.transport())
        self._recompute()
        self.deletions.check_end()
        self.demonstrations.check_end()
        self.people.check_end(report)
        assert report.groups.admitted == len(self.admitted)
        assert report.groups.trained == sum(map(len, self.batches()[: self.version]))
        assert self.finished is not None
        assert self.finished.name.version == self.version
        codes = {one.name: one.exit_code for one in self.simulation.processes}
        assert set(codes.values()) <= {0, 5}, codes
        for role in ("feeder", "buffer", "trainer"):
            assert 0 in [one.exit_code for one in self.simulation.processes if one.role == role], f"{role}: all gone"
        if self.finished.reason == "steps":
            assert self.version == self.config.steps
            assert not self.made or self.config.feeder.on_stale == "drop" or report.groups.pending == 0
        elif self.finished.reason == "drained" and self.made and not self.made[self.version].explores:
            pass  # what was admitted for a later stage waits for whoever goes on
        elif self.finished.reason in ("taskset", "drained"):
            assert self.ended is not None
            assert self.ended.admitted == len(self.outcomes) == len(self.admitted)
            assert report.groups.pending == 0

    def compare(self, calm: Laws) -> None:
        """With a run that was left alone: the same batches and the same weights, as far as both went."""
        # Whether the word that there is no more comes before the last full batch is a matter of time.
        mine, others = (list(filter(None, one.batches())) for one in (self, calm))
        assert self.finished is not None
        assert calm.finished is not None
        drained = self.ended is not None and self.ended.reason == "draining"  # whatever it then ended by
        if self.finished.reason == calm.finished.reason and not drained:
            assert mine == others
        count = max(0, min(len(mine), len(others)) - 1)  # the last batch of a run that was drained may be a short one
        assert mine[:count] == others[:count], "what went wrong changed the batches"
        for version in sorted(set(self.digests) & set(calm.digests)):
            if version <= count or mine == others:
                assert self.digests[version] == calm.digests[version], f"... and the weights of version {version}"

    def __str__(self) -> str:
        return f"version {self.version}, {len(self.admitted)} groups admitted, {len(self.outcomes)} decided"
