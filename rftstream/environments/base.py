"""Environments: the other side of a conversation. The explorer's turn loop asks, samples, tells, until it is done.

An environment object belongs to one rollout. It lives in the explorer's process and must not block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rftstream.messages import ChatMessage, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the environment says to an assistant turn."""

    done: bool
    messages: tuple[ChatMessage, ...] = ()
    """To be shown to the policy before its next turn; empty when done."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewrite: tuple[ChatMessage, ...] | None = None
    """The whole context from now on, for agents that rewrite theirs: a new segment begins."""


class Environment(Protocol):
    """Built as `Class(config: Class.Config, *, problem: Problem, seed: int)`."""

    def start(self) -> tuple[ChatMessage, ...]:
        """What the policy sees first."""

    def reply(self, completion: str, finish_reason: str) -> Reply: ...

    def save(self) -> bytes | None:
        """Its state, for a successor to go on from; None if it can't be saved."""

    def load(self, state: bytes) -> None: ...

    def close(self) -> None: ...


__all__ = ["ChatMessage", "Environment", "Problem", "Reply"]
