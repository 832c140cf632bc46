"""The relay of places, run by an interpreter of this machine: what goes in comes out at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest

from rftstream.environments.places import relay
from rftstream.environments.places.relay import RELAY, Tunnel
from tests.loopback import free_ports
from tests.waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.process]

LARGE = bytes(range(256)) * 8192


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what comes, twice, and close at the end of a line."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        line = await reader.readuntil(b"\n")
        writer.write(line + line)
        await writer.drain()
    writer.close()


async def asked(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data + b"\n")
    answer = await reader.read()
    writer.close()
    return answer


async def test_connections_pass_through_at_once_and_are_closed_with_their_partner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = asyncio.subprocess.PIPE
    port, silent = free_ports(2)
    server = await asyncio.start_server(echo, "127.0.0.1", 0, limit=4 << 20)
    address = server.sockets[0].getsockname()[1]
    command = [sys.executable, "-c", RELAY, str(port)]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin and process.stdout
    tunnel = Tunnel(process.stdout, process.stdin, f"http://127.0.0.1:{address}/v1")
    await tunnel.ready()
    assert tunnel.newest == 0
    running = asyncio.create_task(tunnel.run())
    data = LARGE.replace(b"\n", b"")
    answers = await asyncio.gather(*(asked(port, bytes([number]) + data) for number in range(20, 28)))
    assert answers == [(bytes([number]) + data + b"\n") * 2 for number in range(20, 28)]
    assert tunnel.newest == 8

    monkeypatch.setattr(relay, "MAX_CONNECTIONS", 1)
    await asyncio.to_thread(wait_until, lambda: not tunnel._connections)
    kept_reader, kept = await asyncio.open_connection("127.0.0.1", port)
    kept.write(b"one ")
    await asyncio.to_thread(wait_until, lambda: list(tunnel._connections) == [9])
    assert await asked(port, b"one more?") == b"", "more than a place may have: closed"
    kept.write(b"goes on\n")
    assert await kept_reader.read() == b"one goes on\n" * 2
    kept.close()

    tunnel._port = silent
    assert await asked(port, b"anybody?") == b"", "nobody is there: closed, and the relay goes on"

    tunnel._port = address
    late_reader, late = await asyncio.open_connection("127.0.0.1", port)
    late.write(b"in the middle ")
    await asyncio.to_thread(wait_until, lambda: list(tunnel._connections) == [12])
    assert tunnel.end_calls() == 0
    assert await late_reader.read() == b"" and tunnel.end_calls() == 0, "what is open is closed"
    assert await asked(port, b"and now?") == b"" and tunnel.end_calls() == 1
    late.close()
    server.close()
    await server.wait_closed()

    process.stdin.close()
    assert await process.wait() == 0, "it ends with its stdin"
    await running
    await tunnel.close()
