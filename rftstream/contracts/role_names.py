"""The names of the roles, as they stand on the log: in claims, dead letters and as consumer groups."""

from __future__ import annotations

from enum import StrEnum


class RoleName(StrEnum):
    """The roles. Each is declared in `rftstream/roles/<role>/__init__.py`."""

    feeder = "feeder"
    explorer = "explorer"
    verifier = "verifier"
    buffer = "buffer"
    trainer = "trainer"
    evaluator = "evaluator"
    synthesiser = "synthesiser"
