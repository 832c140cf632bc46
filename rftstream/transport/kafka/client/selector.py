"""A selector for the sockets of kafka-python's clients that makes fewer system calls.

The client waits for one answer after the other. For each answer it registers the connection for reading, and
unregisters it when something can be read. With the selectors of the standard library that is two system calls, plus two
for an error that has the socket's addresses in its text. Here an unregistered socket stays known to the kernel until it
can be read, and is usually registered again before that. docs/decisions/0017 has measurements with transactions of one
record."""

from __future__ import annotations

import select
import selectors
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_EVENTS = 64
"""Most events that one `select` returns. The others come with the next one."""


class LazySelector(selectors.BaseSelector):
    """A selector on epoll for sockets. kafka-python makes one for each client and calls it in one thread at a time.

    `unregister` parks a socket that was registered only for reading: the kernel still watches it. If it is registered
    for reading again, no system call is needed. If it can be read before that, the kernel is told to forget it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._parked: dict[int, weakref.ref[Any]] = {}
        """File descriptor -> parked socket, which the kernel still watches for reading. The reference is weak, so that
        an unused socket is closed."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch a socket. KeyError if it is watched already; ValueError if it is closed."""
        fd: int = fileobj.fileno()
        if fd < 0:
            raise ValueError("the socket is closed")
        if fd in self._keys:
            raise KeyError(f"file descriptor {fd} is registered already")
        parked = self._parked.pop(fd, None)
        if parked is not None and parked() is not fileobj:
            self._watch_anew()  # the parked socket was closed, and its number belongs to this one now
            parked = None
        if parked is None or events != selectors.EVENT_READ:
            if parked is not None:
                self._forget(fd)
            self._epoll.register(fd, _mask_of(events))
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Stop watching a socket. KeyError if it is not watched."""
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
        """Return the sockets that can be read or written, after at most `timeout` seconds; None for any time."""
        try:
            found = self._epoll.poll(None if timeout is None else max(0.0, timeout), _EVENTS)
        except InterruptedError:
            return []
        ready = []
        for fd, mask in found:
            key = self._keys.get(fd)
            if key is None:
                # A parked socket can be read, and nobody reads it: it would be reported again and again.
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
        if fd < 0:  # it was closed while it was watched
            fd = next((key.fd for key in self._keys.values() if key.fileobj is fileobj), fd)
        return self._keys[fd]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the keys of all sockets that are watched, by file descriptor."""
        return self._keys

    def close(self) -> None:
        """Stop watching all sockets."""
        self._keys.clear()
        self._parked.clear()
        self._epoll.close()

    def _forget(self, fd: int) -> None:
        with suppress(OSError):  # the socket was closed, which the kernel has noticed
            self._epoll.unregister(fd)

    def _watch_anew(self) -> None:
        """Let the kernel forget all sockets that are not registered now. If a parked socket was closed and a child
        process has a copy of it, the kernel still watches the copy under a number that belongs to another socket by
        now, or to none."""
        self._epoll.close()
        self._epoll = select.epoll()
        self._parked.clear()
        for fd, key in self._keys.items():
            with suppress(OSError):  # it was closed while it was watched
                self._epoll.register(fd, _mask_of(key.events))


def _mask_of(events: int) -> int:
    return (select.EPOLLIN if events & selectors.EVENT_READ else 0) | (
        select.EPOLLOUT if events & selectors.EVENT_WRITE else 0
    )


CONFIGURED: type[selectors.BaseSelector] = LazySelector if hasattr(select, "epoll") else selectors.DefaultSelector
"""Selector class that is passed to the clients."""
