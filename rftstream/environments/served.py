"""An environment that a server elsewhere runs, over HTTP. The server scales by itself, and may be in any language.

All requests are POST with a JSON object, and so are the answers; `json_form.py` has their parts:

    /start   {"problem", "seed", "options"}           -> {"session", "messages", "tools", "state"}
    /load    {"problem", "seed", "options", "state"}  -> {"session", "tools", "state"}
    /reply   {"session", "turn", "said"}              -> {"reply", "state"}
    /close   {"session"}                              -> {}

`tools` and `state` may be left out. `turn` counts from 1. A request that was lost on its way is sent again, so a server
must give the same answer to a turn that it has answered. A server should drop sessions that it has not heard of for
long. Status 400 to 499 with {"error": text} is a fault of the environment and fails the rollout. 404 says that the
session is not there any more: the environment then goes on from its state, if it has one. After 408, 429 and 500 to 599
the request is sent again after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from msgspec import Meta

from rftstream.config import secrets
from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.environments.json_form import (
    messages_from_plain,
    problem_to_plain,
    reply_from_plain,
    said_to_plain,
    tools_from_plain,
)
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostTimeout

MAX_ANSWER_BYTES = 16 << 20
PAUSE_S = 0.5
"""Seconds before the second try; twice as long before each further try."""
BUSY = frozenset({408, 429})
GONE = frozenset({404, 410})

_THREADS: dict[int, ThreadPoolExecutor] = {}
"""`max_concurrent` -> the threads of this process that send requests, for all environments with that setting."""


class SessionGone(HostError):
    """The server does not know the session any more."""


class ServedEnvironment:
    """An environment on a server, as the turn loop sees it. Each method is a request, and each object a session."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[environments.served]`."""

        url: str = ""
        """The server's address, as `http://127.0.0.1:9000/games`."""
        options: dict[str, Any] = field(default_factory=dict)
        """Settings of the environment, which the server gets with every start."""
        api_key: str | None = None
        """`"env:NAME"`: sent as the bearer token; it is looked up in the environment and written nowhere."""
        timeout_s: Annotated[float, Meta(gt=0)] = 60.0
        """Seconds that one answer may take."""
        tries: Annotated[int, Meta(ge=1)] = 3
        """Tries of a request that meets no server, or a busy one."""
        max_concurrent: Annotated[int, Meta(ge=1)] = 64
        """Requests on their way at once, of each explorer."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        address = urlsplit(config.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(f"environments.served.url: got {config.url!r}, expected an address as http://HOST:PORT")
        self._config = config
        self._address = address
        self._arguments = {"problem": problem_to_plain(problem), "seed": seed, "options": config.options}
        self._connection: http.client.HTTPConnection | None = None
        """The connection of the last request, for the next one; None while a request has it."""
        self._on_its_way: asyncio.Future[tuple[int, bytes]] | None = None
        """A request whose caller may be cancelled. It is waited for before the next one."""
        self._session: Any = None
        self._turn = 0
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._state: bytes | None = None

    async def start(self) -> tuple[ChatMessage, ...]:
        answer = await self._begin("start", self._arguments)
        return messages_from_plain(answer.get("messages"), what="start")

    async def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools, which came with the first answer."""
        return self._tools

    async def reply(self, said: AssistantMessage) -> Reply:
        self._turn += 1
        fields = {"turn": self._turn, "said": said_to_plain(said)}
        try:
            answer = await self._ask("reply", {"session": self._session, **fields})
        except SessionGone:
            if self._state is None:
                raise
            await self._begin("load", {**self._arguments, "state": json.loads(self._state)})
            answer = await self._ask("reply", {"session": self._session, **fields})
        self._keep_state(answer)
        return reply_from_plain(answer.get("reply"))

    def save(self) -> bytes | None:
        return self._state

    async def load(self, state: bytes) -> None:
        await self._begin("load", {**self._arguments, "state": json.loads(state)})

    async def close(self) -> None:
        """End the session. A request that was given up may still begin one, so its answer is waited for."""
        if self._on_its_way is not None:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, HostedCodeError):
                status, answer = await self._on_its_way
                if self._session is None and status < 400:
                    self._session = self._parsed("start", answer).get("session")
        if self._session is not None:
            with contextlib.suppress(HostError, HostedCodeError):
                await self._ask("close", {"session": self._session}, tries=1)
        self._drop_connection()

    async def _begin(self, resource: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = await self._ask(resource, body)
        if "session" not in answer:
            raise HostedCodeError(f"{self._config.url}/{resource}: the answer has no 'session'")
        self._session = answer["session"]
        self._tools = tools_from_plain(answer.get("tools"))
        self._keep_state(answer)
        return answer

    def _keep_state(self, answer: Mapping[str, Any]) -> None:
        state = answer.get("state")
        self._state = None if state is None else json.dumps(state).encode()

    async def _ask(self, resource: str, body: Mapping[str, Any], *, tries: int = 0) -> Mapping[str, Any]:
        """Return the server's answer, after as many tries as it takes or is allowed."""
        tries = tries or self._config.tries
        data = json.dumps(body).encode()
        limit = self._config.max_concurrent
        if limit not in _THREADS:
            _THREADS[limit] = ThreadPoolExecutor(limit, thread_name_prefix="served environments")
        threads = _THREADS[limit]
        loop = asyncio.get_running_loop()
        for number in range(tries):
            if number:
                await asyncio.sleep(PAUSE_S * 2 ** (number - 1))
            try:
                self._on_its_way = loop.run_in_executor(threads, self._post, resource, data)
                status, answer = await asyncio.shield(self._on_its_way)
                self._on_its_way = None
            except (OSError, http.client.HTTPException) as error:
                self._on_its_way = None
                trouble, timed_out = f"{type(error).__name__}: {error}", isinstance(error, TimeoutError)
                continue
            if status < 400:
                return self._parsed(resource, answer)
            trouble, timed_out = f"status {status}: {_error_text(answer)}", False
            if status in GONE and resource == "reply":
                raise SessionGone(f"{self._config.url}/{resource}: {trouble}")
            if status < 500 and status not in BUSY:
                raise HostedCodeError(f"{self._config.url}/{resource}: {trouble}")
        text = f"{self._config.url}/{resource}: {trouble}, after {tries} tries"
        raise HostTimeout(text) if timed_out else HostError(text)

    def _post(self, resource: str, data: bytes) -> tuple[int, bytes]:
        """Send one request, in a thread. The connection is kept for the next one."""
        connection, self._connection = self._connection, None
        if connection is None:
            kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
            assert self._address.hostname
            connection = kind(self._address.hostname, self._address.port, timeout=self._config.timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._config.api_key is not None:
            revealed = secrets.reveal({"api_key": self._config.api_key}, where="environments.served")
            headers["Authorization"] = f"Bearer {revealed['api_key']}"
        is_done = False
        try:
            connection.request("POST", f"{self._address.path.rstrip('/')}/{resource}", data, headers)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES + 1)
            is_done = len(answer) <= MAX_ANSWER_BYTES
        finally:
            if is_done:
                self._connection = connection
            else:
                connection.close()
        return response.status, answer

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _parsed(self, resource: str, answer: bytes) -> Mapping[str, Any]:
        if len(answer) > MAX_ANSWER_BYTES:
            raise HostedCodeError(f"{self._config.url}/{resource}: got more than {MAX_ANSWER_BYTES} bytes")
        try:
            parsed = json.loads(answer)
        except ValueError as error:
            raise HostedCodeError(f"{self._config.url}/{resource}: the answer is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise HostedCodeError(f"{self._config.url}/{resource}: got {str(parsed)[:100]}, expected a JSON object")
        return parsed


def _error_text(answer: bytes) -> str:
    """Return what the server says is wrong."""
    try:
        return str(json.loads(answer)["error"])[:2000]
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode("utf-8", "replace")
