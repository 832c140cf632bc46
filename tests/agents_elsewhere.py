"""Agents outside of a run, for tests with real processes: threads that call the gateways of its explorers, and try each
request again, at whichever explorer, until it is answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus
from tests.e2e.workplace import RunView

SECRET = "a secret for tests alone"
PATIENCE_S = 5.0
"""Seconds after which a connection is given up, and the request is sent again."""
PAUSE_S = 0.05
PASSING = (429, 503)
"""Status of what may be done later."""

_LISTENS = re.compile(r"the gateway for agents is at (http://\S+)/v1")


class RunIsOverError(Exception):
    """Nobody answers any more."""


class RolloutIsOverError(Exception):
    """The rollout has ended, whoever ended it."""


class CallFailedError(Exception):
    """The policy failed."""


class Gateways:
    """The gateways of a run, found in the logs of its explorers, as long as the run lives."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._over = threading.Event()

    def close(self) -> None:
        """Say that the run is over."""
        self._over.set()

    def addresses(self) -> list[str]:
        """Return where explorers listen, or have listened; what was found last comes first."""
        found = []
        for path in sorted(self._logs.glob("explorer*.log")):
            found += _LISTENS.findall(path.read_text(encoding="utf-8", errors="replace"))[-1:]
        return found[::-1]

    def wait(self, seconds: float) -> None:
        """Wait a moment. RunIsOverError at the end of the run."""
        if self._over.wait(seconds):
            raise RunIsOverError

    def ask(self, path: str, key: str, body: Any, name: str | None = None, *, num_tries: int = 0) -> bytes:
        """Send a request until it is answered; return the answer's bytes. `name` is its idempotency key, and
        `num_tries` says how often it was sent before."""
        data = json.dumps(body).encode()
        while True:
            for address in self.addresses():
                try:
                    status, answer = post(address, path, key, data, headers_of(name, num_tries))
                except (OSError, http.client.HTTPException):
                    num_tries += 1
                    continue
                if status == 200:
                    return answer
                if status == 409:
                    raise RolloutIsOverError(answer.decode())
                if status == 500:
                    raise CallFailedError(answer.decode())
                assert status in PASSING, f"{status}: {answer.decode()}"
                num_tries += 1
            self.wait(PAUSE_S)


def headers_of(name: str | None, num_tries: int) -> dict[str, str]:
    """Return what clients send beside the key."""
    named = {} if name is None else {"idempotency-key": name}
    return {**named, "x-stainless-retry-count": str(num_tries)}


def post(
    address: str, path: str, key: str, data: bytes, headers: Mapping[str, str], *, leaves: bool = False
) -> tuple[int, bytes]:
    """Send one request; return status and body. `leaves`: go away without waiting for them."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", f"/v1{path}", data, {"authorization": f"Bearer {key}", **headers})
        if leaves:
            return 0, b""
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class AgentThreads:
    """Threads that do the same until the run is over. Errors are raised by `join`."""

    def __init__(self, gateways: Gateways, work: Callable[[int], None], count: int) -> None:
        self._gateways = gateways
        self._errors: list[BaseException] = []
        self._work = work
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """End them: the run is over."""
        self._gateways.close()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, number: int) -> None:
        try:
            self._work(number)
        except RunIsOverError:
            return
        except BaseException as error:
            self._errors.append(error)


class Conversation:
    """One rollout as its agent sees it: calls that go on from each other. With `named` each has an idempotency key;
    without, a client says that it tries again."""

    def __init__(self, gateways: Gateways, *, rollout_id: str, key: str, question: str, named: bool) -> None:
        self._gateways, self._key, self._named = gateways, key, named
        self.rollout_id = rollout_id
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        self.bodies: list[bytes] = []
        """What was answered, call by call."""
        self._num_left = 0
        """How often the next call was sent, and its answer not waited for."""

    def call(self) -> str:
        """Make the next call; return what the policy said."""
        body = self._send(self._messages, len(self.bodies), num_tries=self._num_left)
        self._num_left = 0
        self.bodies.append(body)
        said = str(json.loads(body)["choices"][0]["message"]["content"])
        self._messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"{len(self.bodies)}+1="},
        ]
        return said

    def call_again(self) -> bytes:
        """Repeat the last call as a client does that has lost its answer; return what is answered now."""
        return self._send(self._messages[:-2], len(self.bodies) - 1, num_tries=1)

    def begin_and_leave(self) -> None:
        """Send the next call to every explorer, and go away at once."""
        data = json.dumps(_call(self._messages)).encode()
        for address in self._gateways.addresses():
            with contextlib.suppress(OSError, http.client.HTTPException):
                headers = headers_of(self._name(len(self.bodies)), self._num_left)
                self._num_left += 1
                post(address, "/chat/completions", self._key, data, headers, leaves=True)

    def end(self, **more: Any) -> None:
        """Say that it is over."""
        self._gateways.ask("/rollouts/end", self._key, more)

    def _send(self, messages: Sequence[dict[str, Any]], number: int, *, num_tries: int = 0) -> bytes:
        return self._gateways.ask(
            "/chat/completions", self._key, _call(messages), self._name(number), num_tries=num_tries
        )

    def _name(self, number: int) -> str | None:
        return f"call {number}" if self._named else None


def _call(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages)}


def check_calls(view: RunView, told: Mapping[str, Sequence[bytes]]) -> dict[str, Rollout]:
    """Check what the log says of calls: each was sampled once, stands there as its agent was told, and is in its
    rollout; return the rollouts. `told`: rollout -> the answers that its agent got, call by call."""
    saved: dict[str, dict[int, bytes]] = defaultdict(dict)
    for piece in view.messages("partials"):
        if isinstance(piece, PartialRollout):
            for call, answer in zip(piece.calls, piece.saved_calls, strict=True):
                calls = saved[piece.ids.rollout_id]
                assert call.number not in calls, f"{piece.ids.rollout_id}: call {call.number} was sampled twice"
                calls[call.number] = answer.answer
    rollouts: dict[str, Rollout] = {}
    for rollout in view.rollouts():
        rollout_id = rollout.ids.rollout_id
        assert rollout_id not in rollouts, f"{rollout_id} has two records"
        rollouts[rollout_id] = rollout
        digests = [call.request_digest for call in rollout.calls]
        assert len(set(digests)) == len(digests), f"{rollout_id}: a request was sampled twice"
        assert rollout.num_tokens == sum(int(one.loss_mask.numpy().sum()) for one in rollout.segments)
        if rollout.calls:  # else it may be none of an agent
            assert rollout.num_tokens == sum(call.count for call in rollout.calls)
    for rollout_id, bodies in told.items():
        for number, body in enumerate(bodies):
            assert saved[rollout_id].get(number, body) == body, f"{rollout_id}: call {number} has two answers"
        if rollout_id in rollouts and rollouts[rollout_id].status is RolloutStatus.completed:
            found = rollouts[rollout_id]
            assert len(found.calls) == len(bodies)
            assert texts_of(found) == [json.loads(body)["choices"][0]["message"]["content"] for body in bodies]
    return rollouts


def texts_of(rollout: Rollout) -> list[str]:
    """Return what the tokens of each call say."""
    segments = [one.token_ids.numpy().tolist() for one in rollout.segments]
    return [
        bytes(segments[call.segment][call.start : call.start + call.count]).rstrip(b"\0").decode()
        for call in rollout.calls
    ]
