"""A message is declared in one place and listed in two. Whoever forgets one is told which, and where it belongs.

The steps stand in docs/extending.md ("A topic with a message").
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import schemas
from rftstream import contracts
from rftstream.contracts.checks import types_of
from rftstream.contracts.message_spec import SPEC_OF, MessageSpec
from rftstream.contracts.messages import CONTRACTS_ON, MESSAGES
from rftstream.contracts.rules import RULES
from rftstream.contracts.topics import TOPICS
from tests.contracts.samples import GOLDEN, SAMPLES

BESIDE = {"assistant", "beside", "limits", "message_spec", "records", "rules", "topics"}
"""Modules whose classes are no messages, but what messages are made with or made of."""

MODULES: list[ModuleType] = [
    importlib.import_module(f"rftstream.contracts.{module.name}") for module in pkgutil.iter_modules(contracts.__path__)
]


def place(module: ModuleType) -> str:
    return module.__name__.replace(".", "/") + ".py"


def declarations() -> Iterator[tuple[ModuleType, str, MessageSpec]]:
    """Every declaration with the module and the name of its class."""
    for cls, spec in SPEC_OF.items():
        yield importlib.import_module(cls.__module__), cls.__name__, spec


def test_every_class_is_a_message_or_part_of_one() -> None:
    used = set(types_of([spec.type for _, _, spec in declarations()]))
    loose = [
        f"{place(module)}: {name} is neither a message nor part of one; write @message(...) above it"
        for module in MODULES
        if module.__name__.rpartition(".")[2] not in BESIDE
        for name, cls in vars(module).items()
        if dataclasses.is_dataclass(cls) and getattr(cls, "__module__", "") == module.__name__ and isinstance(cls, type)
        if cls not in used
    ]
    assert not loose, "\n".join(loose)


def test_every_declaration_is_in_the_table() -> None:
    missing = [
        f"rftstream/contracts/messages.py: MESSAGES lacks {name}; add {place(module)} to its modules"
        for module, name, spec in declarations()
        if MESSAGES.get(spec.contract) is not spec
    ]
    assert not missing, "\n".join(missing)


def test_every_message_has_its_topic() -> None:
    missing = [
        f"rftstream/contracts/topics.py: no topic {spec.topic!r}, which {name} in {place(module)} names; add a Topic"
        for module, name, spec in declarations()
        if spec.topic not in TOPICS
    ]
    assert not missing, "\n".join(missing)


def test_every_topic_has_a_message() -> None:
    empty = [
        f"rftstream/contracts/topics.py: no message names the topic {topic!r}; name it in a @message, or remove it"
        for topic, names in CONTRACTS_ON.items()
        if not names
    ]
    assert not empty, "\n".join(empty)
    assert all(name == topic.name for name, topic in TOPICS.items())


def test_every_version_has_a_sample() -> None:
    stems = {name.partition("-")[0] for name in SAMPLES}
    missing = [
        f"schemas/golden: no {spec.contract}.v{version}.json; write a message of it, then python -m "
        "tests.contracts.samples"
        for spec in MESSAGES.values()
        for version in range(1, spec.version + 1)
        if f"{spec.contract}.v{version}" not in stems
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("suffix", [".msgpack", ".record.json"])
def test_every_sample_has_its_golden_files(suffix: str) -> None:
    missing = [name for name in SAMPLES if not (GOLDEN / f"{name}{suffix}").exists()]
    assert len(SAMPLES) >= 82, "schemas/golden: a golden file stands for what is on somebody's log; put it back"
    assert not missing, f"schemas/golden: no {suffix} of {', '.join(missing)}; run python -m tests.contracts.samples"


def test_every_integer_says_its_range() -> None:
    """Also inside of lists and maps: the schema shows it, whoever checks it."""
    without = [
        f"{place_of(contract)}: {where} has no range; write NonNegativeInt or PositiveInt instead of int"
        for contract in schemas.contracts()
        for where in without_range(schemas.load(contract))
    ]
    assert not without, "\n".join(without)


def place_of(contract: str) -> str:
    return next(place(module) for module, _, spec in declarations() if spec.contract == contract)


def without_range(document: dict[str, Any]) -> Iterator[str]:
    for name, part in {document["title"]: document, **document.get("$defs", {})}.items():
        for field, schema in part.get("properties", {}).items():
            queue: list[Any] = [schema]
            while queue:
                inner = queue.pop()
                if isinstance(inner, dict):
                    if "integer" in inner.get("type", ()) and "minimum" not in inner:
                        yield f"{name}.{field}"
                    queue.extend(inner.values())
                elif isinstance(inner, list):
                    queue.extend(inner)


def test_every_rule_is_of_a_message_or_a_part() -> None:
    used = types_of([spec.type for _, _, spec in declarations()])
    unused = [cls.__name__ for cls in RULES if cls not in used]
    assert not unused, f"rules of classes that no message has: {', '.join(unused)}; declare or remove them"
