"""Agents that a service elsewhere runs: it gets one POST for each rollout.

    POST URL   {"id", "rollout_id", "problem", "seed", "base_url", "api_key", "options"}

`problem` is in plain form (`json_form.py`). The agent calls its model with `base_url` and `api_key`. The service
answers

    200   {"reward", "parts", "metrics"} or {"error"}, when the agent is done; the connection stays open until then
    202   at once. The agent then ends its rollout with POST {base_url}/rollouts/end

`id` names the rollout and its launch, and is also the Idempotency-Key. A lost request is sent again with the same id,
so a service that already has it must not start a second agent. A new id for the same rollout means that another
explorer has taken it over. The service then ends the old agent and starts a new one with the new address and key. Calls
with the older key are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import SplitResult

from msgspec import Meta

from rftstream.config import secrets
from rftstream.environments.hosts.agents import AgentResult, AgentWork, result_from_plain
from rftstream.environments.json_form import problem_to_plain
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostTimeout
from rftstream.http.address import check_key, host_and_port, split_url
from rftstream.http.client import Answer, LoopClient, RequestFailed, pause_s

log = logging.getLogger(__name__)

SECTION = "environments.agent"
PAUSE_S, MAX_PAUSE_S = 0.5, 15.0
"""Seconds before the second try, randomised by half of that; the pause doubles before each further try, up to the
maximum."""
MAX_ANSWER_BYTES = 1 << 20
BUSY = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which the request is sent again."""
MISTAKEN = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405})
"""Statuses that every request would get."""


@dataclass(frozen=True, kw_only=True)
class CalledAgentConfig:
    """Settings of agents that run elsewhere."""

    url: str = ""
    """The address of a service that is called with each rollout, such as `http://127.0.0.1:9000/agent`. Empty: agents
    ask the gateway for rollouts by themselves."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the agent. The service gets them with each call."""
    api_key: str | None = None
    """`"env:NAME"`: sent to the service as the bearer token. The value is read from the environment and never
    written."""
    timeout_s: Annotated[float, Meta(ge=0)] = 0.0
    """Largest number of seconds of one run, from its call on. 0: only the limits of the rollout."""
    patience_s: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds for which a call is repeated while the service cannot be reached or is busy. Then the rollout fails."""


class CalledAgent:
    """An agent that a service elsewhere runs. The explorer makes one for its run file, and calls `run` for many
    rollouts at once."""

    is_elsewhere = True
    keeps_time = False

    def __init__(self, config: CalledAgentConfig) -> None:
        """ConfigError if the address is invalid, or the secret is not in the environment."""
        self._config, self._address = config, _address(config.url)
        self.where = self._address._replace(query="").geturl()
        """The address for messages, without its query, which may contain a secret."""
        key = ""
        if config.api_key is not None:
            key = secrets.reveal({"api_key": config.api_key}, where=SECTION)["api_key"]
            check_key(key, f"{SECTION}.api_key")
        self._http = LoopClient(self._address, key=key, max_bytes=MAX_ANSWER_BYTES)
        self._was_taken = False
        """Whether the service has accepted a call."""

    async def run(self, work: AgentWork, begins: Callable[[], object] = lambda: None) -> AgentResult:
        """Have the agent run, and return its result. `begins` is called before each try.

        After 202 this does not return: it waits until it is cancelled when the rollout ends. Cancelling it closes the
        connection. HostError if the service is lost while it runs the agent; HostTimeout if it takes too long;
        HostedCodeError if it refuses, or cannot be reached for too long; ConfigError if the very first call is refused
        for a reason that applies to all calls."""
        api_key, plain = work.api_key, problem_to_plain(work.problem)
        body = {"id": work.launch_id, "rollout_id": work.rollout_id, "problem": plain, "seed": work.seed}
        body |= {"base_url": work.base_url, "api_key": api_key, "options": self._config.options}
        data = json.dumps(body).encode()
        headers = {"Accept": "application/json", "Idempotency-Key": work.launch_id, "Connection": "close"}
        began, number = time.monotonic(), 0
        while True:
            begins()
            after_s = 0.0
            try:
                answer = await self._within_limit(data, headers)
            except RequestFailed as error:
                if error.was_sent:
                    raise HostError(self._http.hidden(f"{self.where}: {error}", api_key)) from None
                trouble = str(error)
            else:
                if answer.status not in BUSY:
                    return self._result(answer, api_key)
                trouble, after_s = f"status {answer.status}: {_error_text(answer)}", answer.retry_after_s
            trouble = self._http.hidden(trouble, api_key)
            if time.monotonic() - began > self._config.patience_s:
                limit = f"for {self._config.patience_s:g} s (its patience_s)"
                raise HostedCodeError(f"{self.where}: {trouble}, {limit}")
            if not number:
                log.warning("%s: %s: %s; it is called again", work.rollout_id, self.where, trouble)
            number += 1
            await asyncio.sleep(max(pause_s(number, PAUSE_S, most_s=MAX_PAUSE_S), min(after_s, 4 * MAX_PAUSE_S)))

    async def probe(self) -> str:
        """Return why nobody listens at the address now; empty if somebody does."""
        try:
            async with asyncio.timeout(2.0):
                _, writer = await asyncio.open_connection(*host_and_port(self._address))
        except (OSError, TimeoutError) as error:
            return str(error) or type(error).__name__
        writer.close()
        return ""

    async def _within_limit(self, data: bytes, headers: dict[str, str]) -> Answer:
        """Send the call, and wait until the agent is done; after 202, until this is cancelled."""
        limit = asyncio.timeout(self._config.timeout_s or None)
        try:
            async with limit:
                answer = await self._http.ask("POST", "", data, headers=headers, is_last=True)
                self._was_taken |= answer.status < 300
                if answer.status == 202:
                    await asyncio.Event().wait()
                return answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise HostTimeout(f"{self.where}: no end within {self._config.timeout_s:g} s") from None

    def _result(self, answer: Answer, api_key: str) -> AgentResult:
        """Return the agent's result."""
        if answer.status >= 300:
            trouble = self._http.hidden(f"{self.where}: status {answer.status}: {_error_text(answer)}", api_key)
            if answer.status >= 500:
                raise HostError(trouble)
            if answer.status in MISTAKEN and not self._was_taken:
                raise ConfigError(f"{SECTION}.url: {trouble}; every call would get that: look at it, and at api_key")
            raise HostedCodeError(trouble)
        try:
            value = json.loads(answer.body) if answer.body.strip() else None
        except ValueError:
            raise HostedCodeError(f"{self.where}: the answer is not JSON, expected reward, parts, metrics") from None
        if isinstance(value, dict) and value.get("error") is not None:
            raise HostedCodeError(self._http.hidden(str(value["error"])[:2000], api_key))
        return result_from_plain(value)


def _address(url: str) -> SplitResult:
    address = split_url(url)
    if address is None:
        raise ConfigError(f"{SECTION}.url: got {url!r}, expected an address as http://HOST:PORT/PATH")
    if address.username is not None:
        raise ConfigError(f"{SECTION}.url: found a user or password in it, expected a token in {SECTION}.api_key")
    return address


def _error_text(answer: Answer) -> str:
    """Return the service's error message, or the address of its redirect."""
    if (location := answer.headers.get("location")) is not None and answer.status < 400:
        return f"it points to {location}"
    with contextlib.suppress(ValueError):
        found = json.loads(answer.body)
        if isinstance(found, dict) and (text := found.get("error") or found.get("detail")):
            return str(text)[:2000]
    return answer.body[:200].decode("utf-8", "replace").strip() or "without a reason"
