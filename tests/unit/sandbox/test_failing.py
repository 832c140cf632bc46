"""What the sandbox needs fails at each point: then nothing is scored, neither with 0 nor with 1; afterwards all is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rftstream.errors import RewardError
from rftstream.rewards.code import CodeReward
from rftstream.sandbox import cgroups, layers
from tests.loopback import taken_port
from tests.unit.reward_inputs import reward_input
from tests.unit.sandbox.failing import ASSERTS, BREAK, FOR_GOOD, FUNCTION, WHILE_WARM

ROOT = Path(__file__).parents[3]
NEEDS_ROOT = {"no right to change the user", "no processes", "few processes for a user", "memory cgroup read-only"}
REASONS = {
    "no bubblewrap": "not found",
    "no right to change the user": "Operation not permitted",
    "no processes": "Resource temporarily unavailable|can't start new thread",
    "few processes for a user": "below the program's limit",
    "memory cgroup read-only": "a limit of the cgroup cannot be set",
    "keeper killed": "does not start",
    "zygote killed": "does not start|the box is gone|the warm interpreter is gone",
    "process 1 killed": "the box is gone|other side is gone",
}
SCORES = ["1.0", "0.0", "1.0", "0.0"]
"""Of a right and a wrong program, by calls and by assertions."""

pytestmark = [
    pytest.mark.skipif(layers.missing_text() is not None, reason="this machine has no sandbox"),
    pytest.mark.law("unscorable"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAK)
def test_what_fails_on_this_machine_is_no_verdict(name: str) -> None:
    parents = cgroups.find_parents()
    if name in NEEDS_ROOT and (os.geteuid() != 0 or parents is None or parents.is_v2):
        pytest.skip("needs root and cgroups of version 1")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "failing.py"), name], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, list[str]] = {"before": [], "while": [], "after": []}
    for line in done.stdout.splitlines():
        when, _, what = line.partition(" ")
        said[when].append(what)
    assert said["before"] == (SCORES if name in WHILE_WARM else [])
    assert len(said["while"]) == 4
    for what in said["while"]:
        assert what.startswith("unscorable "), what
        assert any(reason in what for reason in REASONS[name].split("|")), what
    assert said["after"] == ([] if name in FOR_GOOD else SCORES)


# ------------------------------------------------------------------------------------------------ servers

Answer = Callable[[socket.socket], None]


def say(text: bytes) -> Answer:
    return lambda connection: connection.sendall(text)


def http(status: str, body: bytes) -> Answer:
    return say(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def silent(connection: socket.socket) -> None:
    """Say nothing until the other side gives up."""
    while connection.recv(65536):
        pass


GARBAGE: dict[str, Answer] = {
    "silent": silent,
    "closes": lambda connection: None,
    "no http": say(b"220 smtp ready\r\n"),
    "html": http("200 OK", b"<html>It works!</html>"),
    "an empty object": http("200 OK", b"{}"),
    "a list": http("200 OK", b"[1, 2]"),
    "an id that is none": http("200 OK", b'{"id": "../../other"}'),
    "half an answer": say(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"id": "'),
    "unauthorised": http("401 Unauthorized", b"{}"),
    "not found": http("404 Not Found", b"{}"),
    "full": http("507 Insufficient Storage", b"{}"),
    "overloaded": http("503 Service Unavailable", b'{"error": "no place"}'),
    "an end that is none": http("200 OK", b'{"id": "0123456789abcdef0123456789abcdef"}'),
    "an end without a status": http("200 OK", b'{"id": "0123456789abcdef0123456789abcdef", "exit_code": null}'),
    "an end for no reason": http(
        "200 OK", b'{"id": "0123456789abcdef0123456789abcdef", "exit_code": 0, "stopped": "x"}'
    ),
}


@pytest.fixture
def broken(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that answers every request with garbage."""
    answer: Answer = GARBAGE[request.param]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closing = threading.Event()

        def serve() -> None:
            while not closing.is_set():
                connection, _ = listener.accept()
                with connection:
                    if not closing.is_set() and (answer is silent or connection.recv(65536)):
                        answer(connection)

        server = threading.Thread(target=serve)
        server.start()
        port = listener.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
        closing.set()
        socket.create_connection(("127.0.0.1", port)).close()
        server.join()


def assert_no_verdict(url: str) -> None:
    reward = CodeReward(CodeReward.Config(sandbox_url=url, wait_s=0.2, wall_s=0.1))
    for info in ({"tests": {"inputs": ["1"], "outputs": [""]}}, {"tests": FUNCTION}, ASSERTS):
        item = reward_input("def f(x): pass", prompt="", info=info, data_source="")
        with pytest.raises(RewardError, match=r"code: sandbox: sandbox: "):
            reward(item)


@pytest.mark.parametrize("broken", [name for name in GARBAGE if name != "silent"], indirect=True)
def test_a_server_that_answers_garbage_is_no_verdict(broken: str) -> None:
    assert_no_verdict(broken)


def test_a_server_that_is_down_is_no_verdict() -> None:
    with taken_port() as port:
        assert_no_verdict(f"http://127.0.0.1:{port}")


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["silent"], indirect=True)
def test_a_server_that_says_nothing_is_no_verdict(broken: str) -> None:
    assert_no_verdict(broken)
