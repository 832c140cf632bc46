"""A reward model behind an endpoint: vLLM's `/classify`, `/pooling` and `/score`, and whatever speaks one of them.

Sources of the forms: vLLM, vllm/entrypoints/pooling/{classify,pooling,score}/protocol.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from rftstream.errors import RewardError
from rftstream.rewards.base import RewardInput
from rftstream.rewards.served import AskedModel, ServedConfig

Endpoint = Literal["classify", "pooling", "score"]
MAX_SHOWN = 200
"""Most characters of an answer that an error shows."""


class ScoringEndpoint:
    """A served reward model. `rewards.reward_model` makes it and asks it about one rollout at a time, in threads."""

    def __init__(self, config: ServedConfig, endpoint: Endpoint) -> None:
        self._endpoint: Endpoint = endpoint
        self._model = AskedModel("reward_model", config, endpoint, fixed={})

    def outputs(self, item: RewardInput, text: str | None) -> list[float]:
        """Return what the model gives for a rollout: one number, or one for each label. `text` stands for the
        conversation, if it is given. RewardError for an answer without numbers."""
        hint = "; is its context longer than the conversation?"
        answer = self._model.ask(self._body(item, text), hint=hint)
        try:
            return _numbers(answer["data"][0], self._endpoint)
        except (LookupError, TypeError, ValueError):
            shown = json.dumps(answer)[:MAX_SHOWN]
            raise RewardError(
                f"reward_model: no {_FIELD[self._endpoint]} in the server's answer {shown}; is {self._endpoint!r} what "
                "it serves?"
            ) from None

    def _body(self, item: RewardInput, text: str | None) -> dict[str, Any]:
        if self._endpoint == "score":
            return {"text_1": item.prompt, "text_2": item.completion}
        return {"input": text} if text is not None else {"messages": [_openai(one) for one in item.messages]}


_FIELD = {"classify": "data[0].probs", "pooling": "data[0].data", "score": "data[0].score"}


def _numbers(data: Mapping[str, Any], endpoint: Endpoint) -> list[float]:
    """Return the numbers of an answer. LookupError, TypeError or ValueError if there are none."""
    found: Any = data[_FIELD[endpoint].rpartition(".")[2]]
    if endpoint == "score":
        found = [found]
    if isinstance(found, list) and found and isinstance(found[0], list):
        found = found[-1]  # one row for each token: the last has seen all of it
    if not isinstance(found, list) or not found:
        raise TypeError
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in found):
        raise ValueError
    return [float(one) for one in found]


def _openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form, where the arguments of calls are JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"].get("arguments", {}))}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
