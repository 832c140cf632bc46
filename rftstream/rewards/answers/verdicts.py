"""Reads whether an answer means true or false, from sentences in English and Chinese, and from words in other
languages."""

from __future__ import annotations

import re

from rftstream.rewards.answers.clean import opened_text

_TRUE_WORDS = """
    true t yes y right correct verdadero verdadeiro cierto sí si oui vrai ja wahr richtig vero да верно правда
    对 對 正确 正確 是 √ ✓ ✔ 真 没错 没有错 成立 对的 是的 はい 正しい ○ 예 참 맞다
"""
_FALSE_WORDS = """
    false f no n wrong incorrect untrue falso nao não non faux nein falsch нет неверно ложь
    错 錯 错误 錯誤 不对 不是 否 × ✗ ✘ x 假 不正确 不成立 不真 不是这样 不是真
    いいえ 間違い 誤り 正しくない 아니요 거짓 틀리다
"""
_TRUE, _FALSE = frozenset(_TRUE_WORDS.split()), frozenset(_FALSE_WORDS.split())
_ENGLISH = re.compile(
    r"\b(?:statement|claim|sentence|proposition|assertion|conclusion|it|this|that|answer)"
    r"(?:'s|\s+is|\s+was|\s+would|\s+must|\s+can(?!')|\s+could|\s+ca(?=n't))(n't|\s*not)?(?:\s+be)?(?:\s+(?:definitely|indeed|clearly|actually|always))?"
    r"(\s+not)?(?:\s+an?|\s+the)?\s+(true|false|right|correct|wrong|incorrect|untrue)\b",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"(?:the\s+answer\s+is\s*:?\s*|so\s*,?\s*|therefore\s*,?\s*|答案(?:是|为)?\s*[:：]?\s*)?"
    r"([^\W\d_]+|√|×|✓|✔|✗|✘)\s*(?:[,.;:!(（，。；—–-]|because\b|since\b|\bas\b|\n)",
    re.IGNORECASE,
)
_LAST = re.compile(
    r"(?:^\W*(?:absolutely|definitely|completely|totally|clearly|obviously|certainly|probably)|\b(?:say|think|believe|it's|is"
    r"|be|guess|answer))\W+(?:not\s+)?(true|false|right|correct|wrong|incorrect|untrue)\W*$",
    re.IGNORECASE,
)
_DENIED = re.compile(r"\bnot\b|n't\b", re.IGNORECASE)
MAX_SHORT = 60
"""Largest number of characters of a sentence that may end with its verdict."""
_CHINESE_CLAUSE = re.compile(r"[,.;，。；!！\n]|因为|所以|因此")
_CHINESE_HEAD = re.compile(
    r"^(?:这|该|此|那|本|上述|以上)?(?:个|种|句|道|一)?(?:话|说法|命题|判断|句子|答案|题|结论|观点|叙述|陈述|描述|表述)?"
    r"(?:说得|应该|应|当然|显然|并)?(?:是|为)?"
)
_CHINESE_TAIL = re.compile(r"(?:的(?:说法|判断|命题|结论|句子|叙述)?|了|啊|呢)+$")


def truth_of(text: str) -> bool | None:
    """Return whether a text means true or false; None if it means neither."""
    text = opened_text(text).strip()
    if (said := _word(text)) is not None:
        return said
    if (lead := _LEAD.match(text)) is not None and (said := _word(lead[1])) is not None:
        return said
    english = list(_ENGLISH.finditer(text))
    if english:
        *denied, word = english[-1].groups()
        return (word.casefold() in _TRUE) != (sum(map(bool, denied)) % 2 == 1)
    if len(text) <= MAX_SHORT and (last := _LAST.search(text)) is not None:
        return (last[1].casefold() in _TRUE) != (len(_DENIED.findall(text)) % 2 == 1)
    said = None
    for clause in _CHINESE_CLAUSE.split(text):
        bare = _CHINESE_TAIL.sub("", clause.strip())
        found = _word(bare)
        if found is None:
            found = _word(_CHINESE_HEAD.sub("", bare))
        said = said if found is None else found
    return said


def verdict_word(text: str) -> str | None:
    """Return `yes`, `no`, `true` or `false` if a text is or begins with that word, else None."""
    text = opened_text(text).strip().casefold()
    match = re.match(
        r"(?:so\s*,?\s*|therefore\s*,?\s*)?(yes|no|true|false)(?![\w'-])\s*(?:$|[,.;:!\n—–-]|because\b|since\b)", text
    )
    return match[1] if match else None


def _word(text: str) -> bool | None:
    word = text.casefold().strip(" .。!！,，()[]'\\\"*")
    if (denied := word.removeprefix("not ")) != word:
        said = _word(denied)
        return None if said is None else not said
    return True if word in _TRUE else False if word in _FALSE else None
