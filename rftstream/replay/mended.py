"""Builds the log of a run that scores another run's rollouts by the answers and columns that its data has by now."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rftstream.contracts import codec
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import Problem, Task
from rftstream.data.tasksets.base import Taskset
from rftstream.errors import ContractError
from rftstream.queries.formatting import plural
from rftstream.runs.making.imported import RolloutImport
from rftstream.runs.writes.additions import Say
from rftstream.transport.base import Transport

SHOWN = 20
"""Most changed problems of a taskset that are named."""
Answer = tuple[str | None, dict[str, Any]]
"""The answer of a problem, and everything else that environment and reward are given."""


class MendedImport(RolloutImport):
    """Copies tasks and rollouts with the answers and columns that the tasksets have now. A problem is the recorded one
    if it has the same prompt and tools: the one in the same place, else the only one in the taskset."""

    def __init__(
        self, source: Transport, target: Transport, run_id: str, say: Say, tasksets: Mapping[str, Taskset]
    ) -> None:
        super().__init__(source, target, run_id, say)
        self._tasksets = tasksets
        self._asked: dict[str, dict[bytes, Answer | None]] = {}
        """Taskset -> digest of a question -> its answer; None for several different ones."""
        self._found: dict[tuple[str, int], str] = {}
        """Taskset and index -> what became of the problem: same, changed or gone."""

    def copy(self) -> None:
        """Copy everything, and say how many problems have changed."""
        super().copy()
        counts = Counter((name, found) for (name, _), found in self._found.items())
        for name in sorted({name for name, _ in self._found}):
            total = sum(count for (one, _), count in counts.items() if one == name)
            text = (
                f"{name}: {counts[name, 'changed']:,} of {plural(total, 'problem')} have another answer or columns now"
            )
            gone = f"; {counts[name, 'gone']:,} are not there by their prompt, or in several forms: scored as recorded"
            which = [
                f"{one}/{index}"
                for (one, index), found in sorted(self._found.items())
                if (one, found) == (name, "changed")
            ]
            text += f": {', '.join(which[:SHOWN])}{', ...' if which[SHOWN:] else ''}" if which else ""
            self._say(text + (gone if counts[name, "gone"] else ""))

    def _of_a_rollout(self, record: Record) -> NewRecord | None:
        copied = super()._of_a_rollout(record)
        try:
            message = None if copied is None else codec.from_record(record)
        except ContractError:
            return copied
        if not isinstance(message, Task | Rollout) or (recorded := message.problem) is None:
            return copied
        place = split_group_id(message.ids.group_id)
        if place is None or place[0] not in self._tasksets:
            return copied
        found = self._now(place[0], place[2], recorded) if recorded.messages else None
        fate = "gone" if found is None else "same"
        if found is not None:
            mended = replace(message, problem=replace(recorded, answer=found[0], info=found[1]))
            if codec.encode(mended) != codec.encode(message):
                fate, epoch = "changed", record.number("writer_epoch") or 0
                copied = codec.to_record(mended, record.topic, record.partition, run=self._run_id, writer_epoch=epoch)
        self._found[place[0], place[2]] = fate
        return copied

    def _now(self, name: str, index: int, recorded: Problem) -> Answer | None:
        """Return the answer to the recorded problem as its taskset has it now; None if the problem is not there."""
        question, taskset = _question(recorded), self._tasksets[name]
        found = taskset.problem(index) if index < len(taskset) else None
        if found is not None and _question(found) == question:
            return found.answer, found.info
        return self._by_question(name, taskset).get(question)

    def _by_question(self, name: str, taskset: Taskset) -> Mapping[bytes, Answer | None]:
        if name not in self._asked:
            asked = self._asked[name] = {}
            for problem in map(taskset.problem, range(len(taskset))):
                question, answer = _question(problem), (problem.answer, problem.info)
                asked[question] = answer if asked.get(question, answer) == answer else None
        return self._asked[name]


def _question(problem: Problem) -> bytes:
    """Return the digest of what the policy sees of a problem. Images count by their bytes: the feeder has put them
    into the run's store."""
    messages = [
        replace(message, media=tuple(replace(one, url="") if one.digest else one for one in message.media))
        for message in problem.messages
    ]
    return hashlib.sha256(repr((messages, problem.tools)).encode(errors="surrogatepass")).digest()
