"""The exchange between the gateway's event loop and the agent loop, which runs in another thread.

Waking a thread is expensive, and so is a transaction for each call. So all requests of one turn of the event loop are
handed over together: the agent loop wakes up once, and the calls share a transaction. Answers that come close together
also wake the event loop once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from rftstream.gateway.keys import KeyOwner
from rftstream.http.server import HttpConnection
from rftstream.roles.explorer.model_calls import (
    AgentAnswer,
    AgentRequest,
    CallAnswer,
    CallInbox,
    Delivered,
    Wanted,
)

TakesAnswer = Callable[[AgentAnswer], None]
"""Sends an answer to the client."""


class AgentExchange:
    """Hands requests to the agent loop, and answers back. The server makes it, and calls it in the event loop:
    `ask` or `answer_to` for each request, `note_delivered` when a client has a call's answer."""

    def __init__(self, inbox: CallInbox) -> None:
        self._inbox = inbox
        self._arrived: list[AgentRequest | Delivered] = []
        """Items that arrived in this turn of the event loop."""
        self._answers: deque[tuple[HttpConnection, TakesAnswer, AgentAnswer]] = deque()
        """Answers on their way from the agent loop's thread."""
        self._hands_out = False
        """Whether the event loop was asked to hand them out."""

    def ask(self, owner: KeyOwner, wanted: Wanted, connection: HttpConnection, answered: TakesAnswer) -> None:
        """Hand a request to the agent loop. `answered` is called in the event loop with its answer."""
        loop = asyncio.get_running_loop()

        def reply(answer: AgentAnswer) -> None:
            self._answers.append((connection, answered, answer))
            if not self._hands_out and not loop.is_closed():
                self._hands_out = True
                loop.call_soon_threadsafe(self._hand_out)

        request = AgentRequest(rollout_id=owner.rollout_id, launch=owner.launch, wanted=wanted, reply=reply)

        def gone() -> None:
            request.is_gone = True

        connection.when_lost = gone
        request.is_gone = connection.is_lost
        self._put(request)

    def answer_to(self, owner: KeyOwner, wanted: Wanted, connection: HttpConnection) -> asyncio.Future[AgentAnswer]:
        """Hand a request to the agent loop; return the future of its answer."""
        found: asyncio.Future[AgentAnswer] = asyncio.get_running_loop().create_future()
        self.ask(owner, wanted, connection, lambda answer: None if found.done() else found.set_result(answer))
        return found

    def note_delivered(self, owner: KeyOwner, answer: CallAnswer) -> None:
        """Tell the agent loop that the client has taken the answer to a call."""
        self._put(Delivered(rollout_id=owner.rollout_id, launch=owner.launch, number=answer.number))

    def _put(self, item: AgentRequest | Delivered) -> None:
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._arrived.append(item)

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._inbox.put(*arrived)

    def _hand_out(self) -> None:
        """Pass the arrived answers to their requests."""
        self._hands_out = False  # before reading: later answers ask again
        while self._answers:
            connection, answered, answer = self._answers.popleft()
            try:
                answered(answer)
            except Exception:
                connection.fail()
