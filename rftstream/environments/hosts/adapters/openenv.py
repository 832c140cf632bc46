"""Environments on a server of openenv-core. `target = "openenv"`; one step for each turn.

It needs the package websockets, which openenv-core brings along, and speaks to the server's `/ws`: one connection is
one episode. Options, also those of a single problem in its `info.options`:

    url           of the server, as http://127.0.0.1:8000
    reset         further arguments of the server's reset, beside the seed
    action        the field of an action that takes the reply's text, "message" by default; "json" if the reply is to
                  hold the action as a JSON object, of which the last one counts
    fields        further fields of every action
    observation   the field of an observation that is shown; without it the observation is shown as JSON
    instructions  text before the first observation
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import websockets.sync.client

KNOWN = ("url", "reset", "action", "fields", "observation", "instructions")
MAX_BYTES = 16 << 20
OPEN_S = 30.0


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
        address = "ws" + options["url"].rstrip("/").removeprefix("http") + "/ws"
        self._connection = websockets.sync.client.connect(address, max_size=MAX_BYTES, open_timeout=OPEN_S)

    def start(self) -> list[dict[str, Any]]:
        """Return the problem's messages, with the first observation at the end."""
        result = self._ask("reset", {"seed": self._seed, **self._options.get("reset", {})})
        text = "\n\n".join(filter(None, (self._options.get("instructions", ""), self._shown(result))))
        if self._messages and self._messages[-1]["role"] == "user":
            last = self._messages[-1]
            return [*self._messages[:-1], {**last, "content": f"{last['content']}\n\n{text}".strip()}]
        return [*self._messages, {"role": "user", "content": text}]

    def reply(self, said: dict[str, Any]) -> dict[str, Any]:
        """Take a step."""
        action = self._action(said["content"])
        if action is None:
            return {"done": False, "messages": ["This holds no JSON object. Answer with the action as one."]}
        result = self._ask("step", {**self._options.get("fields", {}), **action})
        self._steps += 1
        return {
            "done": bool(result.get("done")),
            "messages": [self._shown(result)],
            "reward": result.get("reward"),
            "metrics": {"steps": float(self._steps)},
        }

    def close(self) -> None:
        """End the episode."""
        self._connection.send(json.dumps({"type": "close"}))
        self._connection.close()

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        self._connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._connection.recv())
        if answer.get("type") == "error":
            about = answer.get("data", {})
            raise RuntimeError(f"the server said to {kind!r}: {about.get('message')} ({about.get('code')})")
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


def tasks(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield tasks without end: episodes with seeds from 0 on."""
    return ({"messages": [""], "info": {"options": {"reset": {"seed": seed}}}} for seed in itertools.count())
