"""Requests as coding agents send them: two of each, recorded with their long texts and most of their tools cut out.

In the first the agent asks, and was answered `I compute.` with a call of a tool; in the second it goes on from that.
tests/e2e/test_coding_agents.py has the agents themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from rftstream.contracts.assistant import ToolCall
from rftstream.gateway.dialects import DIALECTS, read_call
from rftstream.roles.explorer.model_calls import ModelCall, SampledCall
from tests.suite.each import each
from tests.unit.gateway.answering import ROLLOUT, said

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "client_requests.json").read_text())
TOOLS = {
    "Claude Code 2.1.197": ("Bash", ["Agent"], []),
    "Codex 0.171.0": ("exec_command", ["exec_command", "multi_agent_v1.wait_agent"], ["web_search"]),
}
"""Client -> the tool that it was told to call, tools that the model is shown, and those that are left out."""


@each("recorded", RECORDED, ids=lambda recorded: recorded["client"])
def test_a_recorded_agent_is_understood_and_goes_on_from_its_answer(recorded: Any) -> None:
    dialect = DIALECTS[recorded["path"]]
    first, second = (read_call(dialect, json.dumps(body).encode(), {}) for body in recorded["bodies"])
    assert isinstance(first, ModelCall) and isinstance(second, ModelCall), (first, second)
    called, shown, left_out = TOOLS.get(recorded["client"], ("add", ["add"], []))
    call = ToolCall(id="call_0_0", name=called, arguments=recorded["arguments"], text="")
    answer = dialect.answer(
        SampledCall(
            call_id=f"{ROLLOUT}/call/0", created=1, model=first.model, num_prompt_tokens=1, num_sampled_tokens=1,
            said=said("I compute.", reasoning="I have a tool for that.", tool_calls=(call,)),
        )
    )  # fmt: skip
    messages = second.messages
    if second.unresolved is not None:
        found = second.unresolved({f"{ROLLOUT}/call/0": msgspec.json.encode(answer)}.get)
        assert isinstance(found, tuple), found
        messages = found
    assert messages[: len(first.messages)] == first.messages
    assert messages[len(first.messages)] == dialect.served(answer)
    assert [message.role for message in messages[len(first.messages) + 1 :]] == ["tool"]
    assert first.tools == second.tools and [one["function"]["name"] for one in first.tools] == shown
    assert first.asked.get("tools left out", []) == left_out
    assert first.constraint is None and first.stream == recorded["bodies"][0].get("stream", False)
