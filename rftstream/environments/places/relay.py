"""The relay of a place: `python3 -c RELAY PORT` in a container beside it, which shares its network and nothing else.

It listens at PORT of the place's loopback, and passes connections on over its stdin and stdout. `Tunnel` at the other
end connects each with the model's address. A frame is the number of a connection, the length of the data, and the data;
without data it closes the connection. The first frame, of number 0, says that the relay listens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
from urllib.parse import urlsplit

from rftstream.environments.places.processes import OUTPUT_BYTES, end_process, exchange, kill

HEAD = struct.Struct("<II")
READ_BYTES = 1 << 16
MAX_CONNECTIONS = 256
"""Most connections of a place at once. Further ones are closed."""
MAX_WAITING = 64
"""Most frames of one connection that wait for the model to read them."""

RELAY = """
import asyncio, itertools, struct, sys
head, numbers, writers = struct.Struct("<II"), itertools.count(1), {}
async def main():
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(), sys.stdout)
    out = asyncio.StreamWriter(transport, protocol, None, loop)
    async def serve(source, target):
        number = next(numbers)
        writers[number] = target
        try:
            while data := await source.read(65536):
                out.write(head.pack(number, len(data)) + data)
                await out.drain()
        except ConnectionError:
            pass
        if writers.pop(number, None):
            out.write(head.pack(number, 0))
        target.close()
    await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    out.write(head.pack(0, 0))
    while True:
        number, length = head.unpack(await reader.readexactly(8))
        data = await reader.readexactly(length)
        writer = writers.get(number)
        if writer and data:
            writer.write(data)
        elif writer:
            writers.pop(number).close()
try:
    asyncio.run(main())
except asyncio.IncompleteReadError:
    pass
"""


class Tunnel:
    """The end of a relay on this machine. `Relayed` makes it over the pipes of the relay's process, awaits `ready`,
    keeps `run` going, and calls `close` at the end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: str) -> None:
        self._reader, self._writer = reader, writer
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80
        self._connections: dict[int, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._takes_no_more = False
        self.newest = 0
        """Number of the newest connection."""
        self._num_late = 0

    async def ready(self) -> None:
        """Return when the relay listens. IncompleteReadError if it ends before."""
        await self._reader.readexactly(HEAD.size)

    async def run(self) -> None:
        """Pass data on until the relay ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, length = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                data = await self._reader.readexactly(length)
                if number > self.newest:  # an older number without a connection is of a closed one
                    self.newest = number
                    self._num_late += self._takes_no_more
                    if not self._takes_no_more and len(self._connections) < MAX_CONNECTIONS:
                        self._connections[number] = asyncio.Queue(MAX_WAITING)
                        task = asyncio.create_task(self._connect(number, self._connections[number]))
                        self._tasks.add(task)
                        task.add_done_callback(functools.partial(self._ended, number))
                    else:
                        self._writer.write(HEAD.pack(number, 0))
                if number in self._connections:
                    await self._connections[number].put(data)

    def end_calls(self) -> int:
        """End all connections, and refuse later ones. Return the number of those that were refused since the first
        call of this."""
        self._takes_no_more = True
        for task in self._tasks:
            task.cancel()
        return self._num_late

    async def close(self) -> None:
        """End all connections."""
        self.end_calls()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, number: int, sent: asyncio.Queue[bytes]) -> None:
        """Connect to the model for one connection of the place, and pass data in both directions until one side closes
        it."""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            both = [asyncio.create_task(one) for one in (self._ask(sent, writer), self._answer(number, reader))]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
                writer.close()

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        """Forget a connection whose task has ended, also before it began, and close it in the place."""
        self._tasks.discard(task)
        sent = self._connections.pop(number)
        while not sent.empty():  # `run` may wait for room
            sent.get_nowait()
        self._writer.write(HEAD.pack(number, 0))

    async def _ask(self, sent: asyncio.Queue[bytes], writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await sent.get():
                writer.write(data)
                await writer.drain()

    async def _answer(self, number: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                self._writer.write(HEAD.pack(number, len(data)) + data)
                await self._writer.drain()


class Relayed:
    """A place, as far as all kinds are alike: its processes on this machine, and perhaps a tunnel to the model."""

    def __init__(self) -> None:
        self._tunnel: Tunnel | None = None
        self._relay: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        """They are cancelled when the place is closed."""
        self._running: set[asyncio.subprocess.Process] = set()
        """Those of commands. They are killed when the tunnel ends: without its model an agent could only wait."""

    @property
    def has_called(self) -> bool:
        """Return whether anything in the place has connected to the model."""
        return self._tunnel is not None and self._tunnel.newest > 0

    def end_calls(self) -> int:
        """Close the connections to the model, and refuse later ones."""
        return 0 if self._tunnel is None else self._tunnel.end_calls()

    async def close(self) -> None:
        """End the place and everything in it. A caller that is cancelled meanwhile leaves nothing behind, either."""
        await asyncio.shield(self._close())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tunnel is not None:
            await self._tunnel.close()

    async def _begin_tunnel(self, relay: asyncio.subprocess.Process, model_url: str) -> None:
        """Pass on what comes from the relay's process. IncompleteReadError if the relay does not begin."""
        self._relay = relay
        assert relay.stdout and relay.stdin
        self._tunnel = Tunnel(relay.stdout, relay.stdin, model_url)
        await self._tunnel.ready()
        task = asyncio.create_task(self._tunnel.run())
        task.add_done_callback(self._tunnel_ended)
        self._tasks.append(task)

    def _tunnel_ended(self, _: asyncio.Task[None]) -> None:
        for process in self._running:
            kill(process)

    async def _finish(
        self, process: asyncio.subprocess.Process, data: bytes = b"", *, timeout_s: float, most: int = OUTPUT_BYTES
    ) -> tuple[int, bytes]:
        """Return the exit code and the last `most` bytes of output of a command's process. TimeoutError if it takes too
        long; it is dead then."""
        self._running.add(process)
        try:
            async with asyncio.timeout(timeout_s):
                output = await exchange(process, data, most)
                return await process.wait(), output
        finally:
            await end_process(process)
            self._running.discard(process)
