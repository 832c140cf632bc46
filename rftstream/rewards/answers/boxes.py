r"""Finds the answer in a completion: the last `\boxed{}`, what follows "the answer is", or all of a short text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rftstream.rewards.answers.clean import matching_brace

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(r"[^\s$]+")
_JOINT = re.compile(
    r"[\s$,;、，；.()\[\]\\]*(?:(?:\\text\{\s*)?(?:and|or|和|或|与|及)(?:\s*\})?)?[\s$,;、，；()\[\]\\]*",
    re.IGNORECASE,
)
_WORDS_BETWEEN = re.compile(r"(?:and|or|和|或|\\quad|\\text)", re.IGNORECASE)

_MARKS = (
    re.compile(
        r"(?:(?:final|correct|the)\s+answers?|answers?|correct\s+(?:choice|option)s?|solutions?)\b"
        r"[^\n.:：=]{0,60}?(?:\bis\b|\bare\b|[:：=])(?:\s*(?:therefore|thus))?[:：]?\s*",
        re.IGNORECASE,
    ),
    re.compile(r"(?:最终|正确|因此|所以|故)?(?:的)?(?:答案|结果|选项)(?:应该|应当)?(?:是|为|选|:|：)+\s*"),
    re.compile(r"(?:故选|应选|因此选|所以选|我选|选择|選)[:：]?\s*"),
)
_SENTENCE_END = re.compile(r"\n|。|(?<=[^\d\s.])\.(?=\s|$)|(?<=\d)\.(?=\s|$)|\.\s*$|[!?！？](?=\s|$)|<\|")
_HOPE = re.compile(r"\.?\s*I hope it is correct.*$", re.IGNORECASE | re.DOTALL)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|(?<![\\$])\$((?:\\\$|[^$\n])+?)\$(?!\d)|\\\((.+?)\\\)", re.DOTALL)
_THINKING = re.compile(r"^.*</think(?:ing)?>", re.DOTALL)
_TAIL = re.compile(
    r"(?:\b(?:is|are|equals|gives|at|be|was|get|have|it's)\b|[:：]|等于|得到|得|共有|共|有|是|为)\s*", re.IGNORECASE
)
MAX_WHOLE = 200
"""Characters up to which a completion may be an answer as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAnswer:
    """What stands for the answer in a completion."""

    text: str
    how: str
    """`box`, `mark` (it follows "the answer is"), `whole` (the whole completion), `tail` (it follows the last "is") or
    `formula` (the last one)."""


def find_answers(completion: str, *, boxed_only: bool = False) -> list[FoundAnswer]:
    """Return what may be the answer, the best first. If there is a box, nothing else counts."""
    boxed = last_boxes(completion)
    if boxed is not None:
        return [FoundAnswer(text=boxed, how="box")] if boxed.strip() else []
    if boxed_only:
        return []
    text = _THINKING.sub("", completion).strip()
    found = []
    if (marked := _after_mark(text)) is not None:
        found.append(FoundAnswer(text=marked, how="mark"))
    if text and len(text) <= MAX_WHOLE:
        found.append(FoundAnswer(text=text, how="whole"))
    if (tail := _tail(text)) is not None:
        found.append(FoundAnswer(text=tail, how="tail"))
    if (formula := _last_formula(text)) is not None:
        found.append(FoundAnswer(text=formula, how="formula"))
    return found


def last_boxes(text: str) -> str | None:
    r"""Return the content of the last box; with those right before it if only commas or "and" stand between them.

    A box that is not closed reaches to the end of its line. None: there is no box."""
    boxes = []
    place = 0
    while match := _BOX.search(text, place):
        start = match.end()
        if text.startswith("{", start):
            end = matching_brace(text, start)
            content = text[start + 1 : end] if end is not None else _unclosed(text[start + 1 :])
            place = start + 1 + len(content)
            boxes.append((match.start(), (end + 1) if end is not None else place, content))
            place = boxes[-1][1]
        elif word := _UNBRACED.match(text, start):
            boxes.append((match.start(), word.end(), word.group().rstrip(".,;:)")))
            place = word.end()
        else:
            place = max(start, match.start() + 1)
    if not boxes:
        return None
    contents = [boxes[-1][2]]
    for before, after in zip(reversed(boxes[:-1]), reversed(boxes), strict=False):
        between = text[before[1] : after[0]]
        if len(between) > 40 or not (_JOINT.fullmatch(between) or _is_joint(between)):
            break
        if "\n" in between.strip(" "):
            break
        if before[2].strip() != contents[0].strip():
            contents.insert(0, before[2])
    return ", ".join(contents)


def _is_joint(between: str) -> bool:
    words = re.sub(r"\\(?:quad|qquad|text|mathrm)|[${}\\(),;\s]", " ", between).split()
    return bool(words) and all(word.lower() in ("and", "or") for word in words)


def _unclosed(text: str) -> str:
    return text.split("\n", 1)[0].rstrip("$ ")


def _after_mark(text: str) -> str | None:
    """Return what follows the last "the answer is", up to the end of its sentence."""
    for pattern in _MARKS:
        matches = list(pattern.finditer(text))
        for match in reversed(matches):
            rest = _HOPE.sub("", text[match.end() :])
            rest = rest.lstrip("*_ \n:：")
            end = _end_of_sentence(rest)
            answer = rest[:end].strip().strip("*").strip()
            if answer:
                return answer
    return None


def _tail(text: str) -> str | None:
    """Return what follows the last verb such as "is" in the last sentence, if it is short."""
    line = text.rstrip().rpartition("\n")[2]
    matches = list(_TAIL.finditer(line))
    if not matches:
        return None
    tail = line[matches[-1].end() :].strip().strip("*").strip()
    return tail if 0 < len(tail) <= 80 else None


def _end_of_sentence(text: str) -> int:
    """Return where the first sentence ends; a dot inside of a formula does not end one."""
    formula = next((match for match in _FORMULA.finditer(text) if not text[: match.start()].strip("*_ ")), None)
    match = _SENTENCE_END.search(text, formula.end() if formula else 0)
    return match.start() if match else len(text)


def _last_formula(text: str) -> str | None:
    matches = list(_FORMULA.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    if text[last.end() :].strip() and re.search(r"\d", text[last.end() :]):
        return None  # a number follows: the formula need not be the answer
    return next(group for group in last.groups() if group is not None)
