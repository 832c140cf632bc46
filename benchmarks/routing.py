"""Prompt tokens that servers with a prefix cache compute for rollouts of several turns: each rollout at the server that
has its beginning, beside one server alone, which computes as little as can be, beside requests that go to the servers
in turn, and beside rollouts that are placed one by one.

The policy `openai` asks real HTTP servers, which are ours. They sample nothing: they keep a cache of prefixes as vLLM
does (blocks of 16 tokens, the least used forgotten first) and count the tokens that are not in it. The cache of a
server holds what its share of the open rollouts needs, so that nothing is forgotten for want of room: that would count
against those who compute everything everywhere.
"""

from __future__ import annotations

import json
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

from rftstream.clock import SystemClock
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import VersionName
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import SampleRequest
from rftstream.policies.openai.policy import OpenAiPolicy
from rftstream.policies.openai.routing import Router

SERVERS = (2, 4)
GROUPS, GROUP_SIZE, TURNS = 12, 8, 4
"""Groups, all of which are sampled at once; rollouts of each; turns of each of these."""
PROMPT, SAMPLED, REPLY = 512, 64, 48
"""Tokens of a group's prompt, of what is sampled in a turn, and of what the tool says."""
BLOCK = 16
"""Tokens of a block of the cache, vLLM's default."""
CACHE_TOKENS = 1 << 18
VOCABULARY = 32_000


class _Server:
    """A model server that counts. `close` ends it."""

    def __init__(self) -> None:
        self.num_computed = self.num_prompt = 0
        self._cache: OrderedDict[int, None] = OrderedDict()
        """Hash of a block and all that stands before it, the least used first."""
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self, "protocol_version": "HTTP/1.1"})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        prompt, chance = body["prompt"], random.Random(body["seed"])
        sampled = [chance.randrange(VOCABULARY) for _ in range(body["max_tokens"])]
        with self._lock:
            known = self._known(prompt)
            self.num_prompt += len(prompt)
            self.num_computed += len(prompt) - known
            self._keep(prompt + sampled)
        return {
            "choices": [
                {
                    "finish_reason": "length", "token_ids": sampled, "text": "",
                    "logprobs": {"token_logprobs": [-1.0] * len(sampled)},
                }
            ]
        }  # fmt: skip

    def _known(self, tokens: Sequence[int]) -> int:
        """Return how many tokens the cache has. The last one is always computed."""
        known = 0
        for block in _blocks(tokens[:-1]):
            if block not in self._cache:
                break
            known += BLOCK
        return known

    def _keep(self, tokens: Sequence[int]) -> None:
        for block in _blocks(tokens[:-1]):  # keys and values of the last one are not there yet
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > CACHE_TOKENS // BLOCK:
            self._cache.popitem(last=False)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: _Server

    def do_POST(self) -> None:
        answer = json.dumps(
            self.owner.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        pass


def _blocks(tokens: Sequence[int]) -> Sequence[int]:
    """Return a hash of each full block and what stands before it."""
    result, before = [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *tokens[start : start + BLOCK]))
        result.append(before)
    return result


class _InTurn:
    """Gives requests to the servers in turn."""

    def __init__(self) -> None:
        self._numbers = count()

    def place(self, rollout: str, group: str, loads: Mapping[str, int], **_: Collection[str]) -> str:
        names = list(loads)
        return names[next(self._numbers) % len(names)]


class _ByRollout(Router):
    """Places each rollout by its own id: siblings begin anywhere."""

    def place(self, rollout: str, group: str, loads: Mapping[str, int], **servers: Collection[str]) -> str:
        return super().place(rollout, rollout, loads, **servers)


def run() -> list[dict[str, Any]]:
    rows = []
    alone, _ = _computed(1, lambda: Router(1.25))
    for num_servers in SERVERS:
        sticky, share = _computed(num_servers, lambda: Router(OpenAiPolicy.Config.max_load))
        title = f"routing: {TURNS} turns, groups of {GROUP_SIZE}, {num_servers} servers"
        rows.append(_row(f"{title}, prompt tokens computed", "%", sticky, alone, "one server alone"))
        for name, make in (("in turn", _InTurn), ("each rollout by itself", lambda: _ByRollout(1.25))):
            other, _ = _computed(num_servers, make)
            rows.append(_row(f"{title}, prompt tokens computed", "%", sticky, other, name))
        rows.append(_row(f"{title}, prompt tokens of the busiest server", "of the mean", share, None, None))
    return rows


def _row(name: str, unit: str, ours: float, reference: float | None, reference_name: str | None) -> dict[str, Any]:
    ratio = None if reference is None else ours / reference
    return {"name": name, "unit": unit, "ours": ours, "reference": reference, "reference_name": reference_name,
            "ratio": ratio}  # fmt: skip


def _computed(num_servers: int, make_router: Callable[[], Any]) -> tuple[float, float]:
    """Return the share of the prompt tokens that were computed, in percent, and the prompt tokens of the busiest server
    as a multiple of the mean."""
    servers = [_Server() for _ in range(num_servers)]
    config = OpenAiPolicy.Config(url=tuple(server.url for server in servers), model="it")
    policy = OpenAiPolicy(config, model=_no_model(), renderer=FakeRenderer(1 << 20), clock=SystemClock())
    policy._router = make_router()
    try:
        policy.load({}, VersionName(trainer_epoch=1, version=0))
        requests = _sample_all(policy)
    finally:
        policy.close()
        for server in servers:
            server.close()
    assert requests == GROUPS * GROUP_SIZE * TURNS
    prompts = [server.num_prompt for server in servers]
    computed = sum(server.num_computed for server in servers)
    return 100 * computed / sum(prompts), max(prompts) * num_servers / sum(prompts)


def _no_model() -> ModelSpec:
    return None  # type: ignore[return-value]  # nothing is asked of it without `update`


def _sample_all(policy: OpenAiPolicy) -> int:
    """Sample all rollouts, each turn with all that was said before it. Return the number of requests."""
    chance = random.Random(0)
    prompts: dict[str, list[int]] = {}
    turns: dict[str, int] = {}
    for group in range(GROUPS):
        tokens = [chance.randrange(VOCABULARY) for _ in range(PROMPT)]
        prompts |= {f"sums/0/{group}/0/{sibling}": list(tokens) for sibling in range(GROUP_SIZE)}

    def ask(rollout: str) -> None:
        policy.submit(
            SampleRequest(
                request_id=rollout, token_ids=tuple(prompts[rollout]), sampling=Sampling(), max_tokens=SAMPLED,
                seed=hash((rollout, turns[rollout])) & 0xFFFF, rollout_id=rollout,
                group_id=rollout.rpartition("/")[0], may_go_on=True,
            )
        )  # fmt: skip

    for rollout in prompts:
        turns[rollout] = 0
        ask(rollout)
    num_requests = 0
    while policy.num_active:
        for done in policy.step():
            assert done.error is None, done.error
            num_requests += 1
            rollout = done.request_id
            turns[rollout] += 1
            if turns[rollout] < TURNS:
                reply = [chance.randrange(VOCABULARY) for _ in range(REPLY)]
                prompts[rollout] += [*done.token_ids.tolist(), *reply]
                ask(rollout)
    return num_requests
