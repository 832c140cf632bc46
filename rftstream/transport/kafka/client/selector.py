"""A selector for the sockets of kafka-python's clients that asks the kernel less.

The client waits for one answer after the other. For each it registers the connection for reading and takes it away
again when something can be read: with the selectors of the standard library that is two system calls, and an error with
the socket's addresses in its text, which are two more. Here a socket that is taken away stays known to the kernel until
it can be read, and is usually registered again before that. Measured with transactions of one record, in
docs/decisions/0017.
"""

from __future__ import annotations

import select
import selectors
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_EVENTS = 64
"""The most events that one `select` returns; what is left comes with the next one."""


class LazySelector(selectors.BaseSelector):
    """A selector on epoll for sockets. kafka-python makes one for each client and calls it in one thread at a time.

    `unregister` parks a socket that was registered for reading alone: the kernel still watches it. If it is registered
    for reading again, nothing has to be done. If it can be read before that, the kernel is told to forget it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._parked: dict[int, weakref.ref[Any]] = {}
        """File descriptor -> the socket that the kernel still watches for reading, if there still is one: a socket that
        nobody holds any more is to be closed by that."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch a socket. KeyError if it is watched already; ValueError if it is closed."""
        fd: int = fileobj.fileno()
        if fd < 0:
            raise ValueError("the socket is closed")
        if fd in self._keys:
            raise KeyError(f"file descriptor {fd} is registered already")
        parked = self._parked.pop(fd, None)
        if parked is not None and parked() is not fileobj:
            self._watch_anew()  # the parked one was closed, and its number went to this one
            parked = None
        if parked is None or events != selectors.EVENT_READ:
            if parked is not None:
                self._forget(fd)
            self._epoll.register(fd, _mask_of(events))
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Watch a socket no longer. KeyError if it is not watched."""
        key = self._keys.pop(self.get_key(fileobj).fd)
        if key.events == selectors.EVENT_READ:
            self._parked[key.fd] = weakref.ref(fileobj)
        else:
            self._forget(key.fd)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch a socket for other events, or with other data. KeyError if it is not watched."""
        fd, before = self.get_key(fileobj)[1:3]
        if events != before:
            self._epoll.modify(fd, _mask_of(events))
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what can be read or written, after at most `timeout` seconds; None stands for any time."""
        try:
            found = self._epoll.poll(None if timeout is None else max(0.0, timeout), _EVENTS)
        except InterruptedError:
            return []
        ready = []
        for fd, mask in found:
            key = self._keys.get(fd)
            if key is None:
                # A parked socket can be read, and nobody wants to: it would be told again and again.
                parked = self._parked.pop(fd, None)
                sock = None if parked is None else parked()
                if sock is None or sock.fileno() != fd:
                    self._watch_anew()
                else:
                    self._forget(fd)
                continue
            events = selectors.EVENT_WRITE if mask & ~select.EPOLLIN else 0
            if mask & ~select.EPOLLOUT:
                events |= selectors.EVENT_READ
            if events & key.events:
                ready.append((key, events & key.events))
        return ready

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        """Return the key of a socket that is watched. KeyError if it is not."""
        fd = fileobj.fileno()
        if fd < 0:  # It was closed while it was watched.
            fd = next((key.fd for key in self._keys.values() if key.fileobj is fileobj), fd)
        return self._keys[fd]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the keys of all sockets that are watched, by file descriptor."""
        return self._keys

    def close(self) -> None:
        """Watch nothing any longer."""
        self._keys.clear()
        self._parked.clear()
        self._epoll.close()

    def _forget(self, fd: int) -> None:
        with suppress(OSError):  # The socket was closed, which the kernel has seen.
            self._epoll.unregister(fd)

    def _watch_anew(self) -> None:
        """Let the kernel forget all that is not registered now. A parked socket was closed, and if a child process has
        a copy of it, the kernel goes on watching that one under a number that means another socket by now, or none."""
        self._epoll.close()
        self._epoll = select.epoll()
        self._parked.clear()
        for fd, key in self._keys.items():
            with suppress(OSError):  # It was closed while it was watched.
                self._epoll.register(fd, _mask_of(key.events))


def _mask_of(events: int) -> int:
    return (select.EPOLLIN if events & selectors.EVENT_READ else 0) | (
        select.EPOLLOUT if events & selectors.EVENT_WRITE else 0
    )


CONFIGURED: type[selectors.BaseSelector] = LazySelector if hasattr(select, "epoll") else selectors.DefaultSelector
"""Class that the clients are given as their `selector`."""
