"""Environments: the other side of a conversation. The explorer's turn loop asks the environment, samples a completion
and passes it on, until the environment is done.

An environment object belongs to one rollout. Its methods may be plain blocking functions, or `async def`. They run
outside the sampling thread, one at a time for each object, each with a time limit. If a method raises, its rollout is a
failed one; if it exceeds the limit, the rollout is a truncated one.

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
    """Reward of this turn. The rewards of all turns add up; None adds nothing. If no turn has a reward, the rollout has
    none from the environment, which is not a reward of 0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward. They add up over turns, too."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the turn. A later value of a name replaces an earlier one."""
    rewrite: tuple[ChatMessage, ...] | None = None
    """The whole context from now on, for agents that rewrite theirs. A new segment begins."""
    reached: tuple[ChatMessage, ...] = ()
    """First messages of a problem that this attempt does solve, for the operator `hindsight`. Later messages replace
    earlier ones. Empty: the environment knows no such problem."""


class Environment(Protocol):
    """Built as `Class(config: Class.Config, *, problem: Problem, seed: int)`.

    The turn loop calls `start` or `load` first, then `tools`, then `reply` for each turn, and `close` at the end. Each
    method may be a plain function or `async def`."""

    def start(self) -> Sequence[ChatMessage] | Awaitable[Sequence[ChatMessage]]:
        """Return the first messages to the policy. The turn loop calls it once, before the first turn."""

    def tools(self) -> Sequence[Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        """Return the tools that the policy may call, each as `{"type": "function", "function": {"name", "description",
        "parameters": JSON Schema}}`.

        The chat template gets them after the problem's own tools. The turn loop calls it once, after `start` or `load`.
        An environment without this method offers no tools."""

    def reply(self, said: AssistantMessage) -> Reply | Awaitable[Reply]:
        """Answer an assistant turn."""

    def save(self) -> bytes | None:
        """Return the state between two turns, from which an object in another process can resume; None if it cannot be
        saved.

        The turn loop calls it only while the rollout waits for a completion. If the state cannot be saved, a rollout
        with at least one turn is not saved at all: should its explorer die, it begins anew. Before the first turn no
        state is needed."""

    def load(self, state: bytes) -> Awaitable[None] | None:
        """Resume from a saved state, instead of `start`. If it raises, the rollout begins anew with a fresh object."""

    def close(self) -> Awaitable[None] | None:
        """Release all resources. The turn loop calls it once, when the rollout is over or abandoned. It may also be
        called after another method exceeded its time limit, while that method still runs."""


__all__ = ["AssistantMessage", "ChatMessage", "Environment", "Media", "Problem", "Reply", "ToolCall"]
