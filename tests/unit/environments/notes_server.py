"""An MCP server for the tests: `python notes_server.py` over stdio, with `http` over HTTP, on a port that it prints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from mcp.server import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return ", ".join(notes)


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no such thing")


@server.tool()
def pids() -> str:
    """Return the ids of this process and of a child that it leaves behind."""
    child = subprocess.Popen(["sleep", "600"])
    return f"{os.getpid()} {child.pid}"


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "unset")


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        import uvicorn

        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(server.streamable_http_app(host="127.0.0.1"), log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])
    else:
        print("noise that is no message", flush=True)
        server.run()
