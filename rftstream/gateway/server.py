"""The HTTP server of the gateway: an event loop in a thread of the explorer.

It checks keys, reads requests with their dialect, and hands them to the agent loop through a `CallInbox`. An answer is
sent after the agent loop has written it to the log. Even a stream is sent as a whole then; before that, it only sends
keep-alives.

| path | key | what |
|---|---|---|
| POST /v1/chat/completions, /v1/responses, /v1/messages | the rollout's | a model call |
| POST /v1/messages/count_tokens | the rollout's | how many tokens a prompt would have |
| GET /v1/models, /v1/models/NAME | the rollout's or the run's | the one model: its name, `policy`, `policy:ROLE` |
| POST /v1/rollouts/end | the rollout's | ends the rollout, with `reward`, `parts`, `roles`, `metrics` or `error` |
| POST /v1/sessions | the run's | a rollout for an agent that runs elsewhere |
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rftstream.contracts.role_names import RoleName
from rftstream.errors import ConfigError
from rftstream.gateway.addresses import OtherGateways, base_url, parse_address
from rftstream.gateway.dialects import CHAT, DIALECTS, MESSAGES, ServedDialect, read_call
from rftstream.gateway.dialects.events import Event
from rftstream.gateway.dialects.fields import ALIAS, RequestRefused, parse_body, role
from rftstream.gateway.exchange import AgentExchange
from rftstream.gateway.keys import GatewayKeys, KeyOwner
from rftstream.http.server import HttpAnswer, HttpConnection, HttpListener, HttpRequest, WhenDelivered
from rftstream.loops import LoopThread
from rftstream.models.calls.call_reading import kind
from rftstream.roles.explorer.model_calls import (
    AgentAnswer,
    CallAnswer,
    CallInbox,
    CountWanted,
    ModelCall,
    Refusal,
    RolloutEnd,
    RolloutEnded,
    SessionGranted,
    SessionWanted,
    TokensCounted,
)

log = logging.getLogger(__name__)

LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Address that listens everywhere -> the address under which this machine reaches it."""

MAX_PARTS = 256
"""Largest number of parts or metrics that an agent may post."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Where the gateway listens, and its limits."""

    section: str = RoleName.explorer.value
    """The section of the run file with these settings."""
    address: str = "127.0.0.1:0"
    """`HOST:PORT`; port 0: any free port."""
    number: int = 0
    """Number of the explorer on its host. A fixed port belongs to number 0; each further number adds 1."""
    public_url: str = ""
    """The URL up to `/v1` under which agents elsewhere reach the gateway, with `{port}` for the port; empty: made from
    the address."""
    model: str = ALIAS
    """The name of the model in the list of models."""
    max_body_bytes: int = 4 << 20
    """Largest body of a request, in bytes."""
    max_connections: int = 1024
    """Largest number of connections at once."""
    keep_alive_s: float = 15.0
    """Seconds between two keep-alives in a waiting stream. A refusal within the first of these intervals has its own
    status; later it is an event."""


class GatewayServer:
    """The gateway of one explorer. Its composition root makes it, calls `start` once, and `close` at the end, after
    closing the inbox."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: GatewayKeys,
        inbox: CallInbox,
        others: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`others`: returns the base URLs of the run's other gateways where rollouts wait; it may block."""
        self._others = OtherGateways(others)
        self._settings, self._keys = settings, keys
        self._exchange = AgentExchange(inbox)
        self._listener = HttpListener(
            self._handle,
            name="gateway",
            max_body_bytes=settings.max_body_bytes,
            max_connections=settings.max_connections,
        )
        self._loop: LoopThread | None = None
        self._routes: dict[tuple[str, str], Callable[[HttpRequest, HttpConnection], Any]] = {
            ("GET", "models"): self._models,
            ("POST", "messages/count_tokens"): self._count,
            ("POST", "rollouts/end"): self._end,
            ("POST", "sessions"): self._session,
        }
        self.base_url = ""
        """The base_url for OpenAI's and Anthropic's clients; set by `start`."""
        self.local_url = ""
        """The same for clients on this machine: it reaches this explorer and no other."""

    def start(self) -> str:
        """Start listening, and return the base URL. ConfigError if the address is not available."""
        number = self._settings.number
        host, port = parse_address(self._settings.address, number + 1, section=self._settings.section)
        port += number if port else 0
        loop = LoopThread("gateway")
        try:
            found = loop.call(self._listener.listen(host, port))
        except OSError as error:
            loop.close()
            section = self._settings.section
            raise ConfigError(
                f"{section}.gateway_address: cannot listen at port {port} of {host}, which {section} {number} here "
                f"takes for {self._settings.address}: {error}; end what listens there, or take another port"
            ) from None
        self._loop = loop
        shown = f"[{host}]" if ":" in host else host
        self.base_url = base_url(self._settings.public_url, host, found)
        self.local_url = f"http://{LOOPBACK_OF.get(host, shown)}:{found}/v1"
        log.info("the gateway for agents is at %s", self.base_url)
        return self.base_url

    def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._loop is not None:
            self._loop.call(self._listener.close())
            self._loop.close()
            self._loop = None

    # ------------------------------------------------------------------------------------------ requests

    def _handle(self, request: HttpRequest, connection: HttpConnection) -> Awaitable[WhenDelivered] | None:
        path = request.path.strip("/")
        while path.startswith("v1/"):  # one client adds it to the base URL, the other does not
            path = path.removeprefix("v1/")
        dialect = DIALECTS.get(path)
        speaks = dialect or (MESSAGES if "anthropic-version" in request.headers else CHAT)
        try:
            if dialect is not None and request.method == "POST":
                return self._call(dialect, request, connection)
            if request.method == "GET" and path.startswith("models/"):
                self._model(request, connection, path.removeprefix("models/"))
            elif (route := self._routes.get((request.method, path))) is not None:
                if (work := route(request, connection)) is not None:
                    return self._refusing(work, speaks, connection)
            else:
                known = dialect is not None or any(path == name for _, name in self._routes)
                _refuse(
                    405 if known else 404,
                    f"{request.method} {request.path}: expected POST /v1/chat/completions, /v1/responses, "
                    "/v1/messages, /v1/messages/count_tokens, /v1/rollouts/end, /v1/sessions or GET /v1/models",
                )
        except RequestRefused as refused:
            connection.send(_refused(speaks, refused.refusal))
        connection.finish()
        return None

    async def _refusing(self, work: Awaitable[None], speaks: ServedDialect, connection: HttpConnection) -> None:
        try:
            await work
        except RequestRefused as refused:
            connection.send(_refused(speaks, refused.refusal))

    def _call(
        self, dialect: ServedDialect, request: HttpRequest, connection: HttpConnection
    ) -> Awaitable[WhenDelivered] | None:
        """Hand a call to the agent loop. Its answer comes through a callback, since a task for each call would be
        expensive."""
        owner = self._owner(request)
        self._check_size(request)
        call = read_call(dialect, request.body, request.headers)
        if isinstance(call, Refusal):
            connection.send(_refused(dialect, call))
            connection.finish()
            return None
        if call.stream:
            return self._stream(dialect, call, owner, connection)

        def answered(answer: AgentAnswer) -> None:
            if isinstance(answer, CallAnswer):
                connection.send(HttpAnswer(status=200, body=answer.body, headers=_numbered(owner.rollout_id, answer)))
                connection.finish(lambda: self._exchange.note_delivered(owner, answer))
            else:
                connection.send(_refused(dialect, _refusal(answer)))
                connection.finish()

        self._exchange.ask(owner, call, connection, answered)
        return None

    async def _stream(
        self, dialect: ServedDialect, call: ModelCall, owner: KeyOwner, connection: HttpConnection
    ) -> WhenDelivered:
        asked = self._exchange.answer_to(owner, call, connection)
        answer = await self._send_stream(dialect, call, asked, connection)
        return (lambda: self._exchange.note_delivered(owner, answer)) if isinstance(answer, CallAnswer) else None

    async def _send_stream(
        self, dialect: ServedDialect, call: ModelCall, asked: asyncio.Future[AgentAnswer], connection: HttpConnection
    ) -> AgentAnswer:
        has_begun = False
        while not asked.done():
            await asyncio.wait([asked], timeout=self._settings.keep_alive_s)
            if not asked.done():
                if not has_begun:
                    connection.begin_events()
                    has_begun = True
                connection.send_events(b": the call is being sampled\n\n")
        answer = asked.result()
        if not has_begun and not isinstance(answer, CallAnswer):
            connection.send(_refused(dialect, _refusal(answer)))
            return answer
        if not has_begun:
            connection.begin_events()
        if isinstance(answer, CallAnswer):
            events = dialect.events(json.loads(answer.body), include_usage=call.include_usage)
            connection.send_events(b"".join(events))
        else:
            refusal = _refusal(answer)
            connection.send_events(_late_error(dialect, refusal))
        connection.end_events()
        return answer

    async def _count(self, request: HttpRequest, connection: HttpConnection) -> None:
        owner = self._owner(request)
        self._check_size(request)
        call = read_call(MESSAGES, request.body, request.headers)
        answer: AgentAnswer
        if isinstance(call, Refusal):
            answer = call
        else:
            answer = await self._exchange.answer_to(owner, CountWanted(call=call), connection)
        if isinstance(answer, TokensCounted):
            connection.send(_json(200, {"input_tokens": answer.count}))
        else:
            connection.send(_refused(MESSAGES, _refusal(answer)))

    async def _end(self, request: HttpRequest, connection: HttpConnection) -> None:
        owner = self._owner(request)
        self._check_size(request)
        wanted = _rollout_end(parse_body(request.body or b"{}"))
        answer = await self._exchange.answer_to(owner, wanted, connection)
        if not isinstance(answer, RolloutEnded):
            connection.send(_refused(CHAT, _refusal(answer)))
            return
        connection.send(_json(200, {"rollout_id": answer.rollout_id, "status": answer.status}))

    async def _session(self, request: HttpRequest, connection: HttpConnection) -> None:
        if not self._keys.is_session_token(_key_of(request)):
            _refuse(401, "the token is not this run's; sessions need the token of the run, not a rollout's key")
        self._check_size(request)
        wanted = _session_wanted(parse_body(request.body or b"{}"), request.headers.get("idempotency-key", ""))
        answer = await self._exchange.answer_to(KeyOwner("", ""), wanted, connection)
        if not isinstance(answer, SessionGranted):
            refusal = _refusal(answer)
            gateways = await self._others.addresses() if refusal.status == 503 else ()
            connection.send(_refused(CHAT, refusal, {"gateways": list(gateways)}))
            return
        found = {
            "rollout_id": answer.rollout_id,
            "base_url": self.base_url,
            "api_key": self._keys.rollout_key(answer.rollout_id),
            "problem": answer.problem,
            "seed": answer.seed,
        }
        connection.send(_json(200, found))

    def _models(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._check_any_key(request)
        name = self._settings.model
        page = {"object": "list", "data": [_model(name)], "has_more": False, "first_id": name, "last_id": name}
        connection.send(_json(200, page))

    def _model(self, request: HttpRequest, connection: HttpConnection, name: str) -> None:
        self._check_any_key(request)
        if name not in (self._settings.model, ALIAS) and not role(name):
            _refuse(404, f"got the model {name!r}, expected {self._settings.model!r} or {ALIAS!r}")
        connection.send(_json(200, _model(name)))

    # ------------------------------------------------------------------------------------------ parts of it

    def _owner(self, request: HttpRequest) -> KeyOwner:
        owner = self._keys.owner_of(_key_of(request))
        if owner is None:
            _refuse(401, "the key is of no rollout of this run")
        return owner

    def _check_any_key(self, request: HttpRequest) -> None:
        if not self._keys.is_session_token(_key_of(request)):
            self._owner(request)

    def _check_size(self, request: HttpRequest) -> None:
        if request.is_too_large:
            most = self._settings.max_body_bytes
            _refuse(
                413, f"the body has more than {most} bytes, expected at most that (explorer.gateway_max_body_bytes)"
            )


def _key_of(request: HttpRequest) -> str:
    """Return the key from the headers of OpenAI's or of Anthropic's clients."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return request.headers.get("x-api-key", "")


def _session_wanted(body: Mapping[str, Any], name: str) -> SessionWanted:
    """Return the request for a rollout from an agent without one."""
    for setting in body:
        if setting != "idle_timeout_s":
            _refuse(400, f"{setting}: unknown; expected idle_timeout_s, or nothing")
    given = body.get("idle_timeout_s")
    idle_timeout_s = None if given is None else _number(given, "idle_timeout_s")
    if idle_timeout_s is not None and idle_timeout_s <= 0:
        _refuse(400, f"idle_timeout_s: got {given!r}, expected seconds above 0")
    return SessionWanted(name=name[:256], idle_timeout_s=idle_timeout_s)


def _rollout_end(body: Mapping[str, Any]) -> RolloutEnd:
    """Return an agent's message at the end of a rollout. RequestRefused for invalid numbers."""
    for name in body:
        if name not in ("reward", "parts", "roles", "metrics", "error"):
            _refuse(400, f"{name}: unknown; expected reward, parts, roles, metrics or error")
    error = body.get("error")
    return RolloutEnd(
        reward=None if body.get("reward") is None else _number(body["reward"], "reward"),
        parts=_numbers(body.get("parts"), "parts"),
        roles=_optional_numbers(body.get("roles"), "roles"),
        metrics=_numbers(body.get("metrics"), "metrics"),
        error=None if error is None else str(error)[:2000],
    )


def _numbers(value: Any, name: str) -> dict[str, float]:
    return {key: _number(number, f"{name}.{key}") for key, number in _object(value, name).items()}


def _optional_numbers(value: Any, name: str) -> dict[str, float | None]:
    given = _object(value, name).items()
    return {key: None if number is None else _number(number, f"{name}.{key}") for key, number in given}


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_PARTS:
        _refuse(400, f"{name}: got {kind(value)}, expected an object of at most {MAX_PARTS} numbers")
    return value


def _number(value: Any, name: str) -> float:
    try:
        if isinstance(value, int | float) and math.isfinite(value):  # true and false are 1 and 0, as in every reward
            return float(value)
    except OverflowError:
        pass
    _refuse(400, f"{name}: got {kind(value)} that is no finite number, expected one")


def _refuse(status: int, sentence: str) -> NoReturn:
    raise RequestRefused(sentence, status=status)


def _refusal(answer: AgentAnswer) -> Refusal:
    if isinstance(answer, Refusal):
        return answer
    log.error("gateway: got %r, expected another answer", type(answer).__name__)
    return Refusal(status=500, sentence="the gateway failed; see its log")


def _refused(dialect: ServedDialect, refusal: Refusal, more: Mapping[str, Any] | None = None) -> HttpAnswer:
    """Return a refusal with headers that tell clients whether to retry. By default they would retry after 409, and not
    after all temporary errors."""
    headers = {"x-should-retry": "false" if refusal.retry_after_s is None else "true"}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(refusal.retry_after_s))
    return _json(refusal.status, {**dialect.error(refusal.status, refusal.sentence), **(more or {})}, headers)


def _late_error(dialect: ServedDialect, refusal: Refusal) -> Event:
    body = dialect.error(refusal.status, refusal.sentence)
    return Event(b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n")


def _json(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> HttpAnswer:
    return HttpAnswer(status=status, body=json.dumps(body, ensure_ascii=False).encode(), headers=headers or {})


def _numbered(rollout_id: str, answer: CallAnswer) -> dict[str, str]:
    return {"x-request-id": f"{rollout_id}/call/{answer.number}"}


def _model(name: str) -> dict[str, Any]:
    """Return a model in the form that both OpenAI's and Anthropic's clients read."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "rftstream",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }
