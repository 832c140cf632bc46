"""Games for the environment `text_game`: each problem is a house with a key and a door."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.ids import derive_seed
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.errors import ConfigError

RULES = (
    "You are in a house. Find the key, take it, and open the door. Answer with one command and nothing else: "
    "go north, go east, go south, go west, take, open."
)


class TextGameTaskset:
    """Houses by their number: the same house for the same number, number of rooms and seed."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`."""

        rooms: Annotated[int, Meta(ge=3, le=36)] = 4
        """Rooms of each house."""
        size: Annotated[int, Meta(ge=1)] = 1000
        """Houses in one pass."""
        seed: Annotated[int, Meta(ge=0)] = 0
        """Another seed makes other houses."""
        rules: str | None = None
        """What stands before the first room; default: the rules of the game."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        if location or columns:
            raise ConfigError('text_game: takes neither a location nor columns; write source = "text_game"')
        self._config, self._system = config, system

    @property
    def digest(self) -> str:
        """Return the digest of the settings, which decide all problems."""
        text = json.dumps(["text_game", 1, asdict(self._config), self._system], sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def __len__(self) -> int:
        return self._config.size

    def problem(self, index: int) -> Problem:
        """Return the house of an index. ConfigError if the index is not below the size."""
        if not 0 <= index < self._config.size:
            raise ConfigError(f"text_game: index {index}, expected below size = {self._config.size}")
        system = () if self._system is None else (ChatMessage(role="system", content=self._system),)
        return Problem(
            messages=(*system, ChatMessage(role="user", content=self._config.rules)),
            info={"seed": derive_seed(self._config.seed, "text_game", index), "rooms": self._config.rooms},
            data_source="text_game",
        )
