"""An agent loop without a model: it answers every request of a gateway by a function, in a thread of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.gateway.keys import GatewayKeys
from rftstream.gateway.server import GatewayServer, GatewaySettings
from rftstream.roles.explorer.model_calls import (
    AgentAnswer,
    AgentRequest,
    CallAnswer,
    CallInbox,
    CountWanted,
    Delivered,
    ModelCall,
    RolloutEnd,
    RolloutEnded,
    SampledCall,
    SessionGranted,
    SessionWanted,
    TokensCounted,
)

ROLLOUT = "sums/0/3/0/1"
Says = Callable[[ModelCall], AssistantMessage]


def said(content: str = "", **values: object) -> AssistantMessage:
    return AssistantMessage(content=content, **{"text": content, **values})  # type: ignore[arg-type]


def a_call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(id="call_0_0", name=name, arguments=arguments, text=json.dumps(arguments))


@dataclass
class Answering:
    """Where the gateway is, and what it was asked."""

    base_url: str
    keys: GatewayKeys
    calls: list[ModelCall] = field(default_factory=list)
    ends: list[RolloutEnd] = field(default_factory=list)
    sessions: list[SessionWanted] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    answer: Callable[[AgentRequest], AgentAnswer | None] | None = None
    """Answers a request otherwise; None for the ordinary answer."""

    @property
    def key(self) -> str:
        return self.keys.rollout_key(ROLLOUT)


@contextmanager
def answering(says: Says, **settings: object) -> Iterator[Answering]:
    """Run a gateway whose calls are answered with what `says` returns."""
    woken, stopped = threading.Event(), threading.Event()
    inbox, keys = CallInbox(woken.set), GatewayKeys(b"a secret of sixteen bytes", "run-1")
    server = GatewayServer(GatewaySettings(**settings), keys, inbox)  # type: ignore[arg-type]
    scene = Answering(server.start(), keys)

    def answer_of(request: AgentRequest) -> AgentAnswer:
        if scene.answer is not None and (found := scene.answer(request)) is not None:
            return found
        match request.wanted:
            case ModelCall() as call:
                number = len(scene.calls)
                scene.calls.append(call)
                result = SampledCall(
                    call_id=f"{request.rollout_id}/call/{number}",
                    created=1_700_000_000,
                    model=call.model,
                    said=says(call),
                    num_prompt_tokens=7,
                    num_sampled_tokens=3,
                )
                return CallAnswer(number=number, body=json.dumps(call.dialect.answer(result)).encode())
            case CountWanted(call=call):
                return TokensCounted(count=sum(len(message.content) for message in call.messages))
            case RolloutEnd() as end:
                scene.ends.append(end)
                return RolloutEnded(rollout_id=request.rollout_id, status="completed")
            case SessionWanted() as session:
                scene.sessions.append(session)
                problem = {"messages": [{"role": "user", "content": "1+1="}], "tools": [], "info": {}}
                return SessionGranted(rollout_id=ROLLOUT, problem=problem, seed=5)

    def work() -> None:
        while not stopped.is_set():
            woken.wait(0.05)  # a notice that an answer was delivered wakes nobody
            woken.clear()
            for item in inbox.take():
                if isinstance(item, Delivered):
                    scene.delivered.append(item.number)
                else:
                    item.reply(answer_of(item))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield scene
    finally:
        stopped.set()
        woken.set()
        thread.join()
        inbox.close()
        server.close()
