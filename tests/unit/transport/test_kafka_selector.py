"""The selector of Kafka's clients: what the standard library's does, with fewer questions to the kernel."""

from __future__ import annotations

import gc
import selectors
import socket
import warnings
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from random import Random

import pytest

from rftstream.transport.kafka.client import selector

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

pytestmark = pytest.mark.skipif(selector.CONFIGURED is selectors.DefaultSelector, reason="this system has no epoll")


@pytest.fixture
def watching() -> Iterator[selector.LazySelector]:
    with closing(selector.LazySelector()) as made:
        yield made


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield mine, theirs


def ready(watching: selector.LazySelector, timeout: float = 5.0) -> list[tuple[object, int]]:
    return [(key.data, events) for key, events in watching.select(timeout)]


def test_what_can_be_read_or_written_is_told(watching, pair):
    mine, theirs = pair
    key = watching.register(mine, READ, "one")
    assert (watching.get_key(mine), watching.get_map()) == (key, {mine.fileno(): key})
    assert ready(watching, 0.0) == []
    theirs.send(b"x")
    assert ready(watching) == [("one", READ)]
    watching.modify(mine, READ | WRITE, "two")
    assert ready(watching) == [("two", READ | WRITE)]
    watching.modify(mine, WRITE, "three")
    assert ready(watching) == [("three", WRITE)]
    assert watching.unregister(mine).data == "three"
    assert ready(watching, 0.0) == []
    with pytest.raises(KeyError):
        watching.get_key(mine)


def test_a_parked_socket_is_watched_again(watching, pair):
    mine, theirs = pair
    watching.register(mine, READ, "one")
    watching.unregister(mine)
    watching.register(mine, READ, "two")
    theirs.send(b"x")
    assert ready(watching) == [("two", READ)]
    watching.unregister(mine)
    watching.register(mine, WRITE, "three")
    assert ready(watching) == [("three", WRITE)]


def test_a_parked_socket_that_can_be_read_is_told_to_nobody_and_then_forgotten(watching, pair):
    mine, theirs = pair
    watching.register(mine, READ)
    watching.unregister(mine)
    theirs.send(b"x")
    assert ready(watching) == []
    assert watching._epoll.poll(0.0) == [], "the kernel would tell it again and again"
    watching.register(mine, READ, "again")
    assert ready(watching) == [("again", READ)]


def test_the_end_of_a_connection_is_told_to_the_reader(watching, pair):
    mine, theirs = pair
    watching.register(mine, READ, "reader")
    theirs.close()
    assert ready(watching) == [("reader", READ)]


@pytest.mark.parametrize("parked", [True, False])
def test_a_new_socket_may_have_the_number_of_a_closed_one(watching, parked):
    mine, theirs = socket.socketpair()
    number = mine.fileno()
    watching.register(mine, READ, "old")
    if parked:
        watching.unregister(mine)
    mine.close()
    theirs.close()
    if not parked:
        watching.unregister(mine)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        assert number in (mine.fileno(), theirs.fileno())
        one, other = (mine, theirs) if mine.fileno() == number else (theirs, mine)
        watching.register(one, READ, "new")
        other.send(b"x")
        assert ready(watching) == [("new", READ)]


def test_what_cannot_be_is_refused(watching, pair):
    mine, theirs = pair
    for refused in (watching.unregister, watching.get_key, lambda one: watching.modify(one, READ)):
        with pytest.raises(KeyError):
            refused(mine)
    watching.register(mine, READ)
    with pytest.raises(KeyError, match="registered already"):
        watching.register(mine, READ)
    theirs.close()
    with pytest.raises(ValueError, match="closed"):
        watching.register(theirs, READ)


def test_it_does_as_the_standard_librarys(watching, pair):
    """Random steps, each with the same outcome."""
    chance, (mine, theirs) = Random(0), pair
    mine.setblocking(False)
    with closing(selectors.DefaultSelector()) as other:
        for _ in range(500):
            events = chance.choice([READ, WRITE, READ | WRITE])
            step = chance.choice(["register", "unregister", "modify", "send", "drain", "select"])
            if step == "send":
                theirs.send(b"x")
            elif step == "drain":
                with suppress(BlockingIOError):
                    mine.recv(1000)
            elif step == "select":
                # A parked socket that can be read makes one call return early, as a signal may.
                watching.select(0.0)
                found = [sorted((key.fd, events) for key, events in one.select(0.0)) for one in (watching, other)]
                assert found[0] == found[1]
            else:
                outcomes = []
                for one in (watching, other):
                    try:
                        method = getattr(one, step)
                        made = method(mine) if step == "unregister" else method(mine, events)
                        outcomes.append(made.events)
                    except KeyError:
                        outcomes.append(None)
                assert outcomes[0] == outcomes[1], step


@pytest.mark.slow
def test_a_parked_socket_that_nobody_holds_is_closed(watching):
    mine, theirs = socket.socketpair()
    with theirs:
        watching.register(mine, READ)
        watching.unregister(mine)
        gone = weakref.ref(mine)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del mine
            gc.collect()
        assert gone() is None
        assert theirs.recv(1) == b"", "the other end is told"


@pytest.mark.parametrize("is_reused", [True, False])
def test_a_parked_socket_that_a_child_has_too_is_told_to_nobody_once_it_is_closed(watching, pair, is_reused):
    """The kernel watches what the child has, under a number that may be that of another socket by now."""
    other, sends = pair
    watching.register(other, READ, "other")
    mine, theirs = socket.socketpair()
    number = mine.fileno()
    with mine.dup():  # as a child of fork has it
        watching.register(mine, READ)
        watching.unregister(mine)
        mine.shutdown(socket.SHUT_RDWR)
        mine.close()
        theirs.close()
        if is_reused:
            mine, theirs = socket.socketpair()
            assert number in (mine.fileno(), theirs.fileno())
            watching.register(mine if mine.fileno() == number else theirs, READ, "new")
        with mine, theirs:
            assert ready(watching, 0.0) == []
            assert watching._epoll.poll(0.0) == [], "the kernel has nothing to tell"
            sends.send(b"x")
            assert ready(watching) == [("other", READ)]
