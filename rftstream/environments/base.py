"""Environments: the other side of a conversation. The explorer's turn loop asks, samples, tells, until it is done.

An environment object belongs to one rollout. It lives in the explorer's process and must not block; its methods are
plain functions, not `async def`. What it raises makes its rollout a failed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rftstream.contracts.tasks import ChatMessage, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the environment says to an assistant turn."""

    done: bool
    messages: tuple[ChatMessage, ...] = ()
    """Messages to show to the policy before its next turn; empty when done."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewrite: tuple[ChatMessage, ...] | None = None
    """The whole context from now on, for agents that rewrite theirs: a new segment begins."""


class Environment(Protocol):
    """Built as `Class(config: Class.Config, *, problem: Problem, seed: int)`."""

    def start(self) -> tuple[ChatMessage, ...]:
        """Return what the policy sees first. The explorer calls it once, before the first turn."""

    def reply(self, completion: str, finish_reason: str) -> Reply:
        """Answer a completion. `finish_reason` is stop, length or repetition; after the last two the rollout ends,
        whatever the reply is."""

    def save(self) -> bytes | None:
        """Return the state between two turns, for an object in another process to go on from; None if it can't be
        saved. Asked only while it waits for a completion. A rollout that has had a turn is then not saved at all, and
        is begun anew should its explorer die; before its first turn no state is needed."""

    def load(self, state: bytes) -> None:
        """Go on from a saved state, instead of `start`. If it raises, the rollout is begun anew with a fresh object."""

    def close(self) -> None:
        """Let go of what it holds. Called once, when its rollout is over or is given up."""


__all__ = ["ChatMessage", "Environment", "Problem", "Reply"]
