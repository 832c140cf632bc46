"""Finds settings, sections and parts by words of their names and meanings, for a text that names none of them.

A word also stands for its other forms: `hacking` finds what is said of a hacked reward, `stale` finds `max_staleness`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rftstream.queries.reference import settings
from rftstream.queries.reference.settings import Setting, SettingSection
from rftstream.queries.reference.themes import THEMES

MOST = 12
"""Most things that are found."""
FILLERS = " a an and are do does for how i in is it many much my no not number of on or the to too use what why with "
"""Words that say nothing of what is searched."""
ENDINGS = ("ings", "ing", "ness", "ers", "ed", "es", "s", "e")
"""Endings that are taken off a word, the first that fits."""
FORMS = r"e?(?:s|d|r|rs|ing|ings|ness|ion|ions|ation|ations|ly)?"
"""Endings that a word may have in a text."""
OF_NAME, OF_KEY, OF_SENTENCE, OF_TEXT = 8, 4, 2, 1
"""Weight of a word in a setting's name, in the rest of its key, in its first sentence, and in the rest."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A setting that the words describe, or a section or part. `search` finds it."""

    section: SettingSection
    setting: Setting | None
    line: str
    """The first sentence of its meaning."""


def search(text: str) -> tuple[list[Hit], bool]:
    """Return the best hits for the words of a text, and whether they have all of them. If nothing has, the hits are
    those with the most."""
    words = content_words(text)
    counted = [(*_count(words, one), one) for one in _catalogue()] if words else []
    most = max((num_found for num_found, _, _ in counted), default=0)
    best = sorted((one for one in counted if one[0] == most and most), key=lambda one: -one[1])
    return _first_of_each(one for _, _, one in best), most == len(words)


def named_with(word: str) -> list[Hit]:
    """Return settings whose name has a word, in any form."""
    has = word_pattern(word)
    return _first_of_each(one for one in _catalogue() if one.hit.setting is not None and has(one.name))


def _first_of_each(entries: Iterable[_Entry]) -> list[Hit]:
    """Return the hits, each setting that several parts share once."""
    found = {(one.name, one.hit.line): one.hit for one in reversed(list(entries))}
    return list(reversed(found.values()))[:MOST]


def content_words(text: str) -> list[str]:
    """Return the words of a text without those that say nothing."""
    words = re.findall(r"[\w@]+", text.lower().replace("_", " "))
    return list(dict.fromkeys(word for word in words if f" {word} " not in FILLERS))


@dataclass(frozen=True, slots=True)
class _Entry:
    hit: Hit
    name: str
    key: str
    sentence: str
    rest: str


def _catalogue() -> Iterator[_Entry]:
    said: dict[str, list[str]] = {}
    for theme in THEMES:
        for key, line in theme.settings.items():
            said.setdefault(key, []).append(line)
    for section in (*settings.run_file_sections(), *settings.parts()):
        name = section.part or section.key.removesuffix(".NAME").rpartition(".")[2]
        yield _entry(section, None, name, section.key, section.about, said.get(section.key, ()))
        for setting in section.settings:
            key = f"{section.part}.{setting.key}" if section.part else setting.key
            yield _entry(section, setting, setting.name, key, setting.meaning, said.get(setting.key, ()))


def _entry(
    section: SettingSection, setting: Setting | None, name: str, key: str, meaning: str, said: Sequence[str]
) -> _Entry:
    sentence = meaning.partition(". ")[0].rstrip(".")
    rest = meaning[len(sentence) :]
    hit = Hit(section, setting, sentence)
    return _Entry(hit, _spaced(name), _spaced(key), " ".join((sentence, *said)), rest)


def _spaced(key: str) -> str:
    return re.sub(r"[._:]", " ", key)


def _count(words: Sequence[str], entry: _Entry) -> tuple[int, int]:
    """Return how many of the words an entry has, and what they count."""
    places = ((entry.name, OF_NAME), (entry.key, OF_KEY), (entry.sentence, OF_SENTENCE), (entry.rest, OF_TEXT))
    counts = [next((count for text, count in places if has(text)), 0) for has in map(word_pattern, words)]
    return sum(map(bool, counts)), sum(counts)


def word_pattern(word: str) -> Callable[[str], object]:
    """Return a function that says whether a text has the word, in any form."""
    stem = word
    ending = next((one for one in ENDINGS if word.endswith(one) and not word.endswith(("ss", "eed"))), "")
    if ending and len(word) - len(ending) >= 3:
        stem = word.removesuffix(ending)
        if len(stem) > 3 and stem[-1] == stem[-2] and ending not in ("s", "e"):
            stem = stem[:-1]  # stopping, logged
    forms = f"{re.escape(stem[-1])}?{FORMS}" if len(stem) > 2 else ""
    return re.compile(rf"\b{re.escape(stem)}{forms}\b", re.IGNORECASE).search
