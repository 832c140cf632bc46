"""Pipelines: the operators of a run in order, and the results of calling them.

If an operator raises or returns an invalid decision, the problem is skipped or the group rejected. The reason says so,
and the log names the operator and the problem. The run continues, or ends when nothing is left.
"""

from __future__ import annotations

import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rftstream.config.data_pipelines.pipelines import OperatorPlace, operator_places
from rftstream.config.sections import RunConfig
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.outcomes import OperatorAction, OperatorDecision, ReuseKind
from rftstream.data.operators.answers import Nonsense, changed_draw, check_experience_decision, check_task_decision
from rftstream.data.operators.base import (
    Change,
    Draw,
    Mask,
    Offer,
    Prioritise,
    Reject,
    ReuseLimits,
    RunProblems,
    ScoredGroup,
    ScoredRollout,
    Shape,
    Skip,
    TokenSpan,
)
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.reuse import check_demonstrating
from rftstream.data.operators.watch import OperatorWatch
from rftstream.errors import ConfigError, RftError

log = logging.getLogger(__name__)

MAX_REASON = 80
"""Largest number of characters of a recorded reason."""

_MAX_COMPLAINTS = 20
"""Number of an operator's errors that are logged; all are counted."""


@dataclass(slots=True, eq=False)
class PlacedOperator:
    """An operator at its place in a pipeline. Pipelines make it."""

    name: str
    where: str
    number: int
    """Place among all operators of the run, on which its seeds depend."""
    operator: Any
    by_version: bool = False
    """Whether its answer depends on the version for the group's training."""
    by_problem: bool = False
    """Whether its answer depends on the problem alone."""
    num_complaints: int = 0
    watch: OperatorWatch | None = None
    """Names the operator in the log if it hangs."""
    complaint: str = ""
    """Last fault of the operator, with the group."""

    @property
    def reuse(self) -> ReuseLimits | None:
        """How later batches use its offers; None if it never offers anything."""
        limits = getattr(self.operator, "reuse", None)
        return limits if isinstance(limits, ReuseLimits) else None

    def ask(self, what: Any, facts: Facts, seed: int, check: Callable[[Any], None]) -> Any:
        """Return the operator's decision about `what`, a Draw or a ScoredGroup; or a text with the reason why there is
        none. `check` raises Nonsense for a decision that cannot be carried out."""
        if self.watch is not None:
            self.watch.asked(f"{self.where} ({self.name}): {what.group_id}")
        try:
            decision = self.operator.decide(what, facts, derive_seed(seed, "operator", self.number, what.group_id))
            check(decision)
        except Nonsense as error:
            self._complain(what.group_id, f"answered {error}")
            return "answered nonsense"
        except (RftError, MemoryError):  # the log did not answer, which is no answer of the operator
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._complain(what.group_id, f"raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})")
            return f"raised {type(error).__name__}"
        finally:
            if self.watch is not None:
                self.watch.answered()
        return decision

    def _complain(self, group_id: str, what: str) -> None:
        self.num_complaints += 1
        self.complaint = f"{self.where}: {group_id}: the operator {self.name} {what}"
        if self.num_complaints <= _MAX_COMPLAINTS:
            log.error("%s (%s): %s: the operator %s; it is left out", self.where, self.name, group_id, what)


def _placed(
    places: Iterable[OperatorPlace], side: str, tasksets: Iterable[str]
) -> dict[str, tuple[PlacedOperator, ...]]:
    """Return the operators of a side for each taskset, in order."""
    built = [
        (
            place.taskset,
            PlacedOperator(place.name, place.where, number, place.build(), place.by_version, place.by_problem),
        )
        for number, place in enumerate(places)
        if place.side == side
    ]
    return {name: tuple(one for taskset, one in built if taskset in (None, name)) for name in tasksets}


def _watch_over(operators: Mapping[str, Sequence[PlacedOperator]], watch: OperatorWatch) -> None:
    for some in operators.values():
        for one in some:
            one.watch = watch


def clean_reason(reason: str) -> str:
    """Return a reason in its recorded form: printable ASCII, and not too long."""
    text = "".join(character if character.isprintable() else " " for character in reason)
    return text.encode("ascii", "backslashreplace").decode("ascii")[:MAX_REASON]


# --------------------------------------------------------------------------------------------- task side


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The decision on a drawn problem."""

    draw: Draw
    """The drawn problem with the operators' changes."""
    skipped: tuple[str, str] | None = None
    """Operator and reason."""
    changed: tuple[str, ...] = ()
    """Operators that changed it."""


class TaskPipeline:
    """The operators of the task side. `workers/feeder.py` makes it, and the feeder calls `decide` for each draw."""

    def __init__(self, operators: Mapping[str, Sequence[PlacedOperator]], run_seed: int) -> None:
        """`operators`: taskset -> its operators, in order."""
        self._operators = {name: tuple(some) for name, some in operators.items()}
        self._has_any = any(self._operators.values())
        self._seed = run_seed

    @classmethod
    def of(cls, config: RunConfig, problems: RunProblems) -> TaskPipeline:
        """Build the operators in the run file, and pass `problems` to those that have `prepare`. ConfigError if an
        operator cannot be built."""
        pipeline = cls(_placed(operator_places(config), "task", config.tasksets), config.run.seed)
        for one in pipeline._each():
            if hasattr(one.operator, "prepare"):
                asked = frozenset(name for name, some in pipeline._operators.items() if one in some)
                try:
                    one.operator.prepare(replace(problems, asked=asked))
                except ConfigError as error:
                    raise ConfigError(f"{one.where}.{error}") from None
        return pipeline

    def _each(self) -> Iterator[PlacedOperator]:
        """Yield each operator once."""
        yield from {id(one): one for some in self._operators.values() for one in some}.values()

    def new_facts(self) -> Facts:
        """Return facts without outcomes, with the operators' own folds."""
        with_fold = [one.operator for one in self._each() if hasattr(one.operator, "fold")]
        return Facts({operator: operator.fold() for operator in with_fold})

    def watched_by(self, watch: OperatorWatch) -> None:
        """Let the watch name operators that hang."""
        _watch_over(self._operators, watch)

    @property
    def operators(self) -> Mapping[str, tuple[PlacedOperator, ...]]:
        """Return the operators of each taskset, in order."""
        return self._operators

    def __bool__(self) -> bool:
        """Whether there are any operators."""
        return self._has_any

    def skips_always(self, draw: Draw) -> bool:
        """Return whether an operator that decides by the problem alone skips it, as it will in every pass."""
        facts, check = self.new_facts(), partial(check_task_decision, draw)
        asked = (one for one in self._operators.get(draw.taskset, ()) if one.by_problem)
        return any(isinstance(one.ask(draw, facts, self._seed, check), Skip) for one in asked)

    def decide(self, draw: Draw, facts: Facts, *, put_back: bool = False) -> TaskResult:
        """Call the operators in order. `put_back`: a user asked for the group, so no operator may skip it."""
        changed: list[str] = []
        for one in self._operators.get(draw.taskset, ()):
            decision = one.ask(draw, facts, self._seed, partial(check_task_decision, draw))
            if isinstance(decision, str):
                decision = Skip(decision)
            if isinstance(decision, Skip) and not put_back:
                return TaskResult(draw, (one.name, clean_reason(decision.reason)))
            if isinstance(decision, Change):
                after = changed_draw(draw, decision)
                if after != draw:
                    changed.append(one.name)
                draw = after
        return TaskResult(draw, changed=tuple(changed))


# --------------------------------------------------------------------------------------------- experience side


@dataclass(frozen=True, slots=True)
class OfferedReuse:
    """An operator's offer to use a group once more."""

    operator: int
    """Place of the operator among all operators of the run."""
    limits: ReuseLimits
    """Limits on the use by later batches."""
    siblings: tuple[int, ...] = ()
    """Numbers of the offered siblings, in order; empty if the whole group is offered."""


@dataclass(frozen=True, slots=True)
class ExperienceResult:
    """The joint decision of the operators on a group."""

    seen: int
    """Number of records of `outcomes` in the facts of the decision."""
    version: int | None = None
    """The version of the group that the operators saw."""
    decisions: tuple[OperatorDecision, ...] = ()
    """Decisions of the operators that changed something, in order."""
    filtered: str | None = None
    """Why the whole group is left out; None if it is kept."""
    rejected: Mapping[int, str] = field(default_factory=dict)
    """Sibling -> why only this sibling is left out."""
    terms: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Sibling -> terms added to its reward, by name."""
    masks: Mapping[int, tuple[TokenSpan, ...]] = field(default_factory=dict)
    """Sibling -> tokens that are not trained on."""
    priority: float = 1.0
    """Priority of the group."""
    offers: tuple[OfferedReuse, ...] = ()
    """Offers to later batches to reuse the group."""


class ExperiencePipeline:
    """The operators of the experience side. `workers/buffer.py` makes it, and the buffer calls `decide` for each group
    that may be batched."""

    def __init__(
        self, operators: Mapping[str, Sequence[PlacedOperator]], run_seed: int = 0, *, is_declared: bool = True
    ) -> None:
        """`operators`: taskset -> its operators, in order. `is_declared`: whether the run file declares operators, of
        either side, so that outcomes contain what facts need."""
        self._operators = {name: tuple(some) for name, some in operators.items()}
        self._seed = run_seed
        self.is_declared = is_declared
        self.by_version = frozenset(
            name for name, some in self._operators.items() if any(one.by_version for one in some)
        )
        """Tasksets with an operator whose answer depends on the version for a group's training."""

    @classmethod
    def of(cls, config: RunConfig) -> ExperiencePipeline:
        """Build the operators in the run file, after the one for `buffer.zero_variance`. ConfigError if an operator
        cannot be built."""
        places = list(operator_places(config))
        operators = _placed(places, "experience", config.tasksets)
        if config.buffer.zero_variance == "replace":
            place = OperatorPlace("buffer.zero_variance", "zero_variance", {}, None)
            first = PlacedOperator(place.name, place.where, -1, place.build())
            operators = {name: (first, *some) for name, some in operators.items()}
        pipeline = cls(operators, config.run.seed, is_declared=bool(places))
        check_demonstrating(config, pipeline.reusing.values())
        if pipeline.reusing and config.feedback is not None:  # its bodies are read again as the scorer wrote them
            raise ConfigError(
                "feedback: found operators that use groups once more, such as replay, beside it; what is used again "
                "has the scorer's reward, not people's; expected one of both: leave out [feedback] or these operators"
            )
        return pipeline

    def watched_by(self, watch: OperatorWatch) -> None:
        """Let the watch name operators that hang."""
        _watch_over(self._operators, watch)

    @property
    def operators(self) -> Mapping[str, tuple[PlacedOperator, ...]]:
        """Return the operators of each taskset, in order."""
        return self._operators

    @property
    def run_seed(self) -> int:
        """Return the run's seed."""
        return self._seed

    @property
    def reusing(self) -> Mapping[int, ReuseLimits]:
        """Return the reuse limits of the operators with offers, by their places, in order."""
        found = {one.number: one.reuse for some in self._operators.values() for one in some if one.reuse is not None}
        return dict(sorted(found.items()))

    def __bool__(self) -> bool:
        """Whether there are any operators."""
        return any(self._operators.values())

    def decide(self, group: ScoredGroup, facts: Facts, min_siblings: int) -> ExperienceResult:
        """Call the operators in order, until the group is left out. `min_siblings`: the number of siblings that it must
        keep."""
        decisions: list[OperatorDecision] = []
        filtered: str | None = None
        rejected: dict[int, str] = {}
        masks: dict[int, tuple[TokenSpan, ...]] = {}
        priority = 1.0
        offers: list[OfferedReuse] = []
        for one in self._operators.get(group.taskset, ()):
            decision = one.ask(
                group, facts, self._seed, partial(check_experience_decision, group, one.reuse is not None)
            )
            if isinstance(decision, str):
                decision = Reject(decision)
            match decision:
                case Reject(siblings=None):
                    filtered = _full_reason(one.name, decision.reason)
                    decisions.append(_decision(one, OperatorAction.reject, decision.reason))
                case Reject() if decision.siblings:
                    numbers = tuple(sorted(set(decision.siblings)))
                    rejected |= dict.fromkeys(numbers, _full_reason(one.name, decision.reason))
                    decisions.append(_decision(one, OperatorAction.reject, decision.reason, numbers))
                    group = _without(group, numbers)
                    if len(group.rollouts) < min_siblings:
                        filtered = _full_reason(one.name, decision.reason)
                case Mask():
                    some = {number: spans for number, spans in sorted(decision.spans.items()) if spans}
                    if some:
                        masks = {**masks, **{number: masks.get(number, ()) + tuple(some[number]) for number in some}}
                        count = sum(_num_masked(_rollout(group, number), some[number]) for number in some)
                        reason = decision.reason
                        decisions.append(_decision(one, OperatorAction.mask, reason, tuple(some), num_tokens=count))
                case Shape():
                    name = clean_reason(decision.name or one.name)
                    added = {number: float(value) for number, value in sorted(decision.terms.items())}
                    if added:
                        group = _shaped(group, name, added)
                        decisions.append(
                            _decision(one, OperatorAction.shape, name, tuple(added), terms=tuple(added.values()))
                        )
                case Prioritise():
                    priority *= decision.factor
                    factor = (float(decision.factor),)
                    decisions.append(_decision(one, OperatorAction.prioritise, decision.reason, terms=factor))
                case Offer():
                    assert one.reuse is not None, "it was checked"
                    numbers = tuple(sorted(set(decision.siblings or ())))
                    offers.append(OfferedReuse(one.number, one.reuse, numbers))
                    decisions.append(_decision(one, OperatorAction.offer, str(one.reuse.kind), numbers))
            if filtered is not None:
                break
        if not math.isfinite(priority):
            priority = sys.float_info.max
        offers = list(_that_count(offers, rejected, filtered))
        terms = {rollout.sibling: dict(rollout.terms) for rollout in group.rollouts if rollout.terms}
        return ExperienceResult(
            facts.seen, group.version, tuple(decisions), filtered, rejected, terms, masks, priority, tuple(offers)
        )


def _that_count(
    offers: Iterable[OfferedReuse], rejected: Mapping[int, str], filtered: str | None
) -> Iterator[OfferedReuse]:
    """Yield the offers without rejected siblings; for a filtered group, only offers as demonstrations."""
    for offer in offers:
        if filtered is not None and offer.limits.kind is ReuseKind.replay:
            continue
        siblings = tuple(number for number in offer.siblings if number not in rejected)
        if siblings or not offer.siblings:
            yield replace(offer, siblings=siblings)


def _full_reason(operator: str, reason: str) -> str:
    name = operator.encode("ascii", "backslashreplace").decode("ascii")  # reasons travel in headers
    return f"{name}: {clean_reason(reason)}" if reason else name


def _decision(
    one: PlacedOperator, action: OperatorAction, reason: str, siblings: tuple[int, ...] = (), **values: Any
) -> OperatorDecision:
    return OperatorDecision(operator=one.name, action=action, reason=clean_reason(reason), siblings=siblings, **values)


def _without(group: ScoredGroup, siblings: Sequence[int]) -> ScoredGroup:
    return replace(group, rollouts=tuple(rollout for rollout in group.rollouts if rollout.sibling not in siblings))


def _shaped(group: ScoredGroup, name: str, added: Mapping[int, float]) -> ScoredGroup:
    """Add a term. Terms with the same name add up."""

    def shaped(rollout: ScoredRollout) -> ScoredRollout:
        if rollout.sibling not in added:
            return rollout
        before = rollout.terms.get(name, 0.0)
        return replace(rollout, terms={**rollout.terms, name: before + added[rollout.sibling]})

    return replace(group, rollouts=tuple(map(shaped, group.rollouts)))


def _rollout(group: ScoredGroup, sibling: int) -> ScoredRollout:
    return next(rollout for rollout in group.rollouts if rollout.sibling == sibling)


def _num_masked(rollout: ScoredRollout, spans: Sequence[TokenSpan]) -> int:
    """Return the number of sampled tokens in the spans."""
    body = rollout.verified.rollout
    assert body is not None, "it was sampled"
    covered: dict[int, set[int]] = {}
    for span in spans:
        covered.setdefault(span.segment, set()).update(range(span.start, span.stop))
    return sum(body.segments[number].loss_mask.data[place] for number, places in covered.items() for place in places)
