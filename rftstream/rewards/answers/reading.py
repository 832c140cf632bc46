r"""Reads a whole answer. Each kind of answer has its own reader; the first that can read the text decides.

A text may have several readings: `1,234` is a number and a list, `5 m` a length and a product. Each reading is a form.
"""

from __future__ import annotations

import re

from rftstream.rewards.answers.clean import bare_words, clean, is_formula
from rftstream.rewards.answers.maths.compounds import read_compound
from rftstream.rewards.answers.maths.expressions import FUNCTIONS
from rftstream.rewards.answers.maths.guards import check_size
from rftstream.rewards.answers.maths.nodes import (
    AnswerGroup,
    Form,
    Matrix,
    Reading,
    RealSet,
    Relation,
    Tree,
    Value,
    Words,
    number,
    symbol,
    symbols_of,
)
from rftstream.rewards.answers.maths.quantities import read_based, read_ratio, read_value
from rftstream.rewards.answers.maths.realsets import (
    ALL_REALS,
    from_inequality,
    intersected,
    interval_of,
    points_of,
    united,
)
from rftstream.rewards.answers.maths.words import number_in_words
from rftstream.rewards.answers.scan import is_balanced, split_outside, whole_brackets

MAX_ITEMS = 200
_MAX_DEPTH = 12

_EMPTY_PHRASES = """
emptyset, empty set, empty, no solution, no solutions, none, no real solution, no real solutions, does not exist,
dne, undefined, not exist, 无解, 空集, 不存在, {}, null set, nonexistent
"""
_EMPTY = {phrase.strip() for phrase in _EMPTY_PHRASES.split(",")}
_SAME_WORDS = dict.fromkeys(("no solutions", "no real solution", "no real solutions", "无解", "none"), "no solution")
_SAME_WORDS |= dict.fromkeys(("emptyset", "empty", "空集", "null set"), "empty set")
_SAME_WORDS |= dict.fromkeys(("dne", "not exist", "不存在", "nonexistent"), "does not exist")
_REAL_PHRASES = """
mathbb r, mathbbr, all real numbers, all reals, real numbers, all real, 全体实数, 实数, 任意实数, r,
the set of real numbers, set of real numbers
"""
_REALS = {phrase.strip() for phrase in _REAL_PHRASES.split(",")}

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"-?\s*(?:\\dollar\s*)?\d{1,3}(?:,\d{3})+(?:\.\d+)?.*")
_WORD_SEPARATOR = (
    r"\\text\{\s*,?\s*(?:and|or|和|或)\s*\}|(?<![a-zA-Z\\{])(?:and|or)(?![a-zA-Z])|或者?|和|以及"
    r"|\\(?:vee|lor|wedge|land)(?![a-zA-Z])"
)
_SEPARATOR = re.compile(rf"\s*(?:[,;]\s*)?(?:{_WORD_SEPARATOR})\s*|\s*[,;]\s*")
_OR = re.compile(r"\\text\{\s*,?\s*(?:or|或)\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|或者?|\\(?:vee|lor)(?![a-zA-Z])")
_ELLIPSIS = re.compile(r"^(?:\\ldots|\.{2,}|etc\.?|等)$")
_UNION = re.compile(r"\s*\\cup(?![a-zA-Z])\s*")
_MINUS = re.compile(r"\s*\\setminus(?![a-zA-Z])\s*|(?<=\})\s*-\s*(?=\\\{)")
_RELATION = re.compile(
    r"\s*(\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|\\ne(?![a-zA-Z])|\\equiv(?![a-zA-Z])|\\approx(?![a-zA-Z])|\\in(?![a-zA-Z])"
    r"|<=|>=|!=|:=|==|=|<|>|≈)\s*"
)
_OPERATORS = {r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\equiv": "=", ":=": "=", "==": "="}
_MATRIX = re.compile(
    r"^[(\[]?\s*\\begin\{([bpBvV]?matrix|smallmatrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}\s*[)\]]?$", re.DOTALL
)
_PAIR_OF_BRACKETS = re.compile(r"^([(\[\]])(.+)([)\[\]])$", re.DOTALL)
_SET_BUILDER = re.compile(r"^([^|:]{1,20}?)\s*(?:\||:)\s*(.+)$", re.DOTALL)


def read_answer(text: str) -> Reading:
    """Return all possible meanings of an answer. TooCostly if it is too long."""
    check_size(text)
    cleaned = clean(text)
    forms = read_forms(cleaned)
    if (word := _word(cleaned, read=bool(forms))) is not None:
        forms = [*forms, word]
    return Reading(text=cleaned, forms=tuple(dict.fromkeys(forms)))


def _word(text: str, *, read: bool) -> Words | None:
    """Return a text as words, or None if it is a formula, in which capitals and braces matter."""
    words = bare_words(text)
    if not words or (is_formula(text) and (read or re.search(r"[\\{}^_]", text))):
        return None
    short = len(words) <= 2 and words != "no"
    return Words(text=text if short else _SAME_WORDS.get(words, words))


def read_forms(text: str, depth: int = 0) -> list[Form]:
    """Return the possible forms of a cleaned text, apart from words. Empty if the text cannot be read completely."""
    text = text.strip()
    if not text or depth > _MAX_DEPTH:
        return []
    if special := _special(text):
        return special
    if depth == 0 and not is_balanced(text) and not _PAIR_OF_BRACKETS.match(text):
        return []
    if depth == 0 and (compound := read_compound(text)):
        return compound if isinstance(compound[0], Value) else [*compound, *_values(text)]
    if re.search(r"[a-z]{3}", text) and (value := number_in_words(bare_words(text))) is not None:
        return [Value(node=number(value))]
    for reader in (_matrix, _reals_without, _union, _listed, _related, _bracketed):
        if found := reader(text, depth):
            return found
    return [*read_based(text), *read_ratio(text), *_values(text)]


def _special(text: str) -> list[Form]:
    words = bare_words(text.replace("\\", " ").replace("_", " ")) if r"\{" not in text else ""
    if words in _EMPTY or text in (r"\{\}", r"\{ \}"):
        return [Words(text=_SAME_WORDS.get(words, words or "empty set"))]
    if words.lstrip("+") in ("infinity", "positive infinity", "infty", "正无穷", "无穷大", "inf"):
        return [Value(node=Tree("infinity"))]
    if words.lstrip("- ") in ("infinity", "negative infinity", "infty", "负无穷"):
        return [Value(node=Tree("neg", (Tree("infinity"),)))]
    if words in _REALS and text != "r":
        return [ALL_REALS] if text != "R" else []
    return []


def _values(text: str) -> list[Form]:
    found: list[Form] = read_value(text)
    values = [form for form in found if isinstance(form, Value)]
    if ("\\pm" in text or "\\mp" in text) and len(values) >= 2:
        return [AnswerGroup(kind="list", items=tuple(values[-2:]))]
    if len(values) >= 2 and re.search(r"^\d+,\d{2}$|^0,\d{2,}$", text):
        return found
    return found or _decimal_comma(text)


def _decimal_comma(text: str) -> list[Form]:
    return read_value(text.replace(",", ".")) if re.fullmatch(r"-?\d+,\d{2}|-?0,\d{2,}", text) else []


# ---------------------------------------------------------------------------------------------- several answers


def _listed(text: str, depth: int) -> list[Form]:
    """Read items that are separated by commas, semicolons, "and" or "or" outside brackets."""
    found: list[Form] = []
    grouped = _THOUSANDS.sub("{,}", text)
    if _GROUPED.fullmatch(text) and len(split_outside(grouped, _SEPARATOR)) == 1:
        found += _values(grouped)
    found += _decimal_comma(text)
    masked = text if ", " not in text and not found else grouped
    parts = [part.strip() for part in split_outside(masked, _SEPARATOR)]
    if found and len(parts) == 1:
        parts = [part.strip() for part in split_outside(text, _SEPARATOR)]
        if any(re.match(r"0\d", part) for part in parts):
            return found
    if len(parts) == 1 or len(parts) > MAX_ITEMS:
        return found
    open_ended = bool(_ELLIPSIS.match(parts[-1]))
    parts = [part for part in parts if part]
    if open_ended:
        parts = parts[:-1]
    if not parts:
        return found
    items = [read_forms(part, depth + 1) or _as_word(part) for part in parts]
    if any(not item for item in items):
        return found
    first: list[Form] = [item[0] for item in items]
    if not open_ended and (solved := _solutions(first, text)):
        return [*found, *solved]
    spread = tuple(inner for form in first for inner in _spread(form))
    return [*found, AnswerGroup(kind="list", items=spread, left="," if found else "", open_ended=open_ended)]


def _spread(form: Form) -> tuple[Form, ...]:
    return form.items if isinstance(form, AnswerGroup) and form.kind == "list" else (form,)


def _as_word(text: str) -> list[Form]:
    words = bare_words(text)
    return [Words(text=words)] if re.fullmatch(r"[^\W\d_][\w '\-.]*", words) else []


def _solutions(items: list[Form], text: str) -> list[Form]:
    """Read `x = 1 or x = 2`, `x = 1, 2`, `x = 1, y = 2`, `x < 1 or x > 3`, `x > 1 and x < 3`."""
    relations = [item for item in items if isinstance(item, Relation)]
    if not relations:
        return []
    if len(relations) == len(items):
        sets = [from_inequality(relation) for relation in relations]
        inequalities = [one for one in sets if one is not None]
        if len(inequalities) == len(sets):
            combined = united(inequalities) if _OR.search(text) else intersected(inequalities) or united(inequalities)
            return [combined] if combined is not None else []
        names = [assigned_name(relation) for relation in relations]
        if all(names):
            values = tuple(relation.sides[-1] for relation in relations)
            if len(set(names)) == 1:
                return [AnswerGroup(kind="list", items=tuple(value for form in values for value in _spread(form)))]
            return [AnswerGroup(kind="list", items=tuple(relations)), AnswerGroup(kind="tuple", items=values)]
        return [AnswerGroup(kind="list", items=tuple(relations))]
    if len(relations) == 1 and items[0] is relations[0] and assigned_name(relations[0]):
        spread = _spread(relations[0].sides[-1]) + tuple(value for item in items[1:] for value in _spread(item))
        return [AnswerGroup(kind="list", items=spread)]
    return []


def assigned_name(relation: Relation) -> str:
    """Return the name to which a relation assigns: its left side, if that is a variable, a function value or a name."""
    if set(relation.operators) != {"="}:
        return ""
    left = relation.sides[0]
    if isinstance(left, Words):
        return left.text
    if isinstance(left, Value):
        if left.node.op == "symbol":
            return left.node.name
        if left.node.op == "mul" and left.node.parts[0].op == "symbol" and not left.percent:
            return _application(left.node)
        if left.node.op in FUNCTIONS.values() and symbols_of(left.node):
            return f"{left.node.op} {sorted(symbols_of(left.node))}"
        if left.node.op == "div" and all(_is_differential(part) for part in left.node.parts):
            return "derivative"
    return ""


def _is_differential(node: Tree) -> bool:
    return (node.op == "symbol" and node.name == "d") or (node.op == "mul" and node.parts[0] == symbol("d"))


def _application(node: Tree) -> str:
    """Return the name if a product is really a function value, `f(x)` or `P(2)`, or side lengths such as `AB`."""
    name, argument = node.parts[0].name, node.parts[1]
    if name[:1].isalpha() and name[:1] in "fghpqFGHPQSTVuvwyLNA" and argument.op in ("symbol", "number"):
        return f"{name}({argument.name or argument.number})"
    if argument.op == "symbol" and name.isupper() and argument.name.isupper():
        return name + argument.name
    return ""


# ---------------------------------------------------------------------------------------------- sets


def _reals_without(text: str, depth: int) -> list[Form]:
    parts = split_outside(text, _MINUS)
    if len(parts) != 2:
        return []
    whole = [form for form in read_forms(parts[0], depth + 1) if isinstance(form, RealSet)]
    points = [form for form in read_forms(parts[1], depth + 1) if isinstance(form, AnswerGroup)]
    if not whole or not points or points[0].kind != "set":
        return []
    spread = [value for item in points[0].items for value in _spread(item)]
    nodes = [item.node for item in spread if isinstance(item, Value)]
    if len(nodes) != len(spread):
        return []
    return [RealSet(intervals=whole[0].intervals, excluded=(*whole[0].excluded, *nodes))]


def _union(text: str, depth: int) -> list[Form]:
    parts = split_outside(text, _UNION)
    if len(parts) == 1:
        return []
    if len(split_outside(text, _RELATION)) > 1:
        return _related(text, depth)
    sets = [_as_set(part, depth) for part in parts]
    found = [one for one in sets if one is not None]
    combined = united(found) if len(found) == len(sets) else None
    return [combined] if combined is not None else []


def _as_set(text: str, depth: int) -> RealSet | None:
    for form in read_forms(text, depth + 1):
        if isinstance(form, RealSet):
            return form
        if isinstance(form, AnswerGroup):
            return interval_of(form) if form.kind == "tuple" else points_of(form)
    return None


def _bracketed(text: str, depth: int) -> list[Form]:
    """Read a tuple, an interval, a set or brackets around one answer."""
    found = whole_brackets(text)
    if found is None:
        match = _PAIR_OF_BRACKETS.match(text)
        if match is None or (match.group(1) != "]" and match.group(3) != "["):
            return []
        left, content, right = match.groups()
    else:
        left, content, right = found
    content = content.strip()
    if left == r"\{" and right == r"\}":
        return _set(content, depth)
    items = _items(content, depth)
    if items is None:
        if left == "(" and right == ")" and len(split_outside(content, _RELATION)) > 1:
            return read_forms(content, depth + 1)
        return []
    if left == "{":
        return [AnswerGroup(kind="list", items=items)]
    left, right = ("(", ")") if left == r"\langle" else (left, right)
    group = AnswerGroup(kind="tuple", items=items, left=left, right=right)
    if (left, right) in (("(", "]"), ("[", ")"), ("]", "["), ("]", "]"), ("[", "[")):
        interval = interval_of(group)
        return [interval] if interval is not None else []
    return [group]


def _items(content: str, depth: int) -> tuple[Form, ...] | None:
    """Return the items between brackets, or None if there are fewer than two or one cannot be read."""
    masked = _THOUSANDS.sub("{,}", content) if ", " in content or ";" in content else content
    separator = re.compile(r"\s*;\s*") if ";" in content else re.compile(r"\s*,\s*")
    parts = split_outside(masked, separator)
    if len(parts) < 2 or len(parts) > MAX_ITEMS:
        return None
    items = [read_forms(part, depth + 1) or _as_word(part) for part in parts]
    return tuple(item[0] for item in items) if all(items) else None


def _set(content: str, depth: int) -> list[Form]:
    if not content:
        return [Words(text="empty set")]
    builder = _SET_BUILDER.match(content)
    if builder and len(split_outside(builder.group(2), _RELATION)) > 1:
        return [form for form in read_forms(builder.group(2), depth + 1) if not isinstance(form, Words)]
    items = _items(content, depth)
    if items is None:
        single = read_forms(content, depth + 1) or _as_word(content)
        if not single:
            return []
        inner = single[0]
        items = inner.items if isinstance(inner, AnswerGroup) and inner.kind == "list" else (inner,)
        if isinstance(inner, AnswerGroup) and inner.open_ended:
            return []
    return [AnswerGroup(kind="set", items=tuple(value for item in items for value in _spread(item)))]


# ---------------------------------------------------------------------------------------------- relations, matrices


def _related(text: str, depth: int) -> list[Form]:
    """Read a chain of comparisons, a membership, or a value with its approximation."""
    sides = split_outside(text, _RELATION)
    if len(sides) == 1:
        return []
    operators = _operators_between(text, sides)
    if operators is None or not sides[-1].strip():
        return []
    if not sides[0].strip():
        return read_forms(sides[-1], depth + 1) if len(sides) == 2 and operators[0] in ("=", "\\approx") else []
    if r"\in" in operators:
        place = operators.index(r"\in")
        if place == 0 and len(sides) >= 2 and len(sides[0]) < 30:
            rest = text[text.index(sides[1], len(sides[0])) :]
            return read_forms(rest, depth + 1)
        return []
    if r"\approx" in operators:
        return _approximated(text, sides, operators, depth)
    forms = [_side(side, depth) for side in sides]
    if any(form is None for form in forms):
        return []
    known = tuple(_OPERATORS.get(operator, operator) for operator in operators)
    relation = Relation(sides=tuple(form for form in forms if form is not None), operators=known)
    real = from_inequality(relation)
    return [relation, real] if real is not None else [relation]


def _operators_between(text: str, sides: list[str]) -> list[str] | None:
    operators = []
    place = 0
    for side in sides[:-1]:
        place += len(side)
        match = _RELATION.match(text, place)
        if match is None:
            return None
        operators.append(match.group(1))
        place = match.end()
    return operators


def _approximated(text: str, sides: list[str], operators: list[str], depth: int) -> list[Form]:
    place = operators.index(r"\approx")
    end = text.index(r"\approx")
    before = read_forms(text[:end], depth + 1)
    after = read_forms(sides[-1], depth + 1)
    lone = place == 0 and bool(re.fullmatch(r"\s*\\?[a-zA-Z]+(?:_\{?\w+\}?)?\s*|\\text\{[^{}]*\}", sides[0]))
    return after if lone else [*before, *after]


def _side(text: str, depth: int) -> Form | None:
    forms = read_forms(text, depth + 1)
    if forms:
        plain = [form for form in forms if isinstance(form, Value) and not form.unit]
        return plain[0] if plain and isinstance(forms[0], Value) and depth > _MAX_DEPTH else forms[0]
    words = bare_words(text)
    if re.fullmatch(r"[\w\\ '()|]{1,40}", words) and re.search(r"[^\W\d]", words):
        return Words(text=words)
    return None


def _matrix(text: str, depth: int) -> list[Form]:
    match = _MATRIX.match(text)
    if match is None or match.group(1) in ("vmatrix", "Vmatrix") or r"\begin" in match.group(2):
        return []
    rows = []
    for line in re.split(r"\\\\(?:\s*\[[^\]]*\])?", match.group(2)):
        line = line.replace(r"\hline", "").strip()
        if not line:
            continue
        cells = [read_forms(cell, depth + 1) for cell in line.split("&")]
        if not all(cells):
            return []
        rows.append(tuple(cell[0] for cell in cells))
    return [Matrix(rows=tuple(rows))] if rows else []
