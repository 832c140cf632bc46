"""The part of a trace about problems that joined the run: their parents and the problems made from them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from rftstream.config.sections import RunConfig
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.problems import NewProblem, ProblemMaker, RejectedProblem
from rftstream.contracts.questions import Judgement, Question, VoteEffect
from rftstream.contracts.records import Record
from rftstream.data.tasksets.growing import GrowingTaskset, GrowingTasksets
from rftstream.errors import ConfigError
from rftstream.queries.people.feedback import has_feedback, judged_text, read_feedback, vote_text
from rftstream.queries.records.problem_list import empty_taskset, text_of
from rftstream.queries.traces.lineage import Node, Target, name_of
from rftstream.runs.folder import OpenRun
from rftstream.service.records.problem_records import read_problems
from rftstream.service.role import Log

SHOWN_CHARACTERS = 60
"""Most characters of a problem."""
MAX_GENERATIONS = 1000
"""Most generations of parents that are followed."""


class ProblemTracer:
    """Makes the nodes of problems. `trace` makes one for each call; `problems` is read on first use."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._growing: dict[str, GrowingTaskset] = {}

    @cached_property
    def _records(self) -> list[tuple[Record, NewProblem | RejectedProblem]]:
        names = self._run.config.tasksets
        growing = GrowingTasksets({name: empty_taskset() for name in names})
        found: list[tuple[Record, NewProblem | RejectedProblem]] = []
        for record, message in read_problems(Log(self._run.transport)):
            growing.absorb(message, record.offset)
            if isinstance(message, NewProblem | RejectedProblem):
                found.append((record, message))
        self._growing = growing.tasksets
        return found

    def _index_of(self, record: Record, new: NewProblem) -> int | None:
        taskset = self._growing.get(new.taskset)
        return None if taskset is None else taskset.index_at(record.offset)

    def of_group(self, group: str) -> list[Node]:
        """Return the problem of a group with its parents, if it joined the run, and the problems made from it."""
        place = split_group_id(group)
        if place is None:
            return []
        made = [self._node(record, one) for record, one in self._records if one.parent_group == group]
        above = self._joined(f"{place[0]}/{place[2]}")
        return ([] if above is None else [self._with_parents(*above)]) + _called("made of it", made)

    def problem(self, name: str) -> Node:
        """Return the trace of a problem, given by `taskset/index` or its id. ConfigError if there is none."""
        found = self._joined(name) or next((pair for pair in self._records if pair[1].problem_id == name), None)
        if found is None:
            taskset = name.partition("/")[0]
            raise ConfigError(
                f"trace: {name}: no such problem among {len(self._records):,} records of `problems`; "
                + (
                    f"problems of {taskset} are traced by their groups, {taskset}/PASS/INDEX/ATTEMPT"
                    if taskset in self._run.config.tasksets
                    else f"tasksets of this run: {', '.join(self._run.config.tasksets)}"
                )
            )
        node = self._with_parents(*found)
        record, message = found
        index = self._index_of(record, message) if isinstance(message, NewProblem) else None
        own = None if index is None else f"{message.taskset}/{index}"
        node.children += _called(
            "made of it", [self._node(*pair) for pair in self._records if own is not None and pair[1].parent == own]
        )
        return node

    def record(self, record: Record) -> Node:
        """Return the trace of the problem in this record of `problems`."""
        for other, message in self._records:
            if other.offset == record.offset:
                return self._with_parents(other, message)
        raise ConfigError(f"trace: {record}: cannot be read, so it is no problem; `rftstream inspect` shows it")

    def _joined(self, name: str) -> tuple[Record, NewProblem] | None:
        """Return the record of the problem with the name `taskset/index`."""
        for record, message in self._records:
            if isinstance(message, NewProblem):
                index = self._index_of(record, message)
                if index is not None and f"{message.taskset}/{index}" == name:
                    return record, message
        return None

    def _with_parents(self, record: Record, message: NewProblem | RejectedProblem) -> Node:
        """Return the node of a problem, with the node of its parent inside, and so on."""
        node = first = self._node(record, message)
        for _ in range(MAX_GENERATIONS):
            if message.parent is None:
                break
            above = self._joined(message.parent)
            if above is None:
                facts = {"is": "of its taskset", "asked about as": message.parent_group}
                node.children.append(Node("parent", message.parent, facts=_set(facts)))
                break
            parent = self._node(*above)
            parent.kind = "parent"
            node.children.append(parent)
            node, message = parent, above[1]
        return first

    def _node(self, record: Record, message: NewProblem | RejectedProblem) -> Node:
        agreed = f"{message.num_agreed} of {message.num_samples}" if message.num_samples else None
        facts: dict[str, Any] = {"is": str(message.kind), "by": f"by {message.made_by}", "agreed": agreed}
        if message.version is not None:
            facts["version"] = name_of(message.version)
        if isinstance(message, RejectedProblem):
            facts |= {"rejected": str(message.reason), "why": message.detail, "said": _short(message.said)}
            return Node("problem", message.problem_id, record, _set(facts))
        index = self._index_of(record, message)
        if message.maker is not ProblemMaker.model:
            facts["by"] = f"by {message.made_by}, a{'n' if message.maker is ProblemMaker.agent else ''} {message.maker}"
        facts |= {"asks": _short(text_of(message.problem)), "answer": message.problem.answer}
        name = message.problem_id if index is None else f"{message.taskset}/{index}"
        return Node("problem", name, record, _set(facts))


def _called(kind: str, nodes: list[Node]) -> list[Node]:
    for node in nodes:
        node.kind = kind
    return nodes


def _set(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN_CHARACTERS else f"{flat[: SHOWN_CHARACTERS - 3]}..."


# ---------------------------------------------------------------------------------------- votes about a rollout


def feedback_nodes(log: Log, config: RunConfig, target: Target) -> list[Node]:
    """Return a node for each question about a rollout or a group, asked or answered, with its votes."""
    if not has_feedback(log) or (not any(log.ends("feedback").values()) and not any(log.ends("questions").values())):
        return []
    view = read_feedback(log, config)
    nodes: dict[str, Node] = {}

    def node(question_id: str) -> Node:
        return nodes.setdefault(question_id, Node("question", question_id))

    for question in view.questions:
        if _is_about(question.rollouts, target):
            node(question.question_id).facts |= _asked(question)
    for line in view.votes:
        vote, judgement = line.vote, line.judgement
        if vote is None or not _is_about(vote.rollouts, target):
            continue
        facts: dict[str, Any] = {"says": vote_text(vote), "by": vote.annotator[:8], "effect": str(judgement.effect)}
        if judgement.effect is VoteEffect.counted:
            facts |= _changed(judgement, recorded=line.recorded)
        child = Node("vote", f"revision {vote.revision}", line.record, facts)
        node(vote.question_id).children.append(child)
    return list(nodes.values())


def _is_about(rollouts: tuple[str, ...], target: Target) -> bool:
    if target.sibling is not None:
        return f"{target.group_id}/{target.sibling}" in rollouts
    return any(rollout.rpartition("/")[0] == target.group_id for rollout in rollouts)


def _asked(question: Question) -> dict[str, Any]:
    return {"asked for": str(question.reason), "quorum": question.quorum}


def _changed(judgement: Judgement, *, recorded: bool) -> dict[str, Any]:
    """Return the state of the question after a vote, and the batch and version for which it came too late."""
    batch = judgement.batch_sequence
    return {
        "votes": judgement.num_votes,
        "judged": judged_text(judgement),
        "applied": str(judgement.applied),
        "why": judgement.reason or None,
        "batch": batch,
        "version": None if batch is None else f"v{batch + 1}",
        **({} if recorded else {"recorded": False}),
    }
