"""Tools of MCP servers, over stdio or HTTP, through the official package `mcp` (the extra `mcp`).

Every connection runs on one event loop in its own thread, not on the environment's loop: shared connections outlive
their rollout, and the package requires that the task that opened a connection also closes it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Annotated, Any

import msgspec

from rftstream.config.secrets import reveal
from rftstream.environments.hosts import guard
from rftstream.environments.toolset.arguments import SchemaCheck
from rftstream.environments.toolset.base import CannotSave, Tool, ToolError
from rftstream.errors import ConfigError, pip_install
from rftstream.loops import LoopThread

WHERE = "environments.tools.options.mcp.servers"
CLOSE_S = 15.0
"""Seconds for a connection to end. The package asks a server to end, and then kills it, within that time."""
HTTP_S, HTTP_READ_S = 30.0, 300.0
"""Seconds for sending a request over HTTP, and for a piece of its response to arrive."""
MAX_PAGES = 100
"""Largest number of pages in a server's list of tools."""


class McpServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server in `[environments.tools.options.mcp.servers.NAME]`."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server that speaks over stdio. The explorer starts it."""
    cwd: str | None = None
    """Folder in which it starts, relative to the run file; default: the explorer's."""
    env: dict[str, str] = {}
    """Its environment variables, besides a few such as PATH and HOME: it does not inherit the explorer's. `"env:NAME"`
    is read from the environment."""
    url: str | None = None
    """Endpoint of a server that speaks streamable HTTP, instead of `command`."""
    headers: dict[str, str] = {}
    """Headers of each request over HTTP. `"env:NAME"` is read from the environment."""
    shared: bool = False
    """Whether all rollouts of an explorer share one connection, for a server without state between calls. Otherwise
    each rollout has its own connection (over stdio: a process), which is closed with it, and the rollout cannot resume
    in another process."""
    tools: tuple[str, ...] = ()
    """Names of its tools that are offered; default: all."""
    prefix: str = ""
    """Prefix of its tools' names, for servers with tools of the same name."""
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Seconds for the server to list its tools. Keep it below `explorer.reply_timeout_s`."""


class McpServers:
    """The tools of all servers in `servers`, for one rollout."""

    def __init__(self, *, servers: dict[str, McpServer]) -> None:
        _require()
        if not servers:
            raise ConfigError(f"{WHERE}: names no server; add [{WHERE}.NAME] with command or url")
        for name, server in servers.items():
            if bool(server.command) == (server.url is not None):
                raise ConfigError(f"{WHERE}.{name}: expected either a command or a url")
        self._servers = servers
        self._own: list[Connection] = []

    async def open_tools(self) -> list[Tool]:
        """Connect to all servers at the same time. ToolError names the ones that failed, with the reasons."""
        connections = {}
        for name, server in self._servers.items():
            if server.shared:
                connections[name] = shared_connection(name, server)
            else:
                connections[name] = Connection(name, server)
                self._own.append(connections[name])
        found = await asyncio.gather(*(connection.tools() for connection in connections.values()))
        return [
            _tool(connections[name], self._servers[name], listed)
            for name, tools in zip(connections, found, strict=True)
            for listed in _offered(name, self._servers[name], tools)
        ]

    def save(self) -> None:
        """Raise CannotSave unless all connections are shared: the state of a server is unknown here."""
        if not all(server.shared for server in self._servers.values()):
            raise CannotSave("an MCP server of one rollout")

    def load(self, state: None) -> None:
        """Do nothing: shared servers have no state to restore."""

    async def close(self) -> None:
        """Close the connections of this rollout, and the servers that were started for them."""
        await asyncio.gather(*(connection.close() for connection in self._own))


class Connection:
    """A connection to one server. Creating it starts to connect; `tools` waits for that; `call` is allowed until
    `close`."""

    def __init__(self, name: str, server: McpServer) -> None:
        self._name, self._server = name, server
        self._listed: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self._client: Any = None
        self._loop = _event_loop()
        self._closing = asyncio.Event()
        self._is_ending = False
        self._task = self._loop.begin(self._run())

    @property
    def is_over(self) -> bool:
        """Whether it was closed, could not be opened, or its server is gone."""
        return self._task.done() or self._is_ending

    async def tools(self) -> list[Any]:
        """Return the server's tools from its list. ToolError if the server does not start."""
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                return await asyncio.shield(asyncio.wrap_future(self._listed))
        except TimeoutError:
            raise ToolError(
                f"{WHERE}.{self._name}: did not list its tools within {self._server.start_timeout_s:g} s"
            ) from None

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return the texts of the result. ToolError if the server reports an error, or is gone."""
        if self.is_over:
            raise ToolError(f"{tool} failed: its server has ended")
        try:
            result = await self._loop.run(self._client.call_tool(tool, arguments))
        except _package().MCPError as error:
            if _is_closed(error):
                self._end()
                raise ToolError(f"{tool} failed: its server has ended") from None
            raise ToolError(f"{tool} failed: {error}") from None
        text = "\n".join(_text(item) for item in result.content)
        if result.is_error:
            raise ToolError(text or f"{tool} failed")
        return text

    async def close(self) -> None:
        """Close the connection, and end a server that was started for it. Return when both are gone."""
        self._end()
        if not self._listed.done():
            self._task.cancel()
        with suppress(Exception, asyncio.CancelledError):  # callers of `tools` get the error
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._task)), CLOSE_S)

    def end_now(self) -> None:
        """Close the connection like `close`, and block until it is gone."""
        self._end()
        with suppress(Exception):
            self._task.result(CLOSE_S)

    def _end(self) -> None:
        self._is_ending = True
        self._loop.soon(self._closing.set)

    async def _run(self) -> None:
        mcp = _package()
        try:
            async with AsyncExitStack() as stack:
                client = mcp.Client(await self._target(stack))
                self._client = await stack.enter_async_context(client)
                self._listed.set_result(await _listing(client))
                await self._closing.wait()
        except BaseException as error:
            if not self._listed.done():
                self._listed.set_exception(ToolError(f"{WHERE}.{self._name}: cannot be used: {_innermost(error)!r}"))
            if not isinstance(error, Exception):
                raise

    async def _target(self, stack: AsyncExitStack) -> Any:
        where = f"{WHERE}.{self._name}"
        if self._server.url is not None:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            headers = reveal(self._server.headers, where=f"{where}.headers")
            http = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(HTTP_S, read=HTTP_READ_S))
            return streamable_http_client(self._server.url, http_client=await stack.enter_async_context(http))
        from mcp.client.stdio import StdioServerParameters, stdio_client

        variables = reveal(self._server.env, where=f"{where}.env")
        program, *arguments = _guarded(self._server.command, variables.get("PATH"))
        parameters = StdioServerParameters(command=program, args=arguments, env=variables, cwd=self._server.cwd)
        return stdio_client(parameters, errlog=sys.stderr)


def _guarded(command: Sequence[str], path: str | None) -> Sequence[str]:
    """Return a command that runs this one, and ends it with all its children when this process dies in any way.
    FileNotFoundError if there is no such program."""
    is_relative = os.sep in command[0] and not os.path.isabs(command[0])  # relative to a folder that may change later
    if not is_relative and shutil.which(command[0], path=path) is None:
        raise FileNotFoundError(2, "no such program", command[0])
    if os.name != "posix":
        return command
    return [sys.executable, "-I", "-S", guard.__file__, "--command", str(os.getpid()), *command]


_shared: dict[bytes, Connection] = {}
_sharing = threading.Lock()


def shared_connection(name: str, server: McpServer) -> Connection:
    """Return this process's connection to a server; a new one if there is none, or if the last one has ended."""
    key = msgspec.json.encode((name, server), order="sorted")
    with _sharing:
        if key not in _shared or _shared[key].is_over:
            if not _shared:
                atexit.register(close_shared)
            _shared[key] = Connection(name, server)
        return _shared[key]


def close_shared() -> None:
    """Close all shared connections of this process. It is called at exit."""
    with _sharing:
        for connection in _shared.values():
            connection.end_now()
        _shared.clear()


async def _listing(client: Any) -> list[Any]:
    found, cursor = [], None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _offered(name: str, server: McpServer, tools: list[Any]) -> list[Any]:
    known = [tool.name for tool in tools]
    if missing := [tool for tool in server.tools if tool not in known]:
        raise ConfigError(f"{WHERE}.{name}.tools: {missing[0]!r} is not there; it has {', '.join(known)}")
    return [tool for tool in tools if not server.tools or tool.name in server.tools]


def _tool(connection: Connection, server: McpServer, listed: Any) -> Tool:
    name = server.prefix + listed.name
    schema: Mapping[str, Any] = {"type": "object", "properties": {}, **listed.input_schema}
    return Tool(
        name=name,
        description=listed.description or "",
        parameters=schema,
        check=SchemaCheck(schema, where=f"MCP tool {name}").check,
        call=lambda arguments: connection.call(listed.name, arguments),
        runs_inline=True,  # it only makes a coroutine
    )


def _text(item: Any) -> str:
    """Return a piece of a result as a text; a piece that is no text is named by its type."""
    resource = getattr(item, "resource", None)
    text = getattr(item, "text", None) or getattr(resource, "text", None)
    return text if isinstance(text, str) else f"[{getattr(item, 'mime_type', None) or item.type}]"


def _is_closed(error: Any) -> bool:
    import mcp.types

    return bool(error.error.code == mcp.types.CONNECTION_CLOSED)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _package() -> Any:
    import mcp

    return mcp


def _require() -> None:
    try:
        _package()
    except ImportError as error:
        command = pip_install("rftstream[mcp]")
        raise ConfigError(f"environments.tools: the tool mcp needs the package mcp ({error}); {command}") from None


@functools.cache
def _event_loop() -> LoopThread:
    """Return the event loop of all connections, which runs until the process ends."""
    return LoopThread("mcp")
