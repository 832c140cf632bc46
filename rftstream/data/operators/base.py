"""The inputs of operators, and their answers.

An operator is pure: the same problem or group, facts and seed give the same answer, so that each decision can be
computed again from the log. It reads no clock, draws no random numbers of its own (it has the seed), keeps no state
between calls, and calls no model, since feeder and buffer wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rftstream.contracts.outcomes import ReuseKind
from rftstream.contracts.tasks import Problem, Sampling
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.core.samples import plain_sum
from rftstream.data.operators.facts import Facts
from rftstream.data.tasksets.base import Taskset

Seed = int
"""Non-negative, below 2**63; derived from the run's seed, the operator's place and the group."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave the problem or group unchanged."""


KEEP = Keep()
"""The usual decision: the group or problem stays unchanged."""


# --------------------------------------------------------------------------------------------- task side


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A problem that was drawn from a taskset and may become a group, with the changes of earlier operators."""

    group_id: str
    """`taskset/pass/index/attempt`."""
    taskset: str
    """Name in the run file."""
    taskset_pass: int
    """Number of completed passes through the taskset."""
    index: int
    """Number of the problem in the taskset."""
    problem: Problem
    """Problem to be solved."""
    sampling: Sampling
    """Sampling settings of its rollouts."""
    group_size: int
    """Number of its rollouts."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Leave the problem out this time."""

    reason: str
    """The reason in a few words. Skips are counted by reason, so all problems with one reason use the same words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Admit the problem with these changes; None leaves a field unchanged. Id and place in the taskset never change."""

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
    """Number of the first problems that are used; None: all."""

    def __iter__(self) -> Iterator[Problem]:
        """Yield the problems in order."""
        count = len(self.source) if self.count is None else min(self.count, len(self.source))
        return map(self.source.problem, range(count))


@dataclass(frozen=True, slots=True)
class RunProblems:
    """All problems of a run. Operators that compare a problem with others get them before the first draw."""

    tasksets: tuple[Problems, ...] = ()
    """Tasksets in the order of the run file."""
    open_evaluations: Callable[[], tuple[Problems, ...]] = tuple
    """Returns the problems of the run's evaluations. They are opened only if an operator needs them."""
    asked: frozenset[str] = frozenset()
    """Tasksets whose problems the operator will be asked about."""


class TaskOperator(Protocol):
    """An operator of the task side. The feeder builds it once and calls `decide` for each problem that it draws.

    It may have a method `fold` (see `facts.Fold`). If it has to see all problems of the run once, for example to build
    an index, it has a method `prepare(problems)`; the builder of the pipeline calls that with RunProblems before the
    first `decide`. The data kept from it must depend only on the problems and the settings, so that they are the same
    after every restart. `dedupe.Dedupe` has `prepare`, `draws.Curriculum` has both.

    Worked example: `texts.Length`."""

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return the decision about a problem. An error skips the problem, with the error's name as the reason.
        `facts`: the facts from the outcomes so far; they must not be changed."""


# --------------------------------------------------------------------------------------------- experience side


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A scored rollout of a group, with the changes of earlier operators."""

    sibling: int
    """Its number in the group."""
    reward: float
    """The reward of the verdict; no operator changes it."""
    num_tokens: int
    """Number of sampled tokens."""
    truncated: bool
    """Whether a limit cut it off."""
    load: Callable[[], VerifiedRollout]
    """Returns the whole rollout with its verdict, which may have to be read from the log. See `verified`."""
    oldest_version: int | None = None
    """The oldest version that sampled a token; None if no token was sampled, or if the group has no version."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Amounts that earlier operators have added to the reward, by name."""
    roles: Mapping[str, float | None] = field(default_factory=dict)
    """Rewards of roles in the verdict, in an episode of several agents."""

    @property
    def verified(self) -> VerifiedRollout:
        """The whole rollout with its verdict."""
        return self.load()

    @property
    def shaped_reward(self) -> float:
        """The reward for training at this point: the verdict's plus all terms."""
        return self.reward + plain_sum(self.terms.values())

    def score(self, on: str = "") -> float | None:
        """Return the verdict's part of this name, or None if it has none. Without a name, return the reward without
        terms."""
        if not on:
            return self.reward
        verdict = self.verified.verdict
        assert isinstance(verdict, Verdict), "the rollout is scored"
        return verdict.parts.get(on)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The scored siblings of a group that may be batched, without those that earlier operators rejected."""

    group_id: str
    taskset: str
    sequence: int
    """The feeder's count of admitted groups."""
    size: int
    """Number of admitted siblings; some may have no reward or be missing."""
    rollouts: tuple[ScoredRollout, ...]
    """Rollouts in the order of their numbers."""
    version: int | None = None
    """The trainer's version for the group's training if it goes into the next batch. None if no operator of the taskset
    declares `by_version`, or if the versions of rollouts mean nothing for this run."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Leave out the group, or some of its siblings. A group with fewer than `buffer.min_siblings` remaining siblings is
    filtered."""

    reason: str = ""
    """The reason in a few words, the same for all groups with this reason."""
    siblings: tuple[int, ...] | None = None
    """Numbers of the siblings; None: the whole group."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one segment of a rollout: from `start`, before `stop`."""

    segment: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Do not train on these tokens."""

    spans: Mapping[int, tuple[TokenSpan, ...]]
    """By sibling."""
    reason: str = ""
    """The reason in a few words."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Add a term to rewards. The verdict's reward is kept as well."""

    terms: Mapping[int, float]
    """Finite numbers by sibling."""
    name: str = ""
    """Name of the term; default: the operator's."""


@dataclass(frozen=True, slots=True)
class Prioritise:
    """Set a factor of the group's priority, by which batches choose among groups. The factors of several operators are
    multiplied."""

    factor: float
    """At least 0; 1 changes nothing. A group with priority 0 is never reused."""
    reason: str = ""
    """The measure in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseLimits:
    """How later batches use an operator's offers. It is the operator's attribute `reuse`, the same for all of its
    offers."""

    kind: ReuseKind
    """Train on the group again, or on its attempts as demonstrations."""
    per_batch: int
    """Largest number of groups that a batch reuses."""
    max_uses: int = 1
    """Largest number of uses of a group, besides its own batch."""
    cool_down: int = 0
    """Smallest number of batches between two uses. The group's own batch counts as a use."""
    max_staleness: int = 8
    """Largest difference between a using batch's version and the version from which the offer's age counts."""
    weight: float = 1.0
    """Factor of the loss at the first use."""
    decay: float = 1.0
    """Factor from one use's weight to the next one's."""
    max_held: int = 1024
    """Largest number of remembered offers; the newest are kept."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Let later batches use the group again, as the operator's `reuse` says. A filtered group is not trained on, so
    only its offers as demonstrations count."""

    siblings: tuple[int, ...] | None = None
    """Numbers of the siblings that may be used; None: all. A sibling that an operator rejects is not used."""


ExperienceDecision = Keep | Reject | Mask | Shape | Prioritise | Offer


class ExperienceOperator(Protocol):
    """An operator of the experience side. The buffer builds it once, and calls `decide` for each group that may be
    batched: when all siblings have come or the group's time is up, and again if another sibling comes before the group
    is in a batch. An operator that declares `by_version = True` is called again at each version while the group waits.
    An operator that returns Offer has an attribute `reuse`, its ReuseLimits.

    Worked examples: `leaving_out.Truncated`; with offers, `reuse.ReplayGroups`."""

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the decision about a group. An error rejects the group, with the error's name as the reason. `facts`:
        the facts from the outcomes so far; they must not be changed."""
