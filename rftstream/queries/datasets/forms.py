"""The forms in which rollouts leave a run: one row for each rollout, or for two siblings.

sft, parquet    a chat (`messages`, `tools`), as TRL and `experts.source` read it; parquet has the tokens, too
pairs           prompt, chosen and rejected: the best and the worst of a group
openai          the messages of OpenAI's fine-tuning files: arguments as JSON texts, no reasoning
atif            Harbor's Agent Trajectory Interchange Format, version 1.7: a step for each message

Every row names where it comes from: rollout, version, verdict and scorer.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rftstream.contracts.rollouts import Rollout, Turn
from rftstream.contracts.tasks import ChatMessage
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.models.calls.tool_calls import split_reasoning
from rftstream.models.chat_template import with_thinking
from rftstream.queries.datasets.scorers import scorer_of
from rftstream.queries.plain import chat_row
from rftstream.version import __version__

Row = dict[str, Any]

ATIF = "ATIF-v1.7"
"""Oldest version of the format that has all that is written here."""


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """An assistant turn in its parts."""

    content: str
    """The text without reasoning and tool calls."""
    reasoning: str
    calls: tuple[Row, ...]
    """The tool calls in OpenAI's form, with their arguments as objects. Calls that could not be read stay in the
    text."""


def parts_of(turn: Turn) -> SpokenTurn:
    """Return an assistant turn without its reasoning and its calls, which the turn's text has, too."""
    reasoning, content, _ = split_reasoning(turn.content, in_thought=bool(turn.reasoning))
    calls = turn.tool_calls
    if not calls or any(call.arguments is None or call.text not in content for call in calls):
        return SpokenTurn(content, reasoning, ())
    for text in dict.fromkeys(call.text for call in calls):
        content = content.replace(text, "", 1)
    made = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return SpokenTurn(content.strip(), reasoning, tuple(made))


def messages_of(rollout: Rollout, *, openai: bool = False) -> tuple[list[Row], list[Row]]:
    """Return the messages of a rollout's problem, and those after it. A tool's message names the call that it answers.
    `openai`: arguments are JSON texts, and reasoning is left out."""
    open_calls: deque[str] = deque()
    said = []
    for turn in rollout.turns:
        row: Row = {"role": turn.role, "content": turn.content}
        if turn.role == "assistant":
            parts = parts_of(turn)
            calls = [dict(call) for call in parts.calls]
            if openai:
                for call in calls:
                    function = call["function"]
                    call["function"] = {**function, "arguments": json.dumps(function["arguments"])}
            if openai:
                row["content"] = parts.content
            elif calls:
                row["content"] = with_thinking(parts.reasoning, parts.content)
            if calls:
                row["tool_calls"] = calls
                open_calls = deque(call["id"] for call in calls)
        elif turn.role == "tool" and open_calls:
            row["tool_call_id"] = open_calls.popleft()
        said.append(row)
    return [chat_row(message) for message in _asked(rollout)], said


def _asked(rollout: Rollout) -> Sequence[ChatMessage]:
    return () if rollout.problem is None else rollout.problem.messages


def lineage_of(verified: VerifiedRollout) -> Row:
    """Return where a rollout comes from, as columns."""
    rollout, verdict = verified.rollout, verified.verdict
    spans = [] if rollout is None else [span for segment in rollout.segments for span in segment.versions]
    return {
        "rollout_id": verified.ids.rollout_id,
        "taskset": verified.ids.taskset,
        "versions": sorted({span.version for span in spans}),
        "reward": None if verdict is None else verdict.reward,
        "reward_parts": {} if verdict is None else dict(verdict.parts),
        "scorer": scorer_of(verified),
    }


def _tools(rollout: Rollout) -> Row:
    tools = () if rollout.problem is None else rollout.problem.tools
    return {"tools": [dict(tool) for tool in tools]} if tools else {}


def _chat(verified: VerifiedRollout, rollout: Rollout) -> Row:
    asked, said = messages_of(rollout)
    return {"messages": asked + said, **_tools(rollout), **lineage_of(verified)}


def _openai(verified: VerifiedRollout, rollout: Rollout) -> Row:
    asked, said = messages_of(rollout, openai=True)
    return {"messages": asked + said, **_tools(rollout), **lineage_of(verified)}


def _parquet(verified: VerifiedRollout, rollout: Rollout) -> Row:
    arrays = {
        name: [getattr(segment, name).numpy().tolist() for segment in rollout.segments]
        for name in ("token_ids", "loss_mask", "behavior_logprobs")
    }
    parts = lineage_of(verified)
    parts["reward_parts"] = json.dumps(parts["reward_parts"])  # the names differ from row to row
    asked, said = messages_of(rollout)
    texts = {"messages": json.dumps(asked + said), "tools": json.dumps(_tools(rollout).get("tools", []))}
    status = {"status": str(rollout.status), "num_tokens": rollout.num_tokens}
    return {**parts, **status, **texts, **arrays}


def _atif(verified: VerifiedRollout, rollout: Rollout) -> Row:
    steps: list[Row] = [_step(str(message.role), message.content) for message in _asked(rollout)]
    tokens = _tokens_of_turns(rollout)
    for turn in rollout.turns:
        if turn.role == "assistant":
            steps.append(_agent_step(turn, next(tokens)))
        elif turn.role == "tool" and steps and steps[-1]["source"] == "agent":
            _observe(steps[-1], turn.content)
        else:
            steps.append(_step(turn.role, turn.content))
    lineage = lineage_of(verified)
    return {
        "schema_version": ATIF,
        "session_id": verified.ids.rollout_id,
        "trajectory_id": verified.ids.rollout_id,
        "agent": {"name": "rftstream", "version": __version__, **_tool_definitions(rollout)},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {"total_completion_tokens": rollout.num_tokens, "total_steps": len(steps)},
        "extra": lineage,
    }


def _tool_definitions(rollout: Rollout) -> Row:
    tools = _tools(rollout)
    return {"tool_definitions": tools["tools"]} if tools else {}


def _step(role: str, content: str) -> Row:
    return {"source": "system" if role == "system" else "user", "message": content}


def _agent_step(turn: Turn, tokens: Row) -> Row:
    parts = parts_of(turn)
    step: Row = {"source": "agent", "message": parts.content, "llm_call_count": 1}
    if parts.reasoning:
        step["reasoning_content"] = parts.reasoning
    if parts.calls:
        step["tool_calls"] = [
            {
                "tool_call_id": call["id"],
                "function_name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in parts.calls
        ]
    extra = {} if turn.reward is None else {"extra": {"reward": turn.reward}}
    return {**step, "metrics": {"completion_tokens": turn.num_tokens, **tokens, **extra}}


def _observe(step: Row, content: str) -> None:
    results = step.setdefault("observation", {"results": []})["results"]
    calls = step.get("tool_calls", ())
    source = {"source_call_id": calls[len(results)]["tool_call_id"]} if len(results) < len(calls) else {}
    results.append({**source, "content": content})


def _tokens_of_turns(rollout: Rollout) -> Iterator[Row]:
    """Yield the sampled tokens and logprobs of each assistant turn; nothing of them if they cannot be told apart."""
    masks = [segment.loss_mask.numpy().astype(bool) for segment in rollout.segments]
    counts = [turn.num_tokens for turn in rollout.turns if turn.role == "assistant"]
    if sum(counts) != sum(int(mask.sum()) for mask in masks):
        yield from ({} for _ in counts)
        return
    pairs = list(zip(rollout.segments, masks, strict=True))
    ids = np.concatenate([segment.token_ids.numpy()[mask] for segment, mask in pairs] or [np.zeros(0, np.int32)])
    logprobs = np.concatenate([segment.behavior_logprobs.numpy()[mask] for segment, mask in pairs] or [np.zeros(0)])
    begin = 0
    for count in counts:
        one = slice(begin, begin + count)
        yield {"completion_token_ids": ids[one].tolist(), "logprobs": logprobs[one].tolist()}
        begin += count


def pair_of(better: VerifiedRollout, worse: VerifiedRollout) -> Row | None:
    """Return two siblings as a preference; None if a record lacks its rollout, or if both said the same."""
    first, second = better.rollout, worse.rollout
    if first is None or second is None or not first.turns or not second.turns:
        return None
    (asked, chosen), (_, rejected) = messages_of(first), messages_of(second)
    if chosen == rejected:
        return None
    sides = {"chosen": lineage_of(better), "rejected": lineage_of(worse)}
    columns = {f"{side}_{name}": value for side, lineage in sides.items() for name, value in lineage.items()}
    taskset = columns.pop("chosen_taskset")
    del columns["rejected_taskset"]
    return {"prompt": asked, "chosen": chosen, "rejected": rejected, **_tools(first), "taskset": taskset, **columns}


FORMS: Mapping[str, Callable[[VerifiedRollout, Rollout], Row]] = {
    "sft": _chat,
    "openai": _openai,
    "atif": _atif,
    "parquet": _parquet,
}
"""Form of a row for each rollout -> the function that makes it. `pairs` is the form of a row for two."""
LEARNED = {"sft": ("messages", "tools"), "openai": ("messages", "tools"), "pairs": ("prompt", "chosen", "rejected")}
"""Form whose rows are to be learned from -> the columns that are. Rows that are alike in these are written once."""
