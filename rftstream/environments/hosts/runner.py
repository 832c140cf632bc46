"""The program inside a host: `PYTHON runner.py SETTINGS`, run by the interpreter with the foreign packages.

It is one file, needs nothing but the standard library (Python 3.9 or newer), and does not import rftstream. It reads
requests from one pipe and writes answers to another. Each is a frame: the length of its body in four bytes,
little-endian, and a JSON object. The end of the requests ends the program.

    {"id": 1, "do": "import", "key": "i1", "target": "module:Thing"}                                   -> {}
    {"id": 2, "do": "start", "key": "e1", "target", "config", "problem", "seed"}    -> {"messages", "tools", "state"}
    {"id": 3, "do": "load", "key": "e1", "target", "config", "problem", "seed", "state"}      -> {"tools", "state"}
    {"id": 4, "do": "reply", "key": "e1", "said"}                                          -> {"reply", "state"}
    {"id": 5, "do": "close", "key": "e1"}                                                              -> {}
    {"id": 6, "do": "run_agent", "key": "a1", "target", "options", "problem", "base_url", "api_key", "seed"}
                                                                                                 -> {"result"}
    {"id": 7, "do": "cancel", "key": "a1", "call": 6}
    {"id": 8, "do": "tasks", "key": "t1", "target", "options", "count"}                     -> {"tasks"}

An answer is `{"id", "value"}` or `{"id", "error": {"kind", "line"}}`. The first frame is `{"ready": {...}}`.

Every environment has its own thread, which makes all calls of its object. So the calls of one environment run one after
the other in one thread, and a blocking call delays no other environment. If a method returns an awaitable, it is
awaited in one event loop in the main thread.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

PR_SET_PDEATHSIG = 1
READ_BYTES = 1 << 20
MAX_LINE = 2000
"""Largest number of characters of the error line."""
LAST = ("close", "run_agent", "import")
"""Requests after which their room is removed."""
DO_NOT_OVERTAKE = threading.Lock()
"""Held while an answer is written."""


class NotCarriedOut(Exception):
    """A request that cannot be carried out. Its text is the reason."""


class Channel:
    """The two pipes. Threads send their answers through it."""

    def __init__(self, requests: int, replies: int, max_bytes: int) -> None:
        self._requests = requests
        self._replies = replies
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        for descriptor in (requests, replies):
            os.set_inheritable(descriptor, False)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        for descriptor in (self._requests, self._replies):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    @property
    def is_in_fork(self) -> bool:
        """Return whether this process is a copy that foreign code has forked."""
        return os.getpid() != self._pid

    def answer(self, number: int, value: object) -> None:
        """Send the result of a call. A result that cannot be sent is an error of the call."""
        try:
            body = json.dumps({"id": number, "value": value}, default=plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            self.fail(number, "answer", f"{type(error).__name__}: {error}")
            return
        if len(body) > self._max_bytes:
            self.fail(number, "answer", f"ValueError: got {len(body)} bytes, expected at most {self._max_bytes}")
            return
        self.send(body)

    def fail(self, number: int, kind: str, line: str) -> None:
        """Send the error of a call."""
        self.send(json.dumps({"id": number, "error": {"kind": kind, "line": line[:MAX_LINE]}}).encode())

    def send(self, body: bytes) -> None:
        """Write one frame. If the pipe is gone, the process ends, and with it the calls that wait for it."""
        view = memoryview(len(body).to_bytes(4, "little") + body)
        try:
            with DO_NOT_OVERTAKE:
                while view:
                    view = view[os.write(self._replies, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.write(2, traceback.format_exc().encode("utf-8", "replace"))
            os._exit(70)

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the requests until the pipe ends."""
        buffer = bytearray()
        while True:
            while len(buffer) >= 4 and len(buffer) - 4 >= int.from_bytes(buffer[:4], "little"):
                end = 4 + int.from_bytes(buffer[:4], "little")
                body = bytes(buffer[4:end])
                del buffer[:end]
                yield json.loads(body)
            data = os.read(self._requests, READ_BYTES)
            if not data:
                return
            buffer += data


class Awaiter:
    """The event loop of the main thread. Threads of environments pass awaitables to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        """Run until the process ends, whatever foreign code does to the event loop."""
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
            except BaseException:
                traceback.print_exc()
            time.sleep(0.01)

    def submit(self, awaitable: Any) -> Any:
        """Return the concurrent future of an awaitable."""
        return asyncio.run_coroutine_threadsafe(guarded(awaitable), self.loop)


async def guarded(awaitable: Any) -> Any:
    """Await the awaitable. Exceptions that would end the event loop are converted."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise NotCarriedOut(f"{type(error).__name__}: {error}") from error


class Room:
    """One environment, or one run of an agent, with its thread. Its first request makes it."""

    def __init__(self, key: str, channel: Channel, awaiter: Awaiter) -> None:
        self._key = key
        self._channel = channel
        self._awaiter = awaiter
        self._thing: Any = None
        self._jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._awaited: tuple[int, Any] | None = None
        """Call and future of the current awaitable."""
        self.thread = threading.Thread(target=self._work, name=key, daemon=True)
        self.thread.start()

    def take(self, request: dict[str, Any]) -> None:
        """Queue a request. "close" is the last one."""
        self._jobs.put(request)

    def cancel(self, number: int) -> None:
        """Cancel a call. A blocking call continues, and its answer is dropped."""
        with self._lock:
            self._cancelled.add(number)
            if self._awaited is not None and self._awaited[0] == number:
                self._awaited[1].cancel()

    def _work(self) -> None:
        while True:
            request = self._jobs.get()
            try:
                value = getattr(self, "_" + request["do"])(request)
            except BaseException as error:
                if self._channel.is_in_fork:
                    os._exit(1)
                self._fail(request["id"], error)
            else:
                if self._channel.is_in_fork:
                    os._exit(0)  # a forked copy of the process returned from the call; the original answers
                self._channel.answer(request["id"], value)
            if request["do"] in LAST:
                return

    def _fail(self, number: int, error: BaseException) -> None:
        text = traceback.format_exc()
        with contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "replace")[-64_000:])
        kind = (
            "import" if isinstance(error, CannotImport) else "refused" if isinstance(error, NotCarriedOut) else "raised"
        )
        line = str(error) if isinstance(error, NotCarriedOut) else last_line(error)
        self._channel.fail(number, kind, line)

    def _call(self, number: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function of the foreign code, and await its result if that is awaitable."""
        value = function(*arguments, **named)
        if not inspect.isawaitable(value):
            return value
        future = self._awaiter.submit(value)
        with self._lock:
            self._awaited = (number, future)
            if number in self._cancelled:
                future.cancel()
        try:
            return future.result()
        finally:
            with self._lock:
                self._awaited = None

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        self._open(request)
        return {"messages": self._call(request["id"], self._thing.start), **self._others(request)}

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        self._open(request)
        state = request["state"]
        value = base64.b64decode(state["base64"]) if "base64" in state else state["json"]
        self._call(request["id"], self._thing.load, value)
        return self._others(request)

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._thing is None:
            raise NotCarriedOut("the environment has not been started")
        reply = self._call(request["id"], self._thing.reply, request["said"])
        return {"reply": reply, **({} if is_done(reply) else self._state(request))}

    def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._thing is not None and hasattr(self._thing, "close"):
            self._call(request["id"], self._thing.close)
        return {}

    def _run_agent(self, request: dict[str, Any]) -> dict[str, Any]:
        function = find(request["target"])
        wanted = {name: request[name] for name in ("problem", "base_url", "api_key", "seed")}
        if "options" in inspect.signature(function).parameters:
            wanted["options"] = request["options"]
        return {"result": self._call(request["id"], function, **wanted)}

    def _tasks(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the next tasks."""
        if self._thing is None:
            self._thing = iter(self._call(request["id"], find(request["target"]), request["options"]))
        return {"tasks": list(itertools.islice(self._thing, request["count"]))}

    def _import(self, request: dict[str, Any]) -> dict[str, Any]:
        find(request["target"])
        return {}

    def _open(self, request: dict[str, Any]) -> None:
        made = find(request["target"])
        self._thing = made(request["config"], problem=request["problem"], seed=request["seed"])

    def _others(self, request: dict[str, Any]) -> dict[str, Any]:
        tools = self._call(request["id"], self._thing.tools) if hasattr(self._thing, "tools") else []
        return {"tools": tools, **self._state(request)}

    def _state(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the state between two turns. It is sent with each answer, so that it survives the host."""
        if not (hasattr(self._thing, "save") and hasattr(self._thing, "load")):
            return {}
        state = self._call(request["id"], self._thing.save)
        if state is None:
            return {}
        if isinstance(state, (bytes, bytearray)):
            return {"state": {"base64": base64.b64encode(state).decode()}}
        return {"state": {"json": state}}


class CannotImport(NotCarriedOut):
    """The target cannot be imported."""


@functools.cache
def find(target: str) -> Any:
    """Import and return what `module:Thing` or `file.py:Thing` names."""
    place, _, name = target.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location("target_" + place.rpartition("/")[2][:-3], place)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except BaseException as error:
        raise CannotImport(f"importing {place!r} failed: {last_line(error)}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise CannotImport(f"module {place!r} has no {name!r}") from None


def last_line(error: BaseException) -> str:
    """Return the last line of the traceback."""
    return traceback.format_exception_only(type(error), error)[-1].strip()[:MAX_LINE]


def is_done(reply: object) -> bool:
    """Return whether a reply ends the rollout. Then no state is needed any more."""
    return isinstance(reply, dict) and bool(reply.get("done"))


def plain(value: object) -> object:
    """Return the plain form of numbers and arrays of numpy and similar libraries, and of sets. TypeError for other
    objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not plain data: expected text, numbers, lists and dicts")


def serve(settings: dict[str, Any], channel: Channel, awaiter: Awaiter) -> None:
    """Pass each request to its room until the requests end. Then close all rooms, and end the process."""
    rooms: dict[str, Room] = {}
    try:
        for request in channel.requests():
            key = request["key"]
            if request["do"] == "cancel":
                if key in rooms:
                    rooms[key].cancel(request["call"])
                continue
            if key not in rooms:
                rooms = {name: room for name, room in rooms.items() if room.thread.is_alive()}
                rooms[key] = Room(key, channel, awaiter)
            rooms[key].take(request)
        for room in rooms.values():
            room.take({"id": 0, "do": "close"})
        deadline = time.monotonic() + settings["close_s"]
        for room in rooms.values():
            room.thread.join(max(0.0, deadline - time.monotonic()))
    except BaseException:
        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
        os._exit(70)
    os._exit(0)


def main() -> None:
    """Set up the pipes, report that the process is ready, and serve."""
    settings = json.loads(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        os._exit(0)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [*settings["path"], *(entry for entry in sys.path if os.path.abspath(entry or ".") != here)]
    sys.argv[1:] = []
    requests, replies = settings["descriptors"]
    channel = Channel(requests, replies, settings["max_frame_bytes"])
    awaiter = Awaiter()
    version = ".".join(map(str, sys.version_info[:3]))
    channel.send(json.dumps({"ready": {"pid": os.getpid(), "python": version}}).encode())
    threading.Thread(target=serve, args=(settings, channel, awaiter), name="requests", daemon=True).start()
    awaiter.run()


if __name__ == "__main__":
    main()
