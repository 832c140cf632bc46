"""Sets of real numbers: intervals and unions of them, from brackets and from inequalities."""

from __future__ import annotations

from rftstream.rewards.answers.maths.nodes import (
    AnswerGroup,
    Form,
    Interval,
    RealSet,
    Relation,
    Tree,
    Value,
    symbols_of,
)
from rftstream.rewards.answers.maths.values import constant, equal_trees

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
ALL_REALS = RealSet(intervals=(Interval(low=None, high=None, low_open=True, high_open=True),))


def interval_of(group: AnswerGroup) -> RealSet | None:
    """Return the interval that a pair in brackets may be. Infinite ends are open."""
    if group.kind != "tuple" or len(group.items) != 2:
        return None
    ends = [_end(item) for item in group.items]
    if any(end is False for end in ends):
        return None
    low, high = ends
    if low == "+" or high == "-" or isinstance(low, bool) or isinstance(high, bool):
        return None
    low_open = group.left in ("(", "]") or low == "-"
    high_open = group.right in (")", "[") or high == "+"
    low_node = low if isinstance(low, Tree) else None
    high_node = high if isinstance(high, Tree) else None
    return RealSet(intervals=(Interval(low=low_node, high=high_node, low_open=low_open, high_open=high_open),))


def _end(item: Form) -> Tree | str | bool:
    """Return an end of an interval: its tree, `-` or `+` for the infinities, or False for anything else."""
    if not isinstance(item, Value) or item.percent:
        return False
    node = item.node
    if node.op == "infinity":
        return "+"
    if node.op == "neg" and node.parts[0].op == "infinity":
        return "-"
    return node


def points_of(group: AnswerGroup) -> RealSet | None:
    """Return a finite set as a real set of points."""
    nodes = [item.node for item in group.items if isinstance(item, Value) and not item.percent]
    if len(nodes) != len(group.items):
        return None
    return RealSet(intervals=tuple(_point(node) for node in nodes))


def _point(node: Tree) -> Interval:
    return Interval(low=node, high=node, low_open=False, high_open=False)


def from_inequality(relation: Relation) -> RealSet | None:
    """Return the set that `x > 1`, `1 < x <= 2`, `x != 3` or `-x < 1` describes; None for other relations."""
    sides = []
    if relation.operators == ("!=",) and (without := _without_several(relation)) is not None:
        return without
    for side in relation.sides:
        if not isinstance(side, Value) or side.percent:
            return None
        sides.append(side.node)
    if "=" in relation.operators:
        return None
    if len(sides) == 2 and (bounded := _absolute(sides, relation.operators[0])) is not None:
        return bounded
    places = [place for place, node in enumerate(sides) if _variable(node) is not None]
    if len(places) != 1:
        return None
    name, flips = _variable(sides[places[0]]) or ("", False)
    others = [node for place, node in enumerate(sides) if place != places[0]]
    if any(name in symbols_of(node) for node in others):
        return None
    if relation.operators == ("!=",):
        return RealSet(intervals=ALL_REALS.intervals, excluded=(_negated(others[0], flips),), variable=name)
    if "!=" in relation.operators:
        return None
    return _bounded(relation.operators, sides, places[0], name, flips)


def _without_several(relation: Relation) -> RealSet | None:
    """Read `x != \\pm 1`."""
    left, right = relation.sides
    if (
        not isinstance(left, Value)
        or left.node.op != "symbol"
        or not isinstance(right, AnswerGroup)
        or right.kind != "list"
    ):
        return None
    nodes = tuple(item.node for item in right.items if isinstance(item, Value))
    return RealSet(intervals=ALL_REALS.intervals, excluded=nodes, variable=left.node.name)


def _absolute(sides: list[Tree], operator: str) -> RealSet | None:
    """Read `|x| < 1` and `|x| > 1`."""
    left, right = sides
    if left.op != "abs" or left.parts[0].op != "symbol" or symbols_of(right) or operator not in FLIPPED:
        return None
    size = constant(right)
    if size is None or not size > 0:
        return None
    low, name, is_open = Tree("neg", (right,)), left.parts[0].name, "=" not in operator
    if operator in ("<", "<="):
        intervals: tuple[Interval, ...] = (Interval(low=low, high=right, low_open=is_open, high_open=is_open),)
    else:
        intervals = (
            Interval(low=None, high=low, low_open=True, high_open=is_open),
            Interval(low=right, high=None, low_open=is_open, high_open=True),
        )
    return RealSet(intervals=intervals, variable=name)


def _bounded(operators: tuple[str, ...], sides: list[Tree], place: int, name: str, flips: bool) -> RealSet | None:
    low: tuple[Tree, bool] | None = None
    high: tuple[Tree, bool] | None = None
    if len(sides) > 3 or (len(sides) == 3 and place != 1):
        return None
    for number, operator in enumerate(operators):
        bound, other = (sides[number], operator) if number < place else (sides[number + 1], FLIPPED[operator])
        bound = _negated(bound, flips)
        below = (other in ("<", "<=")) != flips  # other: bound OP variable
        if below and low is None:
            low = (bound, "=" not in other)
        elif not below and high is None:
            high = (bound, "=" not in other)
        else:
            return None
    return RealSet(
        intervals=(
            Interval(
                low=low[0] if low and not _is_infinite(low[0]) else None,
                high=high[0] if high and not _is_infinite(high[0]) else None,
                low_open=low is None or low[1] or _is_infinite(low[0]),
                high_open=high is None or high[1] or _is_infinite(high[0]),
            ),
        ),
        variable=name,
    )


def _is_infinite(node: Tree) -> bool:
    return node.op == "infinity" or (node.op == "neg" and _is_infinite(node.parts[0]))


def _variable(node: Tree) -> tuple[str, bool] | None:
    """Return the name of a single variable, or of `f(x)`, and whether a minus stands before it."""
    if node.op == "symbol":
        return node.name, False
    if node.op == "neg" and node.parts[0].op == "symbol":
        return node.parts[0].name, True
    return None


def _negated(node: Tree, flips: bool) -> Tree:
    return Tree("neg", (node,)) if flips else node


def united(sets: list[RealSet]) -> RealSet | None:
    """Return the union of sets, or None if it cannot be computed (for complements)."""
    if any(one.excluded for one in sets):
        return sets[0] if len(sets) == 1 else None
    variables = {one.variable for one in sets if one.variable}
    if len(variables) > 1:
        return None
    return RealSet(
        intervals=tuple(interval for one in sets for interval in one.intervals), variable=next(iter(variables), "")
    )


def intersected(sets: list[RealSet]) -> RealSet | None:
    """Return the intersection of the half-lines and complements that inequalities for one variable describe."""
    if len({one.variable for one in sets}) != 1:
        return None
    excluded = tuple(node for one in sets for node in one.excluded)
    low: Interval | None = None
    high: Interval | None = None
    for one in sets:
        if one.excluded:
            continue
        if len(one.intervals) != 1:
            return None
        interval = one.intervals[0]
        if interval.low is not None:
            if low is not None:
                return None
            low = interval
        if interval.high is not None:
            if high is not None:
                return None
            high = interval
    whole = Interval(
        low=low.low if low else None,
        high=high.high if high else None,
        low_open=low.low_open if low else True,
        high_open=high.high_open if high else True,
    )
    return RealSet(intervals=(whole,), excluded=excluded, variable=sets[0].variable)


def without_points(real: RealSet) -> RealSet:
    """Return the set as a union of intervals: excluded points split intervals. The result is sorted and merged if its
    ends are numbers."""
    intervals = list(real.intervals)
    for node in real.excluded:
        intervals = [piece for interval in intervals for piece in _split(interval, node)]
    keyed = [(_key(interval), interval) for interval in intervals]
    if any(key is None for key, _ in keyed):
        return RealSet(intervals=tuple(intervals))
    ordered = [interval for _, interval in sorted(keyed, key=lambda pair: pair[0] or (0.0, 0, 0.0))]
    merged: list[Interval] = []
    for interval in ordered:
        if merged and (joined := _joined(merged[-1], interval)) is not None:
            merged[-1] = joined
        else:
            merged.append(interval)
    return RealSet(intervals=tuple(merged))


def _key(interval: Interval) -> tuple[float, int, float] | None:
    low = _number(interval.low, -float("inf"))
    high = _number(interval.high, float("inf"))
    return None if low is None or high is None else (low, interval.low_open, high)


def _number(node: Tree | None, infinite: float) -> float | None:
    if node is None:
        return infinite
    value = constant(node)
    try:
        return None if value is None else float(value)
    except (TypeError, OverflowError):
        return None


def _split(interval: Interval, node: Tree) -> list[Interval]:
    point = _number(node, 0.0)
    low, high = _number(interval.low, -float("inf")), _number(interval.high, float("inf"))
    if point is None or low is None or high is None or not low <= point <= high:
        return [interval]
    left = Interval(low=interval.low, high=node, low_open=interval.low_open, high_open=True)
    right = Interval(low=node, high=interval.high, low_open=True, high_open=interval.high_open)
    if point == low:
        return [right]
    if point == high:
        return [left]
    return [left, right]


def _joined(first: Interval, second: Interval) -> Interval | None:
    """Return the union of two ordered intervals if they touch, else None."""
    if first.high is None:
        return first
    if second.low is None:
        return None
    end, start = _number(first.high, 0.0), _number(second.low, 0.0)
    if end is None or start is None:
        return None
    same = equal_trees(first.high, second.low, places=6, rounded=False) is True
    if (not same and start > end) or (same and first.high_open and second.low_open):
        return None
    last = second if second.high is None or (_number(second.high, 0.0) or 0.0) >= end else first
    high_open = last.high_open
    ends = (first.high, second.high)
    if last.high is not None and ends[1] is not None and equal_trees(ends[0], ends[1], places=6, rounded=False):
        high_open = first.high_open and second.high_open
    return Interval(low=first.low, high=last.high, low_open=first.low_open, high_open=high_open)
