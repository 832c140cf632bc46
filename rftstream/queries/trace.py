"""From a rollout, a group, a batch or a version up and down the chain: every record that belongs to it.

task -> rollout -> verified -> outcome -> batch -> step -> version -> evaluations, with dead letters and twins. Only
headers are read, of one partition of each topic where a rollout or group is looked for (its sequence says which);
bodies of nothing but what is shown.
"""

from __future__ import annotations

import difflib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.control import Trimmed
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import Task
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced
from rftstream.errors import ConfigError
from rftstream.queries.demonstration_uses import EXPERTS, trace_demonstration
from rftstream.queries.formatting import plural
from rftstream.queries.index import Index
from rftstream.queries.lineage import (
    FORMS,
    Headers,
    Node,
    Target,
    count_stamps,
    header,
    last_line,
    name_of,
    named_siblings,
    no_version,
    number,
    parse_target,
    sampled_by,
    version_of,
    whereabouts,
)
from rftstream.queries.origin import origin_node
from rftstream.queries.rows import digest
from rftstream.queries.shown_completions import CompletionReader, open_reader
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.weights.lineage import Lineage
from rftstream.weights.store import ObjectStore

FLOW = ("tasks", "partials", "rollouts", "verified")
SHOWN_CHARACTERS = 60
"""Of a completion."""
MAX_NAMES = 20_000
"""Group ids remembered while searching, to name the nearest."""


def trace(run: OpenRun, text: str, index: Index | None = None, *, dims: bool = False) -> Node:
    """The chain of `text`, a name as the other commands print it. ConfigError if there is no such thing.

    `index`: what an audit has read spares reading it again. `dims`: special tokens of completions are dimmed."""
    node = _Trace(run, index, open_reader(run, dims=dims)).of(parse_target(text), text)
    node.children += origin_node(run)
    return node


class _Trace:
    def __init__(self, run: OpenRun, index: Index | None, reader: CompletionReader) -> None:
        self._run = run
        self._reader = reader
        self._headers = Headers(run.transport, index)
        self._asked: dict[str, str] = {}
        """Object -> where it is."""
        imported = run.config.run.imported_from
        self._other = None if imported is None else Path(imported).name
        """The run whose versions sampled what is here, if it is not this one."""

    def of(self, target: Target, text: str) -> Node:
        match target.kind:
            case "demonstration":
                return trace_demonstration(self._headers, text, self._uses, target.demonstration)
            case "rollout" | "group" if target.group_id.startswith(EXPERTS):
                taken, number_ = map(int, target.group_id.split("/")[1:3])
                return trace_demonstration(self._headers, text, self._uses, number_, taken)
            case "rollout" | "group":
                return self._group(target, text)
            case "batch":
                return self._batch_or_error(target.batch)
            case "version":
                return self._version_or_error(target)
        return self._of_record(target, text)

    def _of_record(self, target: Target, text: str) -> Node:
        place = target.place
        assert place is not None
        if place.topic not in TOPICS or place not in self._headers.places(place.topic):
            raise ConfigError(f"trace: {text}: no such partition; topics: {', '.join(TOPICS)}")
        record = self._headers.record_at(place, target.offset)
        if record is None:
            begin = self._run.transport.admin.begin_offsets(place.topic)[place]
            why = (
                f"the partition begins at {begin}, what was before is deleted"
                if target.offset < begin
                else (f"the partition ends at {self._run.transport.admin.end_offsets(place.topic)[place]}")
            )
            raise ConfigError(f"trace: {text}: no record there; {why}")
        if place.topic == "dead":
            letter = self._headers.message_of(record)
            if isinstance(letter, DeadLetter):
                origin = f"{letter.topic}[{letter.partition}]@{letter.offset}"
                return self.of(parse_target(origin), origin)
        if place.topic == "experts" and (demonstration := number(record, "number")) is not None:
            return trace_demonstration(self._headers, text, self._uses, demonstration)
        for name in ("rollout_id", "group_id"):
            if (found := header(record, name)) is not None:
                return self.of(parse_target(found), found)
        if (batch := number(record, "batch_sequence")) is not None and place.topic == "batches":
            return self._batch_or_error(batch)
        if (version := version_of(record)) is not None:
            return self.of(parse_target(name_of(version)), name_of(version))
        raise ConfigError(f"trace: {text}: belongs to no chain; `rftstream inspect` shows it. Expected {FORMS}")

    # ------------------------------------------------------------------------------------------ rollouts, groups

    def _group(self, target: Target, text: str) -> Node:
        outcomes, known = self._find("outcomes", self._headers.places("outcomes"), target.group_id)
        sequence = next((found for one in outcomes if (found := number(one, "sequence")) is not None), None)
        if sequence is None:
            tasks, more = self._find("tasks", self._headers.places("tasks"), target.group_id, first=True)
            known |= more
            sequence = number(tasks[0], "sequence") if tasks else None
        if sequence is None and self._headers.index is not None:
            self._headers.index = None  # to name the nearest, all names must be looked at
            return self._group(target, text)
        if sequence is None:
            raise ConfigError(self._not_found(target, text, known))
        partition = sequence % len(self._headers.places("tasks"))
        flow = {topic: self._find(topic, [TopicPartition(topic, partition)], target.group_id)[0] for topic in FLOW}
        siblings = {
            found for records in flow.values() for one in records if (found := number(one, "sibling")) is not None
        }
        if sequence < self._said.sequence:
            siblings |= named_siblings(map(self._headers.message_of, outcomes))
        if target.sibling is not None and target.sibling not in siblings:
            last = max(siblings, default=0)
            raise ConfigError(
                f"trace: {text}: the group {target.group_id} has the rollouts 0 to {last}; did you mean "
                f"{target.group_id}/{min(target.sibling, last)}?"
            )
        wanted = sorted(siblings) if target.sibling is None else [target.sibling]
        batch = next((found for one in outcomes if (found := number(one, "batch_sequence")) is not None), None)
        nodes = [self._rollout(target.group_id, sibling, flow, sequence) for sibling in wanted]
        last_part = [*self._outcomes(outcomes, target), *self._batch_of(batch, target)]
        if target.sibling is not None:
            nodes[0].children += last_part
            return nodes[0]
        return Node(
            kind="group",
            name=target.group_id,
            facts={"sequence": sequence, "partition": partition},
            children=[*nodes, *last_part],
        )

    def _find(
        self, topic: str, places: list[TopicPartition], group_id: str, *, first: bool = False
    ) -> tuple[list[Record], set[str]]:
        """Records of the group, and names of groups that were passed; `first`: up to the first one."""
        known: set[str] = set()
        wanted = group_id.encode()
        indexed, start = self._headers.indexed(topic, places, "group", digest(wanted))
        found = [one for one in indexed if one.header("group_id") == wanted]
        if first and found:
            return found[:1], known
        for record in self._headers.scan(places, start=start):
            group = record.header("group_id")
            if group == wanted:
                found.append(record)
                if first:
                    break
            elif group is not None and len(known) < MAX_NAMES:
                known.add(group.decode("ascii", "backslashreplace"))
        return found, known

    def _rollout(self, group_id: str, sibling: int, flow: dict[str, list[Record]], sequence: int) -> Node:
        own = {topic: [one for one in records if number(one, "sibling") == sibling] for topic, records in flow.items()}
        node = Node(kind="rollout", name=f"{group_id}/{sibling}")
        missing = "deleted by retention" if sequence < self._said.sequence else "not yet"
        node.children += self._each(own["tasks"], "task", self._task_facts)
        node.children += self._saved(own["partials"])
        sampled = self._each(own["rollouts"], "sampled", self._rollout_facts)
        for one, record in zip(sampled, own["rollouts"], strict=True):
            one.children += self._stamps(record)
        node.children += sampled or [Node(kind="sampled", name="", facts={"is": missing})]
        if sampled:
            verified = self._each(own["verified"], "verified", self._verdict_facts)
            node.children += verified or [Node(kind="verified", name="", facts={"is": missing})]
        node.children += self._dead(record for records in own.values() for record in records)
        return node

    def _each(self, records: list[Record], kind: str, facts: Any) -> list[Node]:
        """One is as it should be, more are twins."""
        return [
            Node(kind=kind, name="", record=record, facts=facts(record), twin=i > 0) for i, record in enumerate(records)
        ]

    def _saved(self, records: list[Record]) -> Iterator[Node]:
        """Who sampled what of it before it was finished: pieces of the same explorer in a row are one line, with the
        last of them. What is compacted is told no more."""
        for explorer, pieces in itertools.groupby(records, key=lambda one: header(one, "explorer")):
            some = list(pieces)
            first, last = (number(one, "piece") for one in (some[0], some[-1]))
            yield Node(
                kind="saved",
                name=explorer or "",
                record=some[-1],
                facts={
                    "pieces": f"{first} to {last}" if len(some) > 1 else first,
                    "tokens": sum(number(one, "num_tokens") or 0 for one in some),
                },
            )

    def _task_facts(self, record: Record) -> dict[str, Any]:
        task = self._headers.message_of(record)
        if not isinstance(task, Task):
            return {"why": task}
        return {
            "sequence": task.ids.sequence,
            "min_version": task.ids.min_version,
            "seed": task.seed,
            "environment": task.environment,
        }

    def _rollout_facts(self, record: Record) -> dict[str, Any]:
        facts: dict[str, Any] = {"is": header(record, "status"), "tokens": number(record, "num_tokens")}
        rollout = self._headers.message_of(record)
        if isinstance(rollout, Rollout):
            facts["said"] = self._reader.said(rollout.turns, rollout.segments, SHOWN_CHARACTERS)
        return facts

    def _stamps(self, record: Record) -> list[Node]:
        """Which versions sampled it, and how many tokens each."""
        rollout = self._headers.message_of(record)
        if not isinstance(rollout, Rollout):
            return [Node(kind="sampled", name="", facts={"why": rollout})]
        nodes = []
        for name, count in count_stamps(rollout.segments).items():
            if self._other is not None:
                nodes.append(Node(kind="by version", name=name_of(name), facts={"tokens": count, "of": self._other}))
                continue
            node = self._weights(name)
            nodes.append(
                Node(kind="by version", name=name_of(name), record=node.record, facts={"tokens": count, **node.facts})
            )
        if rollout.error:
            nodes.append(Node(kind="error", name="", facts={"why": rollout.error}))
        return nodes

    def _verdict_facts(self, record: Record) -> dict[str, Any]:
        verified = self._headers.message_of(record)
        if not isinstance(verified, VerifiedRollout):
            return {"why": verified}
        if verified.verdict is None:
            return {"unscorable": verified.reason, "why": verified.detail}
        verdict = verified.verdict
        return {"reward": verdict.reward, "by": f"by {verdict.scorer} {verdict.scorer_version}", **verdict.parts}

    def _outcomes(self, records: list[Record], target: Target) -> list[Node]:
        nodes, on_time = [], 0
        for record in records:
            late = header(record, "late") is not None
            facts: dict[str, Any] = {"is": header(record, "result"), "reason": header(record, "reason")}
            outcome = self._headers.message_of(record)
            if isinstance(outcome, GroupOutcome):
                names = [one.rollout_id.rpartition("/")[2] for one in outcome.rollouts]
                if late and target.sibling is not None and str(target.sibling) not in names:
                    continue
                facts["of"] = f"rollouts {', '.join(names)}"
            nodes.append(
                Node(
                    kind="late outcome" if late else "outcome",
                    name="",
                    record=record,
                    facts=facts,
                    twin=not late and on_time > 0,
                )
            )
            on_time += not late
        return nodes or [Node(kind="outcome", name="", facts={"is": "not yet"})]

    def _dead(self, records: Iterable[Record]) -> Iterator[Node]:
        """Letters about any of these."""
        places = {f"{one.topic}/{one.partition}/{one.offset}" for one in records}
        found = [letter for place in places for letter in self._letters.get(place, ())]
        for letter in sorted(found, key=lambda one: one.offset):
            message = self._headers.message_of(letter)
            detail = message.detail if isinstance(message, DeadLetter) else str(message)
            role = (header(letter, "id") or "").partition("/")[0]
            facts = {"role": role, "reason": header(letter, "reason"), "why": last_line(detail)}
            yield Node(kind="dead", name="", record=letter, facts=facts)

    def _not_found(self, target: Target, text: str, known: set[str]) -> str:
        searched = ", ".join(f"{plural(count, 'record')} of {place}" for place, count in self._headers.searched.items())
        taskset = target.group_id.partition("/")[0]
        near = difflib.get_close_matches(target.group_id, sorted(known), n=1, cutoff=0.0)
        sibling = "" if target.sibling is None else "/0"
        hint = f"; the nearest is {near[0]}{sibling}" if near else ""
        if taskset not in self._run.config.tasksets:
            hint = f"; tasksets of this run: {', '.join(self._run.config.tasksets)}{hint}"
        return f"trace: {text}: no such {target.kind} in {searched or 'an empty log'} of {self._run.run_id}{hint}"

    # ------------------------------------------------------------------------------------------ demonstrations

    def _uses(self, number_: int, taken: int | None) -> list[Node]:
        """A demonstration's batches, one for each pass that took it; `taken`: of this pass alone."""
        uses: dict[int, list[Record]] = defaultdict(list)
        for record in self._headers.all_of("batches"):
            if header(record, "expert") is None:
                continue
            ids = split_group_id(header(record, "group_id") or "")
            batch = number(record, "batch_sequence")
            if ids is not None and ids[2] == number_ and taken in (None, ids[1]) and batch is not None:
                uses[batch].append(record)
        return [
            Node(kind="batch", name=f"batch:{batch}", children=[*self._experiences(records), *self._steps(batch)])
            for batch, records in sorted(uses.items())
        ]

    # ------------------------------------------------------------------------------------------ batches

    def _batch_of(self, batch: int | None, target: Target) -> list[Node]:
        """The batch that a rollout or group went into, with no more of it than theirs."""
        if batch is None:
            return []
        records = [one for one in self._batch_records(batch) if header(one, "group_id") == target.group_id]
        if target.sibling is not None:
            records = [one for one in records if number(one, "sibling") == target.sibling]
        if not records:
            return []
        return [Node(kind="batch", name=f"batch:{batch}", children=[*self._experiences(records), *self._steps(batch)])]

    def _batch_or_error(self, batch: int) -> Node:
        node = self._batch(batch)
        if node is None:
            newest = max(
                (
                    found
                    for one in self._headers.all_of("outcomes")
                    if (found := number(one, "batch_sequence")) is not None
                ),
                default=None,
            )
            first = self._said.version
            range_ = "no batch yet" if newest is None else f"batches batch:{first} to batch:{newest}"
            range_ += ", those before are deleted by retention" if first else ""
            raise ConfigError(f"trace: batch:{batch}: no such batch; the run {self._run.run_id} has {range_}")
        node.children += self._steps(batch)
        return node

    def _batch(self, batch: int) -> Node | None:
        """Manifests, then groups with their outcomes and experiences; None if there is no such batch."""
        records = self._batch_records(batch)
        if not records:
            return None
        manifests = [one for one in records if header(one, "contract") == "batch_manifest"]
        by_group: dict[str, list[Record]] = defaultdict(list)
        for one in records:
            if one not in manifests:
                by_group[header(one, "group_id") or "?"].append(one)
        outcomes = {header(one, "group_id"): one for one in self._outcomes_of(batch) if header(one, "late") is None}
        node = Node(kind="batch", name=f"batch:{batch}", facts={"groups": len(by_group)})
        shares = [number(one, "share") for one in manifests]
        for i, record in enumerate(manifests):
            message = self._headers.message_of(record)
            facts: dict[str, Any] = {"share": number(record, "share"), "experiences": number(record, "count")}
            if isinstance(message, BatchManifest):
                facts |= {"max_staleness": message.max_staleness, "last": "yes" if message.last else None}
            node.children.append(
                Node(kind="manifest", name="", record=record, facts=facts, twin=shares[i] in shares[:i])
            )
        for group, own in by_group.items():
            outcome = outcomes.get(group)
            node.children.append(
                Node(
                    kind="group",
                    name=group,
                    record=outcome,
                    children=self._experiences(own),
                    facts={} if outcome is None else {"is": header(outcome, "result")},
                )
            )
        return node

    def _outcomes_of(self, batch: int) -> Iterator[Record]:
        places = self._headers.places("outcomes")
        indexed, start = self._headers.indexed("outcomes", places, "number", batch)
        records = itertools.chain(indexed, self._headers.scan(places, start=start))
        return (one for one in records if number(one, "batch_sequence") == batch)

    def _batch_records(self, batch: int) -> list[Record]:
        """From where the batch before was trained up to the batch's manifest, in each share."""
        before = [one for one in self._step_records if (k := number(one, "batch_sequence")) is not None and k < batch]
        start: dict[TopicPartition, int] = {}
        if before:
            step = self._headers.message_of(max(before, key=lambda one: number(one, "batch_sequence") or 0))
            if isinstance(step, StepRecord):
                start = {TopicPartition("batches", share): offset for share, offset in enumerate(step.positions)}
        found: list[Record] = []
        for place in self._headers.places("batches"):
            for record in self._headers.scan([place], start=start):
                sequence = number(record, "batch_sequence")
                if sequence == batch:
                    found.append(record)
                elif sequence is not None and sequence > batch:
                    break
        return found

    def _experiences(self, records: list[Record]) -> list[Node]:
        seen: set[str | None] = set()
        nodes = []
        for record in records:
            message = self._headers.message_of(record)
            facts: dict[str, Any] = (
                {"why": message}
                if not isinstance(message, Experience)
                else {
                    "share": message.share,
                    "position": message.position,
                    "reward": message.reward,
                    "sampled by": sampled_by(message.segments, self._other),
                }
            )
            identity = header(record, "id")
            nodes.append(
                Node(
                    kind="experience",
                    name=header(record, "rollout_id") or "",
                    record=record,
                    facts=facts,
                    twin=identity in seen,
                )
            )
            seen.add(identity)
        return nodes

    # ------------------------------------------------------------------------------------------ steps, versions

    def _steps(self, batch: int) -> list[Node]:
        """Every training of a batch, and what came of it."""
        records = [one for one in self._step_records if number(one, "batch_sequence") == batch]
        return [self._step(record) for record in records] or [Node(kind="step", name="", facts={"is": "not yet"})]

    def _step(self, record: Record) -> Node:
        name = version_of(record)
        assert name is not None, "_step_records holds no others"
        same = [one for one in self._step_records if header(one, "id") == header(record, "id")]
        facts: dict[str, Any] = {"is": None if self._lineage.in_force(name) else "not in force any more"}
        step = self._headers.message_of(record)
        if isinstance(step, StepRecord):
            flags = [flag for flag in ("resumed", "skipped", "last") if getattr(step, flag)]
            told: dict[str, Any] = {key: step.metrics[key] for key in ("reward", "loss", "kl") if key in step.metrics}
            facts |= {"was": ", ".join(flags) or None, **told}
        else:
            facts["why"] = step
        node = Node(kind="step", name=name_of(name), record=record, facts=facts, twin=record != same[0])
        node.children.append(self._weights(name))
        node.children += self._evaluations(name)
        return node

    def _version_or_error(self, target: Target) -> Node:
        wanted = [
            one
            for one in self._step_records
            if number(one, "version") == target.version and target.trainer_epoch in (None, number(one, "trainer_epoch"))
        ]
        if not wanted:
            names = [name for one in self._step_records if (name := version_of(one)) is not None]
            raise ConfigError(no_version(target, names, self._run.run_id))
        node = Node(kind="version", name=f"v{target.version}", children=[self._step(one) for one in wanted])
        trained = any(number(one, "batch_sequence") is not None for one in wanted)
        if trained and (batch := self._batch(target.version - 1)) is not None:
            node.children.append(batch)
        return node

    def _weights(self, name: VersionName) -> Node:
        record = self._announcements.get(name)
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
                "is": self._whereabouts(announced),
                "state": announced.weights_digest[:19],
            },
        )

    def _whereabouts(self, announced: WeightsAnnounced) -> str:
        """Siblings have the same versions: the store may be far away, and is asked for each once."""
        if announced.object not in self._asked:
            self._asked[announced.object] = whereabouts(self._store, announced)
        return self._asked[announced.object]

    def _evaluations(self, name: VersionName) -> Iterator[Node]:
        for record in self._results.get(name, ()):
            result = self._headers.message_of(record)
            facts = (
                {"why": result}
                if not isinstance(result, EvalResult)
                else {key: value for key, value in result.metrics.items() if key == "mean" or key.startswith("pass@")}
            )
            evaluation = result.evaluation if isinstance(result, EvalResult) else ""
            yield Node(kind="evaluation", name=evaluation, record=record, facts=facts)

    # ------------------------------------------------------------------------------------------ small topics

    @cached_property
    def _store(self) -> ObjectStore:
        return self._run.store()

    @cached_property
    def _said(self) -> Trimmed:
        """Of what retention deleted."""
        return read_control(self._run.transport).deleted

    @cached_property
    def _step_records(self) -> list[Record]:
        in_force = self._in_force("steps")
        return [one for one in self._headers.all_of("steps") if one.offset in in_force and version_of(one) is not None]

    def _in_force(self, topic: str) -> frozenset[int]:
        """Offsets of the records that count, on a topic of one partition."""
        return frozenset(record.offset for record, _ in Log(self._run.transport).in_force(topic))

    @cached_property
    def _lineage(self) -> Lineage:
        lineage = Lineage()
        for record in self._step_records:
            name = version_of(record)
            if name is not None and header(record, "resumed") is not None and name.trainer_epoch > lineage.epoch:
                lineage.start(name)
        return lineage

    @cached_property
    def _announcements(self) -> dict[VersionName, Record]:
        found: dict[VersionName, Record] = {}
        in_force = self._in_force("weights")
        for record in self._headers.all_of("weights"):
            if record.offset in in_force and (name := version_of(record)) is not None:
                found.setdefault(name, record)
        return found

    @cached_property
    def _results(self) -> dict[VersionName, list[Record]]:
        found: dict[VersionName, list[Record]] = defaultdict(list)
        for record in self._headers.all_of("evals"):
            if (name := version_of(record)) is not None:
                found[name].append(record)
        return found

    @cached_property
    def _letters(self) -> dict[str, list[Record]]:
        """By the place of the record that they are about, `topic/partition/offset`."""
        found: dict[str, list[Record]] = defaultdict(list)
        for record in self._headers.all_of("dead"):
            found[(header(record, "id") or "").partition("/")[2]].append(record)
        return found
