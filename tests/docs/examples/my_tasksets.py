"""Words to be spelled backwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.errors import ConfigError


class Backwards:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        size: Annotated[int, Meta(ge=1)] = 1000
        """Problems in one pass."""
        length: Annotated[int, Meta(ge=1)] = 3
        """Letters of a word."""
        letters: str = "abc"

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        if columns:
            raise ConfigError(f"columns: got {', '.join(columns)}, expected none; these words come from nowhere")
        self._config = config
        self._system = () if system is None else (ChatMessage(role="system", content=system),)

    @property
    def digest(self) -> str:
        """Of all that the problems follow from; the 1 goes up when this code makes others of the same settings."""
        text = json.dumps([1, asdict(self._config), [one.content for one in self._system]])
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def __len__(self) -> int:
        return self._config.size

    def problem(self, index: int) -> Problem:
        """The same in every process and after every restart, so nothing but the index may decide."""
        if not 0 <= index < len(self):
            raise ConfigError(f"problem {index}: expected below size = {len(self)}")
        word = "".join(Random(index).choices(self._config.letters, k=self._config.length))
        return Problem(messages=(*self._system, ChatMessage(role="user", content=word)), answer=word[::-1])
