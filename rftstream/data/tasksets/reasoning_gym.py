"""reasoning-gym: 100 and more procedural tasks, each with its own scorer. `source = "reasoning_gym:chain_sum"`.

Some of its generators depend on Python's hash seed, so a problem carries its whole entry for the scorer.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rftstream.config.parts import registry
from rftstream.contracts.tasks import Problem
from rftstream.data.gym_entries import import_reasoning_gym, pack_value
from rftstream.data.tasksets.generated import GeneratedTaskset
from rftstream.errors import ConfigError, importing


class ReasoningGymTaskset(GeneratedTaskset):
    """The entries of one reasoning-gym task, by their number."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`."""

        size: int = 10_000
        """Number of problems in one pass."""
        seed: int = 0
        """Seed of the problems."""
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
        """Return the entry with this index as a problem."""
        entry = self._dataset[index]
        return Problem(
            messages=self.messages(entry["question"]),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            info={"dataset": self._name, "config": pack_value(self._settings), "entry": pack_value(entry)},
            data_source=f"reasoning_gym/{self._name}",
        )


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
