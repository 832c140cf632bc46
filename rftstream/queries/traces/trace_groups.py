"""The part of a trace about groups and their rollouts, from the task to the outcome."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import Task
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import ConfigError
from rftstream.queries.formatting import image_text, plural
from rftstream.queries.records.shown import (
    CompletionReader,
    call_text,
    has_many_turns,
    model_call_text,
    posted_text,
    role_numbers,
    roles_of_turns,
    segment_starts,
)
from rftstream.queries.traces.lineage import (
    Node,
    Target,
    count_stamps,
    header,
    last_line,
    name_of,
    named_siblings,
    number,
)
from rftstream.queries.traces.trace_batches import BatchTracer
from rftstream.queries.traces.trace_records import TraceRecords, VersionTracer

FLOW = ("tasks", "partials", "rollouts", "verified")
SHOWN_CHARACTERS = 60
"""Most characters of a completion."""
MAX_NAMES = 20_000
"""Most group ids that are remembered during a search, to propose the nearest."""


class GroupTracer:
    """Makes the nodes of groups and rollouts. `trace` makes one for each call."""

    def __init__(
        self, records: TraceRecords, versions: VersionTracer, batches: BatchTracer, reader: CompletionReader
    ) -> None:
        self._records = records
        self._versions = versions
        self._batches = batches
        self._reader = reader

    def group(self, target: Target, text: str) -> Node:
        outcomes, known = self._find("outcomes", self._records.places("outcomes"), target.group_id)
        sequence = next((found for record in outcomes if (found := number(record, "sequence")) is not None), None)
        if sequence is None:
            tasks, more = self._find("tasks", self._records.places("tasks"), target.group_id, first=True)
            known |= more
            sequence = number(tasks[0], "sequence") if tasks else None
        if sequence is None and self._records.index is not None:
            self._records.index = None  # all names are needed to propose the nearest
            return self.group(target, text)
        if sequence is None:
            raise ConfigError(self._not_found(target, text, known))
        partition = sequence % len(self._records.places("tasks"))
        flow = {topic: self._find(topic, [TopicPartition(topic, partition)], target.group_id)[0] for topic in FLOW}
        siblings = {
            found for records in flow.values() for record in records if (found := number(record, "sibling")) is not None
        }
        if sequence < self._records.deleted.sequence:
            siblings |= named_siblings(map(self._records.message_of, outcomes))
        if target.sibling is not None and target.sibling not in siblings:
            last = max(siblings, default=0)
            raise ConfigError(
                f"trace: {text}: the group {target.group_id} has the rollouts 0 to {last}; did you mean "
                f"{target.group_id}/{min(target.sibling, last)}?"
            )
        wanted = sorted(siblings) if target.sibling is None else [target.sibling]
        batch = next((found for record in outcomes if (found := number(record, "batch_sequence")) is not None), None)
        detailed = target.sibling is not None
        nodes = [self._rollout(target.group_id, one, flow, sequence, detailed=detailed) for one in wanted]
        last_part = [*self._outcomes(outcomes, target), *self._batches.batch_of_target(batch, target)]
        if target.sibling is not None:
            nodes[0].children += last_part
            return nodes[0]
        return Node(
            "group",
            target.group_id,
            facts={"sequence": sequence, "partition": partition},
            children=[*nodes, *last_part],
        )

    def _find(
        self, topic: str, places: list[TopicPartition], group_id: str, *, first: bool = False
    ) -> tuple[list[Record], set[str]]:
        """Return the records of the group (with `first` only the first), and the names of other groups on the way."""
        known: set[str] = set()
        wanted = group_id.encode()
        found, start = self._records.of_group(places, wanted)
        if first and found:
            return found[:1], known
        for record in self._records.scan(places, start=start):
            group = record.header("group_id")
            if group == wanted:
                found.append(record)
                if first:
                    break
            elif group is not None and len(known) < MAX_NAMES:
                known.add(group.decode("ascii", "backslashreplace"))
        return found, known

    def _rollout(
        self, group_id: str, sibling: int, flow: dict[str, list[Record]], sequence: int, *, detailed: bool
    ) -> Node:
        own = {
            topic: [record for record in records if number(record, "sibling") == sibling]
            for topic, records in flow.items()
        }
        node = Node("rollout", f"{group_id}/{sibling}")
        missing = "deleted by retention" if sequence < self._records.deleted.sequence else "not yet"
        node.children += self._each(
            own["tasks"], "task", lambda record: self._records.facts_of(record, Task, _task_facts)
        )
        node.children += self._saved(own["partials"])
        sampled = self._each(own["rollouts"], "sampled", self._rollout_facts)
        for node_of_rollout, record in zip(sampled, own["rollouts"], strict=True):
            if detailed:
                node_of_rollout.children += self._turns(record)
            node_of_rollout.children += self._stamps(record)
        node.children += sampled or [Node("sampled", "", facts={"is": missing})]
        if sampled:
            verified = self._each(
                own["verified"],
                "verified",
                lambda record: self._records.facts_of(record, VerifiedRollout, _verdict_facts),
            )
            node.children += verified or [Node("verified", "", facts={"is": missing})]
        node.children += self._dead(record for records in own.values() for record in records)
        return node

    def _each(self, records: list[Record], kind: str, facts: Any) -> list[Node]:
        """Return a node for each record. The first is regular, and the others are its twins."""
        return [Node(kind, "", record, facts(record), twin=i > 0) for i, record in enumerate(records)]

    def _saved(self, records: list[Record]) -> Iterator[Node]:
        """Yield nodes for the saved pieces of the rollout, with their explorers.

        Consecutive pieces of the same explorer are one line, with the newest piece. Compacted pieces are not shown.
        """
        for explorer, pieces in itertools.groupby(records, key=lambda record: header(record, "explorer")):
            some = list(pieces)
            first, last = (number(piece, "piece") for piece in (some[0], some[-1]))
            yield Node(
                "saved",
                explorer or "",
                some[-1],
                {
                    "pieces": f"{first} to {last}" if len(some) > 1 else first,
                    "tokens": sum(number(piece, "num_tokens") or 0 for piece in some),
                },
            )

    def _rollout_facts(self, record: Record) -> dict[str, Any]:
        facts: dict[str, Any] = {"is": header(record, "status"), "tokens": number(record, "num_tokens")}
        rollout = self._records.message_of(record)
        if isinstance(rollout, Rollout):
            if has_many_turns(rollout):
                facts["turns"] = len(rollout.turns)
                facts["segments"] = len(rollout.segments)
            if rollout.calls:
                facts["calls"] = len(rollout.calls)
            if rollout.posted is not None:
                facts["posted"] = posted_text(rollout.posted)
            facts["said"] = self._reader.said(rollout.turns, rollout.segments, SHOWN_CHARACTERS, rollout.calls)
        return facts

    def _turns(self, record: Record) -> Iterator[Node]:
        """Yield a node for each turn of a rollout with several turns or with tool calls, and for each model call of an
        agent."""
        rollout = self._records.message_of(record)
        if not isinstance(rollout, Rollout):
            return
        if has_many_turns(rollout):
            shown = self._reader.turns(rollout.turns, rollout.segments, rollout.calls)
            starts = segment_starts(rollout.turns, rollout.segments, rollout.calls)
            roles = roles_of_turns(rollout.turns, rollout.segments, rollout.calls)
            for index, (turn, pieces) in enumerate(zip(rollout.turns, shown, strict=True)):
                facts: dict[str, Any] = {
                    "as": roles.get(index),
                    "tokens": turn.num_tokens or None,
                    "segment": starts[index].segment if index in starts else None,
                    "opened": starts[index].why or None if index in starts else None,
                    "ended by": turn.finish_reason,
                    "reward": turn.reward,
                    "says": self._reader.one_line(pieces, SHOWN_CHARACTERS) or None,
                }
                calls = [Node("calls", call_text(call)) for call in turn.tool_calls]
                yield Node(turn.role, "", facts=facts, children=calls)
        for call in rollout.calls:
            yield Node("call", f"{rollout.ids.rollout_id}/call/{call.number}", facts={"is": model_call_text(call)})

    def _stamps(self, record: Record) -> list[Node]:
        """Return which versions sampled the rollout, with the number of tokens of each."""
        rollout = self._records.message_of(record)
        if not isinstance(rollout, Rollout):
            return [Node("sampled", "", facts={"why": rollout})]
        nodes = []
        shown = {span.image.digest: span for segment in rollout.segments for span in segment.images}
        for span in shown.values():
            facts = {"tokens": span.count, "at": span.image.url[:100]}
            nodes.append(Node("image", image_text(span.image), facts=facts))
        for name, count in count_stamps(rollout.segments).items():
            if self._records.other_run is not None:
                nodes.append(Node("by version", name_of(name), facts={"tokens": count, "of": self._records.other_run}))
                continue
            node = self._versions.weights(name)
            nodes.append(Node("by version", name_of(name), node.record, {"tokens": count, **node.facts}))
        if rollout.error:
            nodes.append(Node("error", "", facts={"why": rollout.error}))
        return nodes

    def _outcomes(self, records: list[Record], target: Target) -> list[Node]:
        nodes, on_time = [], 0
        for record in records:
            late = header(record, "late") is not None
            facts: dict[str, Any] = {"is": header(record, "result"), "reason": header(record, "reason")}
            outcome = self._records.message_of(record)
            if isinstance(outcome, GroupOutcome):
                names = [rollout.rollout_id.rpartition("/")[2] for rollout in outcome.rollouts]
                if late and target.sibling is not None and str(target.sibling) not in names:
                    continue
                facts["of"] = f"rollouts {', '.join(names)}"
            nodes.append(Node("late outcome" if late else "outcome", "", record, facts, twin=not late and on_time > 0))
            on_time += not late
        return nodes or [Node("outcome", "", facts={"is": "not yet"})]

    def _dead(self, records: Iterable[Record]) -> Iterator[Node]:
        """Return the dead letters about any of these records."""
        places = {f"{record.topic}/{record.partition}/{record.offset}" for record in records}
        found = [letter for place in places for letter in self._records.letters.get(place, ())]
        for letter in sorted(found, key=lambda letter: letter.offset):
            message = self._records.message_of(letter)
            detail = message.detail if isinstance(message, DeadLetter) else str(message)
            role = (header(letter, "id") or "").partition("/")[0]
            facts = {"role": role, "reason": header(letter, "reason"), "why": last_line(detail)}
            yield Node("dead", "", letter, facts)

    def _not_found(self, target: Target, text: str, known: set[str]) -> str:
        counts = Counter[str]()
        for place, count in self._records.searched.items():
            counts[place.partition("[")[0]] += count
        searched = ", ".join(f"{plural(count, 'record')} of {topic}" for topic, count in counts.items())
        taskset = target.group_id.partition("/")[0]
        near = difflib.get_close_matches(target.group_id, sorted(known), n=1, cutoff=0.0)
        sibling = "" if target.sibling is None else "/0"
        hint = f"; the nearest is {near[0]}{sibling}" if near else ""
        if taskset not in self._records.run.config.tasksets:
            hint = f"; tasksets of this run: {', '.join(self._records.run.config.tasksets)}{hint}"
        return (
            f"trace: {text}: no such {target.kind} in {searched or 'an empty log'} of {self._records.run.run_id}{hint}"
        )


def _task_facts(task: Task) -> dict[str, Any]:
    ids = task.ids
    return {
        "sequence": ids.sequence,
        "min_version": ids.min_version,
        "seed": task.seed,
        "environment": task.environment,
    }


def _verdict_facts(verified: VerifiedRollout) -> dict[str, Any]:
    verdict = verified.verdict
    if verdict is None:
        return {"unscorable": verified.reason, "why": verified.detail}
    roles = {"roles": role_numbers(verdict.roles)} if verdict.roles else {}
    why = {"why": verified.detail} if verified.detail else {}
    return {"reward": verdict.reward, "by": f"by {verdict.scored_by}", **verdict.parts, **roles, **why}
