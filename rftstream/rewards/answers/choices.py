r"""Choices: which letters an answer names. Only a lone letter is a choice, never one inside of a word.

`C`, `(C)`, `C.`, `\text{(C)}`, "Option C", `C. carbon` and "选C" name C; "carbon" and "the answer is carbon" do not.
"""

from __future__ import annotations

import re

from rftstream.rewards.answers.clean import bare_words

_MANY = re.compile(r"[A-Ja-j](?:\s*(?:,|;|and|or|&|和|、|/|\s)\s*[A-Ja-j])+")
_LETTERS = re.compile(r"[A-J]{2,10}")
_LONE = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:answer|option|choice|选项|选择|答案|选|故选|应选)s?\s*(?:is|are|是|为|:)?\s*)?"
    r"[\s(\[{*]*([A-Ja-j])[\s)\]}*]*[.:,]?",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"\b(?:option|choice|answer)\s*[(*]*([A-J])[)*]*\s+is\s+(?:the\s+)?(?:correct|right|true|best)\b"
    r"|选项?\s*([A-J])(?![a-zA-Z])",
    re.IGNORECASE,
)
_LED = re.compile(r"[\s(\[{*]*([A-J])(?:[\s*]*[)\]}]+[\s*]*[.:,]?|[\s*]*[.:、]|\s*[-=]\s)\s*(\S.*)", re.DOTALL)


def chosen_letters(text: str) -> frozenset[str] | None:
    """Return the letters that an answer names, in capitals, or None if it names none."""
    plain = _plain(text)
    if (lone := _LONE.fullmatch(plain)) is not None:
        return frozenset(lone.group(1).upper())
    bare = re.sub(r"[()\[\]{}.]", " ", plain).strip()
    if _MANY.fullmatch(bare):
        letters = re.findall(r"(?<![a-z])[A-Ja-j](?![a-z])", bare, re.IGNORECASE)
        return frozenset(letter.upper() for letter in letters)
    if _LETTERS.fullmatch(bare) and list(bare) == sorted(set(bare)):
        return frozenset(bare)
    if (led := _LED.fullmatch(plain)) is not None:
        others = re.findall(r"(?:^|[\s,;(])([A-J])(?:[.)、:]\s)", led.group(2))
        return frozenset((led.group(1), *others))
    named = {letter.upper() for match in _NAMED.finditer(plain) for letter in match.groups() if letter}
    return frozenset(named) if len(named) == 1 else None


def choice_text(text: str) -> str:
    """Return what follows the letter in an answer such as `C. carbon`; empty if nothing does."""
    led = _LED.fullmatch(_plain(text))
    return led.group(2).strip() if led else ""


def lone_letter(text: str) -> str | None:
    """Return the one capital letter that a problem's answer consists of, if it is no more than that."""
    match = re.fullmatch(r"\(?\s*([A-J])\s*\)?", _plain(text))
    return match.group(1) if match else None


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|textrm)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\(?:[ ,;:!]|quad|qquad)|[$*]|~", " ", text)
    return re.sub(r"\s+", " ", text).strip().strip(".。").strip()


def same_words(left: str, right: str) -> bool:
    """Return whether two texts consist of the same words."""
    return bool(bare_words(left)) and bare_words(left) == bare_words(right)
