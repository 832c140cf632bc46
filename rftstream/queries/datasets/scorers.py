"""Which versions of the reward scored rollouts: a reward that was changed inside a run gives other numbers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from rftstream.algorithms.reward_changes import differs
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.verdicts import PEOPLE, VerifiedRollout
from rftstream.errors import ConfigError
from rftstream.queries.decoding import decoded
from rftstream.runs.folder import OpenRun
from rftstream.service.reading import read_many
from rftstream.service.role import Log

NEWEST = "newest"
"""In place of a version: the newest one of each taskset."""
BODIES_AT_ONCE = 64
"""Records that are read together. Each is in memory as a whole."""
Offsets = npt.NDArray[np.int64]
Scored = Counter[tuple[str, str]]
"""Taskset and scorer with its version -> rollouts."""


def scorer_of(verified: VerifiedRollout) -> str | None:
    """Return name and version of the scorer; None for a rollout without a verdict."""
    verdict = verified.verdict
    return None if verdict is None else verdict.scored_by


def by_people(scorer: str) -> bool:
    """Return whether people alone gave the verdict: they are no version of the reward."""
    return scorer.partition(" ")[0] == PEOPLE


def scorers_of_row(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield taskset and scorer of each rollout of a row of a data set."""
    named = row.get("extra", row)  # where a trajectory has them
    for name, value in named.items():
        if value is not None and name in ("scorer", "chosen_scorer", "rejected_scorer"):
            yield str(named["taskset"]), str(value)


def is_mixed(scored: Scored) -> bool:
    """Return whether rollouts of one taskset were scored by several versions."""
    found = [(taskset, scorer) for taskset, scorer in scored if not by_people(scorer)]
    return any(one == other and differs(by, by_other) for (one, by), (other, by_other) in combinations(found, 2))


def rollouts_by_scorer(scored: Scored) -> dict[str, int]:
    """Return scorer with its version -> rollouts, most first."""
    found: Counter[str] = Counter()
    for (_, scorer), count in scored.items():
        found[scorer] += count
    return dict(found.most_common())


def read_verified(run: OpenRun, partition: int, offsets: npt.NDArray[np.int64]) -> dict[int, VerifiedRollout]:
    """Return the readable records of a partition of `verified` at some offsets."""
    found = {}
    for record in read_many(run.transport, TopicPartition("verified", partition), set(offsets.reshape(-1).tolist())):
        if (message := decoded(record, VerifiedRollout)) is not None:
            found[record.offset] = message
    return found


def scorers_at(run: OpenRun, sequences_N: Offsets, offsets_N: Offsets) -> npt.NDArray[Any]:
    """Return the scorer of each of N rollouts, by their records on `verified`; empty for none."""
    found_N = np.full(len(offsets_N), "", dtype=object)
    partitions_N = sequences_N % run.config.transport.partitions
    for partition in np.unique(partitions_N).tolist():
        places = np.flatnonzero((partitions_N == partition) & (offsets_N >= 0))
        for begin in range(0, len(places), BODIES_AT_ONCE):
            some = places[begin : begin + BODIES_AT_ONCE]
            bodies = read_verified(run, partition, offsets_N[some])
            for place, offset in zip(some.tolist(), offsets_N[some].tolist(), strict=True):
                found_N[place] = (scorer_of(bodies[offset]) if offset in bodies else None) or ""
    return found_N


def newest_scorers(run: OpenRun, every: Mapping[str, Any], through: Sequence[int]) -> dict[str, str]:
    """Return taskset -> its newest scorer. `every`: columns of all rollouts; of these, those before the offsets
    `through` count."""
    sequences, offsets = every["sequence"], offsets_of(every)
    counts = (offsets >= 0) & (every["unscored"].codes < 0) & (offsets < np.asarray(through)[sequences % len(through)])
    codes = every["taskset"].codes
    newest = {}
    for code in np.unique(codes[counts]).tolist():
        places = np.flatnonzero(counts & (codes == code))
        places = places[np.argsort(-every["verified_at"][places], kind="stable")]
        batches = (places[begin : begin + BODIES_AT_ONCE] for begin in range(0, len(places), BODIES_AT_ONCE))
        found = (one for some in batches for one in scorers_at(run, sequences[some], offsets[some]))
        newest[every["taskset"].words[code]] = next((one for one in found if one and not by_people(one)), "")
    return newest


def offsets_of(columns: Mapping[str, Any]) -> Offsets:
    """Return the offsets of rollouts on `verified`; -1 for none."""
    offsets: Offsets = np.nan_to_num(columns["verified_offset"], nan=-1).astype(np.int64)
    return offsets


def only_scored_by(
    run: OpenRun, wanted: str, columns: Mapping[str, Any], newest: Mapping[str, str]
) -> npt.NDArray[np.bool_]:
    """Return for each rollout whether this version scored it, or people alone: NEWEST, or the beginning of its digest
    or name. ConfigError names the versions if none begins so."""
    found_N = scorers_at(run, columns["sequence"], offsets_of(columns))
    if wanted == NEWEST:
        tasksets = columns["taskset"]
        of_N = [
            bool(one) and not differs(one, newest.get(tasksets.words[code], ""))
            for one, code in zip(found_N, tasksets.codes, strict=True)
        ]
    else:
        of_N = [_begins(wanted, one) for one in found_N]
        if not any(of_N):
            raise _unknown(wanted, found_N)
    keep_N: npt.NDArray[np.bool_] = np.asarray(of_N, dtype=bool) | np.asarray([by_people(one) for one in found_N], bool)
    return keep_N


def scored_otherwise(log: Log, wanted: str) -> tuple[frozenset[str], str]:
    """Return the rollouts that got their verdict from another version of the reward than this one: NEWEST, or the
    beginning of its digest or name; and that version, NEWEST by its name. People are no version of the reward.
    ConfigError names the versions if none begins so."""
    scored: dict[str, tuple[str, str]] = {}
    newest: dict[str, tuple[float, str]] = {}
    for _, message in log.in_force("verified"):
        if isinstance(message, VerifiedRollout) and (verdict := message.verdict) and verdict.scorer != PEOPLE:
            taskset, scorer = sys.intern(message.ids.taskset), sys.intern(verdict.scored_by)
            scored[message.ids.rollout_id] = taskset, scorer
            newest[taskset] = max(newest.get(taskset, (0.0, "")), (message.verified_at, scorer))
    if wanted == NEWEST:
        others = {one for one in scored.values() if differs(one[1], newest[one[0]][1])}
        wanted = ", ".join(sorted({scorer for _, scorer in newest.values()}))
    else:
        others = {one for one in scored.values() if not _begins(wanted, one[1])}
        if others == set(scored.values()):
            raise _unknown(wanted, (scorer for _, scorer in others))
    return frozenset(rollout for rollout, one in scored.items() if one in others), wanted


def _begins(wanted: str, scorer: str) -> bool:
    return any(text.startswith(wanted) for text in (scorer, *scorer.split()[-1:]))


def _unknown(wanted: str, scorers: Iterable[str]) -> ConfigError:
    known = ", ".join(sorted({one for one in scorers if one})) or "none"
    return ConfigError(f"scorer: got {wanted!r}, expected {NEWEST} or the beginning of one of: {known}")
