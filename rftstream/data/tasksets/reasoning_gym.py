"""reasoning-gym: 100 and more procedural tasks, each with its own scorer. `source = "reasoning_gym:chain_sum"`.

Some of its generators depend on Python's hash seed, so a problem carries its whole entry for the scorer.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rftstream.config import registry
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.generated import GeneratedTaskset
from rftstream.errors import ConfigError, importing


class ReasoningGymTaskset(GeneratedTaskset):
    """The entries of one of reasoning-gym's tasks, by their number."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`."""

        size: int = 10_000
        """Problems in one pass."""
        seed: int = 0
        config: dict[str, Any] = field(default_factory=dict)
        """The task's own settings, e.g. { min_terms = 2, max_terms = 3 } for chain_sum."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        if columns:
            raise ConfigError(f"reasoning_gym:{location}: has no columns, got {', '.join(columns)}; remove them")
        self._name = location
        self._settings = {**config.config, "seed": config.seed, "size": config.size}
        self._dataset = _create(location, self._settings)
        version = importlib.metadata.version("reasoning-gym")
        decided_by = [location, pack_value(self._settings), system, version]
        super().__init__(f"reasoning_gym:{location}", size=config.size, system=system, decided_by=decided_by)

    def make_problem(self, index: int) -> Problem:
        """Return the entry of an index as a problem."""
        entry = self._dataset[index]
        return Problem(
            messages=self.messages(entry["question"]),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            info={"dataset": self._name, "config": pack_value(self._settings), "entry": pack_value(entry)},
            data_source=f"reasoning_gym/{self._name}",
        )


def pack_value(value: Any) -> Any:
    """Return a value of reasoning-gym as plain values that survive any encoding. Tuples, and dicts with other keys than
    texts, are marked."""
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else {"!int": str(value)}
    if isinstance(value, list):
        return [pack_value(one) for one in value]
    if isinstance(value, tuple):
        return {"!tuple": [pack_value(one) for one in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return {str(key): pack_value(one) for key, one in value.items()}
        return {"!dict": [[pack_value(key), pack_value(one)] for key, one in value.items()]}
    if hasattr(value, "item"):  # a number of numpy
        return pack_value(value.item())
    raise ConfigError(f"reasoning_gym: found a {type(value).__name__}, expected plain values; take another task")


def unpack_value(value: Any) -> Any:
    """Return the value that `pack_value` was given."""
    if isinstance(value, list):
        return [unpack_value(one) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "!tuple":
            return tuple(unpack_value(one) for one in inner)
        if key == "!dict":
            return {unpack_value(name): unpack_value(one) for name, one in inner}
        if key == "!int":
            return int(inner)
    return {key: unpack_value(one) for key, one in value.items()}


def import_reasoning_gym() -> Any:
    """Import the package, which takes some seconds. ImportError if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it uses
        return importlib.import_module("reasoning_gym")


def _create(name: str, settings: dict[str, Any]) -> Any:
    with importing(f"reasoning_gym:{name}", "reasoning-gym", install="reasoning-gym"):
        reasoning_gym = import_reasoning_gym()
    datasets = reasoning_gym.factory.DATASETS
    if name not in datasets:
        raise ConfigError(f"reasoning_gym:{name}: unknown task; {registry.suggest(name, list(datasets))}")
    known = {item.name: None for item in dataclasses.fields(datasets[name][1])}
    for key in settings:
        if key not in known:
            raise ConfigError(f"reasoning_gym:{name}: config.{key}: unknown key; {registry.suggest(key, known)}")
    try:
        return reasoning_gym.create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning_gym:{name}: config refused: {type(error).__name__}: {error}") from None
