"""Checks that operators' decisions can be carried out. Pipelines call them for each answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rftstream.contracts import codec
from rftstream.contracts.tasks import Problem, RolloutIds, Sampling, Task
from rftstream.data.operators.base import (
    Change,
    Draw,
    Keep,
    Mask,
    Offer,
    Prioritise,
    Reject,
    ScoredGroup,
    ScoredRollout,
    Shape,
    Skip,
    TokenSpan,
)
from rftstream.errors import ContractError

MAX_GROUP_SIZE = 512
"""Largest number of rollouts that an operator may give a problem."""


class Nonsense(Exception):
    """An answer that is no valid decision."""


def changed_draw(draw: Draw, change: Change) -> Draw:
    """Return the draw with the change."""
    return replace(
        draw,
        problem=draw.problem if change.problem is None else change.problem,
        sampling=draw.sampling if change.sampling is None else change.sampling,
        group_size=draw.group_size if change.group_size is None else change.group_size,
    )


def check_task_decision(draw: Draw, decision: Any) -> None:
    """Raise Nonsense unless the decision can be carried out for the draw."""
    match decision:
        case Keep():
            return
        case Skip(reason=str()):
            return
        case Change():
            size = decision.group_size
            if size is not None and (type(size) is not int or not 1 <= size <= MAX_GROUP_SIZE):
                raise Nonsense(f"group_size = {size!r}, expected 1 to {MAX_GROUP_SIZE}")
            _check_writable(decision, draw)
        case _:
            raise Nonsense(f"{_shown(decision)}, expected Keep, Skip or Change")


def _check_writable(change: Change, draw: Draw) -> None:
    """Raise Nonsense unless a task with these changes can be written."""
    if not isinstance(change.problem, Problem | None) or not isinstance(change.sampling, Sampling | None):
        raise Nonsense(f"{_shown(change)}, expected a Problem and a Sampling")
    after = changed_draw(draw, change)
    ids = RolloutIds.of(draw.group_id, taskset=draw.taskset, group_size=after.group_size)
    try:
        codec.encode(Task(ids=ids, problem=after.problem, sampling=after.sampling, seed=0))
    except ContractError as error:
        raise Nonsense(f"a change that cannot be written: {error}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def check_experience_decision(group: ScoredGroup, can_offer: bool, decision: Any) -> None:
    """Raise Nonsense unless the decision can be carried out for the group. `can_offer`: whether the operator defines
    how its offers are used."""
    known = {rollout.sibling: rollout for rollout in group.rollouts}

    def check_siblings(numbers: Iterable[Any]) -> None:
        if strangers := [number for number in numbers if type(number) is not int or number not in known]:
            raise Nonsense(f"sibling {_shown(strangers[0])}, expected one of {sorted(known)}")

    match decision:
        case Keep():
            return
        case Reject(reason=str(), siblings=None | tuple()):
            check_siblings(decision.siblings or ())
        case Mask(reason=str(), spans=Mapping()):
            check_siblings(decision.spans)
            for number, spans in decision.spans.items():
                _check_spans(known[number], spans)
        case Prioritise(reason=str()):
            factor = decision.factor
            if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
                raise Nonsense(f"the factor {_shown(factor)}, expected a finite number of at least 0")
        case Offer(siblings=None | tuple()):
            if not can_offer:
                raise Nonsense("Offer, expected it from an operator with an attribute `reuse` alone")
            check_siblings(decision.siblings or ())
        case Shape(name=str(), terms=Mapping()):
            check_siblings(decision.terms)
            for number, term in decision.terms.items():
                if not isinstance(term, int | float) or not math.isfinite(known[number].shaped_reward + term):
                    raise Nonsense(f"the term {_shown(term)}, expected a finite number")
        case _:
            raise Nonsense(f"{_shown(decision)}, expected Keep, Reject, Mask, Shape, Prioritise or Offer")


def _check_spans(rollout: ScoredRollout, spans: Any) -> None:
    body = rollout.verified.rollout
    assert body is not None, "it was sampled"
    lengths = [segment.token_ids.shape[0] for segment in body.segments]
    for span in spans:
        if not isinstance(span, TokenSpan) or not (
            0 <= span.segment < len(lengths) and 0 <= span.start <= span.stop <= lengths[span.segment]
        ):
            raise Nonsense(f"{_shown(span)}, expected a TokenSpan within segments of {lengths} tokens")
