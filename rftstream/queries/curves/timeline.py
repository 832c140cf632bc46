"""Who was busy when: the work of each role over a stretch of a run, from the times on its log.

Steps say how long their trainer trained, published and waited for the batch. The catalog knows when each rollout was
admitted, sampled, scored and put into a batch: between two of these times it is in the hands of one role, or waits for
it. A role that has no rollout in its hands waits for the role before it. A long stretch is read in part: every n-th
group, and every n-th step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rftstream.contracts.control import Claim
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.versions import StepRecord
from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.curves.history import History

Floats = npt.NDArray[np.float64]

NUM_SLOTS = 240
"""Parts of equal length into which a stretch is cut."""
MAX_ROLLOUTS, MAX_STEPS = 8_000, 2_000
"""Most rollouts and most steps that are read for a stretch."""
OFTEN, MOSTLY = 0.2, 0.8
"""Shares of the time from which a role waits often, or is busy most of the time."""

ABSENT = 0.1
"""Share of the time without a trainer from which it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The work of a role in each slot."""

    name: str
    values: Floats
    """Share of the slot (for processes), or mean number of rollouts in hand, by slot."""
    share: float | None
    """Share of the stretch in which it went on; None if that is not known, since only a part of the groups was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A role over the stretch."""

    role: str
    process: str
    """Process and host of the role's claim; empty for roles of several processes."""
    activities: tuple[Activity, ...]
    in_hand: bool
    """Whether the values are numbers of rollouts in hand, and not shares."""

    @property
    def peak(self) -> float:
        """Return the largest value of a slot: 1 for shares."""
        return max(float(one.values.max()) for one in self.activities) if self.in_hand else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The roles over a stretch of versions. `read_timeline` makes it."""

    first: int
    last: int
    """Versions that the stretch made, from the first to the last."""
    begin: float
    end: float
    """Times in seconds since 1970."""
    seconds: float
    """Seconds from begin to end without the pauses that somebody asked for, which lanes and shares leave out."""
    made: Floats
    """When its versions were made, as shares of these seconds."""
    lanes: tuple[Lane, ...]
    one_in: int
    """One group in this many was read; 1: all of them."""
    restarted: bool
    """Whether a trainer took over from an earlier one."""
    slowest: tuple[str, float] | None
    """The group whose way from its admission to an outcome in this stretch took longest, and its seconds, pauses
    included."""

    @property
    def paused_s(self) -> float:
        """Return the seconds of its pauses."""
        return self.end - self.begin - self.seconds

    def lane(self, role: str) -> Lane:
        """Return the lane of a role."""
        return next(lane for lane in self.lanes if lane.role == role)

    @property
    def answer(self) -> str:
        """Return in words what waited for what, and whether there was a trainer at all."""
        shares = {one.name: one.share or 0.0 for one in self.lane(RoleName.trainer).activities}
        absent = 1.0 - sum(shares.values()) if self.restarted else 0.0
        return self._waits(shares) + (f" For {absent:.0%} of it no trainer was at work." if absent >= ABSENT else "")

    def _waits(self, shares: Mapping[str, float]) -> str:
        sampling, scoring = (self.lane(role).activities[0].share for role in (RoleName.explorer, RoleName.verifier))
        training, waiting = shares.get("training", 0.0), shares["waiting for a batch"]
        if waiting < OFTEN:
            idle = "" if sampling is None else f"; explorers had nothing to sample {1 - sampling:.0%} of the time"
            return f"The trainer rarely waits: training is what takes the time{idle}."
        waits, first = f"The trainer waits for a batch {waiting:.0%} of the time", "{} is what takes the time."
        if training > waiting:
            waits = f"The trainer trains {training:.0%} of the time, and waits for a batch {waiting:.0%} of it"
            first = "training takes most, then {}."
        if sampling is None or scoring is None:
            return f"{waits}."
        if sampling >= MOSTLY or 1 - sampling < waiting / 2:  # explorers are idle far less than the trainer
            return f"{waits}: {first.format('sampling')}"
        if scoring >= MOSTLY:
            return f"{waits}: {first.format('scoring')}"
        return (
            f"{waits}, and explorers have nothing to sample {1 - sampling:.0%} of it: they wait for each other, since "
            "feeder.max_staleness lets no more be admitted."
        )


def read_timeline(
    history: History, catalog: CatalogReader, claims: Mapping[str, Claim], *, num_versions: int | None = None
) -> Timeline | None:
    """Return the timeline of the newest `num_versions` versions of the history, or of all. None: there are none."""
    steps = history.steps if num_versions is None else history.steps[-num_versions:]
    if not steps:
        return None
    before = history.steps[-len(steps) - 1] if len(history.steps) > len(steps) else None
    end = steps[-1].recorded_at
    begin = before.recorded_at if before is not None else steps[0].recorded_at - sum(_times(steps[0]))
    begin = min(begin, end - 1e-3)
    groups = _Groups.read(catalog, begin, end)
    clock = _Clock(history.asked_pauses)
    since, until = clock(begin), clock(end)
    names = {role: f"{claim.process}@{claim.host}" for role, claim in claims.items()}
    lanes = (
        *groups.lanes(steps, clock, since, until, names),
        Lane(
            role=RoleName.trainer, process=names.get(RoleName.trainer, ""), in_hand=False,
            activities=tuple(_of_steps(steps, clock, since, until)),
        ),
        *_of_evaluations(history, clock, since, until, names.get(RoleName.evaluator, "")),
    )  # fmt: skip
    made = np.asarray([step.recorded_at for step in steps[:: -(-len(steps) // NUM_SLOTS)]])
    return Timeline(
        first=steps[0].name.version,
        last=steps[-1].name.version,
        begin=begin,
        end=end,
        seconds=until - since,
        made=(clock.of(made) - since) / (until - since),
        lanes=lanes,
        one_in=groups.one_in,
        slowest=_slowest(catalog, begin, end),
        restarted=any(begin < step.recorded_at <= end for step in history.resumes),
    )


@dataclass(frozen=True, slots=True)
class _Clock:
    """A clock that stands still in pauses."""

    pauses: tuple[tuple[float, float], ...]

    def __call__(self, time: float) -> float:
        return float(self.of(np.asarray([time]))[0])

    def of(self, times: Floats) -> Floats:
        found = times.copy()
        for begin, end in self.pauses:
            found -= np.clip(times - begin, 0.0, end - begin)
        return found


def _times(step: StepRecord) -> tuple[float, float, float]:
    """Return the seconds for which a trainer waited for the batch of a step, trained, and published."""
    waited, trained, published = (max(0.0, step.metrics.get(name, 0.0)) for name in ("wait_s", "step_s", "publish_s"))
    return waited, trained, published


def _slowest(catalog: CatalogReader, begin: float, end: float) -> tuple[str, float] | None:
    row = catalog.row(
        "SELECT group_id, decided_at - admitted_at AS seconds FROM groups WHERE decided_at BETWEEN ? AND ?"
        " ORDER BY seconds DESC, sequence LIMIT 1",
        (begin, end),
    )
    return None if row is None else (row["group_id"], row["seconds"])


def _of_steps(steps: Sequence[StepRecord], clock: _Clock, begin: float, end: float) -> Iterator[Activity]:
    one_in = -(-len(steps) // MAX_STEPS)
    read = steps[::one_in]
    ends = np.asarray([step.recorded_at for step in read])
    waited, trained, published = np.asarray([_times(step) for step in read]).T
    for name, until, seconds in (
        ("training", ends - published, trained),
        ("publishing", ends, published),
        ("waiting for a batch", ends - published - trained, waited),
    ):
        values = np.minimum(1.0, one_in * in_hand(clock.of(until - seconds), clock.of(until), begin, end))
        yield Activity(name=name, values=values, share=float(values.mean()))


def _of_evaluations(history: History, clock: _Clock, begin: float, end: float, process: str) -> Iterator[Lane]:
    results = [one for one in history.evaluations if clock(one.evaluated_at) >= begin]
    if history.evaluations:
        ends = np.asarray([one.evaluated_at for one in results])
        seconds = np.asarray([max(0.0, one.metrics.get("seconds", 0.0)) for one in results])
        values = np.minimum(1.0, in_hand(clock.of(ends - seconds), clock.of(ends), begin, end))
        activity = Activity(name="evaluating", values=values, share=float(values.mean()))
        yield Lane(role=RoleName.evaluator, process=process, in_hand=False, activities=(activity,))


@dataclass(frozen=True, slots=True)
class _Groups:
    """The times of the rollouts of a stretch, one row each: admitted, sampled, scored, decided, and the batch. A time
    that has not come is NaN."""

    times: Floats
    one_in: int

    @staticmethod
    def read(catalog: CatalogReader, begin: float, end: float) -> _Groups:
        at = {"begin": begin, "end": end}
        first = catalog.row(
            "SELECT min(sequence) AS sequence FROM groups WHERE decided_at IS NULL OR decided_at >= :begin", at
        )
        last = catalog.row(
            "SELECT sequence, group_size FROM groups WHERE admitted_at <= :end ORDER BY admitted_at DESC LIMIT 1", at
        )
        if first is None or last is None or first["sequence"] is None:
            return _Groups(np.empty((0, 5)), 1)
        num_groups = last["sequence"] - first["sequence"] + 1
        one_in = max(1, -(-num_groups * last["group_size"] // MAX_ROLLOUTS))
        chosen = json.dumps(list(range(first["sequence"], last["sequence"] + 1, one_in)))
        rows = catalog.rows(
            "SELECT g.sequence, g.group_size, g.admitted_at, r.sampled_at, r.verified_at,"
            " coalesce(r.decided_at, g.decided_at) AS decided_at, g.batch"
            " FROM json_each(:chosen) JOIN groups g ON g.sequence = value LEFT JOIN rollouts r USING (sequence)",
            {"chosen": chosen},
        )
        found: list[Any] = []
        known: dict[int, int] = {}
        for sequence, _, *times in rows:
            known[sequence] = known.get(sequence, 0) + 1
            found.append(times)
        for sequence, size, admitted_at, *_ in {row[0]: row for row in rows}.values():  # those without a row yet
            found += [[admitted_at, None, None, None, None]] * (size - known[sequence])
        return _Groups(np.asarray(found, dtype=np.float64).reshape(-1, 5), one_in)

    def lanes(
        self, steps: Sequence[StepRecord], clock: _Clock, begin: float, end: float, names: Mapping[str, str]
    ) -> Iterator[Lane]:
        batch = self.times.T[4]
        admitted, sampled, scored, decided = clock.of(self.times[:, :4]).T
        versions = np.asarray([step.name.version for step in steps])
        places = np.searchsorted(versions, np.nan_to_num(batch, nan=-2.0) + 1)
        made = np.append(clock.of(np.asarray([step.recorded_at for step in steps])), np.inf)
        trained = np.where(np.isnan(batch), decided, np.where(batch + 1 < versions[0], -np.inf, made[places]))
        until = np.fmin(np.fmin(sampled, scored), decided)  # what was left out before has no time of its own
        for role, name, begins, ends in (
            (RoleName.explorer, "to be sampled, or being sampled", admitted, until),
            (RoleName.verifier, "to be scored, or being scored", sampled, np.fmin(scored, decided)),
            (RoleName.buffer, "scored, waiting for siblings and a batch", scored, decided),
            ("batches", "in a batch, waiting for the trainer or trained on", decided, trained),
        ):
            starts, stops = np.nan_to_num(begins, nan=np.inf), np.nan_to_num(ends, nan=np.inf, posinf=np.inf)
            share = None if self.one_in > 1 else busy_share(starts, stops, begin, end)
            activity = Activity(name=name, values=self.one_in * in_hand(starts, stops, begin, end), share=share)
            yield Lane(role=str(role), process=names.get(str(role), ""), in_hand=True, activities=(activity,))


def in_hand(starts: Floats, stops: Floats, begin: float, end: float) -> Floats:
    """Return the mean number of intervals that go on in each slot of a stretch. An interval that stops before it starts
    counts as none."""
    there = (stops > starts) & (stops > begin) & (starts < end)
    edges = np.linspace(0.0, end - begin, NUM_SLOTS + 1)

    def seconds_since(times: Floats) -> Floats:
        """Return for each edge the sum of the seconds since those of the times that lie before it."""
        times = np.sort(np.clip(times[there] - begin, 0.0, end - begin))
        counts = np.searchsorted(times, edges)
        sums: Floats = edges * counts - np.concatenate([[0.0], np.cumsum(times)])[counts]
        return sums

    found: Floats = np.diff(seconds_since(starts) - seconds_since(stops)) * NUM_SLOTS / (end - begin)
    return np.maximum(0.0, found)


def busy_share(starts: Floats, stops: Floats, begin: float, end: float) -> float:
    """Return the share of a stretch in which at least one interval goes on."""
    there = (stops > starts) & (stops > begin) & (starts < end)
    starts, stops = np.clip(starts[there], begin, end), np.clip(stops[there], begin, end)
    order = np.argsort(starts)
    covered = np.maximum.accumulate(np.append(begin, stops[order]))
    gaps = np.append(starts[order], end) - covered
    return 1.0 - float(np.maximum(0.0, gaps).sum()) / (end - begin)
