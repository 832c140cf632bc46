"""Processes of an engine's command: what is sent to them and read from them, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

OUTPUT_BYTES = 16_000
"""Number of bytes of a command's output that are kept."""


async def communicate(process: asyncio.subprocess.Process, data: bytes = b"", most: int = OUTPUT_BYTES) -> str:
    """Send data to a process, and return the last part of its output."""
    return (await exchange(process, data, most)).decode(errors="replace")


async def exchange(process: asyncio.subprocess.Process, data: bytes = b"", most: int = OUTPUT_BYTES) -> bytes:
    """Send data to a process, and return the last `most` bytes of its output."""
    assert process.stdin and process.stdout
    reading = asyncio.create_task(read_tail(process.stdout, most))
    try:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.close()
        return await reading
    finally:
        reading.cancel()


async def read_tail(reader: asyncio.StreamReader, most: int = OUTPUT_BYTES) -> bytes:
    """Read to the end, and return the last part."""
    tail = b""
    while data := await reader.read(1 << 16):
        tail = (tail + data)[-most:]
    return tail


async def drain(reader: asyncio.StreamReader) -> None:
    """Read to the end, so that the writer never waits."""
    await read_tail(reader)


async def read_up_to(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Return what comes, up to a number of bytes."""
    data = b""
    while len(data) < max_bytes and (more := await reader.read(max_bytes - len(data))):
        data += more
    return data


async def end_process(process: asyncio.subprocess.Process) -> None:
    """End a process that may have ended."""
    if process.stdin:
        process.stdin.close()
    if process.returncode is None:
        kill(process)
        await asyncio.shield(process.wait())


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process that may have ended. Whoever waits for it notices that."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # `process.kill` would take its exit status from whoever waits for it
