"""Explains a setting, a section or a part. The catalogue of all settings is searched by the key that a user types."""

from __future__ import annotations

import difflib
import itertools
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rftstream.config import aliases
from rftstream.config.loader import split_key
from rftstream.config.parts import registry
from rftstream.errors import ConfigError
from rftstream.queries.formatting import columns
from rftstream.queries.reference import search, settings
from rftstream.queries.reference.setting_types import toml
from rftstream.queries.reference.settings import Setting, SettingSection
from rftstream.queries.reference.themes import THEMES, Theme, theme_named, themes_in

KINDS = {word: kind for kind in registry.KINDS for word in (kind, settings.plural_of(kind))}
KINDS[settings.PIPELINE] = "operator"
"""First word of a key -> the kind of parts that the key may name."""

MOST_PROPOSED = 6
MOST_LISTED = 10
"""Settings of a list that are shown as text, unless all are asked for, or hardly more are there."""
MENTION, MENTION_SOME, NAMED, RANKED = (
    "settings that mention {}:",
    "nothing mentions all of {}; docs/operations.md explains metrics; settings that mention a part of it:",
    "settings whose names have the word:",
    "settings that matter for it, the likeliest first:",
)


@dataclass(frozen=True, slots=True)
class Explained:
    """The section or setting that a key names. `explain` finds it."""

    section: SettingSection
    setting: Setting | None = None
    """The setting. None: the whole section."""
    theme: Theme | None = None
    """The theme that the word stands for; then the setting is one of several."""
    line: str = ""
    """The reason to look at the setting, if it is one of several."""
    found_by: str = ""
    """Heading of those that were found by words and not by a name."""


def explain(key: str) -> list[Explained]:
    """Return the meanings of a key: a setting (`trainer.lr`), a section (`trainer`), a part (`algorithms.grpo`,
    `grpo`), a kind of parts (`algorithms`), a setting of another tool (`learning_rate`), a theme (`OOM`), or words of
    settings' names and meanings. If there are none, ConfigError, which proposes similar names."""
    text = key.strip().strip("[]").partition("=")[0].strip()
    words = split_key(text)
    if not words:
        raise ConfigError(f"explain: got {key!r}, expected a setting, a section or a part, e.g. trainer.lr")
    themed = list(_of_theme(text))
    found = list(_in_run_file(words)) or list(_in_parts(words))
    if not found and len(words) == 1:
        found = list(_by_one_word(words[0]))
    elif not found and words[0] not in (section.key for section in settings.run_file_sections()):
        found = [one for here in aliases.meant(text) for one in explain(here)]
    if not themed and not found and len(words) == 1:
        content = search.content_words(text)
        if content and len(content) < len(text.split()):
            return explain(" ".join(content))
        groups = [list(_of_theme(theme.name)) for theme in themes_in(text)]
        hits, are_whole = search.search(text)
        if are_whole or not groups:
            groups.append(_listed(hits, (MENTION if are_whole else MENTION_SOME).format(text)))
        found = groups[0] if len(groups) == 1 else _ranked(groups)
    if not themed and not found:
        raise ConfigError(
            f"{text}: no such setting, section or part, and metrics are in docs/operations.md; {_proposal(words)}"
        )
    return [*themed, *found]


def _of_theme(word: str) -> Iterator[Explained]:
    """Yield the settings of the theme that a word stands for."""
    if (theme := theme_named(word)) is not None:
        for key, line in theme.settings.items():
            yield from (Explained(one.section, one.setting, theme, line) for one in _exactly(key))


def _ranked(groups: Sequence[Sequence[Explained]]) -> list[Explained]:
    """Return the findings of several groups as one list: what most groups name comes first, then what comes first in
    its group. The line is that of the first group that names it."""
    counts = Counter(key_of(one) for group in groups for one in group)
    places: dict[str, int] = {}
    first: dict[str, Explained] = {}
    for group in groups:
        for place, one in enumerate(group):
            key = key_of(one)
            places[key] = min(place, places.get(key, place))
            first.setdefault(key, one)
    keys = sorted(first, key=lambda key: (-counts[key], places[key]))
    return [replace(first[key], theme=None, found_by=RANKED) for key in keys]


def _exactly(key: str) -> list[Explained]:
    words = split_key(key)
    return list(_in_run_file(words)) or list(_in_parts(words))


def _listed(hits: Sequence[search.Hit], heading: str) -> list[Explained]:
    return [Explained(hit.section, hit.setting, line=hit.line, found_by=heading) for hit in hits]


def _in_run_file(words: Sequence[str]) -> Iterator[Explained]:
    """Yield the setting or section with this key in a run file."""
    words = _without_numbers(words)
    for section in settings.run_file_sections():
        own = section.key.split(".")
        if own[-1] == "NAME" and len(words) == 1:
            own = own[:-1]  # `tasksets` alone
        if len(words) < len(own) or any(mine not in ("NAME", word) for mine, word in zip(own, words, strict=False)):
            continue
        match words[len(own) :]:
            case []:
                yield Explained(section)
            case [name, *rest]:
                found = _setting_in(section, [name, *rest])
                yield from [found] if found else _elsewhere_meant(name, rest)


def _elsewhere_meant(name: str, rest: Sequence[str]) -> Iterator[Explained]:
    """Yield settings in a table whose settings are declared elsewhere: a taskset's own sampling and options."""
    if len(rest) != 1:
        return
    if name in [section.key for section in settings.run_file_sections()]:
        yield from _in_run_file([name, *rest])
    for section in settings.parts():
        if section.kind and section.key.endswith(f".{name}"):
            yield from [found] if (found := _setting_in(section, rest)) else []


def _in_parts(words: Sequence[str]) -> Iterator[Explained]:
    """Yield the meanings of a key that names parts: a kind, a part, or a part's setting."""
    kind = KINDS.get(words[0])
    words = _without_numbers(words)
    if kind is None:
        if len(words) > 1:  # `grpo.clip_low`
            yield from (found for one in _by_part(words[0]) if (found := _setting_in(one, words[1:])))
        return
    if len(words) == 1:
        yield from (Explained(settings.part(kind, name)) for name in registry.table(kind))
    elif (section := _part(kind, words[1])) is not None:
        if len(words) == 2:
            yield Explained(section)
        elif found := _setting_in(section, words[2:]):
            yield found


def _part(kind: str, name: str) -> SettingSection | None:
    try:
        return settings.part(kind, name) if name in registry.table(kind) or ":" in name else None
    except LookupError as error:
        raise ConfigError(f"{name}: {error}; is it installed, or in this folder?") from None


def _setting_in(section: SettingSection, words: Sequence[str]) -> Explained | None:
    """Return the setting that the words lead to, through settings that are tables."""
    setting = next((setting for setting in section.settings if setting.name == words[0]), None)
    if setting is None or len(words) == 1:
        return Explained(section, setting) if setting else None
    inner = settings.table_in(setting)
    return _setting_in(inner, words[1:]) if inner is not None else None


def _by_one_word(word: str) -> Iterator[Explained]:
    """Yield the parts of this name; else the settings that other tools call so; and, but for these, the only setting of
    this name. For a part or a setting, also yield the settings whose names have the word."""
    keys = _keys_named(word)
    if parts := _by_part(word):
        yield from map(Explained, parts)
        yield from (found for key in keys if len(keys) == 1 for found in _exactly(key))
    elif meant := aliases.meant(word):
        yield from (found for key in meant for found in explain(key))
        return
    elif len(keys) == 1:
        yield from explain(keys[0])
    else:
        return
    others = [
        hit for hit in search.named_with(word) if hit.setting and settings.key_of(hit.section, hit.setting) not in keys
    ]
    yield from _listed([hit for hit in others if hit.section not in parts], NAMED)


def _by_part(name: str) -> list[SettingSection]:
    return [settings.part(kind, name) for kind in registry.KINDS if name in registry.table(kind)]


def _keys_named(name: str) -> list[str]:
    """Return the keys of sections that end in this name; if there are none, those of parts."""
    keys = [key for key in settings.all_keys() if key.rpartition(".")[2] == name]
    tops = {section.key for section in settings.run_file_sections()}
    return [key for key in keys if key.rpartition(".")[0] in tops] or keys


def _without_numbers(words: Sequence[str]) -> list[str]:
    """Return the words without indexes of lists: `stages.0.lr` means `stages.lr`."""
    return [word for number, word in enumerate(words) if not (number and word.isdigit())]


def _proposal(words: Sequence[str]) -> str:
    """Return the keys that may be meant: by the name in other tools, by the same name elsewhere, by a similar
    spelling."""
    last = words[-1].lower().replace("-", "_")
    near = list(aliases.SETTINGS.get(last, ())) or _near_beside(words) or _keys_named(last)
    if not near:
        known = [*settings.all_keys(), *(section.key for section in settings.run_file_sections())]
        known += [f"{settings.plural_of(kind)}.{name}" for kind in registry.KINDS for name in registry.table(kind)]
        near = difflib.get_close_matches(".".join(words), known, n=2, cutoff=0.8) or _near_last(words, known)
    if not near:
        return "`rftstream explain` without a name lists all sections and themes"
    return f"did you mean {' or '.join(near[:MOST_PROPOSED])}?"


def _near_beside(words: Sequence[str]) -> list[str]:
    """Return the key with the most similar spelling in the section that the other words name."""
    above = [*_in_run_file(words[:-1]), *_in_parts(words[:-1])] if len(words) > 1 else []
    sections = [found.section for found in above if not found.setting]
    names = {one.name: settings.key_of(section, one) for section in sections for one in section.settings}
    return [names[name] for name in difflib.get_close_matches(words[-1], list(names), n=1)]


def _near_last(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the keys whose last word is spelt like the last of these. The section may be missing or wrong."""
    by_last: dict[str, list[str]] = {}
    for key in known:
        by_last.setdefault(key.rpartition(".")[2], []).append(key)
    near = difflib.get_close_matches(words[-1], list(by_last), n=2, cutoff=0.75)
    return [key for last in near for key in by_last[last]]


# -------------------------------------------------------------------------------------------------------- as text


def to_json(found: Sequence[Explained]) -> list[dict[str, Any]]:
    """Return the findings for JSON: settings, or sections with their settings."""
    return [
        _setting_json(one.setting, one.section) | ({"why": one.line} if one.line else {})
        if one.setting
        else {
            "section": one.section.key,
            "place": one.section.place,
            "kind": one.section.kind or None,
            "part": one.section.part or None,
            "meaning": one.section.about,
            "settings": [_setting_json(setting, one.section) for setting in one.section.settings],
            **({"why": one.line} if one.line else {}),
        }
        for one in found
    ]


def _setting_json(setting: Setting, section: SettingSection) -> dict[str, Any]:
    return {
        "key": setting.key,
        "place": section.place,
        "part": section.part or None,
        "values": setting.values,
        "required": setting.is_required,
        "default": None if setting.is_required else setting.default,
        "meaning": setting.meaning,
        "built_in": _built_in(setting),
        "elsewhere": _names_elsewhere(setting.key),
    }


def to_text(found: Sequence[Explained], width: int = 100, most: int | None = MOST_LISTED) -> str:
    """Return the findings as text. Several parts are shown by their summaries; a single part with its settings. The
    settings of a theme have a line each, at most `most` of them."""
    if any(one.line for one in found):
        groups = itertools.groupby(found, lambda one: (one.theme, one.found_by, bool(one.line)))
        return "\n\n".join(
            _listed_text(theme, heading, list(some), most) if is_listed else to_text(list(some), width)
            for (theme, heading, is_listed), some in groups
        )
    if len(found) > 1 and not any(one.setting for one in found):
        rows = [(_title(one.section), one.section.about) for one in found]
        return "\n".join(columns(rows, left=2))
    texts = [
        _setting_text(one.setting, one.section, width) if one.setting else _section_text(one.section, width)
        for one in found
    ]
    return "\n\n".join(texts)


def _listed_text(theme: Theme | None, heading: str, found: Sequence[Explained], most: int | None) -> str:
    rows = []
    for one in found[: most if most and len(found) > most + 2 else None]:
        default = one.setting.default_text if one.setting else ""
        rows.append((key_of(one), default, one.line))
    title = f"{theme.name}: {theme.about}" if theme else heading
    more = f"`rftstream explain {rows[0][0]}` says more about a setting"
    if left := len(found) - len(rows):
        more += f"; --all lists {left} more"
    return "\n".join([title, "", *columns(rows, left=3, indent="  "), "", more])


def sections_to_text() -> str:
    """Return the sections of a run file, the kinds of parts and the themes, for people."""
    rows = [(section.place, _first_sentence(section.about)) for section in settings.run_file_sections()]
    parts = [(settings.plural_of(kind), ", ".join(registry.table(kind))) for kind in registry.KINDS]
    sections, kinds = ("\n".join(columns(some, left=2, indent="  ")) for some in (rows, parts))
    themes = ", ".join(theme.name for theme in THEMES)
    more = "`rftstream explain trainer`, `trainer.lr`, `algorithms.grpo`, `memory` say more"
    return f"sections of a run file:\n\n{sections}\n\nparts:\n\n{kinds}\n\nthemes:\n\n  {themes}\n\n{more}"


def sections_to_json() -> list[dict[str, Any]]:
    """Return the sections of a run file for JSON, without their settings."""
    return [
        {"section": section.key, "place": section.place, "meaning": section.about}
        for section in settings.run_file_sections()
    ]


def key_of(found: Explained) -> str:
    """Return the key by which `explain` finds a setting, a section or a part."""
    section, setting = found.section, found.setting
    if section.kind == "operator":
        return settings.key_of(section, setting) if setting else f"{settings.PIPELINE}.{section.part}"
    if setting is None and section.part and not section.key.endswith(f".{section.part}"):
        return section.part  # its settings are in the table of whatever names it
    return setting.key if setting else section.key


def _title(section: SettingSection) -> str:
    return f"{section.kind} {section.part}" if section.kind else section.place


def _section_text(section: SettingSection, width: int) -> str:
    lines = [_title(section), *(["", *_wrapped(section.about, "  ", width)] if section.about else [])]
    if not section.settings:
        return "\n".join([*lines, "", "  It has no settings."])
    lines += ["", f"  settings, in {section.place}:"] if section.kind else []
    for setting in section.settings:
        default = setting.default_text if setting.is_required else f"default {setting.default_text}"
        lines += ["", f"  {setting.name}  ({setting.values}; {default})", *_wrapped(setting.meaning, "    ", width)]
    return "\n".join(lines)


def _setting_text(setting: Setting, section: SettingSection, width: int) -> str:
    value = "..." if setting.is_required or setting.default in (None, "") else toml(setting.default)
    bare = setting.default if isinstance(setting.default, str) and setting.default else value
    assignment = shlex.quote(f"{setting.key}={bare}")
    rows = [("values", setting.values), ("default", setting.default_text)]
    if built_in := _built_in(setting):
        rows.append(("built in", ", ".join(built_in)))
    rows.append(("in a file", f"{section.place} {setting.name} = {value}"))
    if section.place.startswith("[[") or section.kind == "operator":
        pass  # of a list: its item depends on the file
    elif "NAME" in setting.key or ":" in setting.key:
        rows.append(("else", f"--set {assignment}"))
    else:
        variable = "RFTSTREAM__" + setting.key.upper().replace(".", "__")
        rows.append(("else", f"--set {assignment}, or the variable {variable}"))
    if elsewhere := _names_elsewhere(setting.key):
        rows.append(("elsewhere", ", ".join(elsewhere)))
    if (inner := settings.table_in(setting)) is not None:
        rows.append(("its keys", ", ".join(one.name for one in inner.settings)))
    title = f"{setting.key}  (of the {section.kind} {section.part})" if section.kind else setting.key
    shown = [
        line
        for name, text in rows
        for line in textwrap.wrap(
            text, width, initial_indent=f"  {name:9}  ", subsequent_indent=" " * 13, break_on_hyphens=False
        )
    ]
    return "\n".join([title, "", *_wrapped(setting.meaning, "  ", width), "", *shown])


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def _built_in(setting: Setting) -> list[str]:
    """Return the built-in parts that the setting may name; none if the setting names no part."""
    kind = settings.kind_named(setting.key)
    return [] if kind is None else list(registry.table(kind))


def _names_elsewhere(key: str) -> list[str]:
    return [name for name, meant in aliases.SETTINGS.items() if key in meant]
