"""An environment that a server elsewhere runs, over HTTP. The server scales by itself, and may be in any language.

All requests are POSTs with a JSON object, and answers are JSON objects; `json_form.py` defines their parts:

    /start   {"problem", "seed", "options"}           -> {"session", "messages", "tools", "state"}
    /load    {"problem", "seed", "options", "state"}  -> {"session", "tools", "state"}
    /reply   {"session", "turn", "said"}              -> {"reply", "state"}
    /close   {"session"}                              -> {}

`tools` and `state` may be left out. `turn` counts from 1. A lost request is sent again, so a server must repeat its
answer to a turn that it has already answered. A server should drop sessions that have been silent for long. Status 400
to 499 with {"error": text} is a fault of the environment and fails the rollout. 404 means that the session no longer
exists: the environment then resumes from its state, if it has one. After 408, 429 and 500 to 599 the request is sent
again after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from msgspec import Meta

from rftstream.config import secrets
from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import Problem
from rftstream.environments.base import Reply
from rftstream.environments.foreign import ForeignEnvironment
from rftstream.environments.json_form import problem_to_plain
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostTimeout
from rftstream.http.address import split_url
from rftstream.http.client import Answer, AnswerTooLong, LoopClient, RequestFailed, pause_s

MAX_ANSWER_BYTES = 16 << 20
PAUSE_S = 0.5
"""Seconds before the second try; the pause doubles before each further try."""
BUSY = frozenset({408, 429})
GONE = frozenset({404, 410})

_PLACES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()
"""Event loop, `max_concurrent` -> semaphore for requests, shared by all environments with that setting."""


class SessionGone(HostError):
    """The server no longer knows the session."""


class ServedEnvironment(ForeignEnvironment):
    """An environment on a server."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[environments.served]`."""

        url: str = ""
        """The server's address, such as `http://127.0.0.1:9000/games`."""
        options: dict[str, Any] = field(default_factory=dict)
        """Settings of the environment. The server gets them with every start."""
        api_key: str | None = None
        """`"env:NAME"`: sent as the bearer token. The value is read from the environment and never written."""
        timeout_s: Annotated[float, Meta(gt=0)] = 60.0
        """Seconds to wait for one answer."""
        tries: Annotated[int, Meta(ge=1)] = 3
        """Tries of a request if the server cannot be reached or is busy."""
        max_concurrent: Annotated[int, Meta(ge=1)] = 64
        """Largest number of requests at once, for each explorer."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        address = split_url(config.url)
        if address is None:
            raise ConfigError(f"environments.served.url: got {config.url!r}, expected an address as http://HOST:PORT")
        key = ""
        if config.api_key is not None:
            key = secrets.reveal({"api_key": config.api_key}, where="environments.served")["api_key"]
        self._config = config
        self._http = LoopClient(address, key=key, max_bytes=MAX_ANSWER_BYTES)
        self._arguments = {"problem": problem_to_plain(problem), "seed": seed, "options": config.options}
        self._on_its_way: asyncio.Task[Answer] | None = None
        """A request whose caller may be cancelled. The next request waits for it."""
        self._session: Any = None
        self._turn = 0

    async def reply(self, said: AssistantMessage) -> Reply:
        self._turn += 1
        return await super().reply(said)

    async def close(self) -> None:
        """End the session. An abandoned request may still start a session, so its answer is waited for."""
        if self._on_its_way is not None:
            with contextlib.suppress(RequestFailed, HostedCodeError):
                answer = await self._on_its_way
                if self._session is None and answer.status < 400:
                    self._session = self._parsed("start", answer.body).get("session")
        if self._session is not None:
            with contextlib.suppress(HostError, HostedCodeError):
                await self._post("close", {"session": self._session}, tries=1)
        await self._http.close()

    async def _open(self, do: str, **fields: Any) -> Mapping[str, Any]:
        answer = await self._post(do, {**self._arguments, **fields}, tries=self._config.tries)
        if "session" not in answer:
            raise HostedCodeError(f"{self._config.url}/{do}: the answer has no 'session'")
        self._session = answer["session"]
        return answer

    async def _ask(self, do: str, **fields: Any) -> Mapping[str, Any]:
        body = {"session": self._session, "turn": self._turn, **fields}
        return await self._post(do, body, tries=self._config.tries)

    def _is_lost(self, error: HostError) -> bool:
        return isinstance(error, SessionGone)

    async def _post(self, resource: str, body: Mapping[str, Any], *, tries: int) -> Mapping[str, Any]:
        """Return the server's answer, after at most `tries` tries."""
        data, where = json.dumps(body).encode(), f"{self._config.url}/{resource}"
        for number in range(tries):
            if number:
                await asyncio.sleep(pause_s(number, PAUSE_S))
            try:
                self._on_its_way = asyncio.get_running_loop().create_task(self._send(resource, data))
                answer = await asyncio.shield(self._on_its_way)
                self._on_its_way = None
            except AnswerTooLong:
                self._on_its_way = None
                raise HostedCodeError(f"{where}: got more than {MAX_ANSWER_BYTES} bytes") from None
            except RequestFailed as error:
                self._on_its_way = None
                trouble, timed_out = str(error), error.timed_out
                continue
            if answer.status < 400:
                return self._parsed(resource, answer.body)
            trouble, timed_out = f"status {answer.status}: {_error_text(answer.body)}", False
            if answer.status in GONE and resource == "reply":
                raise SessionGone(f"{where}: {trouble}")
            if answer.status < 500 and answer.status not in BUSY:
                raise HostedCodeError(f"{where}: {trouble}")
        text = f"{where}: {trouble}, after {tries} tries"
        raise HostTimeout(text) if timed_out else HostError(text)

    async def _send(self, resource: str, data: bytes) -> Answer:
        limit = self._config.max_concurrent
        places = _PLACES.setdefault(asyncio.get_running_loop(), {}).setdefault(limit, asyncio.Semaphore(limit))
        async with places:
            return await self._http.ask("POST", f"/{resource}", data, timeout_s=self._config.timeout_s)

    def _parsed(self, resource: str, answer: bytes) -> Mapping[str, Any]:
        try:
            parsed = json.loads(answer)
        except ValueError as error:
            raise HostedCodeError(f"{self._config.url}/{resource}: the answer is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise HostedCodeError(f"{self._config.url}/{resource}: got {str(parsed)[:100]}, expected a JSON object")
        return {name: value for name, value in parsed.items() if name != "state" or value is not None}


def _error_text(answer: bytes) -> str:
    """Return the server's error message."""
    try:
        return str(json.loads(answer)["error"])[:2000]
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode("utf-8", "replace")
