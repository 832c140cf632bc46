"""The interface of tools.

Three things can be named in `tools = [...]`:

- A function. Its name is the tool's name, its docstring the description, and its parameters the arguments.
- A class. Its object belongs to one rollout and is called as a function; the class's `tool_name`, or its name in small
  letters, is the tool's name. `save() -> plain value` and `load(value)` let a rollout resume in another process; a
  class without them keeps nothing between two calls. `close()` is called when the rollout is over.
- A class with a method `open_tools`, which implements `ToolSource`: it has several tools, or tools from elsewhere.

A function, `__call__` and `open_tools` may be plain or `async def`. A plain function runs in its own thread, unless it
sets `runs_inline = True` because it never waits.

Parameters named `problem` and `seed` are not shown to the model: the environment fills in the rollout's values. A class
has them in `__init__`, beside its settings, and a function after `*`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rftstream.errors import RftError


class ToolError(RftError):
    """A tool cannot answer a call. The model gets the text; the rollout continues."""


class ToolBroken(RftError):
    """A tool cannot work, and the model is not to blame, for example because a server is gone. The rollout fails, so
    that nothing is learned from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a tool that returns more than a text."""

    content: str
    """Text that the model sees."""
    reward: float | None = None
    """Reward of the turn with this call; the rewards of all calls add up."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    done: bool = False
    """Whether the rollout ends with this call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool of a rollout. `toolset.open` makes it from a function or a class; a `ToolSource` makes it from what it
    finds."""

    name: str
    """The name by which the model calls it."""
    description: str
    """Description of the tool, for the model."""
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments, an object."""
    check: Callable[[dict[str, Any]], dict[str, Any]]
    """Returns the arguments in the form for `call`. ToolError says what is wrong with them."""
    call: Callable[[dict[str, Any]], Any]
    """Takes the checked arguments; returns a text, a ToolResult, a plain value, or an awaitable of these."""
    runs_inline: bool = False
    """Whether `call` returns at once, so that it needs no thread."""

    def definition(self) -> dict[str, Any]:
        """Return the tool in the form for chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolSource(Protocol):
    """An object with several tools, for one rollout. It is built like any tool class: settings by keyword, and
    `problem` and `seed` if it has these parameters.

    The environment calls `open_tools` once, before the first turn; for a rollout that resumes in another process, after
    `load`. It calls `close` once, at the end, even if `open_tools` raised."""

    def open_tools(self) -> Sequence[Tool] | Awaitable[Sequence[Tool]]:
        """Return the tools. An error makes the rollout a failed one."""

    def save(self) -> Any:
        """Return the state as a plain value. CannotSave if that is impossible."""

    def load(self, state: Any) -> None:
        """Resume from a saved state."""

    def close(self) -> Awaitable[None] | None:
        """Release all resources."""


class CannotSave(RftError):
    """A tool's state cannot be saved, so its rollout cannot resume in another process."""
