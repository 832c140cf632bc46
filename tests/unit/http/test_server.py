"""One connection, fed by hand: what it takes from a client, and what it lets wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rftstream.http.server import HttpAnswer, HttpConnection, HttpRequest
from tests.suite.each import each

pytestmark = pytest.mark.anyio

GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


class Line(asyncio.Transport):
    """The client's side of a connection: it takes what is written if `takes` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: HttpConnection | None = None
        self.written = b""
        self.reads = self.takes = True
        self.is_cut = self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)
        if not self.takes and self.protocol is not None:
            self.protocol.pause_writing()

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.is_cut

    def close(self) -> None:
        self.is_cut = True

    def abort(self) -> None:
        self.is_aborted = self.is_cut = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


def driven(scene: Callable[[HttpConnection, Line, list[HttpRequest]], Awaitable[None]]) -> None:
    """Run a scene with a connection whose requests are answered at once."""

    async def run() -> None:
        line, requests = Line(), list[HttpRequest]()

        async def handle(request: HttpRequest, connection: HttpConnection) -> None:
            requests.append(request)
            connection.send(HttpAnswer(status=200, body=b"{}"))

        connection = HttpConnection(handle, max_body_bytes=100, connections=set(), max_connections=1)
        line.protocol = connection
        connection.connection_made(line)
        await scene(connection, line, requests)
        connection.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(run())


async def turns(count: int) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.law("bounded")
def test_nothing_more_is_read_while_requests_wait() -> None:
    async def scene(connection: HttpConnection, line: Line, requests: list[HttpRequest]) -> None:
        connection.data_received(GET * 3)
        connection.data_received(GET)
        while len(requests) < 3:
            assert not line.reads
            await asyncio.sleep(0)
        await turns(5)
        assert len(requests) == 4 and line.reads

    driven(scene)


@pytest.mark.law("bounded")
def test_who_takes_no_answers_is_given_no_more() -> None:
    async def scene(connection: HttpConnection, line: Line, requests: list[HttpRequest]) -> None:
        line.takes = False
        connection.data_received(GET * 3)
        await turns(5)
        assert len(requests) == 1
        line.takes = True
        connection.resume_writing()
        await turns(9)
        assert len(requests) == 3

    driven(scene)


def test_who_takes_no_answers_is_cut_off_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.http.server.IDLE_S", 0.001)

    async def scene(connection: HttpConnection, line: Line, requests: list[HttpRequest]) -> None:
        line.takes = False
        connection.data_received(GET)
        while not line.is_aborted:
            await asyncio.sleep(0.001)
        assert len(requests) == 1

    driven(scene)


def test_an_answer_for_a_connection_that_is_closing_is_not_delivered() -> None:
    async def scene(connection: HttpConnection, line: Line, requests: list[HttpRequest]) -> None:
        assert await connection.is_delivered()
        line.is_cut = True  # as after a reset, before the event loop has told it
        assert not await connection.is_delivered()

    driven(scene)


HEAD = b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"


@each(
    ("data", "answer", "paths", "goes_on"),
    [
        (b"GET http://a:8900/v1/models?a=b HTTP/1.1\r\nhost: a\r\n\r\n", b"HTTP/1.1 200 ", ["/v1/models"], True),
        (b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n", b"HTTP/1.1 200 ", ["/"], True),
        (b"GET / HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 ", ["/"], False),
        (b"GET / HTTP/1.1\r\n\r\n" + GET, b"HTTP/1.1 400 ", [], False),
        (b"GET / HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n" + GET, b"HTTP/1.1 400 ", [], False),
        (HEAD % 2, b"HTTP/1.1 100 ", [], True),
        (HEAD % 2 + b"hi", b"HTTP/1.1 100 ", ["/"], True),
        (HEAD % 101 + b" " * 101 + GET, b"HTTP/1.1 200 ", ["/"], False),
    ],
)
def test_targets_hosts_and_expectations(data: bytes, answer: bytes, paths: list[str], goes_on: bool) -> None:
    """A body that is too large is refused before its client sends it."""

    async def scene(connection: HttpConnection, line: Line, requests: list[HttpRequest]) -> None:
        connection.data_received(data)
        await turns(5)
        assert line.written.startswith(answer)
        assert [one.path for one in requests] == paths and line.is_cut == (not goes_on)
        assert all(one.is_too_large == (b"101" in data) for one in requests)

    driven(scene)


def test_headers_behind_a_body_are_passed_over() -> None:
    async def scene(connection: HttpConnection, line: Line, requests: list[HttpRequest]) -> None:
        connection.data_received(CHUNKED + b"2\r\nhi\r\n0\r\nauthorization: Bearer a\r\nhost: b\r\n\r\n")
        await turns(3)
        (request,) = requests
        assert (request.body, request.headers["host"]) == (b"hi", "a")
        assert "authorization" not in request.headers

    driven(scene)


@pytest.mark.law("bounded")
def test_headers_behind_a_body_have_an_end() -> None:
    async def scene(connection: HttpConnection, line: Line, requests: list[HttpRequest]) -> None:
        connection.data_received(CHUNKED + b"0\r\n")
        num_sent = 0
        while not line.is_cut:
            connection.data_received(b"a%d: %s\r\n" % (num_sent, b"b" * 1000))
            num_sent += 1
            assert num_sent < 100
        assert line.written.startswith(b"HTTP/1.1 431") and not requests

    driven(scene)


def test_a_body_in_many_pieces_is_no_head() -> None:
    async def scene(connection: HttpConnection, line: Line, requests: list[HttpRequest]) -> None:
        connection.data_received(CHUNKED)
        for _ in range(20_000):
            connection.data_received(b"1\r\na\r\n")
        connection.data_received(b"0\r\n\r\n")
        await turns(3)
        assert requests[0].is_too_large

    driven(scene)


async def test_requests_that_are_answered_at_once_are_done_in_order_and_one_a_turn() -> None:
    line, paths, delivered = Line(), list[str](), list[str]()

    def handle(request: HttpRequest, connection: HttpConnection) -> None:
        paths.append(request.path)
        connection.send(HttpAnswer(status=200, body=b"{}"))
        connection.finish(lambda: delivered.append(request.path))

    connection = HttpConnection(handle, max_body_bytes=100, connections=set(), max_connections=1)
    connection.connection_made(line)
    connection.data_received(b"".join(b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n" % number for number in range(3)))
    assert paths == delivered == ["/0"]
    connection.data_received(GET)
    assert not line.reads  # others wait for their turn
    await turns(5)
    assert paths == delivered == ["/0", "/1", "/2", "/"] and line.reads
    connection.connection_lost(None)


async def test_a_failure_behind_the_handler_is_told_and_the_next_request_is_done() -> None:
    line, waiting = Line(), list[HttpConnection]()

    def handle(request: HttpRequest, connection: HttpConnection) -> None:
        waiting.append(connection)

    connection = HttpConnection(handle, max_body_bytes=100, connections=set(), max_connections=1)
    connection.connection_made(line)
    connection.data_received(GET)
    connection.fail()
    assert line.written.startswith(b"HTTP/1.1 500 ")
    connection.data_received(GET)
    assert len(waiting) == 2
    connection.connection_lost(None)
