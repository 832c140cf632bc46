"""Traces a rollout, a group, a batch or a version up and down the flow, to every related record.

task -> rollout -> verified -> outcome -> batch -> step -> version -> evaluations, with dead letters and twins. Only
headers are read. For a rollout or group, only one partition of each topic is searched, given by its sequence. Bodies
are read only for the records that are shown.
"""

from __future__ import annotations

import re
from pathlib import Path

from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ConfigError
from rftstream.queries.datasets.exports import export_node
from rftstream.queries.facts.database import Index, StoreError
from rftstream.queries.records.shown import CompletionReader, open_reader
from rftstream.queries.traces.lineage import (
    FORMS,
    Node,
    Target,
    header,
    name_of,
    no_version,
    number,
    origin_node,
    parse_target,
    version_of,
)
from rftstream.queries.traces.trace_batches import DEMONSTRATION_IDS, BatchTracer, trace_demonstration
from rftstream.queries.traces.trace_groups import GroupTracer
from rftstream.queries.traces.trace_problems import ProblemTracer, feedback_nodes
from rftstream.queries.traces.trace_records import TraceRecords, VersionTracer
from rftstream.runs.folder import OpenRun
from rftstream.service.records.problem_records import PROBLEMS
from rftstream.service.role import Log


def trace(run: OpenRun, text: str, index: Index | None = None, *, dims: bool = False) -> Node:
    """Return the trace of `text`, an id as printed by other commands. ConfigError if the id does not exist.

    `index`: records that an audit has read are not read again. `dims`: special tokens of completions are dimmed.
    """
    reader, target = open_reader(run, dims=dims), _target(text)
    try:
        node = _Tracer(run, index, reader).chain_of(target, text)
    except StoreError:  # the file is damaged, and a reader without the lock has not read all of it before
        node = _Tracer(run, None, reader).chain_of(target, text)
    node.children += origin_node(run)
    return node


def _target(text: str) -> Target:
    """Return the target that a text names, which may also be the folder of a data set."""
    try:
        return parse_target(text)
    except ConfigError:
        if (text and Path(text).is_dir()) or ("/" in text and not re.fullmatch(r"[a-z0-9_-]+(/\d+)+", text)):
            return Target("export")
        raise


class _Tracer:
    """Finds out what an id names, and passes it to the tracer of its kind."""

    def __init__(self, run: OpenRun, index: Index | None, reader: CompletionReader) -> None:
        self._run = run
        self._records = TraceRecords(run, index)
        self._versions = VersionTracer(self._records)
        self._batches = BatchTracer(self._records, self._versions, reader)
        self._problems = ProblemTracer(run)
        self._groups = GroupTracer(self._records, self._versions, self._batches, reader)

    def chain_of(self, target: Target, text: str) -> Node:
        """Return the trace of `target`, which was given as `text`."""
        match target.kind:
            case "demonstration":
                return trace_demonstration(self._records, text, self._batches.uses, target.demonstration)
            case "rollout" | "group" if target.group_id.startswith(DEMONSTRATION_IDS):
                taken, number_ = map(int, target.group_id.split("/")[1:3])
                return trace_demonstration(self._records, text, self._batches.uses, number_, taken)
            case "rollout" | "group":
                node = self._groups.group(target, text)
                node.children += self._problems.of_group(target.group_id)
                node.children += feedback_nodes(Log(self._run.transport), self._run.config, target)
                return node
            case "problem":
                return self._problems.problem(target.problem)
            case "export":
                return export_node(self._run, text)
            case "batch":
                return self._batches.batch_or_error(target.batch)
            case "version":
                return self._version_or_error(target)
        return self._of_record(target, text)

    def _of_record(self, target: Target, text: str) -> Node:
        place = target.place
        assert place is not None
        if place.topic not in TOPICS or place not in self._records.places(place.topic):
            raise ConfigError(f"trace: {text}: no such partition; topics: {', '.join(TOPICS)}")
        record = self._records.record_at(place, target.offset)
        if record is None:
            begin = self._run.transport.admin.begin_offsets(place.topic)[place]
            why = (
                f"the partition begins at {begin}, what was before is deleted"
                if target.offset < begin
                else f"the partition ends at {self._run.transport.admin.end_offsets(place.topic)[place]}"
            )
            raise ConfigError(f"trace: {text}: no record there; {why}")
        if place.topic == "dead":
            letter = self._records.message_of(record)
            if isinstance(letter, DeadLetter):
                origin = f"{letter.topic}[{letter.partition}]@{letter.offset}"
                return self.chain_of(parse_target(origin), origin)
        if place == PROBLEMS:
            return self._problems.record(record)
        if place.topic == "experts" and (demonstration := number(record, "number")) is not None:
            return trace_demonstration(self._records, text, self._batches.uses, demonstration)
        for name in ("rollout_id", "group_id"):
            if (found := header(record, name)) is not None:
                return self.chain_of(parse_target(found), found)
        if (batch := number(record, "batch_sequence")) is not None and place.topic == "batches":
            return self._batches.batch_or_error(batch)
        if (version := version_of(record)) is not None:
            return self.chain_of(parse_target(name_of(version)), name_of(version))
        raise ConfigError(f"trace: {text}: belongs to no chain; `rftstream inspect` shows it. Expected {FORMS}")

    def _version_or_error(self, target: Target) -> Node:
        versions = self._records.versions
        wanted = [
            step
            for step in versions.steps_of(target.version)
            if target.trainer_epoch in (None, number(step, "trainer_epoch"))
        ]
        if not wanted:
            raise ConfigError(no_version(target, versions.runs, self._run.run_id))
        node = Node("version", f"v{target.version}", children=[self._versions.step(step) for step in wanted])
        trained = any(number(step, "batch_sequence") is not None for step in wanted)
        if trained and (batch := self._batches.batch(target.version - 1)) is not None:
            node.children.append(batch)
        return node
