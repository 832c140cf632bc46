"""What operators see and what they answer.

An operator is pure: the same problem or group, the same facts and the same seed give the same answer, so that each
decision can be computed again from the log. It reads no clock, draws no numbers of its own (the seed is for that),
keeps nothing from call to call, and asks no model: feeder and buffer wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rftstream.contracts.outcomes import ReuseKind
from rftstream.contracts.tasks import Problem, Sampling
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.data.operators.facts import Facts
from rftstream.data.tasksets.base import Taskset

Seed = int
"""Non-negative, below 2**63; derived from the run's seed, the operator's place and the group."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave it as it is."""


KEEP = Keep()
"""The usual decision: the group or problem stays as it is."""


# --------------------------------------------------------------------------------------------- task side


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A problem that was drawn from a taskset and may become a group, with what operators before have changed."""

    group_id: str
    """`taskset/pass/index/attempt`."""
    taskset: str
    """Name in the run file."""
    taskset_pass: int
    """How often the taskset has been gone through."""
    index: int
    """Number of the problem in the taskset."""
    problem: Problem
    """Problem to be solved."""
    sampling: Sampling
    """How its rollouts will be sampled."""
    group_size: int
    """Rollouts that it will get."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Leave the problem out this time."""

    reason: str
    """Why, in a few words that are the same for all problems with this reason: skips are counted by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Admit the problem with these changes; what is None stays. Id and place in the taskset never change."""

    problem: Problem | None = None
    sampling: Sampling | None = None
    group_size: int | None = None
    """At least 1 and at most `answers.MAX_GROUP_SIZE`. `feeder.groups_per_batch` still counts groups."""


TaskDecision = Keep | Skip | Change


@dataclass(frozen=True, slots=True)
class Problems:
    """A source of problems with its name."""

    name: str
    source: Taskset
    count: int | None = None
    """How many of the first problems are used; None: all."""

    def __iter__(self) -> Iterator[Problem]:
        """Yield the problems in order."""
        count = len(self.source) if self.count is None else min(self.count, len(self.source))
        return map(self.source.problem, range(count))


@dataclass(frozen=True, slots=True)
class RunProblems:
    """All problems of a run. Operators that compare a problem with others are given it before the first draw."""

    tasksets: tuple[Problems, ...] = ()
    """In the order of the run file."""
    open_evaluations: Callable[[], tuple[Problems, ...]] = tuple
    """Returns what the run is evaluated on; it is opened only where an operator asks."""
    asked: frozenset[str] = frozenset()
    """Tasksets of which the operator will be asked."""


class TaskOperator(Protocol):
    """An operator of the task side. The feeder builds it once and calls `decide` for each problem that it draws.

    It may have `fold`, see `facts.Fold`, and `prepare(problems)`, if it has to see all problems of the run once, for
    example to build an index: the builder of the pipeline calls that before the first `decide`, with RunProblems. The
    data kept from it must depend on the problems and the settings alone, so that they are the same after every restart.
    `dedupe.Dedupe` has both.

    Worked example: `texts.Length`."""

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return what to do with a problem. An error skips the problem, with the error's name as the reason. `facts`
        are the facts from outcomes so far; they must not be changed."""


# --------------------------------------------------------------------------------------------- experience side


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A scored rollout of a group, as the operators before have left it."""

    sibling: int
    """Its number in the group."""
    reward: float
    """The reward of the verdict; no operator changes it."""
    num_tokens: int
    """Sampled tokens."""
    truncated: bool
    """Whether a limit ended it."""
    load: Callable[[], VerifiedRollout]
    """Returns the whole rollout with its verdict; it may have to be read from the log. See `verified`."""
    oldest_version: int | None = None
    """The oldest version that sampled a token; None if none was sampled, and where the group has no version."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Amounts that operators before have added to the reward, by name."""

    @property
    def verified(self) -> VerifiedRollout:
        """The whole rollout with its verdict."""
        return self.load()

    @property
    def shaped_reward(self) -> float:
        """The reward that it would be trained with now: the verdict's and all terms."""
        return self.reward + sum(self.terms.values())

    def score(self, on: str = "") -> float | None:
        """Return the verdict's part of this name, None if it has none; without a name its reward, without terms."""
        if not on:
            return self.reward
        verdict = self.verified.verdict
        assert isinstance(verdict, Verdict), "the rollout is scored"
        return verdict.parts.get(on)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The scored siblings of a group that may be batched, without those that operators before have rejected."""

    group_id: str
    taskset: str
    sequence: int
    """The feeder's count of admitted groups."""
    size: int
    """Siblings that were admitted; some may have no reward or be missing."""
    rollouts: tuple[ScoredRollout, ...]
    """In order of their numbers."""
    version: int | None = None
    """The trainer's version at which the group is trained if it goes into the next batch. None where no operator of the
    taskset declares `by_version`, or where the versions of rollouts say nothing about this run."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Leave out the group, or some of its siblings. A group with fewer than `buffer.min_siblings` left is filtered."""

    reason: str = ""
    """Why, in a few words that are the same for all groups with this reason."""
    siblings: tuple[int, ...] | None = None
    """Their numbers; None: the whole group."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of a rollout: those of one segment from `start` on, before `stop`."""

    segment: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Do not train on these tokens."""

    spans: Mapping[int, tuple[TokenSpan, ...]]
    """By sibling."""
    reason: str = ""
    """Why, in a few words."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Add a term to rewards. The reward of the verdict is kept beside them."""

    terms: Mapping[int, float]
    """By sibling; finite numbers."""
    name: str = ""
    """Name of the term; default: the operator's."""


@dataclass(frozen=True, slots=True)
class Prioritise:
    """Set a factor of the group's priority, by which batches choose among groups. Factors of several operators are
    multiplied."""

    factor: float
    """At least 0; 1 changes nothing. A group with priority 0 is never used once more."""
    reason: str = ""
    """By what, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseLimits:
    """How later batches use what an operator offers. The operator has it as its attribute `reuse`; it is the same for
    all of its offers."""

    kind: ReuseKind
    """Train on the group once more, or on its attempts as demonstrations."""
    per_batch: int
    """Most groups that a batch uses once more."""
    max_uses: int = 1
    """Most uses of a group, beside its own batch."""
    cool_down: int = 0
    """Fewest batches between two uses. The group's own batch counts as a use."""
    max_staleness: int = 8
    """No use in a batch whose version is more than this above the version that the offer's age counts from."""
    weight: float = 1.0
    """Factor of the loss at the first use."""
    decay: float = 1.0
    """Each further use has the weight of the one before times this."""
    max_held: int = 1024
    """Most offers that are remembered, the newest ones."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Let later batches have the group once more, as the operator's `reuse` says. A group that is filtered is not
    trained on, so of its offers only those as demonstrations count."""

    siblings: tuple[int, ...] | None = None
    """Numbers of those that may be used; None: all. A sibling that an operator rejects is not used."""


ExperienceDecision = Keep | Reject | Mask | Shape | Prioritise | Offer


class ExperienceOperator(Protocol):
    """An operator of the experience side. The buffer builds it once, and calls `decide` for each group that may be
    batched: when all siblings are there or the group's time is up, and again if another sibling comes before the group
    is in a batch. One that declares `by_version = True` is asked again at each version while the group waits. One that
    answers Offer has an attribute `reuse`, its ReuseLimits.

    Worked example: `leaving_out.Truncated`; of one that offers `reuse.ReplayGroups`."""

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return what to do with a group. An error rejects the group, with the error's name as the reason. `facts` are
        the facts from outcomes so far; they must not be changed."""
