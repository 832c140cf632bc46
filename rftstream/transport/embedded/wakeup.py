"""Wake-up pipes: after a commit a process wakes the processes that wait.

A waiting process keeps a named pipe in the folder of each topic that it waits for. After a commit, the writer writes a
byte into every pipe there. This needs no daemon and no polling, and opening a pipe shows whether its reader is dead. A
byte is only a hint: the log is the truth, and a waiting process also reads the log at intervals."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote


class WakeupPipe:
    """A named pipe that this process reads from. WakeupPipes makes it; `EmbeddedTransport.wait` waits on its `fd`."""

    def __init__(self, folder: Path) -> None:
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        folder.mkdir(parents=True, exist_ok=True)
        hidden = folder / f".{name}"
        os.mkfifo(hidden)
        self.fd = os.open(hidden, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # This process also keeps a write end open. Without any writer, a pipe is at its end and looks readable for
        # ever.
        self._write_fd = os.open(hidden, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.path = str(folder / name)
        # The pipe gets its name only now that it has a reader. Writers take a pipe without a reader for a dead
        # process's.
        os.rename(hidden, self.path)

    def drain(self) -> None:
        """Discard the bytes written so far."""
        try:
            while len(os.read(self.fd, 65536)) == 65536:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Remove the pipe and close it."""
        _unlink(self.path)
        os.close(self.fd)
        os.close(self._write_fd)


class WakeupPipes:
    """The pipes of one log, and those of them that this process reads from. Store makes it and closes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._topics: dict[str, WakeupPipe | None] = {}

    def of_topic(self, topic: str) -> WakeupPipe | None:
        """Return this process's pipe of a topic, which the first call makes. None if the file system has no named
        pipes; the process then only reads the log at intervals."""
        if topic not in self._topics:
            self._topics[topic] = self._made(topic_place(topic))
        return self._topics[topic]

    def of_member(self, group: str) -> WakeupPipe | None:
        """Make a new pipe for a member. The caller closes it. As long as it is open, others see that the member is
        alive."""
        return self._made(group_place(group))

    def wake_topics(self, topics: Iterable[str]) -> None:
        """Wake the processes that wait for one of these topics, and remove the pipes of dead processes."""
        for topic in topics:
            self._wake(topic_place(topic), unlink_dead=True)

    def wake_group(self, group: str) -> None:
        """Wake the members of a group."""
        # Pipes of dead members stay, since the others detect the death by them.
        self._wake(group_place(group), unlink_dead=False)

    def close(self) -> None:
        """Close the pipes of topics."""
        for pipe in self._topics.values():
            if pipe is not None:
                pipe.close()
        self._topics.clear()

    def _made(self, place: str) -> WakeupPipe | None:
        try:
            return WakeupPipe(self._folder / place)
        except OSError:
            return None

    def _wake(self, place: str, *, unlink_dead: bool) -> None:
        folder = f"{self._folder}/{place}"
        try:
            names = os.listdir(folder)
        except OSError:
            return  # no process has ever waited for it
        for name in names:
            if name.startswith("."):
                continue
            path = f"{folder}/{name}"
            try:
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno == errno.ENXIO and unlink_dead:
                    _unlink(path)
                continue
            try:
                os.write(fd, b"!")
            except OSError:
                pass  # the pipe is full of unread bytes, or its reader died just now
            finally:
                os.close(fd)


def topic_place(topic: str) -> str:
    """Return the name of the folder that holds a topic's pipes."""
    return "topic-" + quote(topic, safe="")


def group_place(group: str) -> str:
    """Return the name of the folder that holds the pipes of a group's members."""
    return "group-" + quote(group, safe="")


def is_dead(path: str) -> bool:
    """Return whether the pipe has no reader."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno in (errno.ENXIO, errno.ENOENT)
    os.close(fd)
    return False


def remove_dead(path: str) -> None:
    """Remove a pipe if it has no reader."""
    if path and is_dead(path):
        _unlink(path)


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
