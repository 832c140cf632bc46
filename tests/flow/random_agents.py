"""Random agents over the three dialects: conversations that go on, branch, interleave, are summed up and rewritten."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.gateway.dialects import DIALECTS, ServedDialect, read_call
from rftstream.roles.explorer.model_calls import CallAnswer, Delivered, ModelCall, Refusal, RolloutEnd, RolloutEnded
from rftstream.testing import RoleDriver
from tests.flow.agents import Try, step_of
from tests.flow.talking_model import TOOLS, draw_text

Items = list[dict[str, Any]]
RETRY = {"x-stainless-retry-count": "1"}
PATIENCE = 20
"""Ticks that an agent waits before it asks again for what is moving."""


class Client:
    """How an agent writes one dialect: items of a conversation, and requests of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dialect: ServedDialect = DIALECTS[name]

    def body(self, items: Items, tools: bool, max_tokens: int | None) -> bytes:
        shown: Items = [tool["function"] for tool in TOOLS] if tools else []
        match self.name:
            case "chat/completions":
                values = {"messages": items, "tools": list(TOOLS) if tools else [], "max_tokens": max_tokens}
            case "responses":
                shown = [{"type": "function", **tool} for tool in shown]
                values = {"input": items, "tools": shown, "max_output_tokens": max_tokens}
            case _:
                shown = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in shown]
                values = {"messages": items, "tools": shown, "max_tokens": max_tokens or 1000}
        return json.dumps({"model": "m", **values}).encode()

    def said(self, answer: dict[str, Any], draw: random.Random) -> tuple[Items, list[str]]:
        """The answer as items of a history, as clients keep it, and the ids of its tool calls."""
        match self.name:
            case "chat/completions":
                message = answer["choices"][0]["message"]
                calls = message.get("tool_calls") or []
                if draw.random() < 0.5:
                    message = {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
                for call in calls:
                    call["function"]["arguments"] = rewritten_json(call["function"]["arguments"], draw)
                return [message], [call["id"] for call in calls]
            case "responses":
                items = [one for one in answer["output"] if one["type"] != "reasoning" or draw.random() < 0.5]
                calls = [one for one in items if one["type"] == "function_call"]
                for call in calls:
                    call["arguments"] = rewritten_json(call["arguments"], draw)
                return items, [call["call_id"] for call in calls]
            case _:
                blocks = [one for one in answer["content"] if one["type"] != "thinking" or draw.random() < 0.5]
                ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
                return [{"role": "assistant", "content": blocks}], ids

    def results(self, ids: list[str], texts: list[str]) -> Items:
        pairs = list(zip(ids, texts, strict=True))
        match self.name:
            case "chat/completions":
                return [{"role": "tool", "tool_call_id": name, "content": text} for name, text in pairs]
            case "responses":
                return [{"type": "function_call_output", "call_id": name, "output": text} for name, text in pairs]
            case _:
                blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in pairs]
                return [{"role": "user", "content": blocks}]


def rewritten_json(text: str, draw: random.Random) -> str:
    """The same arguments as another library would write them."""
    return json.dumps(json.loads(text), indent=draw.choice((None, 1)), ensure_ascii=draw.random() < 0.5)


@dataclass
class Talk:
    """One conversation of an agent."""

    items: Items
    tools: bool
    ends: list[int] = field(default_factory=list)
    """Lengths of `items` at which an answer ends."""
    calls: list[str] = field(default_factory=list)
    """Tool calls of the last answer."""


@dataclass
class Asked:
    """A request on its way."""

    talk: Talk
    call: ModelCall
    sent: Try
    wait: int = 0


class RandomAgent:
    """The agent of one rollout. `act` is called between two slices of the explorer's work."""

    def __init__(self, explorer: RoleDriver, rollout_id: str, style: str) -> None:
        self.explorer, self.rollout_id = explorer, rollout_id
        self.draw = random.Random(f"{style}/{rollout_id}")
        self.client = Client(self.draw.choice(list(DIALECTS)))
        self.num_rounds = self.draw.randint(1, 5)
        self.talks: list[Talk] = []
        """Conversations up to an answer."""
        self.past: list[Talk] = []
        """What was asked."""
        self.asked: list[Asked] = []
        self.end: Try | None = None
        self.wait = 0
        self.is_done = False
        self.did: Counter[str] = Counter()
        self.answers: dict[int, bytes] = {}
        """Number of a call -> its answer, as it was told first."""

    def act(self) -> None:
        for asked in list(self.asked):
            self._look(asked)
        if self.asked or self.is_done:
            return
        if self.end is None:
            if self.num_rounds > 0:
                self.num_rounds -= 1
                for _ in range(self.draw.choice((1, 1, 1, 2, 3))):
                    self._ask(self._next())
            else:
                self.end = self._put(RolloutEnd(reward=1.0))
        elif isinstance(self.end.answer, RolloutEnded):
            self.is_done = True
        elif self.end.answer is not None or self.wait > PATIENCE:
            self.end, self.wait = self._put(RolloutEnd(reward=1.0)), 0
        else:
            self.wait += 1

    def was_killed(self) -> None:
        """The explorer is another one now, and forgets who waits: all that waits is asked again."""
        for asked in self.asked:
            if asked.sent.answer is None:
                self._send(asked, RETRY)
        if self.end is not None and self.end.answer is None:
            self.end = self._put(RolloutEnd(reward=1.0))

    # ------------------------------------------------------------------------------------------ requests

    def _ask(self, talk: Talk) -> None:
        most = self.draw.choice((None, None, None, 3, 12))
        body = self.client.body(talk.items, talk.tools, most)
        call = read_call(self.client.dialect, body, {})
        assert isinstance(call, ModelCall), call
        asked = Asked(talk, call, self._put(call))
        self.asked.append(asked)
        self.past.append(talk)
        if self.draw.random() < 0.05:  # it hangs up, and asks again
            asked.sent.request.is_gone = True
            asked.sent = self._put(call)
            self.did["hung up"] += 1

    def _send(self, asked: Asked, headers: dict[str, str]) -> None:
        body = read_call(self.client.dialect, self._body_of(asked), headers)
        assert isinstance(body, ModelCall)
        asked.call, asked.sent, asked.wait = body, self._put(body), 0

    def _body_of(self, asked: Asked) -> bytes:
        return self.client.body(asked.talk.items, asked.talk.tools, asked.call.max_tokens)

    def _put(self, wanted: ModelCall | RolloutEnd) -> Try:
        found = Try(self.rollout_id, wanted)
        step_of(self.explorer).inbox.put(found.request)
        return found

    def _look(self, asked: Asked) -> None:
        match asked.sent.answer:
            case CallAnswer() as answer:
                self.asked.remove(asked)
                assert self.answers.setdefault(answer.number, answer.body) == answer.body
                if self.draw.random() < 0.9:
                    step_of(self.explorer).inbox.put(Delivered(rollout_id=self.rollout_id, number=answer.number))
                talk = copy.deepcopy(asked.talk)
                items, talk.calls = self.client.said(json.loads(answer.body), self.draw)
                talk.items += items
                talk.ends.append(len(talk.items))
                self.talks.append(talk)
            case Refusal(status=503):
                asked.wait += 1
                if asked.wait > PATIENCE:
                    self._send(asked, RETRY)
            case Refusal() as refusal:
                self.asked.remove(asked)
                self.did[f"refused: {refusal.sentence.partition(' ')[0]} {refusal.status}"] += 1
                self.num_rounds = 0

    # ------------------------------------------------------------------------------------------ what it does

    def _next(self) -> Talk:
        draw = self.draw
        if not self.talks:
            return self._begun()
        talk = copy.deepcopy(draw.choice(self.talks[-3:]))
        kinds = {"goes on": 12, "branches": 3, "begins another": 1, "sums up": 2, "tampers": 2, "invents": 1,
                 "shows other tools": 1, "asks again": 1}  # fmt: skip
        (kind,) = draw.choices(list(kinds), weights=list(kinds.values()))
        self.did[kind] += 1
        match kind:
            case "branches":
                end = draw.choice(talk.ends)
                talk = Talk(talk.items[:end], talk.tools, [one for one in talk.ends if one <= end], [])
            case "begins another":
                return self._begun()
            case "sums up":
                before = json.dumps(talk.items[-1], ensure_ascii=False)[:60]
                return Talk([user(f"so far: {before}"), user(draw_text(draw))][-draw.randint(1, 2) :], talk.tools)
            case "tampers":
                self._tamper(talk.items)
            case "invents":
                talk.items += [user(draw_text(draw)), {"role": "assistant", "content": draw_text(draw)}]
                talk.calls = []
            case "shows other tools":
                talk.tools = not talk.tools
            case "asks again":
                return copy.deepcopy(draw.choice(self.past))
        if talk.calls:
            talk.items += self.client.results(talk.calls, [draw_text(draw) for _ in talk.calls])
        if not talk.calls or draw.random() < 0.2:
            talk.items.append(user(draw_text(draw)))
        talk.calls = []
        return talk

    def _begun(self) -> Talk:
        items = [user(draw_text(self.draw))]
        return Talk(items, self.draw.random() < 0.7)

    def _tamper(self, items: Items) -> None:
        """Write True for 1 in what was said, as a careless client does; or another text."""
        for item in items:
            for call in item.get("tool_calls", ()):
                call["function"]["arguments"] = call["function"]["arguments"].replace("true", "1")
                return
            if item.get("type") == "function_call":
                item["arguments"] = item["arguments"].replace("true", "1")
                return
            for block in item["content"] if isinstance(item.get("content"), list) else ():
                if block["type"] == "tool_use":
                    block["input"] = {key: 1 if value is True else value for key, value in block["input"].items()}
                    return
        if isinstance(items[0].get("content"), str):
            items[0]["content"] += "!"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Wanderer:
    """An environment that answers calls of tools and talks on, and now and then rewrites all that was said."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Nothing is to be set."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        self._problem, self._seed, self._turn = problem, seed, 0

    def start(self) -> tuple[ChatMessage, ...]:
        return self._problem.messages

    def tools(self) -> tuple[dict[str, Any], ...]:
        return TOOLS if self._problem.info["tools"] else ()

    def reply(self, said: AssistantMessage) -> Reply:
        draw = random.Random(f"{self._seed}/{self._turn}")
        self._turn += 1
        answers = [
            ChatMessage(role="tool", content=call.error or draw_text(draw), name=call.name, tool_call_id=call.id)
            for call in said.tool_calls
        ]
        if not answers or draw.random() < 0.2:
            answers.append(ChatMessage(role="user", content=draw_text(draw)))
        rewrite = None
        if draw.random() < 0.15:
            rewrite = (ChatMessage(role="user", content=f"so far: {said.content[:20]} {draw_text(draw)}"),)
        done = self._turn > 1 and draw.random() < 0.3
        return Reply(done=done, messages=() if done else tuple(answers), reward=0.5, rewrite=rewrite)

    def save(self) -> bytes | None:
        return bytes([self._turn])

    def load(self, state: bytes) -> None:
        self._turn = state[0]

    def close(self) -> None:
        pass
