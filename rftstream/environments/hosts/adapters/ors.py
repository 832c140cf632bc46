"""Environments that speak ORS, the protocol of OpenReward, by its SDK `openreward`. `target = "ors"`.

Options, also those of a single problem in its `info.options`:

    url           of the server, as http://127.0.0.1:8080; or the name of an environment on OpenReward, as owner/name,
                  for which the host's variable OPENREWARD_API_KEY is the key
    environment   which one of the server's environments, its first by default
    split         the split whose tasks are listed, "train" by default
    task          the task, as the server has listed it
    instructions  text before the prompt

The policy calls the environment's tools, and the rewards of all calls add up. A reply without a call ends the episode;
if the environment has a terminal tool, that gets the text and gives the reward. A call that the environment refuses is
told to the policy; a tool that raises fails the rollout.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OPENREWARD_DISABLE_UPDATE_CHECK", "1")  # read at import

import openreward
from openreward.api.environments.client import EnvironmentsAPI
from openreward.api.environments.types import Task
from openreward.api.errors import ToolCallError

KNOWN = ("url", "environment", "split", "task", "instructions")
PAGE = 100
"""Number of tasks that the server is asked for at once."""


class OrsEnvironment:
    """One episode, as a host calls it."""

    def __init__(self, config: dict[str, Any], *, problem: dict[str, Any], seed: int) -> None:
        self._options = {**config, **problem["info"].get("options", {})}
        if unknown := sorted(set(self._options) - set(KNOWN)):
            raise ValueError(f"options: unknown key {unknown[0]!r}; known: {', '.join(KNOWN)}")
        if missing := [key for key in ("url", "task") if key not in self._options]:
            raise ValueError(f"options: missing {missing[0]}; the source ors:URL lists tasks that have it")
        self._messages = [message for message in problem["messages"] if message["content"]]
        self._session: Any = None
        self._num_calls = 0

    def start(self) -> list[dict[str, Any]]:
        """Open a session, and return the problem's messages and the environment's prompt."""
        environment = environment_of(self._options)
        task = Task(
            server_name=environment.server,
            environment_name=self._options.get("environment"),
            task_spec=self._options["task"],
            namespace=environment.namespace,
        )
        session = environment.session(task=task)
        session.__enter__()
        self._session = session
        before = [{"role": "user", "content": text}] if (text := self._options.get("instructions")) else []
        prompt = [{"role": one.role, **shown(one.blocks)} for one in session.get_messages()]
        return [*self._messages, *before, *prompt]

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools that the environment shows the policy."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema or {"type": "object", "properties": {}},
                },
            }
            for tool in self._session.list_tools()
        ]

    def reply(self, said: dict[str, Any]) -> dict[str, Any]:
        """Call the tools in turn until the episode is over."""
        if not said["tool_calls"]:
            is_final = self._session.is_assistant_message_final()
            output = self._session.call_terminal_tool(said["content"]) if is_final else None
            return {"done": True, "reward": output and output.reward, "metrics": self._metrics()}
        messages, rewards, is_done = [], [], False
        for call in said["tool_calls"]:
            answer, reward, is_done = self._answer(call)
            messages.append({"role": "tool", "name": call["name"], "tool_call_id": call["id"], **answer})
            if reward is not None:
                rewards.append(reward)
            if is_done:
                break
        return {
            "done": is_done,
            "messages": messages,
            "reward": math.fsum(rewards) if rewards else None,
            "metrics": self._metrics(),
        }

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.__exit__(None, None, None)

    def _answer(self, call: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        """Return what a call's message has, its reward, and whether the episode is over."""
        if call["error"] is not None or call["arguments"] is None:
            return {"content": f"Error: {call['error'] or 'the arguments are not a JSON object'}"}, None, False
        self._num_calls += 1
        try:
            output = self._session.call_tool(call["name"], call["arguments"])
        except ToolCallError as error:
            return {"content": f"Error: {error}"}, None, False
        return shown(output.blocks), output.reward, output.finished

    def _metrics(self) -> dict[str, float]:
        return {"tool_calls": float(self._num_calls)}


def shown(blocks: list[Any]) -> dict[str, Any]:
    """Return blocks as the text and the images of a message."""
    if strange := sorted({block.type for block in blocks} - {"text", "image"}):
        raise ValueError(f"got a block of type {strange[0]!r}, expected text or image")
    images = [block for block in blocks if block.type == "image"]
    return {
        "content": "\n".join(block.text for block in blocks if block.type == "text"),
        "media": [
            {"url": f"data:{image.mimeType};base64,{image.data}", "digest": "", "kind": image.mimeType}
            for image in images
        ],
    }


@functools.cache
def client_of(url: str) -> Any:
    """Return the client of a server. The key of OpenReward is sent to OpenReward alone."""
    return EnvironmentsAPI(url, None) if "://" in url else openreward.OpenReward().environments


def environment_of(options: dict[str, Any]) -> Any:
    """Return the environment that the options name."""
    url = options["url"]
    name = "environment" if "://" in url else url
    return client_of(url).get(name, variant=options.get("environment"))


def tasks(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a split, as the server has them."""
    environment, split = environment_of(options), options.get("split", "train")
    known = environment.list_splits()
    if split not in known:
        raise ValueError(f"options.split: got {split!r}, expected one of {', '.join(known)}")
    for first in range(0, environment.num_tasks(split), PAGE):
        for task in environment.get_task_range(split, first, first + PAGE):
            yield {
                "messages": "",
                "info": {"options": {"task": task.task_spec, "environment": task.environment_name}},
            }
