"""The text of `schemas/<contract>.json`, from the messages in `rftstream/contracts`. docs/generate.py writes the files.

The schemas are those that msgspec makes of the classes, with ranges and defaults. To these it adds the lines under the
fields, what the rules of the classes say in JSON Schema, and the form of bytes in the readable twins. This module is
the only one in `schemas` that imports rftstream.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from rftstream.contracts.checks import types_of
from rftstream.contracts.message_spec import MessageSpec
from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.rules import RULES

Schema = dict[str, Any]

HERE = Path(__file__).resolve().parent

BINARY: Schema = {
    "description": "Bytes. On the wire msgpack bin; in the readable twins an object with their base64.",
    "type": "object",
    "properties": {"$base64": {"type": "string", "contentEncoding": "base64"}},
    "required": ["$base64"],
    "additionalProperties": False,
    "x-msgpack": "bin",
}


def schema_of(spec: MessageSpec) -> Schema:
    """Return the whole document of one contract."""
    _, parts = msgspec.json.schema_components([spec.type], ref_template="#/$defs/{name}")
    defs = {cls.__name__: _described(cls, parts[cls.__name__]) for cls in types_of([spec.type])}
    if '"#/$defs/Binary"' in json.dumps(defs):
        defs["Binary"] = BINARY
    body = defs.pop(spec.type.__name__)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:rftstream:contract:{spec.contract}:v{spec.version}",
        "title": spec.type.__name__,
        "x-contract": spec.contract,
        "x-contract-version": spec.version,
        **body,
        **({"$defs": dict(sorted(defs.items()))} if defs else {}),
    }


def _described(cls: Any, schema: Schema) -> Schema:
    """Return the schema of a class with what msgspec does not know of it: the words, and its rule."""
    lines = _lines_under_fields(cls)
    description = _flat(cls.__doc__ or "")
    if issubclass(cls, Enum):
        members = {member.value: lines[member.name] for member in cls}
        return {"description": description, "type": "string", "enum": list(members), "x-enum-descriptions": members}
    properties = {}
    for field in dataclasses.fields(cls):
        found = properties[field.name] = {
            "description": lines[field.name],
            **_readable(schema["properties"][field.name]),
        }
        if field.default_factory is not dataclasses.MISSING:  # which msgspec leaves out
            found["default"] = field.default_factory()
    return {
        "description": description,
        "type": "object",
        "properties": properties,
        "required": schema.get("required", []),
        **(RULES[cls].json_schema if cls in RULES else {}),
    }


def _readable(schema: Any) -> Any:
    """Return a schema in the forms of the contracts: `type: [X, null]`, and bytes as Binary."""
    if isinstance(schema, list):
        return [_readable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: value if name == "default" else _readable(value) for name, value in schema.items()}
    if "type" in schema:
        schema = {"type": schema["type"], **schema}
    if schema.get("contentEncoding") == "base64":
        rest = {name: value for name, value in schema.items() if name not in ("type", "contentEncoding")}
        return rest if "oneOf" in rest else {"$ref": "#/$defs/Binary", **rest}
    match schema.get("anyOf"):
        case [{"type": kind} as inner, {"type": "null"}]:
            rest = {name: value for name, value in schema.items() if name != "anyOf"}
            return {**inner, "type": [kind, "null"], **rest}
    return schema


def _lines_under_fields(cls: type) -> dict[str, str]:
    """Return the line under each field of a class, or under each member of an enumeration."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, below in itertools.pairwise([*node.body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign | ast.Assign):
            name = ast.unparse(field.target if isinstance(field, ast.AnnAssign) else field.targets[0])
            if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                raise SystemExit(f"{inspect.getsourcefile(cls)}: {cls.__name__}.{name} has no line under it")
            found[name] = _flat(str(below.value.value))
    return found


def _flat(text: str) -> str:
    return " ".join(text.split())


def documents() -> dict[Path, str]:
    """Path -> text of each schema, as the messages are declared now."""
    return {
        HERE / f"{contract}.json": json.dumps(schema_of(spec), indent=2, ensure_ascii=False) + "\n"
        for contract, spec in MESSAGES.items()
    }
