"""Reads answers to school problems: options, an order, matching pairs, blanks to fill."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rftstream.rewards.answers.choices import chosen_letters
from rftstream.rewards.answers.clean import without_hidden
from rftstream.rewards.answers.maths.words import number_in_words

LETTERS = "ABCDEFGHIJ"
_OPTION = re.compile(r"(?:^|(?<=\s))[(（]?([A-J])[).）、:：．]\s*(.+?)(?=\s+[(（]?[A-J][).）、:：．]\s|\n|$)")
_ARROW = re.compile(
    r"\\(?:to|implies|iff|(?:long)?(?:left)?rightarrow|(?:Long)?(?:left)?[Rr]ightarrow|Longrightarrow|Leftrightarrow"
    r"|xrightarrow\{[^{}]*\}|longleftrightarrow|mapsto)(?![a-zA-Z])\s?"
    r"|[-=—–]+>|<[-=]+>|[→⇒⟶⟹↔⇔⟷➔➜➡]",
)
_THING = r"[(（]?\s*([^\W_]+(?:[\s'’][^\W\d_]+)*)\s*[)）]?"
_PAIR = re.compile(rf"{_THING}\s*(?:→|-+|=+|—+|–|:|：|~)\s*{_THING}")
_BELONGS = re.compile(
    r"(?<=[^\W_]|[)）])\s*(?:\b(?:(?:is|are|(?:should|must|can)\s+be)\s+)?(?:match|go|pair|belong|correspond|connect|link|join|fit)(?:e?s|ed)?\s+(?:up\s+)?"
    r"(?:(?:with|to|in)\s+)?|\b(?:is|are)\s+(?:(?:in|of|from)\s+)?(?:an?\s+(?!and\b)|the\s+)?|\b(?:stands\s+for|means|represents)\s+|\b(?:with|to)\s+"
    r"|对应着?|匹配|搭配|配对?|连接?|是|属于)\s*(?=[^\W_]|[(（])",
    re.IGNORECASE,
)
_AND = re.compile(r"(?<=[^\W_])\s+and\s+(?=[^\W_])", re.IGNORECASE)
_PAIR_SEPARATOR = re.compile(r"\s*(?:[;；\n]|[,，、]\s*(?:and\b)?)\s*|\s+and\s+")
_BRACKETED_PAIR = re.compile(r"[(（\[]\s*([^\W_]+(?:\s[^\W\d_]+)*)\s*[,，]\s*([^\W_]+(?:\s[^\W\d_]+)*)\s*[)）\]]")
_NUMBERED_PAIRS = re.compile(r"(?:[(（]?\d{1,2}\s*[.)）、．]?\s*[A-Ja-j](?![^\W\d_])[\s,;，；、.]*)+")
_TIGHT_PAIRS = re.compile(r"(?:(?:\d[A-Ja-j]|[A-Ja-j]\d)[\s,;，；、]*)+")
_ORDER_SEPARATOR = re.compile(
    r"\s*(?:[,;，；、\n]|→|>|<|-|—|–|\b(?:first|firstly|then|next|finally|lastly|last|and|after\s+that|followed\s+by)\b"
    r"|首先|然后|接着|最后|再|先)\s*|\s+",
    re.IGNORECASE,
)
_WORD_ORDER_SEPARATOR = re.compile(_ORDER_SEPARATOR.pattern.removesuffix(r"|\s+"), re.IGNORECASE)
_CODE = re.compile(r"(?<![A-Za-z0-9])(\d{1,2}|[A-J])(?![A-Za-z0-9])")
_DENIAL = re.compile(r"\b(?:not|never|no|wrong)\b|n't|不|错")
_FENCE = re.compile(r"^\s*```\w*\s*|\s*```\s*$")
_TAGS = re.compile(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}|[$*]|\\(?:[ ,;:!]|q?quad(?![a-zA-Z]))")
_BLANKS = re.compile(r"\s*[;；\n]\s*")
_ALTERNATIVES = re.compile(r"\s*(?:\||//|\s/\s)\s*")


def options_of(column: Any, prompt: str) -> dict[str, str]:
    """Return the options of a problem by letter: from its column (a list, a map or their JSON), else from its
    prompt."""
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


def pairs_of(text: str, *, loose: bool = False) -> dict[str, str] | None:
    """Return matched pairs from `1-B, 2-A`, `1B 2A` or a JSON map; None for other texts. With `loose`, alternating
    numbers and letters in a sentence count as pairs, too."""
    try:
        value = json.loads(_FENCE.sub("", text))
    except ValueError:
        value = None
    if isinstance(value, Mapping):
        return {_item(str(left)): _item(str(right)) for left, right in value.items()}
    words = plain(text).strip("{}[] ").rstrip(".。")
    if loose:
        words = re.sub(r"(?<=[^\W\d_])/(?=[^\W\d_])", " → ", words)
    for form in (_TIGHT_PAIRS, _NUMBERED_PAIRS):
        if form.fullmatch(words):
            return _unique(re.findall(r"(\d+|[A-Ja-j])\s*[.)）、．]?\s*(\d+|[A-Ja-j])", words))
    if (bracketed := _BRACKETED_PAIR.findall(words)) and not _BRACKETED_PAIR.sub("", words).strip(" ,;，；、"):
        return _unique(bracketed)
    for joined in (words, _BELONGS.sub(" → ", words), _every_other_and(words)):
        pieces = [piece.strip() for piece in _PAIR_SEPARATOR.split(joined) if piece.strip()]
        found = [_PAIR.fullmatch(piece) for piece in pieces]
        if len(found) >= 2 and all(found):
            return _unique([match.groups() for match in found if match])
    codes = _CODE.findall(words) if loose and not _DENIAL.search(words) else []
    take_turns = all(one.isdigit() != other.isdigit() for one, other in itertools.pairwise(codes))
    if len(codes) < 4 or len(codes) % 2 or not take_turns:
        return None
    return _unique(list(zip(codes[::2], codes[1::2], strict=True)))


def codes_in_order(text: str, codes: Sequence[str]) -> list[str] | None:
    """Return the order in which a sentence names codes such as letters, each once. None if it does not name them so, or
    contains "before"."""
    words = plain(text)
    if _DENIAL.search(words) or re.search(r"\b(?:before|after|precedes?)\b|之前|之后", words):
        return None
    found = [code.casefold() for code in _CODE.findall(words)]
    return found if sorted(found) == sorted(codes) else None


def _every_other_and(words: str) -> str:
    """Return `1 and C, 2 and A` with arrows, if commas separate the pairs."""
    return _AND.sub(" → ", re.sub(r"([,;])\s*and\s+", r"\1 ", words))


def _unique(pairs: Sequence[Sequence[str]]) -> dict[str, str] | None:
    """Return pairs as a map, or None if there are fewer than two or a left side is repeated."""
    found = {_item(left): _item(right) for left, right in pairs}
    return found if len(found) == len(pairs) >= 2 else None


def same_pairs(gold: Mapping[str, str], found: Mapping[str, str]) -> float:
    """Return the share of the right pairs that were found, in either direction. With too many pairs it is 0."""
    turned = {right: left for left, right in found.items()}
    best = max(sum(one.get(left) == right for left, right in gold.items()) for one in (found, turned))
    return best / len(gold) if len(found) <= len(gold) else 0.0


def order_of(text: str) -> list[str] | None:
    """Return the items of an order, from `B, A, C`, `B→A→C`, `③①②`, `3 > 1 > 2`, `BAC`, `first B, then A`; None for
    other texts."""
    words = plain(text).strip("()[]{} .。\"'")
    if re.fullmatch(r"[A-J]{2,10}|\d{3,9}", words) and len(set(words)) == len(words):
        return [_item(letter) for letter in words]
    if (listed := enumerated(words)) is not None:
        return [_item(part) for part in listed]
    backwards = "<" in words
    separator = _WORD_ORDER_SEPARATOR if re.search(r"[,;，；、→><]", words) else _ORDER_SEPARATOR
    items = [_item(part) for part in separator.split(words) if part.strip(" .,;:")]
    if len(items) < 2 or len(set(items)) != len(items) or len(items) > 50:
        return None
    return items[::-1] if backwards else items


def is_order(text: str) -> bool:
    """Return whether a problem's answer can only be an order: unsorted letters, or arrows."""
    items = order_of(text)
    if items is None or len(items) < 3:
        return False
    if "→" in plain(text) or re.search("[①-⑳]", text):
        return True
    simple = all(re.fullmatch(r"[a-j]", item) for item in items)
    return simple and items != sorted(items)


_ENUMERATOR = re.compile(
    r"(?:[(（](\d{1,2}|[a-e])[)）]|(?:^|(?<=[\s,;，；.。]))(?:(?:(?:blank|step|item|part)\s*)?(\d{1,2}|[a-e](?=\)))"
    r"\s?[.)）、．:：](?!\d)|第([一二三四五六七八九十]|\d{1,2})(?:个)?[空步]?(?:是|为)?[:：]?"
    r"|(first|second|third|fourth|fifth)\s*(?:blank)?\s*[:：]))\s*",
    re.IGNORECASE,
)
_PLACES = {
    **{str(number): number for number in range(1, 21)},
    **{word: number for number, word in enumerate("一二三四五六七八九十", 1)},
    **{letter: number for number, letter in enumerate("abcde", 1)},
    **{word: number for number, word in enumerate(("first", "second", "third", "fourth", "fifth"), 1)},
}


def enumerated(text: str) -> list[str] | None:
    """Return the parts of `1. x 2. y`, `(1) x (2) y`, `第一空x，第二空y`; None if the text is not numbered from 1."""
    text = re.sub("[①-⑳]", lambda match: f"({unicodedata.normalize('NFKC', match[0])}) ", text)
    found = list(_ENUMERATOR.finditer(text))
    numbers = [_PLACES.get(next(filter(None, match.groups())).lower()) for match in found]
    if len(found) < 2 or numbers != list(range(1, len(found) + 1)) or text[: found[0].start()].strip():
        return None
    ends = [*(match.start() for match in found[1:]), len(text)]
    return [text[match.end() : end].strip(" ,;，；.。\n") for match, end in zip(found, ends, strict=True)]


def blanks_of(text: str) -> list[list[str]]:
    """Return the blanks in a problem's answer, which `;` separates, each with its alternatives, which `|` separates."""
    if (numbered := enumerated(text.strip())) is not None:
        text = ";".join(numbered)
    blanks = [_ALTERNATIVES.split(blank.strip()) for blank in _BLANKS.split(text.strip()) if blank.strip()]
    return [[one for one in blank if one.strip()] for blank in blanks]


def letters_of(text: str) -> frozenset[str] | None:
    """Return the letters of a choice, which may also be circled or in Chinese words."""
    return chosen_letters(unicodedata.normalize("NFKC", text))


def plain(text: str) -> str:
    """Return a text without formula marks, in NFKC, with one sign for every kind of arrow."""
    text = _TAGS.sub(lambda match: match.group(1) or "", re.sub("([①-⑳])", r"\1 ", text))
    return unicodedata.normalize("NFKC", _ARROW.sub(" → ", without_hidden(text))).strip()


def _item(text: str) -> str:
    return re.sub(r"^(?:the|an?)\s+(?=[^\W\d_]{2})", "", text.strip().strip("()（）.:： ").casefold())


_NUMBER = re.compile(r"(?<![A-Za-z0-9.])[-−]?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+|%)?(?:\s+[^\W\d_]+)?")


def lone_number(text: str) -> str | None:
    """Return the only number of a sentence with the word after it; None if there is none or more than one. A number in
    words counts if there are no digits."""
    if re.search(r"[\\=<>^]", text):
        return None
    found = _NUMBER.findall(text)
    if found:
        is_only = len(found) == 1 and len(re.findall(r"\d+(?:[.,/]\d+)*", text)) == 1
        return re.sub(r"\s+of$", "", found[0]).replace("$", r"\$") if is_only else None
    words = re.findall(r"[a-z]+(?:-[a-z]+)*", text.casefold())
    runs = [
        word for word in words if word not in ("one", "a", "an", "half", "second") and number_in_words(word) is not None
    ]
    return runs[0] if len(runs) == 1 else None


_SYMBOLS = re.compile(r"(?:[A-Z][a-z]?|[\d()\[\]+\-=·→]|\s)+")


def same_symbols(left: str, right: str) -> bool:
    """Return whether two texts are the same chemical formula, such as H₂O and `H_2O`. Capitals matter."""
    one, other = _symbols(left), _symbols(right)
    return one == other and _SYMBOLS.fullmatch(one) is not None and re.search("[A-Z]", one) is not None


def _symbols(text: str) -> str:
    text = re.sub(r"\\ce\s*|(?<=[A-Za-z)])_|\^(?=\{?\d*[+-])", "", plain(text))
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub("[{}]", "", text)).strip(".")
