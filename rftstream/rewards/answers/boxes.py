r"""Finds the answer in a completion: the last `\boxed{}`, the text after "the answer is", or the whole of a short
text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rftstream.rewards.answers.thoughts import after_thoughts, final_part

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(r"[^\s$]+")
_JOINT = re.compile(
    r"[\s$,;、，；.()\[\]\\]*(?:(?:\\text\{\s*)?(?:and|or|和|或|与|及)(?:\s*\})?)?[\s$,;、，；()\[\]\\]*",
    re.IGNORECASE,
)


_COPULA = r"(?:ist|lautet|est|es|é|è|is|are|adalah|là|は|が|은|는|이|هو|هي|—|–|-|=|:|：)"
_MARKS = (
    re.compile(
        r"(?:(?:final|correct|the)\s+answers?|answers?|correct\s+(?:choice|option)s?|solutions?)\b"
        r"[^\n.:：=]{0,60}?(?:\bis\b|\bare\b|[:：=])(?:\s*(?:therefore|thus))?[:：]?\s*",
        re.IGNORECASE,
    ),
    re.compile(r"(?:最终|正确|因此|所以|故)?(?:的)?(?:答案|结果|选项)(?:应该|应当)?(?:是|为|选|:|：)+\s*"),
    re.compile(r"(?:故选|应选|因此选|所以选|我选|选择|選|(?:应该?|需要?)?填(?:写|入)?)[:：]?\s*"),
    re.compile(
        r"\b(?:antwort|ergebnis|l(?:ö|oe)sung|r[ée]ponse|r[ée]sultat|respuesta|soluci[óo]n|resultado|resposta|risposta"
        r"|risultato|antwoord|svar|cevap|jawabannya|jawaban|odpowied[źz]|odpov[eě]ď|đáp án|kết quả|ответ|результат)\b"
        r"[^\n.:：=]{0,40}?"
        rf"(?<![^\W_]){_COPULA}(?![^\W_])\s*",
        re.IGNORECASE,
    ),
    re.compile(rf"(?:答え|解答|正解|정답|답|الجواب|الإجابة|उत्तर)(?:[^\n.。:：]{{0,20}}?{_COPULA})?\s*"),
    re.compile(
        r"(?:(?:the\s+)?(?:correct|right|proper)?\s*(?:order|sequence|matching|matches|pairs)\s*"
        r"(?:is|are|(?:should|must|would)\s+be|:)|(?:顺序|排序|排列)(?:应该|应)?(?:是|为|:|：)+)\s*",
        re.IGNORECASE,
    ),
)
_SENTENCE_END = re.compile(r"\n|。|(?<=[^\d\s.])\.(?=\s|$)|(?<=\d)\.(?=\s|$)|\.\s*$|[!?！？](?=\s|$)|<\|")
_HOPE = re.compile(r"I hope it is correct", re.IGNORECASE)
_FORMULA_BEGIN = re.compile(r"\$\$|\\\[|\\\(|(?<![\\$])\$")
_FORMULA_END = {"$$": "$$", r"\[": r"\]", r"\(": r"\)"}
_INLINE = re.compile(r"\$((?:\\\$|[^$\n])+?)\$(?!\d)")
_BRACES = re.compile(r"\\[\s\S]|[{}]")
_SAID_AFTER = re.compile(
    r"(?:です|でした|となります|になります|になる|である|だ|입니다|이다|है|हैं)\s*[。.]?$"
    r"|\s+(?:is|are|was)\s+(?:the\s+)?(?:correct\s+|right\s+|final\s+)?answers?[.!]?$",
    re.IGNORECASE,
)
_REASON = re.compile(r",?\s+(?:because|since|given\s+that|due\s+to)\b.*$", re.IGNORECASE | re.DOTALL)
_LED_BY = re.compile(
    r"^(?:(?:so|thus|hence|therefore|then|finally|in\s+conclusion|consequently|we\s+(?:get|have|find|obtain)|that\s+is"
    r"|it\s+follows\s+that)\b[\s,:]*)+(?=\S)",
    re.IGNORECASE,
)
_STATEMENT = re.compile(
    r"^(?P<words>[^\d\\$=<>|^_+*/]{0,80}?)(?::|(?<![a-z])(?:is|are|was|be|equals?|gets?|gives?|has|have|so|thus|hence"
    r"|therefore|find|obtain|need)(?![a-z])|是|为|有)\s*(?P<rest>\S.*)$",
    re.IGNORECASE | re.DOTALL,
)
_UNSURE = re.compile(
    r"\b(?:not|no|never|nor|least|most|more|less|fewer|about|if|or|either|minus|than)\b|n't", re.IGNORECASE
)
_OPENED = re.compile(r"\\(?:text|mathrm|textbf|mbox|textit)\s*\{([^{}]*)\}")
_TAIL = re.compile(
    r"(?:\b(?:is|are|equals|gives|at|be|was|get|have|it's|called|named|known\s+as|means)\b|叫做?|称为|(?<!\d)[:：]|[:：](?!\d)|等于|得到|得|共有|共|有|是|为)\s*",
    re.IGNORECASE,
)
MAX_MARKS = 50
"""Largest number of marks that are tried, from the end of the text. The answer follows the last mark that has text
after it."""
MAX_MARKED = 4000
"""Largest number of characters after a mark in which the answer must end."""
MAX_JOINED = 20
"""Largest number of boxes, separated only by commas, that make one answer. If there are more, the last box is the
answer."""
MAX_WHOLE = 200
"""Greatest length, in characters, of a completion that may be the answer as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAnswer:
    """The answer that was found in a completion."""

    text: str
    how: str
    """`box`, `stated` (it follows words in a box), `mark` (it follows "the answer is"), `whole` (the whole completion),
    `tail` (it follows the last "is", or is the last line) or `formula` (the last formula)."""


def find_answers(completion: str, *, boxed_only: bool = False) -> list[FoundAnswer]:
    """Return the possible answers, the best first. If there is a box, only boxes count."""
    text = final_part(completion)
    boxed = last_boxes(text)
    if boxed is None and boxed_only:
        boxed = last_boxes(after_thoughts(completion))
    if boxed is not None:
        stated = _stated(boxed)
        found = [] if stated is None else [FoundAnswer(text=stated, how="stated")]
        return [*found, FoundAnswer(text=boxed, how="box")] if boxed.strip() else []
    if boxed_only:
        return []
    found = []
    if (marked := _after_mark(text)) is not None:
        found.append(FoundAnswer(text=marked, how="mark"))
    if text and len(text) <= MAX_WHOLE:
        found.append(FoundAnswer(text=text, how="whole"))
        if (said := _bare(text)) != text:
            found.append(FoundAnswer(text=said, how="tail"))
    if (tail := _tail(text)) is not None:
        found.append(FoundAnswer(text=tail, how="tail"))
    if (formula := _last_formula(text)) is not None:
        found.append(FoundAnswer(text=formula, how="formula"))
    last = text.rpartition("\n")[2].strip()
    if last != text and 0 < len(last) <= MAX_WHOLE:
        found.append(FoundAnswer(text=_bare(last), how="tail"))
    return found


def _bare(sentence: str) -> str:
    """Return a sentence without introductory words, such as "so we get", and without closing words."""
    return _SAID_AFTER.sub("", _LED_BY.sub("", sentence, count=1))


def _stated(boxed: str) -> str | None:
    """Return the text after words such as "the area is" in a box, or None if the box does not begin with such words."""
    if len(boxed) > MAX_WHOLE or not re.search(r"[a-z]{2}", boxed):
        return None
    text = _OPENED.sub(r" \1 ", boxed).replace("~", " ").strip()
    match = _STATEMENT.match(text)
    if match is None:
        said = _SAID_AFTER.sub("", text)
        return said if said != text else None
    rest = match["rest"].strip(" :,.")
    again = _STATEMENT.match(rest)
    if again is not None and not _UNSURE.search(again["words"]):
        rest = again["rest"].strip(" :,.")
    rest = re.sub(r"(?<=\S)\s+(?:at|when)\s.*$", "", rest, flags=re.DOTALL)
    return None if _UNSURE.search(match["words"]) or not rest else rest


def last_boxes(text: str) -> str | None:
    r"""Return the content of the last box, with preceding boxes that only commas or "and" separate from it.

    A box that is not closed reaches to the end of its line. None: there is no box."""
    boxes: list[tuple[int, int, str]] = []
    place = 0
    closing = _matching_braces(text) if _BOX.search(text) else {}
    while match := _BOX.search(text, place):
        start = match.end()
        if text.startswith("{", start):
            end = closing.get(start)
            content = text[start + 1 : end] if end is not None else _unclosed(text, start + 1)
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
    count = 1
    for before, after in zip(reversed(boxes[:-1]), reversed(boxes), strict=False):
        between = text[before[1] : after[0]]
        if len(between) > 40 or not (_JOINT.fullmatch(between) or _is_joint(between)):
            break
        if "\n" in between.strip(" "):
            break
        count += 1
        if count > MAX_JOINED:
            return boxes[-1][2]
        if before[2].strip() != contents[-1].strip():
            contents.append(before[2])
    return ", ".join(reversed(contents))


def _is_joint(between: str) -> bool:
    words = re.sub(r"\\(?:quad|qquad|text|mathrm)|[${}\\(),;\s]", " ", between).split()
    return bool(words) and all(word.lower() in ("and", "or") for word in words)


def _matching_braces(text: str) -> dict[int, int]:
    r"""Return the place of each opening brace that is closed, with that of the closing one. `\{` and `\}` do not
    count. All at once, since a text may have many boxes that are not closed."""
    open_places: list[int] = []
    found = {}
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            open_places.append(match.start())
        elif match[0] == "}" and open_places:
            found[open_places.pop()] = match.start()
    return found


def _unclosed(text: str, start: int) -> str:
    end = text.find("\n", start)
    return text[start : end if end >= 0 else len(text)].rstrip("$ ")


def _after_mark(text: str) -> str | None:
    """Return the text after the last "the answer is", up to the end of its sentence."""
    for pattern in _MARKS:
        matches = list(pattern.finditer(text))
        for match in reversed(matches[-MAX_MARKS:]):
            rest = _without_hope(text[match.end() : match.end() + MAX_MARKED])
            rest = rest.lstrip("*_ \n:：")
            end = _end_of_sentence(rest)
            answer = _SAID_AFTER.sub("", _REASON.sub("", rest[:end]).strip().strip("*").strip())
            if answer:
                return answer
    return None


def _without_hope(text: str) -> str:
    hope = _HOPE.search(text)
    return text if hope is None else text[: hope.start()].rstrip().removesuffix(".")


def _tail(text: str) -> str | None:
    """Return the text after the last verb such as "is" in the last sentence, if that text is short."""
    line = text.rstrip().rpartition("\n")[2]
    matches = list(_TAIL.finditer(line))
    if not matches:
        return None
    tail = line[matches[-1].end() :].strip().strip("*").strip()
    return tail if 0 < len(tail) <= 80 else None


def _end_of_sentence(text: str) -> int:
    """Return where the first sentence ends. A dot inside a formula does not end it."""
    begin, end, _ = next(_formulas(text), (0, 0, ""))
    match = _SENTENCE_END.search(text, end if not text[:begin].strip("*_ ") else 0)
    return match.start() if match else len(text)


def _last_formula(text: str) -> str | None:
    last = next(iter(deque(_formulas(text), maxlen=1)), None)
    if last is None or re.search(r"\d", text[last[1] :]):
        return None  # a number follows: the answer need not be the formula
    return last[2]


def _formulas(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the start, end and content of each formula. A missing end is searched for only once, not from each
    start."""
    place = 0
    never: set[str] = set()
    while match := _FORMULA_BEGIN.search(text, place):
        start, begin = match.start(), match[0]
        place = start + 1
        if begin == "$":
            if inline := _INLINE.match(text, start):
                place = inline.end()
                yield start, place, inline[1]
        elif begin not in never:
            end = text.find(_FORMULA_END[begin], match.end() + 1)
            if end < 0:
                never.add(begin)
            else:
                place = end + 2
                yield start, place, text[match.end() : end]
