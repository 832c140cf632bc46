"""Reads Harbor's Agent Trajectory Interchange Format (ATIF) as chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rftstream.data.tasksets.fields import a_kind
from rftstream.errors import ConfigError
from rftstream.models.chat_template import with_thinking

Row = dict[str, Any]


def is_trajectory(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a trajectory."""
    return str(row.get("schema_version", "")).startswith("ATIF-") and "steps" in row


def chat_of(row: Mapping[str, Any], where: str) -> Row:
    """Return a trajectory as a row with messages and tools. ConfigError for one that is none."""
    steps, agent = row["steps"], row.get("agent")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ConfigError(f"{where}: steps are {a_kind(steps)}, expected a list of objects")
    tools = agent.get("tool_definitions") if isinstance(agent, dict) else None
    known = {name: row[name] for name in ("session_id", "trajectory_id", "extra") if row.get(name) is not None}
    messages = [message for step in steps for message in _messages(step)]
    return {"messages": messages, **({"tools": tools} if tools else {}), **known}


def _messages(step: Mapping[str, Any]) -> Iterator[Row]:
    text = _text(step.get("message"))
    results = (step.get("observation") or {}).get("results", [])
    if step.get("source") != "agent":
        yield {"role": step.get("source"), "content": text}
    else:
        calls = [
            {
                "id": call.get("tool_call_id"),
                "type": "function",
                "function": {"name": call.get("function_name"), "arguments": call.get("arguments")},
            }
            for call in step.get("tool_calls") or ()
        ]
        content = with_thinking(step.get("reasoning_content") or "", text)
        yield {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    for result in results:
        call = result.get("source_call_id")
        yield {"role": "tool", "content": _text(result.get("content")), **({"tool_call_id": call} if call else {})}


def _text(content: Any) -> Any:
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return "" if content is None else content
