"""The problems that joined a run's growing tasksets, and a model's rejected ones, read from `problems`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from rftstream.contracts.problems import NewProblem, RejectedProblem
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.growing import GrowingTaskset, GrowingTasksets
from rftstream.queries.formatting import columns, plural
from rftstream.queries.plain import Report
from rftstream.service.records.problem_records import read_problems
from rftstream.service.role import Log

NONE_GROWS = (
    "this run has no taskset that grows, so no problems to solve have joined it; what is wrong with a run, "
    "`rftstream status RUN` says"
)
TEXT_WIDTH = 70
"""Most characters of a problem, or of a model's text, on a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemLine:
    """One record of `problems`."""

    name: str
    """`taskset/index`, or the id of a problem that did not join."""
    problem_id: str
    taskset: str
    kind: str
    parent: str | None
    parent_group: str | None
    maker: str
    made_by: str
    text: str
    """Text of the problem; for a rejected problem, the text that the model wrote."""
    answer: str | None
    num_samples: int
    num_agreed: int
    made_at: float
    rejected: str | None = None
    """Why it did not join; `repeated` if the taskset had it already."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemList(Report):
    """The problems of a run's growing tasksets. `list_problems` makes it."""

    JSON = "joined rejected problems=lines"

    joined: dict[str, int]
    """Taskset -> joined problems."""
    rejected: dict[str, dict[str, int]]
    """Taskset -> reason -> number of a model's problems that did not join."""
    lines: tuple[ProblemLine, ...]

    def to_text(self) -> str:
        """Return the list as text for people."""
        lines = []
        for name, count in self.joined.items():
            reasons = self.rejected.get(name, {})
            lost = ", ".join(
                f"{number:,} {reason}" for reason, number in sorted(reasons.items(), key=lambda one: -one[1])
            )
            lines.append(f"{name}: {plural(count, 'problem')}" + (f"; rejected: {lost}" if lost else ""))
        if self.lines:
            rows = [("problem", "kind", "made of", "made by", "agreed", "answer", "text"), *map(_row, self.lines)]
            lines += ["", *columns(rows, left=7, indent="  ")]
        return "\n".join(lines) or NONE_GROWS


def list_problems(
    log: Log, growing: list[str], *, taskset: str | None = None, rejected: bool = False, last: int | None = None
) -> ProblemList:
    """Return the problems of the growing tasksets (or of one of them), in the order in which they joined. `rejected`:
    show those that did not join instead. `last`: the number of newest problems to show; None: all."""
    names = [name for name in growing if taskset in (None, name)]
    tasksets = GrowingTasksets({name: empty_taskset() for name in names})
    reasons: dict[str, Counter[str]] = {name: Counter() for name in names}
    shown: deque[ProblemLine] = deque(maxlen=last)
    for line in _lines(log, tasksets):
        if line.rejected is not None:
            reasons[line.taskset][line.rejected] += 1
        if rejected is (line.rejected is not None):
            shown.append(line)
    return ProblemList(
        joined={name: len(one) for name, one in tasksets.tasksets.items()},
        rejected={name: dict(counts) for name, counts in reasons.items() if counts},
        lines=tuple(shown),
    )


def empty_taskset() -> GrowingTaskset:
    """Return a growing taskset without settings, for views of joined problems."""
    return GrowingTaskset(GrowingTaskset.Config(), location="problems", columns={}, system=None)


def _lines(log: Log, growing: GrowingTasksets) -> Iterator[ProblemLine]:
    for record, message in read_problems(log):
        if isinstance(message, NewProblem) and (taskset := growing.tasksets.get(message.taskset)) is not None:
            before = len(taskset)
            growing.absorb(message, record.offset)
            yield _joined(message, None if len(taskset) == before else before)
        elif isinstance(message, RejectedProblem) and message.taskset in growing.tasksets:
            yield _rejected(message)


_ALIKE = ("problem_id", "taskset", "kind", "parent", "parent_group", "made_by", "num_samples", "num_agreed", "made_at")


def _joined(new: NewProblem, index: int | None) -> ProblemLine:
    """Return the line of a problem that joined at this index; None: the taskset had it already."""
    return ProblemLine(
        **{name: getattr(new, name) for name in _ALIKE},
        name=new.problem_id if index is None else f"{new.taskset}/{index}",
        maker=new.maker,
        text=text_of(new.problem),
        answer=new.problem.answer,
        rejected="repeated" if index is None else None,
    )


def _rejected(one: RejectedProblem) -> ProblemLine:
    return ProblemLine(
        **{name: getattr(one, name) for name in _ALIKE},
        name=one.problem_id,
        maker="model",
        text=one.said,
        answer=None,
        rejected=one.reason,
        detail=one.detail,
    )


def text_of(problem: Problem) -> str:
    """Return the last user message of a problem."""
    asked = [message.content for message in problem.messages if message.role == "user"]
    return asked[-1] if asked else ""


def _row(line: ProblemLine) -> tuple[object, ...]:
    what = line.kind if line.rejected is None else f"{line.kind}, {line.rejected}"
    agreed = f"{line.num_agreed} of {line.num_samples}" if line.num_samples else ""
    text = " ".join(line.text.split())
    shown = text if len(text) <= TEXT_WIDTH else f"{text[: TEXT_WIDTH - 3]}..."
    return (line.name, what, line.parent or "", line.made_by, agreed, line.answer or "", shown)
