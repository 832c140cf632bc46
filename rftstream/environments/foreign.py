"""An environment of foreign code that runs elsewhere: in a host process (`hosted.py`) or on a server (`served.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage
from rftstream.environments.base import Reply
from rftstream.environments.json_form import messages_from_plain, reply_from_plain, said_to_plain, tools_from_plain
from rftstream.errors import HostError


class ForeignEnvironment:
    """An environment elsewhere, as the turn loop sees it. Each method is a request, and each object a session.

    If the foreign code can save its state, the state comes with each answer. If the session is then lost, the
    environment resumes from the state in another one. Otherwise HostError says that the rollout has to begin anew.

    A subclass defines how a session is started and called, and which errors mean that it is lost."""

    _tools: Sequence[Mapping[str, Any]] = ()
    _state: bytes | None = None

    async def _open(self, do: str, **fields: Any) -> Mapping[str, Any]:
        """Start a session with `start` or `load`, and return the first answer."""
        raise NotImplementedError

    async def _ask(self, do: str, **fields: Any) -> Mapping[str, Any]:
        """Return the session's answer to a request."""
        raise NotImplementedError

    def _is_lost(self, error: HostError) -> bool:
        """Return whether the session is lost, not only one answer."""
        raise NotImplementedError

    async def start(self) -> tuple[ChatMessage, ...]:
        answer = await self._begin("start")
        return messages_from_plain(answer.get("messages"), what="start")

    async def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools from the first answer."""
        return self._tools

    async def reply(self, said: AssistantMessage) -> Reply:
        plain = said_to_plain(said)
        try:
            answer = await self._ask("reply", said=plain)
        except HostError as error:
            if self._state is None or not self._is_lost(error):
                raise
            await self.load(self._state)
            answer = await self._ask("reply", said=plain)
        self._keep_state(answer)
        return reply_from_plain(answer.get("reply"))

    def save(self) -> bytes | None:
        return self._state

    async def load(self, state: bytes) -> None:
        await self._begin("load", state=json.loads(state))

    async def _begin(self, do: str, **fields: Any) -> Mapping[str, Any]:
        answer = await self._open(do, **fields)
        self._tools = tools_from_plain(answer.get("tools"))
        self._keep_state(answer)
        return answer

    def _keep_state(self, answer: Mapping[str, Any]) -> None:
        self._state = json.dumps(answer["state"]).encode() if "state" in answer else None
