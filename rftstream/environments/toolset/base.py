"""What a tool is.

Three things can be named in `tools = [...]`:

- A function. Its name is the tool's name, its docstring the description, and its parameters the arguments.
- A class. Its object belongs to one rollout and is called as a function; the class's `tool_name`, or its name in small
  letters, is the tool's name. `save() -> plain value` and `load(value)` let a rollout go on in another process; a
  class without them keeps nothing between two calls. `close()` is called when the rollout is over.
- A class with a method `open_tools`, which keeps `ToolSource`: it has several tools, or tools that it asks for.

A function, `__call__` and `open_tools` may be plain or `async def`. A plain function has a thread of its own while it
runs, unless it says `runs_inline = True` because it never waits for anything.

Parameters called `problem` and `seed` are not shown to the model: the environment fills in the rollout's. So a class
takes them in `__init__`, beside its settings, and a function after `*`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rftstream.errors import RftError


class ToolError(RftError):
    """A tool cannot answer a call. The model is told the text; the rollout goes on."""


class ToolBroken(RftError):
    """A tool cannot work, by no fault of the model, such as one whose server is gone. The rollout fails, so that nobody
    learns from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a tool that returns more than a text."""

    content: str
    """Text that the model is shown."""
    reward: float | None = None
    """Reward of the turn with this call; the rewards of all calls add up."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    done: bool = False
    """Whether the rollout ends with this call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool of a rollout. `toolset.open` makes it of a function or a class, a `ToolSource` of what it has found."""

    name: str
    """The name that the model calls."""
    description: str
    """Description of the tool, for the model."""
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments, an object."""
    check: Callable[[dict[str, Any]], dict[str, Any]]
    """Returns the arguments as `call` takes them. ToolError says what is wrong with them."""
    call: Callable[[dict[str, Any]], Any]
    """Takes the checked arguments; returns a text, a ToolResult, a plain value, or an awaitable of these."""
    runs_inline: bool = False
    """Whether `call` returns at once, so that it needs no thread."""

    def definition(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolSource(Protocol):
    """Something with several tools, for one rollout. Built like any class of a tool: settings by keyword, `problem` and
    `seed` if it names them.

    The environment calls `open_tools` once, before the first turn (also of a rollout that goes on in another process,
    after `load`), and `close` once, at the end, also if `open_tools` has raised."""

    def open_tools(self) -> Sequence[Tool] | Awaitable[Sequence[Tool]]:
        """Return the tools. An error makes the rollout a failed one."""

    def save(self) -> Any:
        """Return the state as a plain value. CannotSave if there is no way to."""

    def load(self, state: Any) -> None:
        """Go on from a saved state."""

    def close(self) -> Awaitable[None] | None:
        """Let go of what it holds."""


class CannotSave(RftError):
    """A tool has a state that cannot be saved, so its rollout cannot go on in another process."""
