"""The client of model servers: connections that are kept, tries, waits, time limits, and cancelled requests."""

import contextlib
import email.utils
import gc
import socket
import threading
import time

import pytest

from rftstream.errors import ConfigError
from rftstream.http.client import Call
from rftstream.models import server_client
from rftstream.models.server_client import ModelServer, Refused, RetryableError, Unreachable
from tests.suite.each import each
from tests.unit.served import Server
from tests.waiting import wait_until

BODY = {"prompt": [5, 6], "max_tokens": 9}


@pytest.fixture
def keeping():
    opened = Server(keeps_open=True)
    yield opened
    opened.close()


def client(server=None, *, url=None, **settings):
    settings = {"api_key": None, "timeout_s": 60.0, "tries": 3, "section": "it", **settings}
    return ModelServer(server.url if url is None else url, "completions", **settings)


def test_a_connection_is_used_again(keeping):
    asked = client(keeping)
    for _ in range(5):
        assert asked.ask(BODY)["choices"]
    assert len(keeping.requests) == 5
    assert len(keeping.connections) == 1
    asked.close()


def test_requests_at_once_have_a_connection_each(keeping):
    asked = client(keeping)
    keeping.hold.clear()
    threads = [threading.Thread(target=asked.ask, args=(BODY,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(keeping.requests) == 4)
    keeping.hold.set()
    for thread in threads:
        thread.join()
    for _ in range(4):
        asked.ask(BODY)
    assert len(keeping.connections) == 4
    asked.close()


def test_a_connection_that_the_server_closed_costs_no_try(keeping):
    asked = client(keeping, tries=1)
    asked.ask(BODY)
    (idle,) = asked._http._idle
    keeping.cut()
    wait_until(lambda: idle.has_expired)
    assert asked.ask(BODY)["choices"]
    assert idle.socket.fileno() == -1, "it is closed on our side, too"
    asked.close()


def test_a_watch_is_open_until_the_server_ends(keeping):
    watch = client(keeping).watch()
    wait_until(lambda: keeping.connections)
    assert watch.is_open and not keeping.requests
    keeping.cut()
    wait_until(lambda: not watch.is_open)
    watch.close()
    assert client(url="http://127.0.0.1:9/v1").watch() is None


@pytest.mark.slow
def test_idle_connections_are_closed_with_the_client(keeping):
    asked, forgotten = client(keeping), client(keeping)
    sockets = []
    for one in (asked, forgotten):
        one.ask(BODY)
        sockets.append(one._http._idle[0].socket)
    asked.close()
    del forgotten, one
    gc.collect()
    assert [one.fileno() for one in sockets] == [-1, -1]
    assert asked.ask(BODY)["choices"], "a request that comes late is answered"
    assert not asked._http._idle


def test_a_cancelled_request_ends_at_once_and_takes_no_other_with_it(keeping):
    asked, call, said = client(keeping), Call(), []
    asked.ask(BODY)  # its connection is used again
    keeping.hold.clear()

    def ask():
        try:
            asked.ask(BODY, call)
        except Unreachable as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: len(keeping.requests) == 2)
    call.cancel()
    thread.join(30)
    assert said and not thread.is_alive()
    keeping.hold.set()
    assert asked.ask(BODY)["choices"]
    with pytest.raises(Refused, match="aborted"):
        asked.ask(BODY, call)
    asked.close()


def test_a_request_may_be_cancelled_when_it_is_over(keeping):
    asked, call = client(keeping, tries=1), Call()
    asked.ask(BODY, call)
    call.cancel()
    assert asked.ask(BODY)["choices"]
    assert len(keeping.connections) == 1
    asked.close()


@pytest.mark.parametrize("status", [400, 409, 413, 422, 425, 501])
def test_what_the_server_refuses_is_asked_once(server, status):
    server.answers.append((status, {"error": "no"}))
    with pytest.raises(Refused, match=f"the server answered {status}: no"):
        client(server).ask(BODY)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(server, status):
    server.answers += [(status, {})] * 2
    assert client(server).ask(BODY)["choices"]
    assert len(server.requests) == 3


def in_two_minutes():
    return email.utils.formatdate(time.time() + 120, usegmt=True)


@pytest.mark.parametrize(("status", "said", "low", "high"), [
    (429, lambda: "120", 110, 120), (429, in_two_minutes, 1, 120), (503, lambda: "soon", 0, 0),
    (503, lambda: "-3", 0, 0), (503, lambda: "Wed, 21 Oct 2015 07:28:00 GMT", 0, 0), (503, str, 0, 0),
], ids=range(6))  # fmt: skip
def test_a_server_says_when_it_wants_to_be_asked_again(server, status, said, low, high):
    """An odd wish is none."""
    server.answers.append((status, {}, {"Retry-After": said()}))
    with pytest.raises(RetryableError) as busy:
        client(server).ask_once(BODY, Call())
    assert low <= busy.value.after_s <= high


@pytest.mark.slow
def test_a_wait_is_no_longer_than_an_answer_may_take(server):
    server.answers.append((429, {}, {"Retry-After": "86400"}))
    began = time.monotonic()
    assert client(server, timeout_s=1.5).ask(BODY)["choices"]
    assert 1.5 <= time.monotonic() - began < 600


def test_waits_grow_and_differ(monkeypatch):
    monkeypatch.setattr(server_client, "PAUSE_S", 8.0)
    waits = []
    call = Call()
    monkeypatch.setattr(call.cancelled, "wait", waits.append)
    asked = client(url="http://127.0.0.1/v1")
    for _ in range(50):
        asked.pause(1, call)
        asked.pause(3, call)
    assert all(4.0 <= wait <= 12.0 for wait in waits[::2])
    assert all(16.0 <= wait <= 48.0 for wait in waits[1::2])
    assert len(set(waits)) > 90


def test_an_answer_in_drops_is_a_timeout():
    """Each drop comes in time, the whole does not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def drip():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while not ended.wait(0.02):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        asked = client(url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1", tries=1, timeout_s=0.3)
        with pytest.raises(Unreachable, match="TimeoutError: timed out, after 1 tries") as late:
            asked.ask(BODY)
        ended.set()
        thread.join()
    assert late.value.timed_out


def test_a_host_that_takes_no_connection_is_given_up_early(monkeypatch):
    """However long its answers may take."""
    monkeypatch.setattr("rftstream.http.client.CONNECT_S", 0.1)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # more than may wait to be accepted
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        asked = client(url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1", tries=1, timeout_s=600)
        with pytest.raises(RetryableError, match="TimeoutError: timed out") as late:
            asked.ask_once(BODY, Call())
    assert late.value.timed_out and late.value.is_away


def test_the_host_is_named_as_in_the_url(server):
    url = server.url.replace("127.0.0.1", "localhost")
    client(server, url=url).ask(BODY)
    assert server.hosts == [url.removeprefix("http://").removesuffix("/v1")]


@each("url", [
    "ftp://x/v1", "x:8000/v1", "http:///v1", "http://x:port/v1", "http://x:99999/v1", "",
    "http://a..b/v1", f"http://{'x' * 64}.org/v1", "http://x/\u00fc"])  # fmt: skip
def test_a_url_that_is_none(url):
    with pytest.raises(ConfigError, match=r"it\.url: expected http://HOST:PORT/v1"):
        client(url=url)
