"""The server alone: limits, bad requests, streams that wait, clients that go away, the end of a rollout, sessions."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from rftstream.contracts.assistant import AssistantMessage
from rftstream.errors import ConfigError
from rftstream.gateway.addresses import parse_address, worker_number
from rftstream.gateway.keys import GatewayKeys
from rftstream.gateway.server import GatewayServer, GatewaySettings
from rftstream.roles.explorer.model_calls import (
    AgentRequest,
    CallInbox,
    Delivered,
    ModelCall,
    Refusal,
    RolloutEnd,
    SessionWanted,
)
from tests.suite.each import each
from tests.unit.gateway.answering import ROLLOUT, Answering, answering, said

HI = {"messages": [{"role": "user", "content": "hi"}]}


def says(call: ModelCall) -> AssistantMessage:
    return said(f"you said {call.messages[-1].content}")


@pytest.fixture
def scene() -> Iterator[Answering]:
    with answering(says, max_body_bytes=100_000) as scene:
        yield scene


def connect(scene: Answering) -> HTTPConnection:
    place = urlsplit(scene.base_url)
    assert place.hostname is not None and place.port is not None
    return HTTPConnection(place.hostname, place.port, timeout=300)


def ask(
    scene: Answering, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str
) -> tuple[int, Any]:
    with closing(connect(scene)) as connection:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"authorization": f"Bearer {scene.key if key is None else key}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data if method == "POST" else None, given)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def sentence(found: tuple[int, Any]) -> str:
    return str(found[1]["error"]["message"])


# --------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens", "rollouts/end"])
def test_a_large_body_is_refused_and_the_connection_goes_on(scene: Answering, path: str) -> None:
    with closing(connect(scene)) as connection:
        for to, body, status in (
            (path, b" " * 10_000_000, 413),
            ("chat/completions", json.dumps(HI).encode(), 200),
        ):
            connection.request("POST", f"/v1/{to}", body, {"authorization": f"Bearer {scene.key}"})
            answer = connection.getresponse()
            found = json.loads(answer.read())
            assert answer.status == status
            if status == 413:
                assert found["error"]["message"].startswith("the body has more than 100000 bytes")
    assert len(scene.calls) == 1


def test_a_body_without_end_is_cut_off(scene: Answering) -> None:
    with closing(connect(scene)) as connection:
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("content-length", str(10**12))
        connection.endheaders()
        num_sent = 0
        with suppress(ConnectionError):
            while num_sent < 1000:
                connection.send(b" " * 1_000_000)
                num_sent += 1
        assert num_sent < 1000


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"\0" * 1000,
        b"\x16\x03\x01" * 50,
    ],
)
def test_what_is_no_http_is_answered_and_cut(scene: Answering, data: bytes) -> None:
    place = urlsplit(scene.base_url)
    with socket.create_connection((place.hostname, place.port), timeout=300) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while more := connection.recv(65536):
                found += more
        except ConnectionResetError:
            pass
        assert found == b"" or found.startswith(b"HTTP/1.1 4")
    assert ask(scene, "POST", "/v1/chat/completions", HI)[0] == 200


def test_unknown_paths_are_told(scene: Answering) -> None:
    assert "expected POST /v1/chat/completions" in sentence(ask(scene, "POST", "/v1/completions", HI))
    assert ask(scene, "POST", "/v1/completions", HI)[0] == 404
    assert ask(scene, "GET", "/v1/chat/completions")[0] == 405
    assert ask(scene, "GET", "/v1/models", key="")[0] == 401


def test_two_requests_at_once_on_one_connection_are_answered_in_order(scene: Answering) -> None:
    place = urlsplit(scene.base_url)
    head = f"authorization: Bearer {scene.key}\r\nhost: a\r\n"
    requests = b""
    for word in ("one", "two"):
        body = json.dumps({"messages": [{"role": "user", "content": word}]})
        requests += f"POST /v1/chat/completions HTTP/1.1\r\n{head}content-length: {len(body)}\r\n\r\n{body}".encode()
    with socket.create_connection((place.hostname, place.port), timeout=300) as connection:
        connection.sendall(requests)
        found = b""
        while b"you said two" not in found:
            found += connection.recv(65536)
    assert found.index(b"you said one") < found.index(b"you said two")


def test_a_failure_of_ours_is_a_500_and_the_next_request_is_done(scene: Answering) -> None:
    answers = iter((RolloutEnd(),))
    scene.answer = lambda request: next(answers, None)  # type: ignore[return-value,arg-type]  # an answer that is none
    assert ask(scene, "POST", "/v1/chat/completions", HI)[0] == 500
    assert ask(scene, "POST", "/v1/chat/completions", HI)[0] == 200


# --------------------------------------------------------------------------------------------- streams, clients


class Held:
    """Holds requests back until `release`."""

    def __init__(self, scene: Answering) -> None:
        self.asked, self.released = threading.Event(), threading.Event()
        self.requests: list[AgentRequest] = []
        scene.answer = self._hold

    def _hold(self, request: AgentRequest) -> None:
        self.requests.append(request)
        self.asked.set()
        assert self.released.wait(300)


def test_a_stream_that_waits_shows_signs_of_life() -> None:
    with answering(says, keep_alive_s=0.02) as scene, closing(connect(scene)) as connection:
        held = Held(scene)
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({**HI, "stream": True}),
            {"authorization": f"Bearer {scene.key}"},
        )
        answer = connection.getresponse()
        assert answer.status == 200 and answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        assert answer.readline() == b": the call is being sampled\n"
        held.released.set()
        assert answer.read().rstrip().endswith(b"data: [DONE]")
        wait_until_delivered(scene, [0])


def test_a_late_refusal_is_an_event() -> None:
    with answering(says, keep_alive_s=0.02) as scene, closing(connect(scene)) as connection:
        told = threading.Event()

        def hold(request: AgentRequest) -> Refusal:
            assert told.wait(300)
            return Refusal(status=409, sentence="it has ended")

        scene.answer = hold
        connection.request(
            "POST", "/v1/messages", json.dumps({**HI, "max_tokens": 5, "stream": True}), {"x-api-key": scene.key}
        )
        answer = connection.getresponse()
        assert answer.readline().startswith(b": ")
        told.set()
        assert b'event: error\ndata: {"type": "error"' in answer.read()


def test_a_client_that_goes_away_is_noticed_and_its_call_is_done(scene: Answering) -> None:
    held = Held(scene)
    connection = connect(scene)
    connection.request("POST", "/v1/chat/completions", json.dumps(HI), {"authorization": f"Bearer {scene.key}"})
    assert held.asked.wait(300)
    connection.close()
    (request,) = held.requests
    while not request.is_gone:
        threading.Event().wait(0.001)
    held.released.set()
    scene.answer = None
    assert ask(scene, "POST", "/v1/chat/completions", HI)[0] == 200
    assert len(scene.calls) == 2
    wait_until_delivered(scene, [1])


def wait_until_delivered(scene: Answering, calls: list[int]) -> None:
    while not scene.delivered:
        threading.Event().wait(0.001)
    assert scene.delivered == calls


def test_too_many_connections_are_cut() -> None:
    with answering(says, max_connections=1) as scene:
        place = urlsplit(scene.base_url)
        with closing(connect(scene)) as connection:
            connection.request("GET", "/v1/models", None, {"authorization": f"Bearer {scene.key}"})
            assert connection.getresponse().read()
            other = socket.create_connection((place.hostname, place.port), timeout=300)
            with other, suppress(ConnectionResetError):
                assert other.recv(1) == b""


# --------------------------------------------------------------------------------------------- end, sessions


def test_the_end_of_a_rollout(scene: Answering) -> None:
    body = {"reward": True, "parts": {"tests": 0.5}, "metrics": {"steps": 3}}
    assert ask(scene, "POST", "/v1/rollouts/end", body) == (200, {"rollout_id": ROLLOUT, "status": "completed"})
    assert ask(scene, "POST", "/v1/rollouts/end", b"")[0] == 200
    assert scene.ends == [RolloutEnd(reward=1.0, parts={"tests": 0.5}, metrics={"steps": 3.0}), RolloutEnd()]


@pytest.mark.parametrize(
    ("body", "start"),
    [
        (b'{"reward": NaN}', "the body is not JSON"),
        ({"reward": "1"}, "reward: got a string that is no finite number"),
        ({"reward": 10**400}, "reward: got a number that is no finite number"),
        ({"parts": [1]}, "parts: got a list"),
        ({"rewards": 1}, "rewards: unknown"),
    ],
)
def test_a_reward_that_is_none_is_refused(scene: Answering, body: Any, start: str) -> None:
    found = ask(scene, "POST", "/v1/rollouts/end", body)
    assert found[0] == 400 and sentence(found).startswith(start)
    assert not scene.ends


def test_a_session_brings_all_that_an_agent_needs(scene: Answering) -> None:
    status, session = ask(scene, "POST", "/v1/sessions", {}, key=scene.keys.session_token(), idempotency_key="worker-1")
    assert status == 200 and session["problem"]["messages"][0]["content"] == "1+1="
    assert (session["rollout_id"], session["seed"], session["base_url"]) == (ROLLOUT, 5, scene.base_url)
    found = ask(scene, "POST", "/v1/chat/completions", HI, key=session["api_key"])
    assert found[1]["choices"][0]["message"]["content"] == "you said hi"
    ask(scene, "POST", "/v1/sessions", {"idle_timeout_s": 5}, key=scene.keys.session_token())
    assert [one.idle_timeout_s for one in scene.sessions] == [None, 5.0]
    for body, why in (
        ({"idle_timeout_s": 0}, "idle_timeout_s: got 0"),
        ({"name": "a"}, "name: unknown; expected idle"),
    ):
        found = ask(scene, "POST", "/v1/sessions", body, key=scene.keys.session_token())
        assert found[0] == 400 and sentence(found).startswith(why)


def test_sessions_need_the_token_of_the_run(scene: Answering) -> None:
    wanted: list[SessionWanted] = []
    scene.answer = lambda request: wanted.append(request.wanted)  # type: ignore[func-returns-value,arg-type]
    found = ask(scene, "POST", "/v1/sessions", {})
    assert found[0] == 401 and sentence(found).startswith("the token is not this run's")
    assert not wanted


# --------------------------------------------------------------------------------------------- its life


@each("address", ["nowhere", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "203.0.113.7:0"])
def test_an_address_that_cannot_be_had(address: str) -> None:
    server = GatewayServer(GatewaySettings(address=address), GatewayKeys(b"s" * 16, "r"), CallInbox())
    with pytest.raises(ConfigError, match=r"explorer\.gateway_address: "):
        server.start()
    server.close()


def two_free_ports() -> int:
    """Return the first of two ports in a row that nobody has."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def test_explorers_of_one_host_have_a_port_each() -> None:
    port, keys = two_free_ports(), GatewayKeys(b"s" * 16, "r")
    servers = [
        GatewayServer(
            GatewaySettings(address=f"127.0.0.1:{port}", number=number, public_url="https://a.example/{port}/v1/"),
            keys,
            CallInbox(),
        )
        for number in (0, 1, 1)
    ]
    try:
        assert [server.start() for server in servers[:2]] == [f"https://a.example/{port + n}/v1" for n in (0, 1)]
        assert [server.local_url for server in servers[:2]] == [f"http://127.0.0.1:{port + n}/v1" for n in (0, 1)]
        with pytest.raises(ConfigError, match=f"cannot listen at port {port + 1} of .*, which explorer 1 here takes"):
            servers[2].start()
    finally:
        for server in servers:
            server.close()


def test_who_gets_no_rollout_is_told_where_some_wait() -> None:
    keys, inbox = GatewayKeys(b"s" * 16, "r"), CallInbox()
    looks: list[int] = []

    def others() -> list[str]:
        looks.append(1)
        return ["http://127.0.0.1:9/v1"]

    server = GatewayServer(GatewaySettings(), keys, inbox, others)
    scene = Answering(server.start(), keys)
    inbox.close()  # so that all is refused
    try:
        for _ in range(2):
            status, body = ask(scene, "POST", "/v1/sessions", {}, key=keys.session_token())
            assert status == 503 and body["gateways"] == ["http://127.0.0.1:9/v1"] and body["error"]["message"]
        assert len(looks) == 1, "not for every request"
    finally:
        server.close()


@each(("process", "number"), [("explorer-0", 0), ("explorer-12", 12), ("explorer-host-4711", 0), ("mine", 0)])
def test_numbers_of_workers(process: str, number: int) -> None:
    assert worker_number(process) == number


def test_addresses_for_several_explorers() -> None:
    assert parse_address("[::1]:65534", 2) == ("::1", 65534)
    with pytest.raises(ConfigError, match=r"for 3 explorers, .*; expected at most 65533"):
        parse_address("127.0.0.1:65534", 3)


def test_what_waits_when_the_explorer_leaves_is_told_to_come_again() -> None:
    inbox = CallInbox()
    keys = GatewayKeys(b"s" * 16, "r")
    server = GatewayServer(GatewaySettings(), keys, inbox)
    scene = Answering(server.start(), keys)
    found: list[tuple[int, Any]] = []
    client = threading.Thread(target=lambda: found.append(ask(scene, "POST", "/v1/chat/completions", HI)))
    client.start()
    while not inbox.has_woken:
        threading.Event().wait(0.001)
    inbox.close()
    client.join()
    assert found[0][0] == 503 and "moving" in sentence(found[0])
    assert ask(scene, "POST", "/v1/chat/completions", HI)[0] == 503
    server.close()


def test_what_was_delivered_wakes_nobody_and_is_read_before_what_comes_after_it() -> None:
    rings = list[int]()
    inbox = CallInbox(lambda: rings.append(1))
    notice = Delivered(rollout_id="r", number=0)
    request = AgentRequest(rollout_id="r", wanted=SessionWanted(), reply=lambda answer: None)
    inbox.put(notice)
    assert not rings and not inbox.has_woken
    inbox.put(notice, request, request)
    inbox.put(request)
    assert len(rings) == 1 and inbox.has_woken
    assert inbox.take() == [notice, notice, request, request, request]
    inbox.put(request)
    assert len(rings) == 2
