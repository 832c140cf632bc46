"""Environments of OpenEnv. `target = "openenv"`; one step for each turn, or for each call of a tool.

It speaks to a server's `/ws`: one connection is one episode. Without a server of one's own the host starts that of an
installed package. A URL needs the package websockets alone. Options, also those of a single problem in its
`info.options`:

    url           of the server, as http://127.0.0.1:8000; or an installed package, as openenv-echo; or the module with
                  its server, as echo_env.server.app
    reset         further arguments of the server's reset, beside the seed
    action        the field of an action that takes the reply's text, "message" by default; "json" if the reply is to
                  hold the action as a JSON object, of which the last one counts
    fields        further fields of every action
    observation   the field of an observation that is shown; without it the observation is shown as JSON
    instructions  text before the first observation
    wait_s        seconds to wait while all sessions of the server are taken, 40 by default

An environment that begins differently with the same seed is told of in the host's output: its siblings would not have
the same problem. MCP tools of an environment are the policy's tools. Then a reply without a call ends the episode,
unless `action` says which field takes its text. Many packages allow one session for each server: `processes` is how
many servers there are.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import websockets
import websockets.sync.client

KNOWN = ("url", "reset", "action", "fields", "observation", "instructions", "wait_s")
MAX_BYTES = 16 << 20
OPEN_S = 30.0
WAIT_S = 40.0
PAUSE_S = 0.2
CLOSE_S = 2.0
SERVER = "server/app.py"
"""Where a package has its server, as `openenv init` lays it out. The server is `app`."""


class RefusedByServer(RuntimeError):
    """An error that the server answered with."""

    def __init__(self, kind: str, about: dict[str, Any]) -> None:
        details = "".join(f"; {one.get('loc')}: {one.get('msg')}" for one in about.get("errors", ()))
        super().__init__(f"the server said to {kind!r}: {about.get('message')} ({about.get('code')}){details}")
        self.code = about.get("code")


class OpenEnvEnvironment:
    """One episode on a server, as a host calls it."""

    def __init__(self, config: dict[str, Any], *, problem: dict[str, Any], seed: int) -> None:
        own = problem["info"].get("options", {})
        options = {**config, **own, "reset": {**config.get("reset", {}), **own.get("reset", {})}}
        if unknown := sorted(set(options) - set(KNOWN)):
            raise ValueError(f"options: unknown key {unknown[0]!r}; known: {', '.join(KNOWN)}")
        if "url" not in options:
            raise ValueError("options: missing url, as in url = 'http://127.0.0.1:8000'")
        self._options = options
        self._messages = problem["messages"]
        self._seed = seed % 2**31
        self._steps = 0
        self._tools: list[dict[str, Any]] = []
        self._connection: Any = None

    def start(self) -> list[dict[str, Any]]:
        """Return the problem's messages, with the first observation at the end."""
        result = self._begun()
        self._compare(result)
        self._tools = self._listed()
        text = "\n\n".join(filter(None, (self._options.get("instructions", ""), self._shown(result))))
        if self._messages and self._messages[-1]["role"] == "user":
            last = self._messages[-1]
            return [*self._messages[:-1], {**last, "content": f"{last['content']}\n\n{text}".strip()}]
        return [*self._messages, {"role": "user", "content": text}]

    def tools(self) -> list[dict[str, Any]]:
        """Return the environment's MCP tools."""
        return self._tools

    def reply(self, said: dict[str, Any]) -> dict[str, Any]:
        """Take a step for each call, or one with the text."""
        if self._tools and said["tool_calls"]:
            return self._called(said["tool_calls"])
        if self._tools and "action" not in self._options:
            return {"done": True, "metrics": {"steps": float(self._steps)}}
        action = self._action(said["content"])
        if action is None:
            return {"done": False, "messages": ["This holds no JSON object. Answer with the action as one."]}
        result = self._step({**self._options.get("fields", {}), **action})
        return {
            "done": bool(result.get("done")),
            "messages": [self._shown(result)],
            "reward": result.get("reward"),
            "metrics": {"steps": float(self._steps)},
        }

    def close(self) -> None:
        """End the episode."""
        if self._connection is not None:
            with contextlib.suppress(websockets.ConnectionClosed, TimeoutError):
                self._connection.send(json.dumps({"type": "close"}))
                self._connection.recv(timeout=CLOSE_S)  # the server closes, and takes a connection that is gone ill
            self._connection.close()

    def _begun(self) -> dict[str, Any]:
        """Connect and reset. A server whose sessions are all taken is asked again."""
        address = "ws" + url_of(self._options["url"]).removeprefix("http") + "/ws"
        wait_s = self._options.get("wait_s", WAIT_S)
        deadline = time.monotonic() + wait_s
        while True:
            self._connection = websockets.sync.client.connect(
                address, max_size=MAX_BYTES, open_timeout=OPEN_S, ping_interval=None
            )  # a server that is busy with an episode answers no ping
            try:
                return self._ask("reset", self._asked())
            except RefusedByServer as error:
                self._connection.close()
                if error.code != "CAPACITY_REACHED":
                    raise
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no free session within {wait_s:g} s; raise processes or wait_s") from error
            time.sleep(PAUSE_S)

    def _asked(self) -> dict[str, Any]:
        """Return the arguments of the server's reset."""
        return {"seed": self._seed, **self._options.get("reset", {})}

    def _compare(self, result: dict[str, Any]) -> None:
        key = json.dumps([self._options["url"], self._asked()], sort_keys=True, default=str)
        if _BEGUN.setdefault(key, result) != result and key not in _TOLD:
            _TOLD.add(key)
            print(f"{self._options['url']}: two episodes of one seed begin differently; siblings have other problems")

    def _listed(self) -> list[dict[str, Any]]:
        """Return the tools as functions; none if the environment has no MCP."""
        try:
            answer = self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
        except RefusedByServer:
            return []  # a server from before MCP
        listed = (answer.get("result") or {}).get("tools", ())
        return [{"type": "function", "function": function_of(tool)} for tool in listed]

    def _called(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Take a step for each call until the episode is over. The rewards add up."""
        messages, rewards, is_done = [], [], False
        for call in calls:
            if call["error"] is not None or call["arguments"] is None:
                answer = {"content": f"Error: {call['error'] or 'the arguments are not a JSON object'}"}
            else:
                result = self._step({"type": "call_tool", "tool_name": call["name"], "arguments": call["arguments"]})
                answer = answer_of(result.get("observation", {}))
                is_done = bool(result.get("done"))
                if result.get("reward") is not None:
                    rewards.append(result["reward"])
            messages.append({"role": "tool", "name": call["name"], "tool_call_id": call["id"], **answer})
            if is_done:
                break
        return {
            "done": is_done,
            "messages": messages,
            "reward": math.fsum(rewards) if rewards else None,
            "metrics": {"steps": float(self._steps)},
        }

    def _step(self, action: dict[str, Any]) -> dict[str, Any]:
        self._steps += 1
        return self._ask("step", action)

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(websockets.ConnectionClosed):  # what the server sent before says why
            self._connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._connection.recv())
        if answer.get("type") == "error":
            raise RefusedByServer(kind, answer.get("data", {}))
        result: dict[str, Any] = answer.get("data", {})
        return result

    def _action(self, text: str) -> dict[str, Any] | None:
        field = self._options.get("action", "message")
        if field != "json":
            return {field: text}
        found = None
        start = text.find("{")
        while start >= 0:
            try:
                found, length = json.JSONDecoder().raw_decode(text[start:])
                start = text.find("{", start + length)
            except ValueError:
                start = text.find("{", start + 1)
        return found

    def _shown(self, result: dict[str, Any]) -> str:
        observation = result.get("observation", {})
        if "observation" in self._options:
            observation = observation[self._options["observation"]]
        return observation if isinstance(observation, str) else json.dumps(observation)


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of MCP as chat templates have it."""
    schema = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}


def answer_of(observation: dict[str, Any]) -> dict[str, Any]:
    """Return the text and the images that a tool answered."""
    if error := observation.get("error"):
        return {"content": f"Error: {error.get('message', error) if isinstance(error, dict) else error}"}
    result = observation.get("result", observation)
    if not (isinstance(result, dict) and isinstance(result.get("content"), list)):
        return {"content": result if isinstance(result, str) else json.dumps(result)}
    texts = [part["text"] for part in result["content"] if part.get("type") == "text"]
    images = [part for part in result["content"] if part.get("type") == "image"]
    return {
        "content": ("Error: " if result.get("is_error") else "") + "\n".join(texts),
        "media": [
            {"url": f"data:{image['mimeType']};base64,{image['data']}", "digest": "", "kind": image["mimeType"]}
            for image in images
        ],
    }


# Servers of installed packages, one of each in a host

_BEGUN: dict[str, dict[str, Any]] = {}
"""Server and arguments of reset -> the first observation."""
_TOLD: set[str] = set()
_STARTED: dict[str, str] = {}
_LOCK = threading.Lock()


def url_of(server: str) -> str:
    """Return the URL of a server. That of an installed package is started when it is first asked for."""
    if "://" in server:
        return server.rstrip("/")
    with _LOCK:
        if server not in _STARTED:
            _STARTED[server] = _start(server)
        return _STARTED[server]


def _start(package: str) -> str:
    import uvicorn

    place = place_of(package)
    app = importlib.import_module(place).app
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws_max_size=MAX_BYTES))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=place, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError(f"the server of {place} did not start; its output says why")
        time.sleep(0.01)
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def place_of(package: str) -> str:
    """Return the module with the server of an installed package, by the name of the package or of its module."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(package) or ():
            if str(file).endswith(SERVER):
                return str(file)[: -len(".py")].replace("/", ".")
    module = re.sub(r"[^\w.]", "_", package)
    for name in (module, f"{module}.server.app", f"{module}_env.server.app"):
        with contextlib.suppress(ModuleNotFoundError):
            if "." in name and importlib.util.find_spec(name):
                return name
    raise ValueError(
        f"url: got {package!r}, expected http://..., an installed package with {SERVER}, or a module with `app`"
    )


def tasks(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield tasks without end: episodes with seeds from 0 on."""
    return ({"messages": [""], "info": {"options": {"reset": {"seed": seed}}}} for seed in itertools.count())
