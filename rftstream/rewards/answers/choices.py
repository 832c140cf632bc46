r"""Choices: the letters that an answer names. Only a single letter is a choice, never a letter inside a word.

`C`, `(C)`, `C.`, `\text{(C)}`, "Option C", `C. carbon`, "选C", "I choose C because A is cold" and "not A, so C" name C;
"carbon" and "the answer is carbon" do not.
"""

from __future__ import annotations

import re

from rftstream.rewards.answers.clean import bare_words

_MANY = re.compile(
    r"(?:both\s+|options?\s+)?[A-Ja-j](?:\s*(?:,\s*(?:and|or)\b|,|;|and|or|&|\+|和|与|及|、|/|\s)\s*[A-Ja-j])+",
    re.IGNORECASE,
)
_LETTERS = re.compile(r"[A-J]{2,10}")
_LONE = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:answer|option|choice|选项|选择|答案|选|故选|应选)s?\s*(?:is|are|是|为|:)?\s*)?"
    r"[\s(\[{【「*\"']*([A-Ja-j])[\s)\]}】」*\"']*[.:,]?",
    re.IGNORECASE,
)
_LED = re.compile(
    r"[\s(\[{*]*([A-J])(?:[\s*]*[)\]}]+[\s*]*[.:,]?|[\s*]*[.:、]|\s*[-=]\s|\s+(?=\())\s*(\S.*)", re.DOTALL
)
_CLAUSE_END = re.compile(
    r"[.!?;:。！？；]+(?:\s+|$)|[。！？；\n]"
    r"|,?\s*\b(?:because|since|but|so|therefore|thus|hence|whereas|while|although|which|rather than|instead of|leaving"
    r"|weil|denn|car|parce que|porque|pois)\b"
    r"|,\s*(?=(?:and\s+)?(?:not|neither|as|it|we|I)\b)|,(?=\s*[\u4e00-\u9fff])|(?<=[\u4e00-\u9fff]),|因为|所以|因此|但是?|故(?=选|答|为)",
    re.IGNORECASE,
)
_STANDALONE = re.compile(r"(?<![A-Za-z0-9'_\\])([A-J])(?![A-Za-z0-9'_])")
_ARTICLE = re.compile(
    r"(?-i:A|I)\s+(?!is\b|was\b|are\b|and\b|or\b|as\b|must\b|because\b|since\b|est\b|es\b|ist\b)[a-z]"
)
_CUE = re.compile(
    r"\b(?:answers?|correct|right|true|choose|chose|choosing|choices?|options?|selec\w*|pick\w*|go(?:ing)? with"
    r"|opt for|must be|would be|best|say|guess|only|leav\w*|remain\w*|it is|it's"
    r"|letter|antwort\w*|l(?:ö|oe)sung|richtig\w*|r[eé]ponse|bonne|respuesta|correcta"
    r"|opci[oó]n|resposta|letra|risposta|corretta|antwoord|jawaban\w*|[đd]áp án)\b"
    r"|选|答|正确|对(?!不)|正解|解答|정답|답|ответ|вариант|буква",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"\b(?:not|neither|nor|none|never|no|except|wrong|incorrect|false|exclud\w*|eliminat\w*|rul\w+ out|nicht"
    r"|falsch\w*|keine?|pas|faux|fausse|incorrecta?|falsa)\b|n't\b|不|错|误|排除|除了?|非|没|ない|아니|не\b|неверн",
    re.IGNORECASE,
)
_BARE_CLAUSE = re.compile(
    r"[\s,:*\"'()\[\]{}.\-–—]*"
    r"(?:(?:both|项|options?|la|le|el|die|der|das|lettre|letra|буква|вариант)[\s,:*\"'()\[\]{}.\-–—]*)?",
    re.IGNORECASE,
)


def chosen_letters(text: str) -> frozenset[str] | None:
    """Return the letters that an answer names, in capitals, or None if it names none."""
    plain = _plain(text)
    if (lone := _LONE.fullmatch(plain)) is not None:
        return frozenset(lone.group(1).upper())
    bare = re.sub(r"[()\[\]{}.\"]", " ", plain).strip()
    if _MANY.fullmatch(bare):
        letters = re.findall(r"(?<![a-z])[A-Ja-j](?![a-z])", re.sub(r"(?i)both|options?", " ", bare), re.IGNORECASE)
        return frozenset(letter.upper() for letter in letters)
    if _LETTERS.fullmatch(bare) and list(bare) == sorted(set(bare)):
        return frozenset(bare)
    if (led := _LED.fullmatch(plain)) is not None and _DENIED.search(led.group(2)[:40]) is None:
        others = re.findall(r"(?:^|[\s,;(])([A-J])(?:[.)、:]\s)", led.group(2))
        return frozenset((led.group(1), *others))
    return _stated_letters(plain)


def _stated_letters(plain: str) -> frozenset[str] | None:
    """Return the letters in the last clause that states which ones are right. A clause that negates, or only mentions
    letters, does not count."""
    found: frozenset[str] | None = None
    for clause in _CLAUSE_END.split(plain[-2000:]):
        letters = _letters_in(clause)
        if letters and _DENIED.search(clause) is None:
            rest = _STANDALONE.sub(" ", clause)
            rest = re.sub(r"\b(?:and|or|the)\b|[和与及、,]", " ", rest, flags=re.IGNORECASE)
            if _BARE_CLAUSE.fullmatch(rest) or _CUE.search(clause):
                found = letters
    return found


def _letters_in(clause: str) -> frozenset[str]:
    """Return the single capitals in a clause, without articles and pronouns. Runs such as AC count only after a Chinese
    word."""
    letters = [match[1] for match in _STANDALONE.finditer(clause) if not _ARTICLE.match(clause, match.start())]
    letters = [letter for letter in letters if letter != "I" or len(clause.strip()) < 3]
    for run in re.findall(r"(?<=[选为是])\s*([A-J]{2,10})(?![A-Za-z])", clause):
        letters += run
    return frozenset(letters)


def choice_text(text: str) -> str:
    """Return the text after the letter in an answer such as `C. carbon`; empty if there is none."""
    led = _LED.fullmatch(_plain(text))
    return led.group(2).strip() if led else ""


def lone_letter(text: str) -> str | None:
    """Return the capital letter if a problem's answer is only one letter, else None."""
    match = re.fullmatch(r"\(?\s*([A-J])\s*\)?", _plain(text))
    return match.group(1) if match else None


def listed_letters(text: str) -> frozenset[str] | None:
    """Return the capitals if a problem's answer consists of at least two capitals in alphabetical order, else None."""
    letters = re.sub(r"[\s,;()、]|\band\b", "", _plain(text))
    is_list = re.fullmatch(r"[A-H]{2,8}", letters) and list(letters) == sorted(set(letters))
    return frozenset(letters) if is_list else None


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|textrm)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\(?:[ ,;:!]|quad|qquad)|[$*]|~", " ", text)
    text = re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text))
    return text.strip().strip(".。").strip()


def same_words(left: str, right: str) -> bool:
    """Return whether two texts consist of the same words."""
    return bool(bare_words(left)) and bare_words(left) == bare_words(right)
