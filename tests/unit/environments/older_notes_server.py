"""The tools of `notes_server.py` over stdio, without its package: this server starts at once.

It knows no `server/discover`, as servers before it did not, and answers every call in a thread of its own.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

notes: list[str] = []


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return ", ".join(notes)


def die() -> str:
    """End the server in the middle of a call."""
    os._exit(1)


def hang() -> str:
    """Never answer."""
    time.sleep(600)
    return ""


def pids() -> str:
    """Return the ids of this process and of a child that it leaves behind."""
    return f"{os.getpid()} {subprocess.Popen(['sleep', '600']).pid}"


TOOLS: dict[str, Callable[..., str]] = {tool.__name__: tool for tool in (add, note, die, hang, pids)}


def listed(name: str, tool: Callable[..., str]) -> dict[str, object]:
    parameters = inspect.signature(tool).parameters
    properties = {
        name: {"type": "integer" if found.annotation == "int" else "string"} for name, found in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    return {"name": name, "description": tool.__doc__, "inputSchema": schema}


def result_of(method: str, params: dict[str, object]) -> dict[str, object] | None:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "notes", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [listed(name, tool) for name, tool in TOOLS.items()]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": TOOLS[params["name"]](**params["arguments"])}]}
    return None


def answer(message: dict) -> None:
    result = result_of(message["method"], message.get("params", {}))
    said = {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **said}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    print("noise that is no message", flush=True)
    for line in sys.stdin:
        if "id" in (message := json.loads(line)):  # else nobody waits for an answer
            threading.Thread(target=answer, args=(message,), daemon=True).start()
