"""Reads what school problems ask for: options, true or false, an order, pairs that belong together, blanks to fill."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rftstream.rewards.answers.choices import chosen_letters

LETTERS = "ABCDEFGHIJ"
_TRUE = frozenset(["true", "t", "yes", "y", "right", "correct", "对", "對", "正确", "正確", "是", "√", "✓", "✔", "真"])
_FALSE = frozenset(
    [
        "false",
        "f",
        "no",
        "n",
        "wrong",
        "incorrect",
        "错",
        "錯",
        "错误",
        "錯誤",
        "不对",
        "不是",
        "否",
        "×",
        "✗",
        "✘",
        "x",
        "假",
        "不正确",
    ]
)
_TRUTH_IN_TEXT = re.compile(
    r"\b(?:statement|claim|sentence|it|this|answer)\s+is\s+(not\s+)?(true|false|right|correct|wrong|incorrect)\b"
    r"|(?:说法|命题|判断|答案)(?:是)?(?:为)?(不正确|正确|错误|不对|对|错)",
    re.IGNORECASE,
)
_OPTION = re.compile(r"(?:^|(?<=\s))[(（]?([A-J])[).）、:：．]\s*(.+?)(?=\s+[(（]?[A-J][).）、:：．]\s|\n|$)")
_PAIR = re.compile(
    r"[(（]?\s*([^\W_]+(?:\s[^\W\d_]+)*)\s*[)）]?\s*(?:-+>?|=+>?|—+|–|→|:|：|\\to|\\rightarrow|\\leftrightarrow)\s*"
    r"[(（]?\s*([^\W_]+(?:\s[^\W\d_]+)*)\s*[)）]?"
)
_PAIR_SEPARATOR = re.compile(r"\s*[,;，；、\n]\s*|\s+and\s+")
_TIGHT_PAIRS = re.compile(r"(?:(?:\d[A-Ja-j]|[A-Ja-j]\d)[\s,;，；、]*)+")
_ORDER_SEPARATOR = re.compile(r"\s*(?:[,;，；、]|->|-+>|→|>|<|\\to|\\rightarrow|\\rightarrow|\bthen\b|-|—|–)\s*|\s+")
_TAGS = re.compile(r"\\text\{([^{}]*)\}|[$*]")
_BLANKS = re.compile(r"\s*[;；\n]\s*")
_ALTERNATIVES = re.compile(r"\s*(?:\||//|\s/\s)\s*")


def truth_of(text: str) -> bool | None:
    """Return whether a text says true or false, in English or Chinese, or None if it says neither."""
    word = plain(text).casefold().strip(" .。!()[]'\\\"")
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    found = list(_TRUTH_IN_TEXT.finditer(text))
    if not found:
        return None
    denied, english, chinese = found[-1].groups()
    if chinese:
        return chinese in _TRUE
    return (english.casefold() in _TRUE) != bool(denied)


def options_of(column: Any, prompt: str) -> dict[str, str]:
    """Return the options of a problem by letter: from its column (a list, a map or their JSON), else from its text."""
    if isinstance(column, str):
        try:
            column = json.loads(column)
        except ValueError:
            return _options_in(column) or _options_in(prompt)
    if isinstance(column, Mapping):
        if isinstance(column.get("text"), Sequence) and isinstance(column.get("label"), Sequence):
            return {str(label): str(text) for label, text in zip(column["label"], column["text"], strict=False)}
        return {str(letter).strip().upper(): str(text) for letter, text in column.items()}
    if isinstance(column, Sequence) and column:
        options = {}
        for letter, text in zip(LETTERS, column, strict=False):
            led = re.fullmatch(r"\s*[(（]?([A-J])[).）、:：．]\s*(.*)", str(text), re.DOTALL)
            options[led.group(1) if led else letter] = led.group(2) if led else str(text)
        return options
    return _options_in(prompt)


def _options_in(text: str) -> dict[str, str]:
    found = {letter: words.strip() for letter, words in _OPTION.findall(text)}
    return found if len(found) > 1 and "A" in found else {}


def pairs_of(text: str) -> dict[str, str] | None:
    """Return which thing belongs to which, from `1-B, 2-A`, `1B 2A` or a JSON map; None if the text is not that."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, Mapping):
        return {_item(str(left)): _item(str(right)) for left, right in value.items()}
    words = plain(text).strip("{}[] ")
    if _TIGHT_PAIRS.fullmatch(words):
        tight = re.findall(r"([\dA-Ja-j])([\dA-Ja-j])", words)
        return {_item(left): _item(right) for left, right in tight}
    pieces = [piece.strip().strip("()（） ") for piece in _PAIR_SEPARATOR.split(words.rstrip(".。")) if piece.strip()]
    found = [_PAIR.fullmatch(piece) for piece in pieces]
    if len(found) < 2 or not all(found):
        return None
    pairs = [(_item(match.group(1)), _item(match.group(2))) for match in found if match]
    return dict(pairs) if len({left for left, _ in pairs}) == len(pairs) else None


def same_pairs(gold: Mapping[str, str], found: Mapping[str, str]) -> float:
    """Return the share of the pairs that were found, whichever side stands first. A pair too many makes it 0."""
    turned = {right: left for left, right in found.items()}
    best = max(sum(one.get(left) == right for left, right in gold.items()) for one in (found, turned))
    return best / len(gold) if len(found) <= len(gold) else 0.0


def order_of(text: str) -> list[str] | None:
    """Return the things of an order, from `B, A, C`, `B→A→C`, `③①②`, `3 > 1 > 2` or `BAC`; None if it is none."""
    words = plain(text).strip("()[]{} .。")
    if re.fullmatch(r"[A-J]{2,10}|\d{3,9}", words) and len(set(words)) == len(words):
        return [_item(letter) for letter in words]
    backwards = "<" in words
    items = [_item(part) for part in _ORDER_SEPARATOR.split(words) if part.strip()]
    if len(items) < 2 or len(set(items)) != len(items) or len(items) > 50:
        return None
    return items[::-1] if backwards else items


def is_order(text: str) -> bool:
    """Return whether a problem's answer can only be an order: letters that are not sorted, or arrows."""
    items = order_of(text)
    if items is None or len(items) < 3:
        return False
    if re.search(r"->|→|\\\\to|\\\\rightarrow", text) or re.search("[①-⑳]", text):
        return True
    simple = all(re.fullmatch(r"[a-j]", item) for item in items)
    return simple and items != sorted(items)


def blanks_of(text: str) -> list[list[str]]:
    """Return the blanks of a problem's answer, `;` between them, each with its alternatives, `|` between those."""
    blanks = [_ALTERNATIVES.split(blank.strip()) for blank in _BLANKS.split(text.strip()) if blank.strip()]
    return [[one for one in blank if one.strip()] for blank in blanks]


def letters_of(text: str) -> frozenset[str] | None:
    """Return the letters of a choice, which may also be circled or in Chinese words."""
    return chosen_letters(unicodedata.normalize("NFKC", text))


def plain(text: str) -> str:
    """Return a text without formulas' marks, in NFKC."""
    text = _TAGS.sub(lambda match: match.group(1) or "", re.sub("([①-⑳])", r"\1 ", text))
    return unicodedata.normalize("NFKC", text.replace("→", " → ").replace("×", "×")).strip()


def _item(text: str) -> str:
    return text.strip().strip("()（） ").casefold()
