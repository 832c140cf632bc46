"""The part of a trace about batches: their manifests, groups and experiences."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.versions import StepRecord
from rftstream.errors import ConfigError
from rftstream.queries.records.problem_list import text_of
from rftstream.queries.records.shown import CompletionReader
from rftstream.queries.traces.lineage import Headers, Node, Target, header, last_line, number, sampled_by
from rftstream.queries.traces.trace_records import TraceRecords, VersionTracer

SAMPLE_CHARACTERS = 60
"""Most characters of a prompt and of a completion that are shown of a batch."""


class BatchTracer:
    """Makes the nodes of batches, with their steps below them. `trace` makes one for each call."""

    def __init__(self, records: TraceRecords, versions: VersionTracer, reader: CompletionReader) -> None:
        self._records = records
        self._versions = versions
        self._reader = reader

    def batch_of_target(self, batch: int | None, target: Target) -> list[Node]:
        """Return the batch of a rollout or group, with only its experiences."""
        if batch is None:
            return []
        records = [record for record in self._records_of(batch) if header(record, "group_id") == target.group_id]
        if target.sibling is not None:
            records = [record for record in records if number(record, "sibling") == target.sibling]
        if not records:
            return []
        return [self._part_of_batch(batch, records)]

    def batch_or_error(self, batch: int) -> Node:
        node = self.batch(batch)
        if node is None:
            newest = max(
                (
                    found
                    for record in self._records.all_of("outcomes")
                    if (found := number(record, "batch_sequence")) is not None
                ),
                default=None,
            )
            first = self._records.deleted.version
            range_ = "no batch yet" if newest is None else f"batches batch:{first} to batch:{newest}"
            range_ += ", those before are deleted by retention" if first else ""
            raise ConfigError(f"trace: batch:{batch}: no such batch; the run {self._records.run.run_id} has {range_}")
        node.children += self._versions.steps_of(batch)
        return node

    def batch(self, batch: int) -> Node | None:
        """Return manifests, some rollouts as text, then groups with their outcomes and experiences; None if there is no
        such batch."""
        records = self._records_of(batch)
        if not records:
            return None
        manifests = [record for record in records if header(record, "contract") == "batch_manifest"]
        by_group: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record not in manifests:
                by_group[header(record, "group_id") or "?"].append(record)
        outcomes = {
            header(record, "group_id"): record for record in self._outcomes_of(batch) if header(record, "late") is None
        }
        node = Node("batch", f"batch:{batch}", facts={"groups": len(by_group)})
        shares = [number(record, "share") for record in manifests]
        for i, record in enumerate(manifests):
            message = self._records.message_of(record)
            facts: dict[str, Any] = {"share": number(record, "share"), "experiences": number(record, "count")}
            if isinstance(message, BatchManifest):
                facts |= {
                    "max_staleness": message.max_staleness,
                    "last": "yes" if message.last else None,
                    "newest scorer": ", ".join(f"{scorer} of {taskset}" for taskset, scorer in message.scorers.items()),
                }
            node.children.append(Node("manifest", "", record, facts, twin=shares[i] in shares[:i]))
        groups = []
        for group, own in by_group.items():
            outcome = outcomes.get(group)
            groups.append(
                Node(
                    "group",
                    group,
                    outcome,
                    {} if outcome is None else {"is": header(outcome, "result")},
                    children=self._experiences_of(own),
                )
            )
        node.children += [*self._samples(groups), *self._shown_demonstrations(groups), *groups]
        return node

    def _samples(self, groups: list[Node]) -> Iterator[Node]:
        """Yield the best, a middling and the worst rollout of a batch with their texts."""
        scored = [one for group in groups for one in group.children if one.facts.get("reward") is not None]
        ranked = sorted(scored, key=lambda one: one.facts["reward"], reverse=True)
        for place in sorted({0, len(ranked) // 2, len(ranked) - 1} if ranked else ()):
            experience = ranked[place]
            rollout = self._rollout_of(experience)
            if rollout is not None:
                asked = "" if rollout.problem is None else text_of(rollout.problem)
                said = self._reader.said(rollout.turns, rollout.segments, SAMPLE_CHARACTERS, rollout.calls)
                prompt = self._reader.one_line([(asked, False)], SAMPLE_CHARACTERS)
                facts = {"reward": experience.facts["reward"], "prompt": prompt, "said": said}
                yield Node("sample", experience.name, facts=facts)

    def _shown_demonstrations(self, groups: list[Node]) -> Iterator[Node]:
        """Yield the first, a middling and the last demonstration of a batch with their texts."""
        taken = [
            one for group in groups for one in group.children if one.record and header(one.record, "expert") is not None
        ]
        chosen = [taken[place] for place in sorted({0, len(taken) // 2, len(taken) - 1} if taken else ())]
        names = {one.name: ids[2] for one in chosen if (ids := split_group_id(one.name.rpartition("/")[0])) is not None}
        places = self._records.places("experts")
        wanted = {places[index % len(places)] for index in names.values()}
        texts = {
            index: self._records.message_of(record)
            for record in (self._records.scan(wanted) if wanted else ())
            if (index := number(record, "number")) in names.values()
        }
        for name, index in names.items():
            if isinstance(message := texts.get(index), Demonstration):
                asked, answered = (
                    self._reader.one_line([(text, False)], SAMPLE_CHARACTERS) for text in _asked_and_answered(message)
                )
                yield Node("sample", name, facts={"prompt": asked, "shown": answered})

    def _rollout_of(self, experience: Node) -> Rollout | None:
        record = experience.record
        assert record is not None, "each experience is a record"
        group, rollout = record.header("group_id"), record.header("rollout_id")
        places = self._records.places("rollouts")
        places = places[(number(record, "sequence") or 0) % len(places) :][:1]
        indexed, start = self._records.of_group(places, group or b"")
        found = itertools.chain(indexed, self._records.scan(places, start=start))
        whole = next((one for one in found if one.header("rollout_id") == rollout), None)
        message = None if whole is None else self._records.message_of(whole)
        return message if isinstance(message, Rollout) else None

    def _outcomes_of(self, batch: int) -> Iterator[Record]:
        places = self._records.places("outcomes")
        indexed, start = self._records.of_batch(batch)
        records = itertools.chain(indexed, self._records.scan(places, start=start))
        return (record for record in records if number(record, "batch_sequence") == batch)

    def _records_of(self, batch: int) -> list[Record]:
        """Read each share from the end of the batch before up to the manifest of this batch."""
        newest = max((run.last for run in self._records.versions.runs), default=0)
        start: dict[TopicPartition, int] = {}
        for record in self._records.versions.steps_of(min(batch, newest)):
            step = self._records.message_of(record)
            if isinstance(step, StepRecord):
                start = {TopicPartition("batches", share): offset for share, offset in enumerate(step.positions)}
        found: list[Record] = []
        for place in self._records.places("batches"):
            for record in self._records.scan([place], start=start):
                sequence = number(record, "batch_sequence")
                if sequence == batch:
                    found.append(record)
                elif sequence is not None and sequence > batch:
                    break
        return found

    def _experiences_of(self, records: list[Record]) -> list[Node]:
        seen: set[str | None] = set()
        nodes = []
        for record in records:
            facts = self._records.facts_of(record, Experience, self._experience_facts)
            identity = header(record, "id")
            nodes.append(Node("experience", header(record, "rollout_id") or "", record, facts, twin=identity in seen))
            seen.add(identity)
        return nodes

    def _experience_facts(self, message: Experience) -> dict[str, Any]:
        by = sampled_by(message.segments, self._records.other_run)
        return {"share": message.share, "position": message.position, "reward": message.reward, "sampled by": by}

    def uses(self, number_: int, taken: int | None) -> list[Node]:
        """Return the batches that used a demonstration, or only the batch of the pass `taken`."""
        uses: dict[int, list[Record]] = defaultdict(list)
        for record in self._records.all_of("batches"):
            if header(record, "expert") is None:
                continue
            ids = split_group_id(header(record, "group_id") or "")
            batch = number(record, "batch_sequence")
            if ids is not None and ids[2] == number_ and taken in (None, ids[1]) and batch is not None:
                uses[batch].append(record)
        return [self._part_of_batch(batch, records) for batch, records in sorted(uses.items())]

    def _part_of_batch(self, batch: int, records: list[Record]) -> Node:
        """Return the batch with these of its experiences, and with its steps."""
        return Node(
            "batch", f"batch:{batch}", children=[*self._experiences_of(records), *self._versions.steps_of(batch)]
        )


# ------------------------------------------- from a demonstration to its batches, and on from there


DEMONSTRATION_IDS = "experts/"
"""Prefix of the ids of demonstrations: `experts/pass/number/0`."""

Uses = Callable[[int, int | None], list[Node]]
"""Function from a demonstration's number and a pass (None: all passes) to its batches."""


def trace_demonstration(headers: Headers, text: str, uses: Uses, wanted: int | str, taken: int | None = None) -> Node:
    """Return the trace of a demonstration, given by number or id. `taken`: only in this pass. ConfigError if there is
    none."""
    places = headers.places("experts")
    if isinstance(wanted, int):
        places = [TopicPartition("experts", wanted % len(places))]
    numbered = ((number(record, "number"), record) for record in headers.scan(places))
    found = next(
        (
            (count, record)
            for count, record in numbered
            if count is not None and wanted in (count, header(record, "id"))
        ),
        None,
    )
    if found is None:
        raise ConfigError(
            f"trace: {text}: no such demonstration on experts; `rftstream inspect RUN experts` lists them"
        )
    count, record = found
    node = Node("demonstration", header(record, "id") or "", record, headers.facts_of(record, Demonstration, _facts))
    node.children += _letters(headers, record)
    node.children += uses(count, taken) or [Node("batch", "", facts={"is": "not yet"})]
    return node


def _facts(message: Demonstration) -> dict[str, Any]:
    pair = message.preference
    answer = (pair.chosen if pair is not None else message.messages)[-1].content
    return {
        "number": message.number,
        "from": message.source,
        "is": "a chat" if pair is None else "a pair",
        "weight": message.weight,
        "ends with": repr(answer if len(answer) <= 60 else f"{answer[:57]}..."),
    }


def _asked_and_answered(message: Demonstration) -> tuple[str, str]:
    """Return the last message of the user, and the last answer: of a pair, the better one."""
    pair = message.preference
    before, answer = (message.messages[:-1], message.messages[-1:]) if pair is None else (pair.prompt, pair.chosen)
    asked = next((one.content for one in reversed(before) if one.role == "user"), "")
    return asked, answer[-1].content if answer else ""


def _letters(headers: Headers, record: Record) -> Iterator[Node]:
    wanted = f"buffer/experts/{record.partition}/{record.offset}"
    for letter in headers.all_of("dead"):
        if header(letter, "id") == wanted:
            message = headers.message_of(letter)
            why = last_line(message.detail) if isinstance(message, DeadLetter) else str(message)
            yield Node("dead", "", letter, {"reason": header(letter, "reason"), "why": why})
