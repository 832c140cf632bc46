"""An MCP server for the tests: `python notes_server.py` over stdio, `python notes_server.py PORT` over HTTP."""

from __future__ import annotations

import os
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
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        print("noise that is no message", flush=True)
        server.run()
