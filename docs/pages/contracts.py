"""docs/contracts.md: the table of topics, who writes and reads them, the headers, and every message's fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import schemas
from pages.markdown import table
from rftstream.contracts import codec
from rftstream.contracts.messages import CONTRACTS_ON, MESSAGES
from rftstream.contracts.topics import TOPICS
from rftstream.queries.reference.source_text import field_docs, find_class, tree
from rftstream.roles import role_specs

GOLDEN = Path(schemas.__file__).parent / "golden"
WIDTHS = {"partitions": "P", "shares": "S", "one": "1"}
HEADERS = {
    "contract": "name of the message type",
    "contract_version": "version of the contract that the value was written by",
    "readable_since": "the oldest version of the contract whose readers may read it, where that is not its own version",
    "run": "the run's name",
    "writer_epoch": "of the claim under which it was written; 0 for roles that share work",
    "id": "the record's own id: its key, but where several records share one",
    "group_id": "`taskset/pass/index/attempt`",
    "rollout_id": "`group_id/sibling`",
    "sibling": "index in the group",
    "group_size": "siblings that were admitted",
    "sequence": "the feeder's count of groups",
    "min_version": "no token of the rollout is sampled by an older version",
    "taskset": "its name in the run file",
    "status": "how the rollout ended",
    "num_tokens": "sampled tokens",
    "role": "who gave up",
    "reason": "why there is no reward, why the group ended so, or why it is dead",
    "error": "the last line of what is said of it, at most 300 characters",
    "piece": "of a partial rollout",
    "number": "of a demonstration: dense, in the order in which they were loaded",
    "explorer": "name of the process that sampled it",
    "batch_sequence": "of the batch",
    "share": "of the batch",
    "expert": "`1` for what did not come from the policy",
    "count": "experiences that the manifest closes",
    "last": "`1` on the manifest of the run's last batch",
    "result": "what became of the group",
    "total_experts": "demonstrations in all batches so far",
    "late": "`1` for siblings that came after their group's outcome",
    "num_uses": "groups that the batch has once more",
    "use": "number of the use of a group that was in a batch before",
    "version": "of the weights",
    "trainer_epoch": "of the weights",
    "trained_groups": "by all batches up to this version",
    "resumed": "`1` for the record that a trainer starts with",
    "skipped": "`1` for a batch that gave a NaN",
}
"""Header -> its meaning. One that is not here has that of the message's field of its name."""


def topics() -> str:
    roles = role_topics()
    rows = []
    for topic in TOPICS.values():
        writers = [name for name, (_, _, out) in roles.items() if topic.name in out]
        readers = [name for name, (took, followed, _) in roles.items() if topic.name in (*took, *followed)]
        key = f"`{topic.key}`"
        if topic.name == "control":  # every service reads it, and every single role claims there
            key, writers, readers = "see below", [*writers, "claims: every single role"], ["all"]
        twin = " + ".join(topic.twin) if topic.twin else "-"
        kind = f"{WIDTHS[topic.width]}{', compacted' if topic.compacted else ''}"
        messages = ", ".join(f"[{name}](#{name})" for name in CONTRACTS_ON[topic.name])
        rows.append(
            (
                f"`{topic.name}`",
                topic.description,
                messages,
                kind,
                key,
                twin,
                ", ".join(writers) or "-",
                ", ".join(readers) or "-",
            )
        )
    return table(("topic", "holds", "messages", "partitions", "key", "unique", "written by", "read by"), rows)


def headers() -> str:
    on: dict[str, set[str]] = {codec.READABLE_SINCE: {one.contract for one in MESSAGES.values() if one.readable_since}}
    meanings = dict(HEADERS)
    for file in sorted(GOLDEN.glob("*.msgpack")):
        contract = file.name.partition(".")[0]
        message = codec.decode(file.read_bytes(), contract)
        for name, _ in codec.headers_of(message, "run"):
            on.setdefault(name, set()).add(contract)
            if name in (fields := schemas.load(contract)["properties"]):
                meanings.setdefault(name, fields[name]["description"])
    if unknown := sorted(set(on) - set(meanings)):
        raise LookupError(f"docs/pages/contracts.py: no meaning for the headers {', '.join(unknown)}; add them")
    every = {contract for contracts in on.values() for contract in contracts}
    rows = [
        (f"`{name}`", meanings[name], "all" if on[name] == every else ", ".join(sorted(on[name])) or "-")
        for name in sorted(on, key=list(meanings).index)
    ]
    return table(("header", "meaning", "on"), rows)


def messages() -> str:
    shared: dict[str, Any] = {}
    parts = []
    for contract in (name for names in CONTRACTS_ON.values() for name in names):
        schema = schemas.load(contract)
        shared |= schema.get("$defs", {})
        version = schema["x-contract-version"]
        parts.append(f"### {contract}\n\n`{contract}.v{version}`: {schema['description']}\n\n{_fields(schema)}")
    parts.append("## Parts of messages")
    titles = {spec.type.__name__ for spec in MESSAGES.values()}
    for name, schema in sorted(shared.items()):
        if name == "Binary" or name in titles:
            continue
        body = _fields(schema) if "properties" in schema else _enum(name, schema)
        parts.append(f"### {name}\n\n{schema.get('description', '')}\n\n{body}")
    return "\n\n".join(parts)


def role_topics() -> dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """Role -> topics that it consumes, follows and produces, as its declaration says."""
    return {spec.name: (spec.consumes, spec.follows, spec.produces) for spec in role_specs()}


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema["properties"].items():
        default = "required" if name in required else f"`{json.dumps(field.get('default'))}`"
        rows.append((f"`{name}`", _kind(field), default, field.get("description", "")))
    return table(("field", "type", "default", "meaning"), rows)


def _kind(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return "bin" if name == "Binary" else f"[{name}](#{name.lower()})"
    if field.get("x-msgpack") == "bin":
        return "bin or null" if "null" in json.dumps(field) else "bin"
    for form in ("anyOf", "oneOf"):
        if form in field:
            return " or ".join(_kind(one) for one in field[form])
    kind = field.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        if "prefixItems" in field:
            return f"list of {', '.join(_kind(one) for one in field['prefixItems'])}"
        return f"list of {_kind(field['items'])}" if field.get("items") else "list"
    if kind == "object":
        inner = field.get("additionalProperties")
        return f"map of {_kind(inner)}" if isinstance(inner, dict) and inner else "map"
    return str(kind)


def _enum(name: str, schema: dict[str, Any]) -> str:
    modules = {spec.type.__module__ for spec in MESSAGES.values()} | {"rftstream.contracts.arrays"}
    found = next((cls for module in sorted(modules) if (cls := find_class(tree(module).body, name))), None)
    docs = field_docs(found.body) if found else {}
    return table(("value", "meaning"), [(f"`{value}`", docs.get(value, "")) for value in schema["enum"]])
