"""Where the reward of a run changed: rewards and evaluations before and after it do not compare.

Steps and evaluations say which reward scored them, by its name and version. All who compare rewards of a run ask here
since when they may: charts, the best of an evaluation, signs of hacked rewards, the first and the last reward.

The version of a reward that takes the environment's holds the environment's own digest. One without it, as those of
older releases, is not known to be another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rftstream.contracts.verdicts import without_environment
from rftstream.contracts.versions import EvalResult

Scorers = Mapping[str, str]
"""Taskset -> name and version of the reward that scored it."""
TURNS = 3
"""Changes in a row between the same two rewards that no mending of a reward makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChange:
    """A taskset that another reward scores since some version. `find_reward_changes` makes it."""

    taskset: str
    before: str
    """Name and version of the reward before the change."""
    after: str
    version: int
    """The first version that was trained on rewards of the new one."""

    def to_text(self) -> str:
        """Return the change as a sentence."""
        change = f"{self.taskset}: {self.before} -> {self.after} since version {self.version:,}"
        return f"{change}; older rewards do not compare"


def differs(one: str, other: str) -> bool:
    """Return whether these are two scorers, whose rewards do not compare. Where one says nothing of the environment,
    it counts as the same."""
    bare = without_environment(one), without_environment(other)
    return one != other and (bare[0] != bare[1] or (one not in bare and other not in bare))


def turns_in(changes: Sequence[RewardChange]) -> Iterator[list[RewardChange]]:
    """Yield the changes of each taskset, in parts: those of two rewards that score it in turns, and others alone."""
    for taskset in {change.taskset: None for change in changes}:
        own = [change for change in changes if change.taskset == taskset]
        while own:
            pair = own[0].before, own[0].after
            end = next((place for place, change in enumerate(own) if change.after not in pair), len(own))
            end = end if end >= TURNS else 1
            yield own[:end]
            own = own[end:]


def turns_to_text(turns: Sequence[RewardChange]) -> str:
    """Return a part of `turns_in` as a sentence."""
    first, last = turns[0], turns[-1]
    if first is last:
        return first.to_text()
    is_environment = without_environment(first.before) == without_environment(first.after)
    roles, what = ("explorers", "another environment") if is_environment else ("verifiers", "different code")
    where = "" if is_environment else f"; `scores {first.taskset} by` in a verifier's log says which code it has"
    return (
        f"{first.taskset}: {first.before} and {first.after} score in turns, {len(turns)} times from version "
        f"{first.version:,} to {last.version:,}, so rewards do not compare: {roles} have {what}; give every "
        f"host the same files, and start its {roles} again{where}"
    )


def changes_to_text(changes: Sequence[RewardChange], most: int | None = None) -> tuple[str, ...]:
    """Return the newest changes as sentences, at most `most`, those in turns as one."""
    lines = sorted((turns[-1].version, turns_to_text(turns)) for turns in turns_in(changes))
    return tuple(line for _, line in lines[-(most or len(lines)) :])


def is_changed(before: Scorers, now: Scorers) -> bool:
    """Return whether another reward scores one of the tasksets than before. A taskset that is new changes nothing."""
    return any(differs(before.get(taskset, scorer), scorer) for taskset, scorer in now.items())


def find_reward_changes(scored: Iterable[tuple[int, Scorers]]) -> tuple[RewardChange, ...]:
    """Return the changes in some steps in force: their versions, in order, and who scored them. Steps that do not say
    it, as those of older releases, change nothing."""
    known: dict[str, str] = {}
    found = []
    for version, scorers in scored:
        for taskset, scorer in scorers.items():
            before = known.get(taskset, scorer)
            if not differs(before, scorer):
                known[taskset] = max(before, scorer, key=len)  # one may say nothing of the environment
            else:
                known[taskset] = scorer
                found.append(RewardChange(taskset=taskset, before=before, after=scorer, version=version))
    return tuple(found)


def changed_at(changes: Iterable[RewardChange]) -> int:
    """Return the version since which the rewards of steps compare; 0 if the reward never changed."""
    return max((change.version for change in changes), default=0)


def by_newest_scorer(results: Sequence[EvalResult]) -> list[EvalResult]:
    """Return those of one evaluation's results that the reward of the newest of them scored, in their order.

    A result that does not say who scored it, as those of older releases, counts as scored by the first reward that is
    known; one that does not say which environment gave its reward, as of the first that is known of this reward."""
    known = [one.scored_by for one in sorted(results, key=lambda result: result.evaluated_at) if one.scored_by]
    if not known:
        return list(results)

    def full(scorer: str) -> str:
        return next((one for one in known if one != scorer and without_environment(one) == scorer), scorer)

    newest = full(known[-1])
    return [one for one in results if full(one.scored_by or known[0]) == newest]


def comparable_results(results: Iterable[EvalResult]) -> dict[str, list[EvalResult]]:
    """Return evaluation -> those of its results that compare, by its newest scorer, in their order."""
    found: dict[str, list[EvalResult]] = {}
    for result in results:
        found.setdefault(result.evaluation, []).append(result)
    return {name: by_newest_scorer(some) for name, some in found.items()}
