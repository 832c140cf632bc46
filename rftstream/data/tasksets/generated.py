"""A base of tasksets that make their problems from settings and read no files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.data.tasksets.columns import with_system
from rftstream.errors import ConfigError


class GeneratedTaskset:
    """A `Taskset` of `size` problems. A subclass passes its settings to `__init__`, and implements `make_problem`."""

    def __init__(self, where: str, *, size: int, system: str | None, decided_by: Sequence[object]) -> None:
        """`where`: names the taskset in errors. `decided_by`: all settings that affect the problems, as plain values;
        the digest is made from them."""
        self._where = where
        self._size = size
        self._system = system
        text = json.dumps(decided_by, sort_keys=True)
        self.digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        """Digest of the settings, which decide all problems."""

    def __len__(self) -> int:
        return self._size

    def problem(self, index: int) -> Problem:
        """Return the problem with this index. ConfigError if the index is not below the size."""
        if not 0 <= index < self._size:
            raise ConfigError(f"{self._where}: index {index}, expected below size = {self._size}")
        return self.make_problem(index)

    def make_problem(self, index: int) -> Problem:
        """Return the problem with this index, which is below the size. `problem` calls it."""
        raise NotImplementedError

    def messages(self, prompt: str) -> tuple[ChatMessage, ...]:
        """Return the prompt as a chat, with the system prompt in front if there is one."""
        return with_system((ChatMessage(role="user", content=prompt),), self._system, self._where)
