"""The JSON Schema of a run file, made from the catalogue of settings. With it, editors complete, explain and check.

It uses draft 7, which every editor knows. Valid files are never refused. A file may extend another one, so no section
and no setting of a section is required. Parts may be the user's `module:Class`, with any settings. Texts with a few
allowed values may also be `env:NAME` where secrets are looked up. Unknown keys and values out of range are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rftstream.config.parts import registry, reward_uses
from rftstream.config.parts.part_specs import TasksetSpec
from rftstream.config.role_sections import AUTO
from rftstream.queries.reference import settings, source_text
from rftstream.queries.reference.settings import LISTED, NAMED, OPTIONS, PIPELINE, Setting, SettingSection

Schema = dict[str, Any]

FILE_NAME = "rftstream.schema.json"
OWN_PART = ":"
"""Pattern of `module:Thing`."""
FROM_ENVIRONMENT: Schema = {"type": "string", "pattern": "^env:"}
"""A value that is read from an environment variable."""
OPEN_TABLE: Schema = {"type": "object", "additionalProperties": True}
"""A table with arbitrary keys. Tombi needs the second key."""
TEXT_OR_NAMED = (
    "tasksets.NAME.environment",
    "evaluations.NAME.environment",
    "tasksets.NAME.algorithm",
    "stages.algorithm",
)
"""Settings that are a part's name, or a table with the name and the part's settings."""
REWARDS = ("tasksets.NAME.reward", "evaluations.NAME.reward")


SHARED = ("sampling", PIPELINE)
"""Tables that several sections have, which are described once."""


@functools.cache
def schema_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(run_file_schema(), indent=1, ensure_ascii=False) + "\n"


def run_file_schema() -> Schema:
    """Return the schema of a whole run file."""
    top: Schema = {}
    for section in settings.run_file_sections():
        name, *below = section.key.split(".")
        if name == PIPELINE:
            top[name] = {"description": section.about, **_ref(PIPELINE)}
        elif below and below != ["NAME"]:
            top[name]["properties"][below[0]] = _table(section)
        elif name in NAMED:
            table = _table(section)
            top[name] = {
                "type": "object",
                "description": section.about,
                "additionalProperties": {**table, "allOf": _options_by_source()},
            }
        else:
            table = _table(section, required=name in LISTED)
            top[name] = {"type": "array", "description": section.about, "items": table} if name in LISTED else table
    for kind in registry.KINDS:
        if kind not in OPTIONS:
            top[settings.plural_of(kind)] = _tables_of(kind)
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "urn:rftstream:run-file",
        "title": "Run file of rftstream",
        "description": "docs/configuration.md explains it; `rftstream explain trainer.lr` explains a setting.",
        "type": "object",
        "additionalProperties": False,
        "properties": top,
        "definitions": _definitions(),
    }
    return _with_repeated_once(schema)


def _definitions() -> Schema:
    """Return the definitions that are used in several places: tables of one part with its name, rewards, operators,
    sampling."""
    operators = [_named("operator", name, "op") for name in registry.table("operator")]
    rewards = [_named("reward", name, "name", _reward_use()) for name in registry.table("reward")]
    use = {"anyOf": [_name_of("reward"), *rewards, _own("name")]}
    named = {
        kind: {"anyOf": [_name_of(kind), *(_named(kind, name, "name") for name in registry.table(kind)), _own("name")]}
        for kind in ("environment", "algorithm")
    }
    sampling = _table(settings.section_of("sampling"))
    return {
        PIPELINE: {"type": "array", "items": {"anyOf": [*operators, _own("op")]}},
        "reward": {"anyOf": [*use["anyOf"], {"type": "array", "minItems": 1, "items": use}]},
        **named,
        "sampling": sampling,
        **{f"source.{name}": _part_table("taskset", name) for name in registry.table("taskset")},
    }


def _table(
    section: SettingSection, *, required: bool = False, shown: Callable[[Setting], Schema] | None = None
) -> Schema:
    """Return the schema of a section's table."""
    return {
        "type": "object",
        "description": section.about,
        "additionalProperties": False,
        "properties": {setting.name: (shown or _setting)(setting) for setting in section.settings},
        **({"required": [setting.name for setting in section.settings if setting.is_required]} if required else {}),
    }


def _setting(setting: Setting) -> Schema:
    """Return the schema of a setting of a section."""
    key, kind = setting.key, settings.kind_named(setting.key)
    shared = (
        kind if key in (*REWARDS, *TEXT_OR_NAMED) else next((end for end in SHARED if key.endswith(f".{end}")), None)
    )
    if shared is not None:
        return _described(setting, _ref(shared))
    is_name = kind is not None and kind != TasksetSpec.kind
    more = [AUTO] if setting.default == AUTO else []
    return _described(setting, _name_of(str(kind), *more) if is_name else _of_type(setting.type))


def _described(setting: Setting, schema: Schema) -> Schema:
    plain = not setting.is_required and setting.default is not None and setting.default not in ({}, (), [])
    default = {"default": msgspec.to_builtins(setting.default)} if plain else {}
    return {
        "description": setting.meaning,
        **{key: one for key, one in schema.items() if key != "description"},
        **default,
    }


def _ref(name: str) -> Schema:
    return {"allOf": [{"$ref": f"#/definitions/{name}"}]}


# --------------------------------------------------------------------------------------------------------- parts


def _name_of(kind: str, *more: str) -> Schema:
    """Return the schema of a part's name: a built-in one, one of `more`, or the user's own."""
    return {"anyOf": [{"type": "string", "enum": [*more, *registry.table(kind)]}, _own_name()]}


def _own_name() -> Schema:
    return {"type": "string", "pattern": OWN_PART, "description": "module:Thing of your own."}


def _tables_of(kind: str) -> Schema:
    """Return the schema of the section with each part's settings: `[algorithms.NAME]`."""
    return {
        "type": "object",
        "description": f"Settings of {settings.plural_of(kind)}, in a table for each.",
        "additionalProperties": False,
        "properties": {name: _part_table(kind, name) for name in registry.table(kind)},
        "patternProperties": {OWN_PART: {**OPEN_TABLE, "description": "Settings of one of your own."}},
    }


def _part_table(kind: str, name: str) -> Schema:
    return _table(settings.part(kind, name), shown=_part_setting)


def _part_setting(setting: Setting) -> Schema:
    schema = _of_type(setting.type)
    may_be_named = schema.get("type") == "string" and ("pattern" in schema or "enum" in schema)
    return _described(setting, {"anyOf": [schema, FROM_ENVIRONMENT]} if may_be_named or "enum" in schema else schema)


def _named(kind: str, name: str, key: str, more: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of a table with a part's name under `key`, and the part's settings beside it."""
    table = _part_table(kind, name)
    properties = {key: {"type": "string", "enum": [name]}, **(more or {}), **table["properties"]}
    return {**table, "properties": properties, "required": [key]}


def _own(key: str) -> Schema:
    """Return the schema of a table that names a user's own part. It may have any other keys."""
    return {"type": "object", "required": [key], "properties": {key: _own_name()}, "additionalProperties": True}


@functools.cache
def _reward_use() -> Schema:
    """Return the schema of a reward's use: the keys beside the reward's own settings."""
    hints = source_text.class_docs(reward_uses.RewardUse)
    types = {field.name: field for field in dataclasses.fields(reward_uses.RewardUse)}
    full = msgspec.json.schema_components([reward_uses.RewardUse])[1]["RewardUse"]["properties"]
    return {
        name: {"description": hints.get(name, ""), **full[name]} for name in types if name not in ("name", "settings")
    }


def _options_by_source() -> list[Schema]:
    """Return the options of each built-in source."""
    return [
        {
            "if": {"required": ["source"], "properties": {"source": {"type": "string", "pattern": f"^{name}(:|$)"}}},
            "then": {"properties": {"options": {"$ref": f"#/definitions/source.{name}"}}},
        }
        for name in registry.built_in(TasksetSpec)
    ]


# ------------------------------------------------------------------------------------------------------ repeated


def _with_repeated_once(schema: Schema) -> Schema:
    """Return the schema with settings that repeat in many tables, such as those of algorithms, written once."""
    counts = Counter(json.dumps(inner) for _, inner in _properties(schema))
    names: dict[str, str] = {}
    for name, inner in _properties(schema):
        text = json.dumps(inner)
        if counts[text] > 1 and text not in names and "$ref" not in text:
            taken = sum(one.partition(".")[0] == name for one in names.values())
            names[text] = f"{name}.{taken + 1}"
    repeated = {f"setting.{name}": json.loads(text) for text, name in names.items()}
    found: Schema = _referring(schema, {text: f"setting.{name}" for text, name in names.items()})
    return {**found, "definitions": {**found["definitions"], **repeated}}


def _properties(schema: Any) -> Iterator[tuple[str, Schema]]:
    """Yield every property of every table in a schema."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {}).items()
        schema = list(schema.values())
    for one in schema if isinstance(schema, list) else ():
        yield from _properties(one)


def _referring(schema: Any, names: Mapping[str, str]) -> Any:
    if isinstance(schema, list):
        return [_referring(one, names) for one in schema]
    if not isinstance(schema, dict):
        return schema
    name = names.get(json.dumps(schema))
    return {"$ref": f"#/definitions/{name}"} if name else {key: _referring(one, names) for key, one in schema.items()}


# --------------------------------------------------------------------------------------------------------- types


def _of_type(kind: Any) -> Schema:
    """Return the schema of a type, without references and without null, which TOML does not have."""
    schema = msgspec.json.schema(kind)
    parts = schema.pop("$defs", {})
    plain: Schema = _plain(schema, parts)
    return plain


def _plain(schema: Any, parts: Mapping[str, Schema]) -> Any:
    if isinstance(schema, list):
        return [_plain(one, parts) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        inner = _plain(parts[schema["$ref"].rpartition("/")[2]], parts)
        return {key: value for key, value in inner.items() if key != "title"} | {"additionalProperties": False}
    found = {key: value if key == "default" else _plain(value, parts) for key, value in schema.items()}
    if "anyOf" in found:
        found["anyOf"] = [one for one in found["anyOf"] if one != {"type": "null"}]
        if len(found["anyOf"]) == 1:
            found = {**{key: value for key, value in found.items() if key != "anyOf"}, **found["anyOf"][0]}
    if "enum" in found:
        found["enum"] = [one for one in found["enum"] if one is not None]
    if "prefixItems" in found:  # as draft 7 writes it
        found["items"] = found.pop("prefixItems")
        found["additionalItems"] = False
    if found == {"type": "object"}:
        return dict(OPEN_TABLE)
    if found.get("default", ...) is None:
        del found["default"]
    return found
