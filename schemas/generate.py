"""Writes `schemas/<contract>.json` from the text of the messages in `rftstream/contracts`, or tells whether they agree.

    python schemas/generate.py [--check]

It reads types, defaults and the line under each field; what JSON Schema can say beyond them stands in REFINEMENTS.
It parses the file and does not import it: nothing in `schemas` needs rftstream.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONTRACTS = HERE.parent / "rftstream" / "contracts"
STAGES = (
    "arrays",
    "tasks",
    "rollouts",
    "verdicts",
    "demonstrations",
    "feedback",
    "batches",
    "outcomes",
    "versions",
    "control",
    "dead",
    "messages",
)
"""Modules of rftstream/contracts that declare messages, and the one with their table."""
VERSIONS: dict[str, int] = {
    "batch_manifest": 2,
    "demonstration": 2,
    "group_outcome": 2,
    "partial_rollout": 2,
    "run_manifest": 2,
    "step_record": 2,
    "tasks_ended": 2,
    "weights_announced": 3,
}
"""Contract -> its version, where that is not 1; as in `rftstream/contracts/codec.py`."""

Schema = dict[str, Any]

_DIGEST = {"pattern": "^sha256:[0-9a-f]{64}$"}
_NAME = {"pattern": "^[a-z0-9_-]+$"}

REFINEMENTS: dict[str, dict[str, Schema]] = {
    "Array": {
        "dtype": {
            "enum": ["int8", "uint8", "bool", "int32", "int64", "float16", "bfloat16", "float32", "float64"],
        },
        "shape": {"maxItems": 4},
        "data": {
            "oneOf": [{"$ref": "#/$defs/Binary"}, {"type": "array", "items": {"type": "number"}}],
            "x-msgpack": "bin",
            "x-json": "In the readable twins a flat list of the elements; bfloat16 as its uint16 bit patterns.",
        },
    },
    "RolloutIds": {"group_size": {"minimum": 1}, "taskset": _NAME},
    "GroupOutcome": {
        "": {
            "if": {"properties": {"result": {"const": "batched"}}},
            "then": {"required": ["batch_sequence"], "properties": {"batch_sequence": {"type": "integer"}}},
            "else": {"properties": {"batch_sequence": {"type": "null"}}},
        }
    },
    "VersionSpan": {"count": {"minimum": 1}},
    "Task": {"seed": {"exclusiveMaximum": 2**63}},
    "Rollout": {
        "": {
            "if": {"properties": {"status": {"const": "undecodable"}}},
            "then": {"properties": {"problem": {"type": "null"}}},
            "else": {"properties": {"problem": {"type": "object"}}},
        }
    },
    "VerifiedRollout": {
        "": {
            "if": {"properties": {"verdict": {"type": "null"}}},
            "then": {"required": ["reason"], "properties": {"reason": {"type": "string"}}},
            "else": {"properties": {"reason": {"type": "null"}}},
            "allOf": [
                {
                    "if": {"required": ["reason"], "properties": {"reason": {"const": "undecodable"}}},
                    "then": {"properties": {"rollout": {"type": "null"}}},
                    "else": {"properties": {"rollout": {"type": "object"}}},
                }
            ],
        }
    },
    "Demonstration": {
        "": {
            "oneOf": [
                {"required": ["messages"], "properties": {"messages": {"minItems": 1}, "preference": {"type": "null"}}},
                {
                    "required": ["preference"],
                    "properties": {"messages": {"maxItems": 0}, "preference": {"type": "object"}},
                },
            ]
        }
    },
    "Experience": {"pair": {"enum": ["chosen", "rejected", None]}},
    "BatchManifest": {"digest": _DIGEST},
    "WeightsAnnounced": {
        "": {
            "if": {"properties": {"kind": {"const": "delta"}}},
            "then": {"properties": {"parent": {"type": "object"}, "delta": {"type": "null"}}},
            "else": {"properties": {"parent": {"type": "null"}}},
        }
    },
    "StepRecord": {
        "": {
            "if": {"required": ["resumed"], "properties": {"resumed": {"const": True}}},
            "then": {"properties": {"batch_sequence": {"type": "null"}}},
            "else": {"properties": {"batch_sequence": {"type": "integer"}}},
        }
    },
}
"""Type -> field ("" for the type itself) -> what its schema says beyond the type.

More in `rftstream/contracts/rules.py`."""

BINARY: Schema = {
    "description": "Bytes. On the wire msgpack bin; in the readable twins an object with their base64.",
    "type": "object",
    "properties": {"$base64": {"type": "string", "contentEncoding": "base64"}},
    "required": ["$base64"],
    "additionalProperties": False,
    "x-msgpack": "bin",
}


class Declarations:
    """The classes of messages, as text."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(re.sub(r"^from __future__ [^\n]*$", "", text, flags=re.MULTILINE))
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.contracts = next(
            {
                ast.literal_eval(ast.unparse(key)): ast.unparse(value)
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if key is not None
            }
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MESSAGES"
            if isinstance(node.value, ast.Dict)
        )

    def schema(self, contract: str) -> Schema:
        """The whole document of one contract."""
        defs: dict[str, Schema] = {}
        body = self._object(self.contracts[contract], defs)
        version = VERSIONS.get(contract, 1)
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"urn:rftstream:contract:{contract}:v{version}",
            "title": self.contracts[contract],
            "x-contract": contract,
            "x-contract-version": version,
            **body,
            **({"$defs": dict(sorted(defs.items()))} if defs else {}),
        }

    def _object(self, name: str, defs: dict[str, Schema]) -> Schema:
        node = self.classes[name]
        refinements = REFINEMENTS.get(name, {})
        properties: dict[str, Schema] = {}
        required: list[str] = []
        for field, description in _described(node, ast.AnnAssign):
            key = ast.unparse(field.target)
            properties[key] = {"description": description, **self._type(field.annotation, defs)}
            if field.value is None:
                required.append(key)
            else:
                properties[key]["default"] = _default(field.value)
            _refine(properties[key], refinements.get(key, {}))
        schema: Schema = {
            "description": _flat(ast.get_docstring(node)),
            "type": "object",
            "properties": properties,
            "required": required,
        }
        return {**schema, **refinements.get("", {})}

    def _enum(self, name: str) -> Schema:
        members = {ast.literal_eval(field.value): text for field, text in _described(self.classes[name], ast.Assign)}
        description = _flat(ast.get_docstring(self.classes[name]))
        return {"description": description, "type": "string", "enum": list(members), "x-enum-descriptions": members}

    def _type(self, node: ast.expr, defs: dict[str, Schema]) -> Schema:
        if isinstance(node, ast.BinOp):  # X | None
            inner = self._type(node.left, defs)
            if "type" in inner:
                return {**inner, "type": [inner["type"], "null"]}
            return {"anyOf": [inner, {"type": "null"}]}
        if isinstance(node, ast.Subscript):
            return self._container(ast.unparse(node.value), node.slice, defs)
        name = ast.unparse(node)
        if name in _SIMPLE:
            return dict(_SIMPLE[name])
        if name == "bytes":
            defs["Binary"] = BINARY
            return {"$ref": "#/$defs/Binary"}
        if name not in defs:
            is_enum = any(ast.unparse(base) == "StrEnum" for base in self.classes[name].bases)
            defs[name] = {}  # its place, while it is made
            defs[name] = self._enum(name) if is_enum else self._object(name, defs)
        return {"$ref": f"#/$defs/{name}"}

    def _container(self, kind: str, inside: ast.expr, defs: dict[str, Schema]) -> Schema:
        assert isinstance(inside, ast.Tuple), f"{kind} needs two arguments"
        first, second = inside.elts
        if kind == "dict":
            value = self._type(second, defs)
            return {"type": "object", **({"additionalProperties": value} if value else {})}
        if ast.unparse(second) == "...":
            return {"type": "array", "items": self._type(first, defs)}
        items = [self._type(element, defs) for element in inside.elts]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


_SIMPLE: dict[str, Schema] = {
    "str": {"type": "string"},
    "int": {"type": "integer", "minimum": 0},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "Any": {},
}


def _refine(schema: Schema, refinement: Schema) -> None:
    if "oneOf" in refinement:
        schema.pop("$ref", None)
    schema.update(refinement)


def _described(node: ast.ClassDef, kind: type) -> list[tuple[Any, str]]:
    """The fields of a class, each with the line under it."""
    found = []
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, kind):
            if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                raise SystemExit(f"rftstream/contracts:{field.lineno}: {node.name} has a field without a line under it")
            found.append((field, _flat(below.value.value)))
    return found


def _default(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):  # field(default_factory=dict)
        return {}
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, tuple) else value


def _flat(text: Any) -> str:
    return " ".join(str(text or "").split())


def documents() -> dict[Path, str]:
    """Path -> text of each schema, as the messages are declared now."""
    source = Declarations("\n".join((CONTRACTS / f"{stage}.py").read_text(encoding="utf-8") for stage in STAGES))
    return {
        HERE / f"{contract}.json": json.dumps(source.schema(contract), indent=2, ensure_ascii=False) + "\n"
        for contract in source.contracts
    }


def main(arguments: list[str]) -> int:
    wanted = documents()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    surplus = [path for path in HERE.glob("*.json") if path not in wanted]
    if "--check" in arguments:
        for path in [*stale, *surplus]:
            print(
                f"schemas/{path.name}: not what rftstream/contracts says; run python schemas/generate.py, "
                "and read the diff"
            )
        return 1 if stale or surplus else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(f"wrote schemas/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
