"""From the names in `tools = [...]` to the tools of one rollout."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rftstream.contracts.tasks import Problem
from rftstream.environments.toolset import TOOLS
from rftstream.environments.toolset.arguments import SchemaCheck, Signature, describe
from rftstream.environments.toolset.base import Tool, ToolError
from rftstream.errors import ConfigError

WHERE = "environments.tools"
NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)
"""Tool names that all model families can write."""


class OpenedTools:
    """The tools of one rollout. The environment `tools` makes one for each rollout, calls `open`, reads `by_name`, and
    calls `save` between two turns and `close` at the end."""

    def __init__(
        self, names: Sequence[str], options: Mapping[str, Mapping[str, Any]], *, problem: Problem, seed: int
    ) -> None:
        """Keep the arguments; nothing is built yet."""
        self._names, self._options = names, options
        self._filled = {"problem": problem, "seed": seed}
        self._objects: dict[str, Any] = {}
        self.by_name: dict[str, Tool] = {}
        """Name that the model calls -> tool."""

    async def open(self, states: Mapping[str, Any] | None = None) -> None:
        """Build all objects, restore their states, and get their tools. ConfigError says what cannot be built, or that
        two tools have the same name."""
        for entry in self._names:
            self._objects[entry] = await asyncio.to_thread(build, entry, self._options.get(entry, {}), self._filled)
        for entry, state in (states or {}).items():
            self._objects[entry].load(state)
        for entry, made in self._objects.items():
            found = await finished(made.open_tools()) if is_source(made) else [tool_of(entry, made, self._filled)]
            for tool in found:
                self._add(entry, tool)

    def _add(self, entry: str, tool: Tool) -> None:
        if not NAME.fullmatch(tool.name):
            raise ConfigError(f"{WHERE}: {entry}: a tool called {tool.name!r}, expected letters, digits, _ and -")
        if tool.name in self.by_name:
            raise ConfigError(f"{WHERE}: two tools are called {tool.name!r}; leave one of them out")
        self.by_name[tool.name] = tool

    def save(self) -> dict[str, Any]:
        """Return the state of each object that has one. CannotSave if an object's state cannot be saved."""
        return {entry: made.save() for entry, made in self._objects.items() if _has(made, "save")}

    async def close(self) -> None:
        """Close every object that can be closed, even if one of them raises."""
        errors = []
        for made in self._objects.values():
            if _has(made, "close"):
                try:
                    await finished(made.close())
                except Exception as error:  # user code: the other objects have to be closed all the same
                    errors.append(error)
        if errors:
            raise errors[0]


def build(entry: str, options: Mapping[str, Any], filled: Mapping[str, Any]) -> Any:
    """Return the function, or a new object of the class. ConfigError if its settings do not fit."""
    part: Any = resolve(entry)
    is_class = inspect.isclass(part)
    if not is_class:
        if options:
            raise ConfigError(f"{WHERE}: {entry}: a function has no settings, got {', '.join(options)}; remove them")
        return part
    where = f"{WHERE}.options.{entry}"
    signature = signature_of(part, where)
    try:
        settings = signature.check(options)
    except ToolError as error:
        raise ConfigError(f"{where}: {error}") from None
    return part(**settings, **{name: filled[name] for name in signature.filled_in})


@functools.cache
def resolve(entry: str) -> Any:
    """Return the object that a name in `tools` refers to. ConfigError if there is none."""
    path = entry if ":" in entry else TOOLS.get(entry)
    if path is None:
        raise ConfigError(f"{WHERE}: unknown tool {entry!r}; known: {', '.join(TOOLS)} (or 'module:name' of your own)")
    module, _, name = path.partition(":")
    try:
        part = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{WHERE}: {entry!r} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(part):
        raise ConfigError(f"{WHERE}: {entry!r} is a {type(part).__name__}, expected a function or a class")
    return part


@functools.cache
def signature_of(function: Callable[..., Any], where: str) -> Signature:
    """Return the parameters of a function, or of a class's `__init__`. They are read once for all rollouts."""
    return Signature(function, where=where)


def tool_of(entry: str, made: Any, filled: Mapping[str, Any]) -> Tool:
    """Return the tool that calls a function, or an object."""
    function = made if inspect.isroutine(made) else type(made).__call__
    where = f"{WHERE}: {entry}"
    signature, description, schema = _described(function, where)
    given = {name: filled[name] for name in signature.filled_in}
    name = getattr(made, "tool_name", None) or getattr(made, "__name__", None) or type(made).__name__.lower()
    own = getattr(made, "parameters", None)
    return Tool(
        name=name,
        description=getattr(made, "description", None) or description or _doc(made),
        parameters=schema if own is None else own,
        check=signature.check if own is None else SchemaCheck(own, where=where).check,
        call=lambda arguments: made(**arguments, **given),
        runs_inline=bool(getattr(made, "runs_inline", False)) or inspect.iscoroutinefunction(made),
    )


def is_source(made: Any) -> bool:
    """Return whether an object is a ToolSource."""
    return _has(made, "open_tools")


async def finished(value: Any) -> Any:
    """Return a value, or the result of an awaitable."""
    return await value if inspect.isawaitable(value) else value


def _has(made: Any, method: str) -> bool:
    return not inspect.isroutine(made) and callable(getattr(made, method, None))


def _doc(made: Any) -> str:
    return "" if inspect.isroutine(made) else describe(type(made))[0]


@functools.cache
def _described(function: Callable[..., Any], where: str) -> tuple[Signature, str, dict[str, Any]]:
    signature = Signature(function, where=where)
    description, arguments = describe(function)
    properties = {
        name: {**schema, "description": arguments[name]}
        if name in arguments and "description" not in schema
        else schema
        for name, schema in signature.schema["properties"].items()
    }
    return signature, description, {**signature.schema, "properties": properties}
