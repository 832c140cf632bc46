"""Builds the log of a run that scores another run's rollouts by the answers and columns that its data has by now."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rftstream.config.loader import sampling_for
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.ids import group_id as make_group_id
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import Problem, Task
from rftstream.data.operators.base import Draw
from rftstream.data.operators.pipeline import TaskPipeline
from rftstream.data.operators.problems import all_problems
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


class Operated:
    """The operators of a run, applied to a problem as when the feeder drew it, but without the outcomes that they saw
    then."""

    def __init__(self, config: RunConfig, tasksets: Mapping[str, Taskset]) -> None:
        self._config = config
        self._pipeline = TaskPipeline.of(config, all_problems(config, tasksets))
        self._facts = self._pipeline.new_facts()

    def __call__(self, group_id: str, problem: Problem) -> Problem:
        """Return the problem of a group with the operators' changes. None of them skips it."""
        place = split_group_id(group_id)
        if place is None or not self._pipeline:
            return problem
        name, taskset_pass, index, _ = place
        sampling = sampling_for(self._config, self._config.tasksets[name].sampling, where=f"tasksets.{name}.sampling")
        draw = Draw(
            group_id=group_id, taskset=name, taskset_pass=taskset_pass, index=index, problem=problem,
            sampling=sampling, group_size=self._config.feeder.group_size,
        )  # fmt: skip
        return self._pipeline.decide(draw, self._facts, put_back=True).draw.problem


class MendedImport(RolloutImport):
    """Copies tasks and rollouts with the answers and columns that the tasksets have now. A problem is the recorded one
    if it has the same prompt and tools: the one in the same place, else the only one in the taskset. `operated`: adds
    what the run's operators change."""

    def __init__(
        self,
        source: Transport,
        target: Transport,
        run_id: str,
        say: Say,
        tasksets: Mapping[str, Taskset],
        operated: Callable[[str, Problem], Problem] = lambda group_id, problem: problem,
    ) -> None:
        super().__init__(source, target, run_id, say)
        self._tasksets = tasksets
        self._operated = operated
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
        found = self._now(message.ids.group_id, place[0], place[2], recorded) if recorded.messages else None
        fate = "gone" if found is None else "same"
        if found is not None:
            mended = replace(message, problem=replace(recorded, answer=found[0], info=found[1]))
            if codec.encode(mended) != codec.encode(message):
                fate, epoch = "changed", record.number("writer_epoch") or 0
                copied = codec.to_record(mended, record.topic, record.partition, run=self._run_id, writer_epoch=epoch)
        self._found[place[0], place[2]] = fate
        return copied

    def _now(self, group_id: str, name: str, index: int, recorded: Problem) -> Answer | None:
        """Return the answer to the recorded problem as its taskset has it now; None if the problem is not there."""
        question, taskset = _question(recorded), self._tasksets[name]
        if index < len(taskset):
            found = self._operated(group_id, taskset.problem(index))
            if _question(found) == question:
                return found.answer, found.info
        return self._by_question(name, taskset).get(question)

    def _by_question(self, name: str, taskset: Taskset) -> Mapping[bytes, Answer | None]:
        if name not in self._asked:
            asked = self._asked[name] = {}
            for index in range(len(taskset)):
                problem = self._operated(make_group_id(name, 0, index, 0), taskset.problem(index))
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
