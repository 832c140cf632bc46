"""Tasksets: ordered, addressable problems. Index i is the same problem in every process and after every restart."""

from __future__ import annotations

from typing import Protocol

from rftstream.contracts.tasks import Problem


class Taskset(Protocol):
    """Built by `tasksets.open_taskset(spec, folder)`."""

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of what the problems are; a resumed run refuses another one."""

    def __len__(self) -> int:
        """Problems in one pass. Generators have a configured size."""

    def problem(self, index: int) -> Problem:
        """ConfigError naming file and line if the problem is not there."""
