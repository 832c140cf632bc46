"""The records of small topics that a trace looks up. Each topic is read once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from rftstream.contracts.control import Trimmed
from rftstream.contracts.records import Record
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced
from rftstream.queries.facts.database import Index
from rftstream.queries.formatting import staleness_text
from rftstream.queries.traces.lineage import Headers, Node, header, name_of, number, version_of, whereabouts
from rftstream.queries.traces.versions_on_log import VersionsOnLog
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.weights.stores.store import ObjectStore


class TraceRecords(Headers):
    """The records about a run that a trace needs beside those of its target: steps, versions, evaluations, dead
    letters, deletions.

    `trace` makes it. Each topic is read on first use.
    """

    def __init__(self, run: OpenRun, index: Index | None) -> None:
        super().__init__(run.transport, index)
        self.run = run
        self._log = Log(run.transport)
        self.versions = VersionsOnLog(self._log)
        self._places: dict[str, str] = {}
        """Object -> its place, if it was looked up."""
        imported = run.config.run.imported_from
        self.other_run = None if imported is None else Path(imported).name
        """The other run whose versions sampled the rollouts here; None if it is this run."""

    def whereabouts_of(self, announced: WeightsAnnounced) -> str:
        """Return where the object of a version is. The store may be remote, so it is asked once for each version."""
        if announced.object not in self._places:
            self._places[announced.object] = whereabouts(self._store, announced)
        return self._places[announced.object]

    @cached_property
    def _store(self) -> ObjectStore:
        return self.run.store()

    @cached_property
    def deleted(self) -> Trimmed:
        """The deletions by retention, from `control`."""
        return read_control(self.run.transport, log=self._log).deleted

    @cached_property
    def evaluations(self) -> dict[VersionName, list[Record]]:
        """The results of evaluations of each version."""
        found: dict[VersionName, list[Record]] = defaultdict(list)
        for record in self.all_of("evals"):
            if (name := version_of(record)) is not None:
                found[name].append(record)
        return found

    @cached_property
    def letters(self) -> dict[str, list[Record]]:
        """Dead letters by the place of the record that they are about, `topic/partition/offset`."""
        found: dict[str, list[Record]] = defaultdict(list)
        for record in self.all_of("dead"):
            found[(header(record, "id") or "").partition("/")[2]].append(record)
        return found


# ------------------------- the part of a trace from a step to the version that it made: step, weights, evaluations


class VersionTracer:
    """Makes the nodes of steps and versions. `trace` makes one for each call."""

    def __init__(self, records: TraceRecords) -> None:
        self._records = records

    def steps_of(self, batch: int) -> list[Node]:
        """Return every step that trained a batch, each with the version that it made."""
        records = self._records.versions.steps_of(batch + 1)
        return [self.step(record) for record in records if number(record, "batch_sequence") == batch] or [
            Node("step", "", facts={"is": "not yet"})
        ]

    def step(self, record: Record) -> Node:
        name = version_of(record)
        assert name is not None, "VersionsOnLog has found it by its name"
        in_force = self._records.versions.lineage.in_force(name)
        facts: dict[str, Any] = {"is": None if in_force else "not in force any more"}
        step = self._records.message_of(record)
        if isinstance(step, StepRecord):
            flags = [flag for flag in ("resumed", "skipped", "last") if getattr(step, flag)]
            told: dict[str, Any] = {key: step.metrics[key] for key in ("reward", "loss", "kl") if key in step.metrics}
            facts |= {"was": ", ".join(flags) or None, **told}
            for what, counts in (("tokens", step.token_staleness), ("groups", step.group_staleness)):
                facts[what] = f"{found} versions old" if (found := staleness_text(counts)) else None
        else:
            facts["why"] = step
        node = Node("step", name_of(name), record, facts)
        node.children.append(self.weights(name))
        node.children += self._evaluations(name)
        return node

    def weights(self, name: VersionName) -> Node:
        record = self._records.versions.find("weights", name)
        if record is None:
            return Node("weights", name_of(name), facts={"is": "not announced"})
        return Node(
            "weights",
            name_of(name),
            record,
            self._records.facts_of(
                record,
                WeightsAnnounced,
                lambda announced: {
                    "object": announced.object,
                    "is": self._records.whereabouts_of(announced),
                    "state": announced.weights_digest[:19],
                },
            ),
        )

    def _evaluations(self, name: VersionName) -> Iterator[Node]:
        for record in self._records.evaluations.get(name, ()):
            result = self._records.message_of(record)
            evaluation = result.evaluation if isinstance(result, EvalResult) else ""
            yield Node("evaluation", evaluation, record, self._records.facts_of(record, EvalResult, _result_facts))


def _result_facts(result: EvalResult) -> dict[str, Any]:
    shown = {key: value for key, value in result.metrics.items() if key == "mean" or key.startswith("pass@")}
    return shown | ({"num_unscored": result.num_unscored} if result.num_unscored else {})
