"""docs/extending.md: the kinds of parts, where their tables and protocols are, and what parts declare."""

from __future__ import annotations

import dataclasses
import importlib

from pages.markdown import table
from rftstream.config.parts import part_specs, registry
from rftstream.config.parts.part_specs import PartSpec
from rftstream.config.parts.registry import KINDS
from rftstream.queries.reference.setting_types import toml
from rftstream.queries.reference.settings import NAMING
from rftstream.queries.reference.source_text import field_docs, find_class, tree


def kinds() -> str:
    rows = []
    for kind, where in KINDS.items():
        module, _, name = where.partition(":")
        folder = module.replace(".", "/")
        names = ", ".join(f"`{one}`" for one in getattr(importlib.import_module(module), name))
        rows.append(
            (
                kind,
                f"`{NAMING[kind]}`",
                names,
                f"[`{folder}/base.py`](../{folder}/base.py)",
                f"`{name}` in [`{folder}/__init__.py`](../{folder}/__init__.py)",
            )
        )
    return table(("kind", "named by", "built in", "what it must be", "one line in"), rows)


def capabilities() -> str:
    """What a record of each kind says beside the part's place, and which built-in parts differ from the default."""
    rows = []
    for kind in KINDS:
        records = registry.table(kind)
        spec_type = type(next(iter(records.values())))
        found = find_class(tree(part_specs.__name__).body, spec_type.__name__)
        docs = field_docs(found.body) if found is not None else {}
        common = {field.name for field in dataclasses.fields(PartSpec)}
        for field in dataclasses.fields(spec_type):
            if field.name not in common:
                rows.append(
                    (
                        kind,
                        f"`{field.name}`",
                        f"`{toml(_default(field))}`",
                        docs[field.name],
                        _differing(records, field),
                    )
                )
    return table(("kind", "capability", "default", "meaning", "built-in parts that differ"), rows)


def _differing(records: dict[str, PartSpec], field: dataclasses.Field[object]) -> str:
    """The names, with their values where these are not just the other one of two."""
    values = {name: getattr(record, field.name) for name, record in records.items()}
    return ", ".join(
        f"`{name}`" if isinstance(value, bool) else f"`{name}`: `{toml(value)}`"
        for name, value in values.items()
        if value != _default(field)
    )


def _default(field: dataclasses.Field[object]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
