"""The part of a trace from a training to the version that it made: step, weights, evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rftstream.contracts.records import Record
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced
from rftstream.queries.formatting import staleness_text
from rftstream.queries.traces.lineage import Node, header, name_of, number, version_of
from rftstream.queries.traces.trace_records import TraceRecords


class VersionTracer:
    """Makes the nodes of steps and versions. `trace` makes one for each question."""

    def __init__(self, records: TraceRecords) -> None:
        self._records = records
        self._headers = records.headers

    def steps_of(self, batch: int) -> list[Node]:
        """Return every training of a batch, each with what came of it."""
        records = [record for record in self._records.steps if number(record, "batch_sequence") == batch]
        return [self.step(record) for record in records] or [Node(kind="step", name="", facts={"is": "not yet"})]

    def step(self, record: Record) -> Node:
        name = version_of(record)
        assert name is not None, "TraceRecords.steps holds no others"
        same = [other for other in self._records.steps if header(other, "id") == header(record, "id")]
        facts: dict[str, Any] = {"is": None if self._records.lineage.in_force(name) else "not in force any more"}
        step = self._headers.message_of(record)
        if isinstance(step, StepRecord):
            flags = [flag for flag in ("resumed", "skipped", "last") if getattr(step, flag)]
            told: dict[str, Any] = {key: step.metrics[key] for key in ("reward", "loss", "kl") if key in step.metrics}
            facts |= {"was": ", ".join(flags) or None, **told}
            facts["tokens"] = staleness_text(step.token_staleness) or None
            facts["groups"] = staleness_text(step.group_staleness) or None
        else:
            facts["why"] = step
        node = Node(kind="step", name=name_of(name), record=record, facts=facts, twin=record != same[0])
        node.children.append(self.weights(name))
        node.children += self._evaluations(name)
        return node

    def weights(self, name: VersionName) -> Node:
        record = self._records.announcements.get(name)
        if record is None:
            return Node(kind="weights", name=name_of(name), facts={"is": "not announced"})
        announced = self._headers.message_of(record)
        if not isinstance(announced, WeightsAnnounced):
            return Node(kind="weights", name=name_of(name), record=record, facts={"why": announced})
        return Node(
            kind="weights",
            name=name_of(name),
            record=record,
            facts={
                "object": announced.object,
                "is": self._records.whereabouts_of(announced),
                "state": announced.weights_digest[:19],
            },
        )

    def _evaluations(self, name: VersionName) -> Iterator[Node]:
        for record in self._records.evaluations.get(name, ()):
            result = self._headers.message_of(record)
            facts = (
                {"why": result}
                if not isinstance(result, EvalResult)
                else {
                    **{key: value for key, value in result.metrics.items() if key == "mean" or key.startswith("pass@")},
                    **({"num_unscored": result.num_unscored} if result.num_unscored else {}),
                }
            )
            evaluation = result.evaluation if isinstance(result, EvalResult) else ""
            yield Node(kind="evaluation", name=evaluation, record=record, facts=facts)
