"""Environments: the other side of a conversation. The explorer's turn loop asks, samples, tells, until it is done.

An environment object belongs to one rollout. Its methods may be plain functions that block, or `async def`. They run
outside of the sampling thread, one at a time for each object, each under a time limit. What a method raises makes its
rollout a failed one; a method that exceeds the limit makes it a truncated one.

A worked example is in docs/environments.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.contracts.tasks import ChatMessage, Media, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The environment's reply to an assistant turn."""

    done: bool
    messages: tuple[ChatMessage, ...] = ()
    """Messages to show to the policy before its next turn, with images as their `media`; empty when done."""
    reward: float | None = None
    """Reward of this turn. The rewards of all turns add up; None adds nothing. If no turn has a reward, the environment
    gave none, which is not a reward of 0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward. They add up over turns, too."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the turn. A later value of a name replaces an earlier one."""
    rewrite: tuple[ChatMessage, ...] | None = None
    """The whole context from now on, for agents that rewrite theirs: a new segment begins."""
    reached: tuple[ChatMessage, ...] = ()
    """First messages of a problem that this attempt does solve, for the operator `hindsight`. Later messages replace
    earlier ones. Empty: the environment knows no such problem."""


class Environment(Protocol):
    """Built as `Class(config: Class.Config, *, problem: Problem, seed: int)`.

    The turn loop calls `start` or `load` first, then `tools`, then `reply` for each turn, and `close` at the end. Each
    may be a plain function or `async def`."""

    def start(self) -> Sequence[ChatMessage] | Awaitable[Sequence[ChatMessage]]:
        """Return what the policy sees first. Called once, before the first turn."""

    def tools(self) -> Sequence[Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        """Return the tools that the policy may call, each as `{"type": "function", "function": {"name", "description",
        "parameters": JSON Schema}}`. They go into the chat template, after the problem's own tools. Called once, after
        `start` or `load`. An environment without this method offers none."""

    def reply(self, said: AssistantMessage) -> Reply | Awaitable[Reply]:
        """Answer an assistant turn."""

    def save(self) -> bytes | None:
        """Return the state between two turns, for an object in another process to go on from; None if it can't be
        saved. Asked only while the rollout waits for a completion. A rollout that has had a turn is then not saved at
        all, and is begun anew should its explorer die; before its first turn no state is needed."""

    def load(self, state: bytes) -> Awaitable[None] | None:
        """Go on from a saved state, instead of `start`. If it raises, the rollout is begun anew with a fresh object."""

    def close(self) -> Awaitable[None] | None:
        """Let go of what it holds. Called once, when its rollout is over or is given up; also after another method
        exceeded its time limit, while that may still run."""


__all__ = ["AssistantMessage", "ChatMessage", "Environment", "Media", "Problem", "Reply", "ToolCall"]
