"""One realistic message of each contract, and more where it has forms that exclude each other: those of schemas/golden.

    python -m tests.contracts.samples     writes the golden files that do not exist yet

A sample is written by hand as its readable twin, `<contract>.v<N>.json` or `<contract>.v<N>-<form>.json` there. A
golden file that exists is never written again: it stands for what is on somebody's log. Who changes a contract copies
the twin of the newest version under the name of the next, sets the new field there *and raises the version*, or leaves
the twins as they are. A new header needs no version, as readers pass over headers that they do not know: it gets a
sample of its own, a form of the newest version (`partial_rollout.v6-given`).
"""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

from rftstream.contracts.arrays import Array
from rftstream.contracts.codec import encode, headers_of, key_of
from rftstream.contracts.messages import MESSAGES, Message
from rftstream.contracts.rollouts import Rollout

COMMON_HEADERS = ("contract", "contract_version", "run", "writer_epoch")
GOLDEN = Path(__file__).parents[2] / "schemas" / "golden"
NUMPY_DTYPES = {"bool": "uint8", "bfloat16": "uint16"}
"""dtype of an Array -> that of its elements in the readable twin, if it is another."""


def contract_of(name: str) -> str:
    return name.partition(".")[0]


def is_newest(name: str) -> bool:
    return name.partition("-")[0] == f"{contract_of(name)}.v{MESSAGES[contract_of(name)].version}"


def plain(value: Any) -> Any:
    """The value of a readable twin with bytes in the place of their texts and of the elements of arrays."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$base64"}:
        return base64.b64decode(value["$base64"])
    if value.keys() == {"dtype", "shape", "data"}:
        dtype = NUMPY_DTYPES.get(value["dtype"], value["dtype"])
        return {**value, "data": Array.of(value["data"], dtype).data}
    return {name: plain(item) for name, item in value.items()}


def message_of(name: str) -> Message:
    """The message whose readable twin is the golden file of this name."""
    twin = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    message: Message = msgspec.convert(plain(twin), MESSAGES[contract_of(name)].type)
    return message


NAMES = sorted(path.stem for path in GOLDEN.glob("*.json") if not path.stem.endswith(".record"))
SAMPLES = {name: message_of(name) for name in NAMES}
"""`<contract>.v<N>` or `<contract>.v<N>-<form>`, the stem of the golden files -> the message in them."""
ROLLOUT = SAMPLES["rollout.v1"]
assert isinstance(ROLLOUT, Rollout)
IDS, SAMPLING = ROLLOUT.ids, ROLLOUT.sampling


def readable(value: object) -> Any:
    """The JSON twin of a message: arrays as flat lists, bytes as {"$base64": ...}."""
    if isinstance(value, Array):
        dtype = "uint8" if value.dtype == "bool" else value.dtype
        elements = Array(dtype=dtype, shape=value.shape, data=value.data).numpy().ravel().tolist()
        return {"dtype": value.dtype, "shape": list(value.shape), "data": elements}
    if dataclasses.is_dataclass(value):
        return {field.name: readable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: readable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [readable(item) for item in value]
    if isinstance(value, bytes):
        return {"$base64": base64.b64encode(value).decode("ascii")}
    return value


def twin_text(message: Message) -> str:
    return json.dumps(readable(message), indent=2, ensure_ascii=False) + "\n"


def record_text(message: Message) -> str:
    """Key and headers of a message's record, without the headers that all have and that do not depend on it."""
    headers = {name: value.decode("ascii") for name, value in headers_of(message, "a-run", 4)}
    for name in COMMON_HEADERS:
        del headers[name]
    headers.pop("readable_since", None)  # it tells of the newest version, not of the message
    return json.dumps({"key": key_of(message).decode("utf-8"), "headers": headers}, indent=2) + "\n"


def write_missing() -> None:
    """Write the other golden files of the twins that have none yet, and those twins as all are written."""
    for name, message in SAMPLES.items():
        is_new = not (GOLDEN / f"{name}.msgpack").exists()
        for suffix, content in (
            (".msgpack", encode(message)),
            (".json", twin_text(message).encode()),
            (".record.json", record_text(message).encode()),
        ):
            path = GOLDEN / f"{name}{suffix}"
            if is_new or not path.exists():
                path.write_bytes(content)
                print(f"wrote {path.name}")


if __name__ == "__main__":
    write_missing()
