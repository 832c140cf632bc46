"""What passes between the gateway's event loop and the agent loop, which runs in another thread.

Waking a thread is dear, and so is a transaction for each call. So what comes in one turn of the event loop is handed
over as one group: the agent loop wakes up once, and the calls share a transaction. Answers that come close together
wake the event loop once, too.
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
        """Items that came in this turn of the event loop."""
        self._answers: deque[tuple[HttpConnection, TakesAnswer, AgentAnswer]] = deque()
        """Answers on their way from the agent loop's thread."""
        self._hands_out = False
        """Whether the event loop was asked to take them."""

    def ask(self, owner: KeyOwner, wanted: Wanted, connection: HttpConnection, answered: TakesAnswer) -> None:
        """Hand a request to the agent loop. `answered` is called with its answer, in the event loop."""
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
        """Hand a request to the agent loop; return where its answer will be."""
        found: asyncio.Future[AgentAnswer] = asyncio.get_running_loop().create_future()
        self.ask(owner, wanted, connection, lambda answer: None if found.done() else found.set_result(answer))
        return found

    def note_delivered(self, owner: KeyOwner, answer: CallAnswer) -> None:
        """Tell the agent loop that the client's side has taken the answer to a call."""
        self._put(Delivered(rollout_id=owner.rollout_id, launch=owner.launch, number=answer.number))

    def _put(self, item: AgentRequest | Delivered) -> None:
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._arrived.append(item)

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._inbox.put(*arrived)

    def _hand_out(self) -> None:
        """Hand the answers that have come to their requests."""
        self._hands_out = False  # before it looks: what comes meanwhile asks again
        while self._answers:
            connection, answered, answer = self._answers.popleft()
            try:
                answered(answer)
            except Exception:
                connection.fail()
