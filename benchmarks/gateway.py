"""Model calls of agents through the gateway, beside an echo of the same size by uvicorn alone, as it comes: over h11.

Each agent sends one call after the other on its own connection. The gateway has each call sampled by the fake policy,
which takes no time, and on the embedded log before it answers; many calls share a transaction. The echo does nothing.

Server and load share the machine's cores, so calls per second depend on what else runs there. The CPU time of a call
does not: that of the server's process, all threads together, and that of the load, which is this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks._gateway_server import SECRET

NUM_AGENTS, NUM_CALLS = 64, 40
NUM_REPEATS = 3
"""How often both are measured; what is told is the median."""
WARM_CALLS = 4
"""Calls of each agent that are not counted."""

MEASURED = (
    ("calls answered", "calls/s"),
    ("time of a call, median", "ms"),
    ("time of a call, 99 %", "ms"),
    ("CPU of a call, in the server", "us"),
    ("CPU of a call, in the load", "us"),
)
"""What is measured, and its unit."""

ECHO = """
ANSWER = b'{"id":"' + b"x" * 420 + b'"}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]

async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})
"""


def run() -> list[dict[str, Any]]:
    all_ours, all_echo = [], []
    for _ in range(NUM_REPEATS):  # in turns, since the other work on the machine comes and goes
        with gateway(NUM_AGENTS, NUM_AGENTS) as (port, keys, process):
            all_ours.append(_measure(process, port, keys))
        with _echo() as (process, port):
            all_echo.append(_measure(process, port, ["x"] * NUM_AGENTS))
    ours, echo = (tuple(map(statistics.median, zip(*found, strict=True))) for found in (all_ours, all_echo))
    return [
        {
            "name": f"gateway: {name}, {NUM_AGENTS} agents",
            "unit": unit,
            "ours": mine,
            "reference": other,
            "reference_name": "uvicorn, an echo",
            "ratio": mine / other,
        }
        for (name, unit), mine, other in zip(MEASURED, ours, echo, strict=True)
    ]


def _measure(process: int, port: int, keys: Sequence[str]) -> tuple[float, ...]:
    """Return what MEASURED names, of the server with this process id."""
    server = psutil.Process(process)
    times: list[float] = []
    used: list[tuple[float, float]] = []

    async def agent(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for call in range(WARM_CALLS + NUM_CALLS):
            if call == WARM_CALLS:
                await barrier.wait()
            content = f"{number}+{call}="
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
            began = time.perf_counter()
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s" % (keys[number].encode(), len(body), body)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            if call >= WARM_CALLS:
                times.append(1000 * (time.perf_counter() - began))
        writer.close()

    async def all_agents() -> float:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_AGENTS):
                group.create_task(agent(number))
            await barrier.wait()
            began = time.perf_counter()
            used.append((sum(server.cpu_times()[:2]), time.process_time()))
        return time.perf_counter() - began

    barrier = asyncio.Barrier(NUM_AGENTS + 1)
    took_s = asyncio.run(all_agents())
    used.append((sum(server.cpu_times()[:2]), time.process_time()))
    server_us, client_us = (1e6 * (after - before) / len(times) for before, after in zip(*used, strict=True))
    slowest = statistics.quantiles(times, n=100)[98]
    return len(times) / took_s, statistics.median(times), slowest, server_us, client_us


@contextmanager
def gateway(num_rollouts: int, at_once: int) -> Iterator[tuple[int, list[str], int]]:
    """Yield port, keys of rollouts, and process id of a server."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        settings = [folder, str(num_rollouts), str(port), str(at_once)]
        command = [sys.executable, "-m", "benchmarks._gateway_server", *settings]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **SECRET})
        assert process.stdin is not None and process.stdout is not None
        try:
            yield port, json.loads(process.stdout.readline()), process.pid
        finally:
            process.stdin.close()
            process.wait()
            process.stdout.close()


@contextmanager
def _echo() -> Iterator[tuple[int, int]]:
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        with open(f"{folder}/echo.py", "w", encoding="utf-8") as file:
            file.write(ECHO)
        command = [sys.executable, "-m", "uvicorn", "echo:app", "--port", str(port), "--no-access-log"]
        process = subprocess.Popen([*command, "--log-level", "error", "--lifespan", "off", "--http", "h11"], cwd=folder)
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            yield process.pid, port
        finally:
            process.terminate()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
