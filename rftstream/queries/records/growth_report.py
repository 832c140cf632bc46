"""The growth of a run's growing tasksets, and the share of rejected problems, from headers alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rftstream.config.data_pipelines.synthesis import growing_tasksets
from rftstream.config.sections import RunConfig
from rftstream.contracts.message_spec import SPEC_OF
from rftstream.contracts.problems import NewProblem, RejectedProblem
from rftstream.contracts.records import Record
from rftstream.queries.formatting import plural
from rftstream.queries.plain import Report
from rftstream.service.records.problem_records import problem_records
from rftstream.service.role import Log

WATCHED = 50
"""Number of a model's newest problems over which the share of rejected ones is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetGrowth(Report):
    """The problems that joined one taskset."""

    JSON = "* waits"

    joined: int
    drawn: int
    """Number of joined problems that the feeder has drawn at least once."""

    @property
    def waits(self) -> bool:
        """Whether every joined problem was drawn, so that the taskset waits for new ones."""
        return self.drawn >= self.joined


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthReport(Report):
    """The growth of the tasksets that grow. `read_growth` makes it, for `status`."""

    JSON = "tasksets rejected rejects_most"

    tasksets: Mapping[str, TasksetGrowth]
    rejected: Mapping[str, int]
    """Reason -> rejected problems that a model made."""
    recent_rejected: int
    """Rejected problems among the newest WATCHED of a model."""
    num_recent: int
    warn_share: float
    """Share of rejected problems above which a warning is given."""

    @property
    def rejects_most(self) -> bool:
        """Whether more of the model's problems are rejected than `warn_share`."""
        return self.num_recent == WATCHED and self.recent_rejected > self.warn_share * WATCHED

    def status_rows(self) -> list[tuple[str, str]]:
        """Return rows of `status`: a name and a text each."""
        rows = []
        for name, one in self.tasksets.items():
            text = f"{plural(one.joined, 'problem')} joined, {one.drawn:,} of them drawn"
            rows.append((f"grows: {name}", text + (": the feeder waits for more of it" if one.waits else "")))
        if self.rejected:
            counts = sorted(self.rejected.items(), key=lambda pair: -pair[1])
            rows.append(("rejected", ", ".join(f"{count:,} {reason}" for reason, count in counts)))
        if self.rejects_most:
            text = f"{self.recent_rejected} of the last {WATCHED} problems that its model made were rejected"
            rows.append(("look at synthesiser", f"{text}; `rftstream problems list RUN --rejected` shows them"))
        return rows


def read_growth(log: Log, config: RunConfig, cursor: Mapping[str, Any]) -> GrowthReport | None:
    """Return the growth so far; None for a run without growing tasksets. `cursor`: the feeder's."""
    names = growing_tasksets(config)
    if not names:
        return None
    joined: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    recent: deque[bool] = deque(maxlen=WATCHED)
    for record in problem_records(log, bodies=False):
        contract, taskset = _header(record, "contract"), _header(record, "taskset")
        if contract == SPEC_OF[NewProblem].contract and taskset in names:
            joined[taskset] += 1
            if _header(record, "maker") == "model":
                recent.append(False)
        elif contract == SPEC_OF[RejectedProblem].contract and taskset in names:
            rejected[_header(record, "reason")] += 1
            recent.append(True)
    walks = cursor.get("walks", {})
    return GrowthReport(
        tasksets={
            name: TasksetGrowth(joined=joined[name], drawn=walks.get(name, {}).get("fresh", 0)) for name in names
        },
        rejected=dict(rejected),
        recent_rejected=sum(recent),
        num_recent=len(recent),
        warn_share=1.0 if config.synthesiser is None else config.synthesiser.warn_share,
    )


def _header(record: Record, name: str) -> str:
    return (record.header(name) or b"").decode(errors="replace")
