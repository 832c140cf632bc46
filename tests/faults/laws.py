"""What must be true of a run at its end, whatever happened to it, and that it is the run that it would have been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.tasks import Task
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.versions import StepRecord
from rftstream.queries.audits.balance import AuditReport
from tests.e2e.workplace import RunView

SINGLE_WRITERS = {"tasks": "feeder", "batches": "buffer", "outcomes": "buffer", "steps": "trainer",
                  "weights": "trainer"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    report: AuditReport
    reason: str
    trained: dict[str, int]
    """Rollout -> tokens."""
    batches: dict[int, list[str]]
    """Rollouts in order."""
    digests: dict[int, str]
    """Of the weights that were announced, by version."""
    num_records: int
    results: dict[str, GroupResult]
    """Group -> what became of it."""

    @property
    def trimmed(self) -> bool:
        """Whether retention has deleted records meanwhile."""
        return self.report.deleted_groups > 0

    @property
    def num_lost(self) -> int:
        groups = self.report.groups
        return groups.admitted - groups.pending - groups.trained - groups.expired - groups.filtered - groups.dead


def check_the_end(view: RunView) -> Facts:
    """Of a run that went once through its taskset: all that was admitted is decided."""
    report = view.audit()
    assert report.fine, report.to_text()
    assert report.groups.pending == 0, report.to_text()
    assert not report.undeleted, report.to_text()
    assert (report.groups.expired, report.groups.filtered) == (0, 0), report.to_text()
    outcomes = view.outcomes()
    decided = Counter(one.group_id for one in outcomes if not one.late)
    assert set(decided.values()) == {1}, "a group has one outcome"
    assert len(decided) == report.groups.admitted, "... every admitted one"
    experiences = view.experiences()
    trained = Counter(one.ids.rollout_id for one in experiences)
    assert set(trained.values()) == {1}, "trained once"
    lengths = {one.ids.rollout_id: sum(segment.loss_mask.num_ones for segment in one.segments) for one in experiences}
    order = [manifest.batch_sequence for manifest in view.manifests()]
    assert order == list(range(report.earliest_version, report.version)), "batches are dense, and every one is trained"
    if not report.deleted_groups:
        _check_whole(view, report, lengths)
    for topic, role in SINGLE_WRITERS.items():
        _check_fencing(view, topic, role)
    batches: dict[int, list[str]] = {number: [] for number in order}
    for one in experiences:
        batches[one.batch_sequence].append(one.ids.rollout_id)
    finished = view.control().finished
    assert finished is not None
    return Facts(
        report, finished.reason, lengths, batches,
        {step.name.version: step.weights_digest for step in view.messages("steps")
         if isinstance(step, StepRecord) and step.weights_digest is not None},
        sum(len(view.records(topic)) for topic in TOPICS),
        {one.group_id: one.result for one in outcomes if not one.late},
    )  # fmt: skip


def _check_whole(view: RunView, report: AuditReport, lengths: Mapping[str, int]) -> None:
    """Where all records are still there: from task to batch."""
    tasks = [one for one in view.messages("tasks") if isinstance(one, Task)]
    admitted = {one.ids.rollout_id: one.ids.group_id for one in tasks}
    assert len(admitted) == len(tasks) == report.rollouts.admitted
    outcomes = [one for one in view.outcomes() if not one.late]
    assert {one.group_id for one in outcomes} == set(admitted.values())
    batched = {one.group_id for one in outcomes if one.result is GroupResult.batched}
    sampled = {one.ids.rollout_id: one.num_tokens for one in view.rollouts()}
    scored = {one.ids.rollout_id for one in view.verified() if one.verdict is not None}
    assert set(sampled) == set(admitted) == {one.ids.rollout_id for one in view.verified()}
    expected = {rollout for rollout in scored if admitted[rollout] in batched}
    assert set(lengths) == expected, "what was scored is trained, but for the named outcomes"
    assert Counter(lengths.values()) == Counter(sampled[rollout] for rollout in expected), "nothing was lost for length"
    newest = {record.key: record for record in view.records("partials")}
    left = {one.header("rollout_id") for one in newest.values() if one.value is not None}
    assert not left & {name.encode() for name in sampled}, "what is finished leaves no piece"


def compare(facts: Facts, calm: Facts) -> None:
    """With the same run left alone: the same rollouts, lengths, batches and weights."""
    assert facts.reason == calm.reason
    assert facts.report.rollouts.admitted == calm.report.rollouts.admitted
    assert facts.results == calm.results, "what went wrong changed what became of groups"
    assert facts.report.rollouts == calm.report.rollouts, "... or of rollouts, deleted ones included"
    mine, others = ({k: one for k, one in each.batches.items() if one} for each in (facts, calm))
    if facts.trimmed:
        assert mine, "the newest batches stay"
        others = {number: batch for number, batch in others.items() if number >= facts.report.earliest_version}
        assert facts.trained.items() <= calm.trained.items(), "... or what was trained"
    else:
        assert facts.trained == calm.trained, "... or what was trained"
    assert mine == others, "... or in which batch"
    for version in set(facts.digests) & set(calm.digests):
        assert facts.digests[version] == calm.digests[version], f"... or the weights of version {version}"


def _check_fencing(view: RunView, topic: str, role: str) -> None:
    """A zombie writes nothing once a newer epoch has begun to write."""
    newest: dict[int, int] = {}
    for record in view.records(topic):
        epoch = int(record.header("writer_epoch") or b"0")
        assert epoch >= newest.get(record.partition, 0), (
            f"{record}: of the {role} with epoch {epoch}, after a newer one"
        )
        newest[record.partition] = epoch
