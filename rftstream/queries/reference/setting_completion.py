"""Completes settings in a shell: sections, then their keys, then values.

Only the data for the typed text is read, since a shell waits for the answer at every Tab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import TasksetSpec
from rftstream.config.toml_files import glance
from rftstream.queries.reference import settings
from rftstream.queries.reference.setting_types import toml
from rftstream.queries.reference.settings import LISTED, NAMED, OPTIONS, Setting, SettingSection
from rftstream.queries.reference.themes import THEMES

Offer = tuple[str, str]
"""A proposed text, and its meaning."""

DEFAULT_FILE = "rftstream.toml"


def complete_set(typed: str, files: Sequence[Path] = ()) -> list[Offer]:
    """Return the proposals after `--set`: `trainer.`, then `trainer.lr=`, then its values. Names of tasksets,
    evaluations and stages come from the run files, or from ./rftstream.toml."""
    key, equals, value = typed.partition("=")
    if equals:
        return [(f"{key}={one}", about) for one, about in _values(key) if one.startswith(value)]
    offers = dict(_places(typed, files))
    above = typed.rpartition(".")[0]
    if above in offers:
        found = [(f"{above}.{setting.name}=", setting.meaning) for setting in offers[above].settings]
        found += [(f"{place}.", section.about) for place, section in offers.items() if place.startswith(f"{above}.")]
    else:
        depth = typed.count(".") + 1
        found = [(_cut(place, depth) + ".", section.about) for place, section in offers.items()]
        found = list({text: (text, about) for text, about in reversed(found)}.values())[::-1]
    return [(text, about) for text, about in found if text.startswith(typed)]


def complete_explained(typed: str) -> list[Offer]:
    """Return the sections, kinds of parts, parts and settings that begin with the typed text."""
    kinds = [(settings.plural_of(kind), f"all {settings.plural_of(kind)}") for kind in registry.KINDS]
    sections = [(section.key, section.about) for section in settings.run_file_sections()]
    found = [*sections, *(kind for kind in kinds if kind[0] not in dict(sections))]
    found += [(theme.name, theme.about) for theme in THEMES]
    above = typed.rpartition(".")[0]
    if above:
        found += [
            (setting.key, setting.meaning)
            for section in settings.run_file_sections()
            if section.key == above
            for setting in section.settings
        ]
        found += list(_of_parts(above))
    return [(text, about) for text, about in found if text.startswith(typed)]


def _of_parts(above: str) -> Iterator[Offer]:
    """Yield the parts of a kind, or the settings of a part, named by the words before the last dot."""
    plural, _, name = above.partition(".")
    for kind in registry.KINDS:
        if settings.plural_of(kind) == plural and not name:
            yield from ((f"{plural}.{one}", settings.part(kind, one).about) for one in registry.table(kind))
        elif settings.plural_of(kind) == plural and name in registry.table(kind):
            yield from ((f"{above}.{setting.name}", setting.meaning) for setting in settings.part(kind, name).settings)


def _cut(place: str, words: int) -> str:
    return ".".join(place.split(".")[:words])


def _places(typed: str, files: Sequence[Path]) -> Iterator[tuple[str, SettingSection]]:
    """Yield each table that can hold settings, with its place in these run files. Only parts of the typed kind are
    listed with their settings."""
    given = _given(files)
    for section in settings.run_file_sections():
        first, _, rest = section.key.partition(".")
        if first in NAMED:
            yield from ((f"{first}.{_quoted(name)}", section) for name in given.get(first, ()))
        elif first in LISTED:
            yield from ((f"{first}.{number}", section) for number in range(len(given.get(first, ()))))
        elif rest or first != settings.PIPELINE:
            yield section.key, section
    for kind in registry.KINDS:
        plural = settings.plural_of(kind)
        if kind in OPTIONS:
            continue
        if typed.startswith(f"{plural}."):
            yield from ((f"{plural}.{name}", settings.part(kind, name)) for name in registry.table(kind))
        else:
            yield f"{plural}.NAME", SettingSection(key=plural, place=plural, about=f"settings of {plural}", settings=())


def _given(files: Sequence[Path]) -> dict[str, Any]:
    """Return the named and listed sections of all run files, as far as they can be read."""
    found: dict[str, Any] = {}
    for file in files or [Path(DEFAULT_FILE)]:
        for name, value in glance(file).items():
            if isinstance(value, dict) and isinstance(found.get(name), dict):
                found[name] = {**found[name], **value}
            else:
                found[name] = value
    return {name: found[name] for name in (*NAMED, *LISTED) if isinstance(found.get(name), (dict, list))}


def _values(key: str) -> Iterator[Offer]:
    """Yield the possible values of a setting if there are only a few."""
    setting = _setting(key)
    if setting is None:
        return
    kind = settings.kind_named(setting.key)
    if kind == TasksetSpec.kind:
        specs = registry.built_in(TasksetSpec)
        yield from ((name + _colon(specs[name]), settings.part(kind, name).about) for name in specs)
    elif kind is not None:
        yield from ((name, settings.part(kind, name).about) for name in registry.table(kind))
    for value in _choices(setting.type):
        yield (value if isinstance(value, str) else toml(value)), ""


def _colon(spec: TasksetSpec) -> str:
    return ":" if spec.location != "name" else ""


def _setting(key: str) -> Setting | None:
    """Return the setting of a typed key, which may contain names of a run file."""
    above, _, name = key.rpartition(".")
    words = above.split(".")
    if words[0] in NAMED:
        words = [words[0], "NAME"]
    elif words[0] in LISTED:
        words = words[:1]
    sections = [section for section in settings.run_file_sections() if section.key == ".".join(words)]
    if len(words) == 2 and not sections:
        sections = [
            settings.part(kind, words[1])
            for kind in registry.KINDS
            if settings.plural_of(kind) == words[0] and words[1] in registry.table(kind)
        ]
    return next((setting for section in sections for setting in section.settings if setting.name == name), None)


def _choices(kind: Any) -> list[Any]:
    """Return the values of a type that has only a few: true and false, or words."""
    if kind is bool:
        return [True, False]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for inner in get_args(kind) for choice in _choices(inner)]


def _quoted(name: str) -> str:
    return f'"{name}"' if "." in name or ":" in name else name
