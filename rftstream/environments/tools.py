"""Several turns with tools: the policy calls tools until it answers without a call."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.environments.toolset.arguments import as_text, cut, shown
from rftstream.environments.toolset.base import CannotSave, Tool, ToolBroken, ToolError, ToolResult
from rftstream.environments.toolset.open import OpenedTools, finished
from rftstream.errors import ConfigError

MAX_HANGING = 32
"""Number of calls that exceeded their time limit and still run in this process, from which on no further call is
begun."""


class ToolEnvironment:
    """An environment that runs the policy's tool calls. It is done when a turn has no call."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[environments.tools]`."""

        tools: tuple[str, ...] = ("calculator",)
        """Built-in tools (calculator, python, search, mcp), and your own as `module:function` or `module:Class`."""
        options: dict[str, dict[str, Any]] = field(default_factory=dict)
        """Settings of tools, by their names in `tools`: `[environments.tools.options.search]`. For your own class,
        these are the parameters of its `__init__`."""
        max_turns: Annotated[int, Meta(ge=1)] = 8
        """Largest number of the policy's turns. The calls of the last turn are not run."""
        max_calls: Annotated[int, Meta(ge=1)] = 16
        """Largest number of calls in one turn. Further calls are bad calls."""
        on_bad_call: Literal["tell", "end"] = "tell"
        """Treatment of a call that is invalid JSON, names an unknown tool, or has wrong arguments. tell: a tool message
        tells the model what is wrong. end: the rollout ends."""
        max_result_chars: Annotated[int, Meta(ge=1)] = 4000
        """Largest number of characters of a tool's result that the model sees. The rest is cut off, with a note."""
        timeout_s: Annotated[float, Meta(gt=0)] = 20.0
        """Seconds for one call. After that, the model is told that the tool did not answer. Keep it below
        `explorer.reply_timeout_s`, which covers all calls of a turn together."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        self._config, self._problem = config, problem
        if twice := sorted({name for name in config.tools if config.tools.count(name) > 1}):
            raise ConfigError(f"environments.tools: tools has {twice[0]!r} twice; remove one")
        for name in config.options:
            if name not in config.tools:
                raise ConfigError(f"environments.tools.options: {name!r} is not in tools; add it there, or remove it")
        self._opened = OpenedTools(config.tools, config.options, problem=problem, seed=seed)
        self._counts = {"num_turns": 0, "num_tool_calls": 0, "num_bad_calls": 0, "num_failed_calls": 0}
        self._is_open = False

    def start(self) -> tuple[ChatMessage, ...]:
        return self._problem.messages

    async def tools(self) -> Sequence[Mapping[str, Any]]:
        """Open the tools, and return those that the problem does not already offer."""
        if not self._is_open:
            await self._open()
        for name in self._opened.by_name:
            self._counts.setdefault(f"num_calls_{name}", 0)
        theirs = {str(tool.get("function", tool).get("name")) for tool in self._problem.tools}
        return [tool.definition() for name, tool in self._opened.by_name.items() if name not in theirs]

    async def reply(self, said: AssistantMessage) -> Reply:
        self._counts["num_turns"] += 1
        is_last = self._counts["num_turns"] >= self._config.max_turns or said.finish_reason != "stop"
        if not said.tool_calls or is_last:
            return Reply(done=True, metrics=self._metrics())
        results = [await self._answer(call, place) for place, call in enumerate(said.tool_calls)]
        rewards = [result.reward for result in results if result.reward is not None]
        parts: dict[str, float] = {}
        for result in results:
            for name, value in result.parts.items():
                parts[name] = parts.get(name, 0.0) + value
        done = any(result.done for result in results)
        messages = [
            ChatMessage(
                role="tool",
                content=self._readable(result.content),
                name=call.name if call.name in self._opened.by_name else None,
                tool_call_id=call.id,
            )
            for call, result in zip(said.tool_calls, results, strict=True)
        ]
        return Reply(
            done=done,
            messages=() if done else tuple(messages),
            reward=math.fsum(rewards) if rewards else None,
            parts=parts,
            metrics=self._metrics(),
        )

    def save(self) -> bytes | None:
        try:
            return json.dumps({"counts": self._counts, "tools": self._opened.save()}).encode()
        except CannotSave:
            return None

    async def load(self, state: bytes) -> None:
        saved = json.loads(state)
        await self._open(saved["tools"])
        self._counts.update(saved["counts"])

    async def close(self) -> None:
        await self._opened.close()

    async def _open(self, states: Mapping[str, Any] | None = None) -> None:
        self._is_open = True
        await self._opened.open(states)

    def _metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._counts.items()}

    def _readable(self, content: str) -> str:
        """Return a result for the model: not too long, and without invalid characters."""
        return cut(content, self._config.max_result_chars).encode(errors="replace").decode()

    async def _answer(self, call: ToolCall, place: int) -> ToolResult:
        self._counts["num_tool_calls"] += 1
        try:
            tool, arguments = self._understood(call, place)
        except ToolError as error:
            self._counts["num_bad_calls"] += 1
            return ToolResult(content=f"Error: {error}", done=self._config.on_bad_call == "end")
        self._counts[f"num_calls_{tool.name}"] += 1
        try:
            value = await self._run(tool, arguments)
            return value if isinstance(value, ToolResult) else ToolResult(content=as_text(value))
        except ToolBroken:
            raise
        except ToolError as error:
            text = str(error)
        except Exception as error:  # user code: the model is told, as about any tool that fails
            text = f"{tool.name} failed: {type(error).__name__}: {error}"
        self._counts["num_failed_calls"] += 1
        return ToolResult(content=f"Error: {text}")

    def _understood(self, call: ToolCall, place: int) -> tuple[Tool, dict[str, Any]]:
        """Return the tool and its checked arguments. ToolError says what is wrong with the call."""
        known = self._opened.by_name
        if call.error is not None:
            raise ToolError(call.error)
        if call.name not in known:
            raise ToolError(f"there is no tool {shown(call.name)}; there are: {', '.join(known) or 'none'}")
        if place >= self._config.max_calls:
            raise ToolError(f"not run: more than {self._config.max_calls} calls in one turn")
        if call.arguments is None:
            raise ToolError(f"the arguments of {call.name} are not a JSON object")
        try:
            return known[call.name], known[call.name].check(call.arguments)
        except ToolError as error:
            raise ToolError(f"{call.name}: {error}") from None

    async def _run(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                if tool.runs_inline:
                    return await finished(tool.call(arguments))
                return await finished(await _in_thread(lambda: tool.call(arguments), tool.name))
        except TimeoutError:
            raise ToolError(f"{tool.name} did not answer within {self._config.timeout_s:g} s") from None


_hanging: set[threading.Thread] = set()


async def _in_thread(call: Callable[[], Any], name: str) -> Any:
    """Return the result of a blocking function. A thread cannot be stopped: if it exceeds its limit, it is left
    running."""
    for thread in [thread for thread in _hanging if not thread.is_alive()]:
        _hanging.discard(thread)
    if len(_hanging) >= MAX_HANGING:
        raise ToolError(f"{name} was not called: {len(_hanging)} earlier calls still hang")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)
        elif inspect.iscoroutine(value):
            value.close()  # it came too late to be awaited

    def work() -> None:
        value, problem = None, None
        try:
            value = call()
        except BaseException as error:  # every exception of a tool belongs to its call
            problem = error if isinstance(error, Exception) else ToolError(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits for the result any more
            loop.call_soon_threadsafe(settle, value, problem)

    thread = threading.Thread(target=work, name=f"tool {name}", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        _hanging.add(thread)
        raise
