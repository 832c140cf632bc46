"""docs/configuration.md: every section and key of a run file, and the settings of every part."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable

from pages.markdown import table
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import OperatorSpec
from rftstream.queries.reference import settings, source_text
from rftstream.queries.reference.settings import Setting, SettingSection

HEAD = ("key", "value", "default", "meaning")


def sections() -> str:
    return "\n\n".join(map(_section, settings.run_file_sections()))


def operators() -> str:
    """The built-in operators, with their sides and what they are for."""
    rows = [
        (spec.side, f"[`{name}`](configuration.md#operator-{name})", settings.part("operator", name).about)
        for name, spec in sorted(registry.table("operator").items(), key=lambda one: (one[1].side != "task", one[0]))
        if isinstance(spec, OperatorSpec)
    ]
    return table(("side", "operator", "what it does"), rows)


def part_settings() -> str:
    parts = [(section.kind, _part(section)) for section in settings.parts()]
    first = next(number for number, (kind, _) in enumerate(parts) if kind == "algorithm")
    texts = [text for _, text in parts]
    return "\n\n".join([*texts[:first], _shared(), *texts[first:]])


def keys() -> set[str]:
    """Every `section.key`, for the docs that name one."""
    names = {setting.key for section in settings.run_file_sections() for setting in section.settings}
    return names | {section.key for section in settings.run_file_sections()}


def _section(section: SettingSection) -> str:
    about = f"{section.about}\n\n" if section.about else ""
    if section.key == settings.PIPELINE:
        about = f"{section.about} [Data pipelines](data-pipelines.md) says what they do.\n\n"
    return f"### {section.place}\n\n{about}{_table(section.settings)}"


def _table(rows: Iterable[Setting]) -> str:
    return table(HEAD, [(f"`{one.name}`", one.values, _default(one), one.meaning) for one in rows])


def _default(setting: Setting) -> str:
    plain = setting.is_required or setting.default is None
    return setting.default_text if plain else f"`{setting.default_text}`"


def _shared() -> str:
    """Of algorithms; a class inherits from those before it, and shows only what it adds."""
    texts = []
    for node in source_text.tree(settings.SHARED).body:
        if isinstance(node, ast.ClassDef):
            fields = source_text.class_fields(settings.SHARED, node)
            rows = [settings.part_setting("algorithms.NAME", node.name, field) for field in fields]
            texts.append(f"{ast.get_docstring(node)}\n\n{_table(rows)}")
    return "### settings that algorithms share\n\n" + "\n\n".join(texts)


def _inherits(where: str) -> list[str]:
    """Whose settings an algorithm shares, in words."""
    module, _, thing = where.partition(":")
    bases = _mirrored(module, f"{thing}.Config").__mro__
    return [(cls.__doc__ or "").partition(":")[0].rstrip(".").removeprefix("Settings ")
            for cls in reversed(bases) if cls.__module__ == settings.SHARED]  # fmt: skip


@functools.cache
def _mirrored(module: str, name: str) -> type:
    """Return an empty class with the bases and the docstring of a class of the source. An import of the algorithms
    themselves would take seconds, since they import PyTorch."""
    found = source_text.find_class_in(module, name)
    if found is None:
        return object
    place, node = found
    bases = dict.fromkeys(_mirrored(place, ast.unparse(base)) for base in node.bases)
    return type(node.name, tuple(bases) or (object,), {"__module__": place, "__doc__": ast.get_docstring(node)})


def _part(section: SettingSection) -> str:
    head = f"### {section.kind} `{section.part}`\n\n{section.about}"
    rows = section.settings
    if section.kind == "algorithm":
        path = registry.table(section.kind)[section.part].path
        rows = tuple(one for one in rows if one.module == path.partition(":")[0])
        text = f"{head}\n\nIn `{section.place}`: the settings {', '.join(_inherits(path))}"
        return f"{text}; and\n\n{_table(rows)}" if rows else f"{text}."
    place = settings.PIPELINE if section.kind == "operator" else section.key
    place = f"[[{place}]]" if section.kind == "operator" else f"[{place}]"
    return f"{head}\n\nIn `{place}`:\n\n{_table(rows)}" if rows else f"{head} No settings."
