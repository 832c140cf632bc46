"""The common base of rewards that call a served model: settings, errors, several rollouts at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.errors import ConfigError, RewardError, RewardTimeout
from rftstream.http.client import Call
from rftstream.models.server_client import ModelServer, Refused, Unreachable
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.evaluating import allow_time
from rftstream.rewards.event_loop import caught


@dataclass(frozen=True, kw_only=True)
class ServedConfig:
    """Settings of a reward that calls a served model."""

    url: str | None = None
    """URL of the server's API: `http://127.0.0.1:8000/v1`."""
    model: str | None = None
    """Name of the model on the server."""
    api_key: str | None = None
    """`"env:NAME"`: sent as the bearer token. The value is read from the environment and never written."""
    max_concurrent: Annotated[int, Meta(ge=1)] = 32
    """Requests at once, for each of `verifier.processes` children."""
    timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds to wait for one answer, in place of `verifier.timeout_s`."""
    tries: Annotated[int, Meta(ge=1)] = 3
    """Tries of a request if the server cannot be reached or is busy."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, as the server defines them."""


UNSEEN = {"api_key": None, "max_concurrent": 1, "timeout_s": 1.0, "tries": 1}
"""Settings that change no score."""


GREEDY = {"temperature": 0.0}
"""Fields of requests to generating models."""


class ServerRefusal(RewardError):
    """The server rejects a request of this form. Another try would not change that."""


class AskedModel:
    """A served model that is called through `resource` of its server. A reward makes it; RewardErrors begin with
    `name`."""

    def __init__(self, name: str, config: ServedConfig, resource: str, *, fixed: Mapping[str, Any] = GREEDY) -> None:
        """`fixed`: fields of every request besides the model's name."""
        if not config.url or not config.model:
            raise ConfigError(f"rewards.{name}: expected url and model, where the model is served and its name there")
        self._name = name
        self._fixed = {"model": config.model, **fixed}
        self._extra = config.extra
        self._timeout_s = config.timeout_s
        self._longest_s = config.timeout_s * (2 * config.tries - 1)
        """Seconds after which a request has its answer or its error. A server that is busy may ask for a pause."""
        self._server = ModelServer(
            config.url,
            resource,
            api_key=config.api_key,
            timeout_s=config.timeout_s,
            tries=config.tries,
            section=f"rewards.{name}",
        )

    def digest(self, body: dict[str, Any]) -> str:
        """Return a digest of a request: the server, the model, its sampling, and the whole body."""
        whole = [self._server.where, {**self._fixed, **body, **self._extra}]
        return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()

    def ask(self, body: dict[str, Any], *, hint: str = "", call: Call | None = None) -> dict[str, Any]:
        """Return the server's answer. RewardError if there is none. `hint`: advice at the end of the error if the
        server refuses. `call` counts the tries in vain."""
        allow_time(self._longest_s)
        try:
            return self._server.ask({**self._fixed, **body, **self._extra}, call, waits_once=True)
        except Refused as error:
            raise ServerRefusal(f"{self._name}: {error}{hint}") from None
        except Unreachable as error:
            if error.timed_out and not error.is_away:
                said = f"no answer within {self._timeout_s:g} s (rewards.{self._name}.timeout_s)"
                raise RewardTimeout(f"{self._name}: {self._server.where}: {said}") from None
            raise (RewardTimeout if error.timed_out else RewardError)(f"{self._name}: {error}") from None


class Concurrent:
    """A reward whose calls may run at the same time, in threads. A subclass defines `__call__`."""

    batched = True

    def __init__(self, threads: int) -> None:
        self.num_concurrent = threads if threads > 1 else 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=type(self).__name__)

    def __call__(self, item: RewardInput) -> Score:
        raise NotImplementedError

    def score_all(self, items: Sequence[RewardInput]) -> list[Score | BaseException]:
        """Return the score of each item, or the exception that explains its absence. The calls run at the same time."""
        if len(items) == 1:
            return [caught(self, items[0])]
        return list(self._threads.map(lambda item: caught(self, item), items))


# ------------------------------------------------------------------------------------------ scoring

Endpoint = Literal["classify", "pooling", "score"]
MAX_SHOWN = 200
"""Largest number of characters of an answer that an error shows."""


class ScoringEndpoint:
    """A reward model behind an endpoint: vLLM's `/classify`, `/pooling` and `/score`, or a compatible one.
    `rewards.reward_model` makes it and calls it for one rollout at a time, in threads.

    Sources of the forms: vLLM, vllm/entrypoints/pooling/{classify,pooling,score}/protocol.py."""

    def __init__(self, config: ServedConfig, endpoint: Endpoint) -> None:
        self._endpoint: Endpoint = endpoint
        self._model = AskedModel("reward_model", config, endpoint, fixed={})

    def outputs(self, item: RewardInput, text: str | None) -> list[float]:
        """Return the model's output for a rollout: one number, or one for each label. `text` replaces the conversation,
        if given. RewardError for an answer without numbers."""
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
        return {"input": text} if text is not None else {"messages": [_openai(message) for message in item.messages]}


_FIELD = {"classify": "data[0].probs", "pooling": "data[0].data", "score": "data[0].score"}


def _numbers(data: Mapping[str, Any], endpoint: Endpoint) -> list[float]:
    """Return the numbers of an answer. LookupError, TypeError or ValueError if there are none."""
    found: Any = data[_FIELD[endpoint].rpartition(".")[2]]
    if endpoint == "score":
        found = [found]
    if isinstance(found, list) and found and isinstance(found[0], list):
        found = found[-1]  # one row for each token: the last one has seen all tokens
    if not isinstance(found, list) or not found:
        raise TypeError
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in found):
        raise ValueError
    return [float(one) for one in found]


def _openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form, in which the arguments of calls are JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"].get("arguments", {}))}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
