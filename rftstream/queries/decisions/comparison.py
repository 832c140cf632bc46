"""Compares old and new verdicts of the same rollouts. Shapes: N rollouts that both runs could score."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import shorten

import numpy as np

from rftstream.contracts.ids import split_group_id
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.queries.decoding import decoded
from rftstream.queries.formatting import columns, number
from rftstream.queries.plain import Report
from rftstream.queries.records.shown import PLAIN, CompletionReader
from rftstream.roles.buffer.people.judged_rewards import HUMAN
from rftstream.service.role import Log
from rftstream.transport.base import Transport

SAME = 1e-9
"""Rewards agree if they differ by at most this."""
NUM_MOVED = 5
SHOWN_CHARACTERS = 60
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
NOT_SCORED_ON_PURPOSE = {"skipped"}


@dataclass(frozen=True, slots=True, order=True)
class Moved(Report):
    """A rollout whose reward changed. `compare` makes it."""

    JSON = "rollout_id old new completion answer"

    distance: float
    rollout_id: str
    old: float
    new: float
    completion: str = field(compare=False)
    said: str = field(compare=False)
    """The completion with its special tokens, cut to a line."""
    answer: str | None = field(default=None, compare=False)
    """The problem's own answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedProblem(Report):
    """A problem whose rollouts have other rewards. `compare` makes it."""

    taskset: str
    problem: int
    num_moved: int
    """Its rollouts whose reward changed."""
    num_both: int
    """Its rollouts that both runs could score."""
    old: float
    """Mean reward of those."""
    new: float
    answer: str | None
    """Its own answer in the new run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Report):
    """The comparison of two runs' scores of the same rollouts. `compare` makes it; a command prints it."""

    JSON = "* mean_shift shift_quantiles=quantiles"

    num_rollouts: int
    """Rollouts in the new run. Skipped ones have nothing to score, and are in no figure."""
    num_both: int
    """Rollouts that both runs could score. The figures below are over these."""
    agreement: float | None
    """Share of rollouts with the same reward."""
    correlation: float | None
    """Pearson's correlation; None if the old or the new rewards do not vary."""
    mean_old: float | None
    mean_new: float | None
    quantiles: dict[str, float]
    """Quantiles of new minus old reward."""
    parts_old: dict[str, float]
    """Part of the reward -> its mean over the rollouts that the old run could score, without weights."""
    parts_new: dict[str, float]
    unscorable_old: dict[str, int]
    unscorable_new: dict[str, int]
    """Reason -> rollouts without a new reward."""
    became_scorable: int
    became_unscorable: int
    num_judged: int
    """Rollouts among these that people judged."""
    judged_alike: int
    """Rollouts among those that people judged as the old run's scorer did."""
    moved: tuple[Moved, ...]
    """The rollouts whose reward changed most, the largest change first."""
    problems: tuple[MovedProblem, ...]
    """The problems whose mean reward changed most, the largest change first."""

    @property
    def mean_shift(self) -> float | None:
        """Change of the mean reward; None if no rollout has both rewards."""
        return None if self.mean_old is None or self.mean_new is None else self.mean_new - self.mean_old

    def to_text(self) -> str:
        """Return the comparison as text for people."""
        return "\n".join(_text(self))


def compare(old: Transport, new: Transport, *, reader: CompletionReader = PLAIN) -> Comparison:
    """Compare the verdicts of two runs. `verified` of both is read once; memory grows by about 100 bytes for each
    rollout."""
    before: dict[str, float | str] = {}
    parts_old, parts_new = _Parts(), _Parts()
    for verified in _verified(old):
        before[verified.ids.rollout_id] = _judged(verified)
        parts_old.add(verified)
    pairs: list[tuple[float, float]] = []
    unscorable_old, unscorable_new = Counter[str](), Counter[str]()
    became_scorable = became_unscorable = num_rollouts = num_judged = judged_alike = 0
    moved: list[Moved] = []
    problems: dict[tuple[str, int], _ProblemSums] = {}
    for verified in _verified(new):
        now, then = _judged(verified), before.get(verified.ids.rollout_id, "pending")
        if now in NOT_SCORED_ON_PURPOSE:
            continue
        num_rollouts += 1
        parts_new.add(verified)
        if isinstance(now, str):
            unscorable_new[now] += 1
            became_unscorable += isinstance(then, float)
        if isinstance(then, str) and then not in NOT_SCORED_ON_PURPOSE:
            unscorable_old[then] += 1
            became_scorable += isinstance(now, float)
        if isinstance(now, float) and isinstance(then, float):
            if verified.verdict is not None and (human := verified.verdict.parts.get(HUMAN)) is not None:
                num_judged += 1
                judged_alike += abs(human - then) <= SAME
            pairs.append((then, now))
            if (split := split_group_id(verified.ids.group_id)) is not None:
                problems.setdefault(split[::2], _ProblemSums()).add(then, now, verified)
            if abs(now - then) > SAME and verified.rollout is not None:
                rollout = verified.rollout
                said = [turn.content for turn in rollout.turns if turn.role == "assistant"]
                line = reader.said(rollout.turns, rollout.segments, SHOWN_CHARACTERS) or ""
                text, answer = said[-1] if said else "", rollout.problem.answer if rollout.problem else None
                one = Moved(abs(now - then), verified.ids.rollout_id, then, now, text, line, answer)
                (heapq.heappush if len(moved) < NUM_MOVED else heapq.heappushpop)(moved, one)
    old_N, new_N = np.asarray(pairs, np.float64).reshape(-1, 2).T
    shift_N = new_N - old_N
    varies = bool(len(old_N)) and old_N.std() > 0 and new_N.std() > 0
    return Comparison(
        num_rollouts=num_rollouts,
        num_both=len(old_N),
        agreement=float((np.abs(shift_N) <= SAME).mean()) if len(old_N) else None,
        correlation=float(np.corrcoef(old_N, new_N)[0, 1]) if varies else None,
        mean_old=float(old_N.mean()) if len(old_N) else None,
        mean_new=float(new_N.mean()) if len(old_N) else None,
        quantiles={f"{q:g}": float(np.quantile(shift_N, q)) for q in QUANTILES} if len(old_N) else {},
        parts_old=parts_old.means(),
        parts_new=parts_new.means(),
        unscorable_old=dict(unscorable_old),
        unscorable_new=dict(unscorable_new),
        became_scorable=became_scorable,
        became_unscorable=became_unscorable,
        num_judged=num_judged,
        judged_alike=judged_alike,
        moved=tuple(sorted(moved, reverse=True)),
        problems=_moved_most(problems),
    )


@dataclass(slots=True)
class _ProblemSums:
    """Adds up the rewards of a problem's rollouts."""

    num_both: int = 0
    num_moved: int = 0
    old: float = 0.0
    new: float = 0.0
    answer: str | None = None

    def add(self, then: float, now: float, verified: VerifiedRollout) -> None:
        self.num_both += 1
        self.old += then
        self.new += now
        if abs(now - then) > SAME:
            self.num_moved += 1
            if verified.rollout is not None and verified.rollout.problem is not None:
                self.answer = verified.rollout.problem.answer


def _moved_most(problems: Mapping[tuple[str, int], _ProblemSums]) -> tuple[MovedProblem, ...]:
    found = [
        MovedProblem(
            taskset=taskset,
            problem=problem,
            num_moved=sums.num_moved,
            num_both=sums.num_both,
            old=sums.old / sums.num_both,
            new=sums.new / sums.num_both,
            answer=sums.answer,
        )
        for (taskset, problem), sums in problems.items()
        if sums.num_moved
    ]
    return tuple(heapq.nsmallest(NUM_MOVED, found, key=lambda one: (-abs(one.new - one.old), one.taskset, one.problem)))


class _Parts:
    """Adds up the parts of rewards."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts = Counter[str]()

    def add(self, verified: VerifiedRollout) -> None:
        for name, value in () if verified.verdict is None else verified.verdict.parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] += 1

    def means(self) -> dict[str, float]:
        return {name: value / self._counts[name] for name, value in self._sums.items()}


def _verified(transport: Transport) -> Iterator[VerifiedRollout]:
    found = (decoded(record, VerifiedRollout) for record in Log(transport).read("verified"))
    return (verified for verified in found if verified is not None)


def _judged(verified: VerifiedRollout) -> float | str:
    """Return the reward, or the reason why there is none."""
    return verified.verdict.reward if verified.verdict is not None else str(verified.reason)


def _part_rows(one: Comparison) -> Iterator[tuple[str, ...]]:
    old, new = one.parts_old, one.parts_new
    for name in {**old, **new} if max(len(old), len(new)) > 1 else ():
        shift = new[name] - old[name] if name in old and name in new else None
        yield f"  {name}", number(old.get(name)), number(new.get(name)), number(shift)


def _text(one: Comparison) -> list[str]:
    agreement = "-" if one.agreement is None else f"{one.agreement:.1%}"
    rows = [
        ("", "old", "new", "shift"),
        ("mean reward", number(one.mean_old), number(one.mean_new), number(one.mean_shift)),
        *_part_rows(one),
        ("no reward", *(f"{sum(some.values()):,}" for some in (one.unscorable_old, one.unscorable_new)), ""),
        *(
            (f"  {reason}", number(one.unscorable_old.get(reason, 0)), number(one.unscorable_new.get(reason, 0)), "")
            for reason in sorted({*one.unscorable_old, *one.unscorable_new})
        ),
    ]
    lines = [
        f"{one.num_rollouts:,} rollouts, {one.num_both:,} of them with a reward then and now: {agreement} agree, "
        f"correlation {number(one.correlation)}; {one.became_scorable:,} became scorable, "
        f"{one.became_unscorable:,} unscorable",
        *(
            [f"people judged {one.num_judged:,} of them, {one.judged_alike:,} as the scorer had"]
            if one.num_judged
            else []
        ),
        "",
        *columns(rows),
    ]
    if one.quantiles:
        heads = (f"p{100 * float(share):g}" for share in one.quantiles)
        shares = [("new - old", *heads), ("", *map(number, one.quantiles.values()))]
        lines += ["", *columns(shares)]
    if one.moved:
        table = [("moved most", "old", "new", "answer", "said")]
        table += [(m.rollout_id, number(m.old), number(m.new), _short(m.answer), m.said) for m in one.moved]
        lines += ["", *columns(table)]
    if one.problems:
        table = [("problems moved most", "old", "new", "rollouts", "answer")]
        table += [
            (
                f"{p.taskset} {p.problem}",
                *(number(p.old), number(p.new), f"{p.num_moved:,} of {p.num_both:,}", _short(p.answer)),
            )
            for p in one.problems
        ]
        lines += ["", *columns(table)]
    return lines


def _short(answer: str | None) -> str:
    return shorten(answer or "-", SHOWN_CHARACTERS, placeholder="...")
