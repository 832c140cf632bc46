"""schema = dataclass = golden, for every contract."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import msgpack  # type: ignore[import-untyped]  # it has no stubs

import schemas
from rftstream.contracts.checks import parts_of
from rftstream.contracts.codec import decode, encode
from rftstream.contracts.messages import MESSAGES
from tests.contracts.samples import GOLDEN, SAMPLES, contract_of, is_newest, readable, twin_text
from tests.suite.each import each

Schema = dict[str, Any]


def test_every_contract_has_a_schema_and_a_golden_sample_of_each_version() -> None:
    assert schemas.contracts() == tuple(sorted(MESSAGES))
    for contract, spec in MESSAGES.items():
        versions = {name.partition("-")[0] for name in schemas.golden(contract)}
        assert versions == {f"v{version}" for version in range(1, spec.version + 1)}


def test_golden_folder_holds_nothing_else() -> None:
    names = {path.name for path in GOLDEN.iterdir()}
    stems = [f"{contract}.{name}" for contract in MESSAGES for name in schemas.golden(contract)]
    assert names == {f"{stem}{suffix}" for stem in stems for suffix in (".msgpack", ".json", ".record.json")}


@each("contract", MESSAGES)
def test_schema_says_the_fields_types_and_defaults_of_the_dataclass(contract: str) -> None:
    schema, spec = schemas.load(contract), MESSAGES[contract]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["title"] == spec.type.__name__
    assert schema["x-contract-version"] == spec.version
    assert schema["description"]
    parts = parts_of([spec.type])
    enums = {name for name, part in schema.get("$defs", {}).items() if "enum" in part}
    assert set(schema.get("$defs", {})) - {"Binary"} - enums == {part.__name__ for part in parts[1:]}
    for part in parts:
        _compare(part, schema if part is spec.type else schema["$defs"][part.__name__], schema)


def _compare(cls: type, schema: Schema, document: Schema) -> None:
    fields = dataclasses.fields(cls)
    hints = get_type_hints(cls)
    assert list(schema["properties"]) == [field.name for field in fields]
    assert schema["required"] == [field.name for field in fields if not _has_default(field)]
    assert "additionalProperties" not in schema, "fields that a reader does not know are skipped"
    for field in fields:
        where = f"{cls.__name__}.{field.name}"
        found = schema["properties"][field.name]
        assert found["description"], f"{where} has no description"
        assert ("default" in found) == _has_default(field), where
        if _has_default(field):
            assert found["default"] == readable(_default(field)), where
        if where != "Array.data":
            _compare_type(hints[field.name], found, document, where)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _compare_type(kind: Any, schema: Schema, document: Schema, where: str) -> None:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        assert NoneType in arguments, where
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        if "anyOf" in schema:
            assert schema["anyOf"][1] == {"type": "null"}, where
            return _compare_type(inner, schema["anyOf"][0], document, where)
        assert schema["type"][1] == "null", where
        return _compare_type(inner, {**schema, "type": schema["type"][0]}, document, where)
    if origin is dict:
        assert schema["type"] == "object" and arguments[0] is str, where
        return _compare_type(arguments[1], schema.get("additionalProperties", {}), document, where)
    if origin is tuple:
        assert schema["type"] == "array", where
        if arguments[-1] is ...:
            return _compare_type(arguments[0], schema["items"], document, where)
        assert schema["items"] is False, where
        for argument, item in zip(arguments, schema["prefixItems"], strict=True):
            _compare_type(argument, item, document, where)
        return None
    if kind is Any:
        assert schema == {}, where
    elif kind is bytes:
        assert schema["$ref"] == "#/$defs/Binary", where
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        assert schema["$ref"] == f"#/$defs/{kind.__name__}", where
    elif issubclass(kind, Enum):
        assert document["$defs"][schema["$ref"].rpartition("/")[2]]["enum"] == [member.value for member in kind], where
    else:
        names = {str: "string", int: "integer", float: "number", bool: "boolean"}
        assert schema["type"] == names[kind], where
    return None


@each("name", SAMPLES)
def test_golden_decodes_and_the_newest_encodes_to_the_same_bytes(name: str) -> None:
    value = (GOLDEN / f"{name}.msgpack").read_bytes()
    message = decode(value, contract_of(name))
    assert message == SAMPLES[name]
    if is_newest(name):
        assert encode(message) == value


@each("name", SAMPLES)
def test_readable_twin_is_the_golden_message_and_valid(name: str) -> None:
    text = (GOLDEN / f"{name}.json").read_text(encoding="utf-8")
    if is_newest(name):
        assert text == twin_text(SAMPLES[name])
    jsonschema.Draft202012Validator(schemas.load(contract_of(name))).validate(json.loads(text))


@each("name", SAMPLES)
def test_wire_form_of_the_golden_message_is_valid(name: str) -> None:
    """Also without our decoder: bytes become the marker that the schema calls Binary, and nothing else is done."""
    fields = msgpack.unpackb((GOLDEN / f"{name}.msgpack").read_bytes())
    jsonschema.Draft202012Validator(schemas.load(contract_of(name))).validate(readable(fields))


def test_every_optional_field_differs_from_its_default_in_some_golden_message() -> None:
    unused = {
        (part, field.name): _default(field)
        for part in parts_of([spec.type for spec in MESSAGES.values()])
        for field in dataclasses.fields(part)
        if _has_default(field)
    }
    queue: list[Any] = list(SAMPLES.values())
    while queue:
        part = queue.pop()
        if isinstance(part, dict | tuple):
            queue.extend(part.values() if isinstance(part, dict) else part)
        elif dataclasses.is_dataclass(part):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                queue.append(value)
                if (type(part), field.name) in unused and value != unused[type(part), field.name]:
                    del unused[type(part), field.name]
    assert not unused
