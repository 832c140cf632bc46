"""Games for the environment `text_game`: each problem is a house with a key and a door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.ids import derive_seed
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.generated import GeneratedTaskset
from rftstream.errors import ConfigError

RULES = (
    "You are in a house. Find the key, take it, and open the door. Answer with one command and nothing else: "
    "go north, go east, go south, go west, take, open."
)


class TextGameTaskset(GeneratedTaskset):
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
        self._config = config
        super().__init__(
            "text_game", size=config.size, system=system, decided_by=["text_game", 1, asdict(config), system]
        )

    def make_problem(self, index: int) -> Problem:
        """Return the house of an index."""
        return Problem(
            messages=self.messages(RULES if self._config.rules is None else self._config.rules),
            info={"seed": derive_seed(self._config.seed, "text_game", index), "rooms": self._config.rooms},
            data_source="text_game",
        )
