"""The catalogue of all settings of a run file, each with its type, range, default and meaning.

docs/configuration.md, `rftstream explain`, the JSON Schema for editors and the completion of `--set` are made from it.
It is read from the classes: sections from the classes of `rftstream.config`, settings of parts from the source of their
`Config`, so that no part is imported. Sections are built on demand, since a shell waits at every Tab.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from rftstream.config import sections
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import PartSpec
from rftstream.config.role_sections import SynthesisServer
from rftstream.config.sampling_ranges import SAMPLING_RANGES
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.tasks import Sampling
from rftstream.queries.reference import source_text
from rftstream.queries.reference.setting_types import in_words, toml
from rftstream.queries.reference.source_text import SourceField

NAMING = {
    "transport": "transport.kind",
    "policy": "explorer.policy",
    "backend": "trainer.backend",
    "algorithm": "trainer.algorithm",
    "reward": "tasksets.NAME.reward",
    "environment": "tasksets.NAME.environment",
    "taskset": "tasksets.NAME.source",
    "operator": "pipeline.op",
}
"""Kind -> the setting that names a part of this kind."""

KINDS_NAMED = {naming: kind for kind, naming in NAMING.items()} | {
    "evaluator.policy": "policy",
    "tasksets.NAME.algorithm": "algorithm",
    "stages.algorithm": "algorithm",
}
"""Setting -> kind of the part that it names. Evaluations are treated like tasksets: see `kind_named`."""
OPTIONS = {
    "taskset": "tasksets.NAME.options",
    "transport": "transport.options",
    "operator": "[pipeline]], [[tasksets.NAME.pipeline]",
}
"""Kind -> the table of its parts' settings, if it is not [<kind>s.<name>]."""

NAMED = ("tasksets", "evaluations")
"""Sections that a run file may have several times, each with a name."""
LISTED = ("stages",)
"""Sections that are lists in a run file."""
SUBTABLES: dict[str, dict[str, type]] = {
    "model": {"make": sections.MakeModel, "lora": sections.LoraSection},
    RoleName.synthesiser: {"server": SynthesisServer},
}
"""Section -> keys that are tables with keys of their own."""
SHARED = "rftstream.algorithms.settings"
"""Module with the settings that several algorithms share."""
PIPELINE = "pipeline"
"""The only section whose tables have just a part's name and settings."""


class Required:
    """Stands for the default of a required setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of a run file. It belongs to one section."""

    key: str
    """`trainer.lr`, `tasksets.NAME.source`, `algorithms.grpo.clip_low`."""
    type: Any
    """Its type, with its range."""
    values: str
    """Possible values, in words."""
    default: Any
    """Default. None: the setting is unset. `Required`: it has to be given."""
    meaning: str
    module: str
    """The module that declares it."""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def is_required(self) -> bool:
        """Whether the setting is required."""
        return self.default is Required

    @property
    def default_text(self) -> str:
        """The default in the form of a run file; `unset` or `required` if there is none."""
        return "required" if self.is_required else toml(self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSection:
    """A group of settings: a section of the run file, or the settings of one part."""

    key: str
    """Prefix of the keys of its settings: `trainer`, `tasksets.NAME`, `algorithms.grpo`."""
    place: str
    """Place in a run file: `[trainer]`, `[[stages]]`, `[tasksets.NAME.options]`."""
    about: str
    """Purpose of the section; empty for [sampling]."""
    settings: tuple[Setting, ...]
    kind: str = ""
    """The kind of the part that the settings belong to; empty for a section of the run file."""
    part: str = ""
    """The name of the part."""


def kind_named(key: str) -> str | None:
    """Return the kind of the part that a setting names, or None for other settings."""
    return KINDS_NAMED.get(key.replace("evaluations.", "tasksets."))


def plural_of(kind: str) -> str:
    """Return the plural of a kind."""
    return "policies" if kind == "policy" else f"{kind}s"


def part_table(kind: str, name: str) -> str:
    """Return the keys of the table with a part's settings: `algorithms.grpo`, `tasksets.NAME.options`, `pipeline`."""
    return OPTIONS.get(kind, f"{plural_of(kind)}.{name}").partition("]")[0].removeprefix("[")


# ------------------------------------------------------------------------------------------------------ sections


@functools.cache
def run_file_sections() -> tuple[SettingSection, ...]:
    """Return the sections of a run file in its order, each followed by its tables. Settings of parts are left out."""
    return tuple(_sections())


def section_of(key: str) -> SettingSection:
    """Return the section of the run file whose settings begin with `key`. KeyError if there is none."""
    return next(section for section in run_file_sections() if section.key == key)


def _sections() -> Iterator[SettingSection]:
    hints = typing.get_type_hints(sections.RunConfig)
    meanings = source_text.class_docs(sections.RunConfig)
    for item in dataclasses.fields(sections.RunConfig):
        found = [one for one in _types_in(hints[item.name]) if dataclasses.is_dataclass(one)]
        if found:
            key = f"{item.name}.NAME" if item.name in NAMED else item.name
            place = f"[[{key}]]" if item.name in LISTED else f"[{key}]"
            yield _section(key, place, found[0], own_tables=SUBTABLES.get(item.name, {}))
            for name, table in SUBTABLES.get(item.name, {}).items():
                yield _section(f"{key}.{name}", f"[{key}.{name}]", table)
        elif item.name == PIPELINE:
            meaning, key = "A built-in operator, or `module:Class` of one's own.", f"{PIPELINE}.op"
            op = Setting(key=key, type=str, values="text", default=Required, module=sections.__name__, meaning=meaning)
            yield SettingSection(key=PIPELINE, place=f"[[{PIPELINE}]]", about=meanings[PIPELINE], settings=(op,))


def _types_in(hint: Any) -> list[type]:
    """Return the classes inside a type: of `dict[str, A]`, `tuple[A, ...]` and `A | None`."""
    inner = [one for argument in typing.get_args(hint) for one in _types_in(argument)]
    return [*inner, hint] if isinstance(hint, type) else inner


def _section(key: str, place: str, cls: type, own_tables: dict[str, type] | None = None) -> SettingSection:
    found = source_text.find_class(source_text.tree(cls.__module__).body, cls.__name__)
    about = ast.get_docstring(found) if found is not None and cls is not Sampling else None
    hints = _sampling_types() if cls is Sampling else typing.get_type_hints(cls, include_extras=True)
    meanings = source_text.class_docs(cls)
    settings = tuple(
        Setting(
            key=f"{key}.{item.name}",
            type=hints[item.name],
            values=(_sampling_range(item.name) if cls is Sampling else None) or in_words(hints[item.name]),
            default=_default_of(item),
            meaning=_meaning(f"{key}.{item.name}", meanings.get(item.name)),
            module=cls.__module__,
        )
        for item in dataclasses.fields(cls)
        if item.name not in (own_tables or {})
    )
    return SettingSection(key=key, place=place, about=" ".join((about or "").split()), settings=settings)


def _sampling_types() -> dict[str, Any]:
    """Return the types of sampling settings, with the run file's bounds, which are narrower than the contract's."""
    plain = typing.get_type_hints(Sampling)
    bounds = {name: Annotated[plain[name], meta] for name, (meta, _) in SAMPLING_RANGES.items()}
    return typing.get_type_hints(Sampling, include_extras=True) | bounds


def _sampling_range(name: str) -> str | None:
    if name not in SAMPLING_RANGES:
        return None
    kind = "integer" if isinstance(getattr(Sampling(), name), int) else "number"
    return f"{kind} {SAMPLING_RANGES[name][1].removesuffix(' (0 is off)')}"


def _default_of(item: dataclasses.Field[Any]) -> Any:
    if item.default is not dataclasses.MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else Required


def _meaning(key: str, text: str | None) -> str:
    if not text:
        raise LookupError(f"{key}: has no line under it in the code; write one that says what it means")
    return text


# --------------------------------------------------------------------------------------------------------- parts


def parts() -> Iterator[SettingSection]:
    """Yield the settings of every built-in part, by kind, in the order of the tables."""
    for kind in registry.KINDS:
        for name in registry.table(kind):
            yield part(kind, name)


@functools.cache
def part(kind: str, name: str) -> SettingSection:
    """Return the settings of a part: a built-in one, or `module:Class`. LookupError if its module cannot be found."""
    spec: PartSpec | None = registry.table(kind).get(name)
    path = spec.path if spec is not None else name
    key, place = part_table(kind, name), f"[{OPTIONS.get(kind, f'{plural_of(kind)}.{_quoted(name)}')}]"
    return SettingSection(
        key=key,
        place=place,
        about=source_text.first_paragraph(source_text.part_doc(path)),
        settings=tuple(part_setting(key, name, field) for field in source_text.config_fields(path)),
        kind=kind,
        part=name,
    )


def part_setting(key: str, owner: str, field: SourceField) -> Setting:
    """Return a setting of a part from its source. `owner` is named in the error for a field without a docstring."""
    kind = source_text.evaluate(field.annotation, field.module)
    default: Any = Required
    if field.default is not None:
        is_factory = ast.unparse(field.default).startswith("field(")
        default = {} if is_factory else source_text.evaluate(field.default, field.module)
    return Setting(
        key=f"{key}.{field.name}",
        type=kind,
        values=in_words(kind),
        default=default,
        meaning=_meaning(f"{owner}.{field.name}", field.meaning),
        module=field.module,
    )


def table_in(setting: Setting) -> SettingSection | None:
    """Return the keys of a setting that is a table with its own keys, or a list of such tables; else None."""
    found = [one for one in _types_in(setting.type) if dataclasses.is_dataclass(one)]
    return _section(setting.key, f"[{setting.key}]", found[0]) if found else None


def _quoted(name: str) -> str:
    return f'"{name}"' if ":" in name or "." in name else name


def all_keys() -> list[str]:
    """Return the keys of all settings, those of sections first, by which `explain` finds them."""
    every = [*run_file_sections(), *parts()]
    return list(dict.fromkeys(key_of(section, setting) for section in every for setting in section.settings))


def key_of(section: SettingSection, setting: Setting) -> str:
    """Return the key by which `explain` finds a setting: an operator's is below the operator's name."""
    return f"{PIPELINE}.{section.part}.{setting.name}" if section.kind == "operator" else setting.key
