"""256 agents at once on one explorer with the fake policy: its memory over thousands of rollouts, and calls per second.

Each agent makes one rollout after the other: a conversation of some calls, which each carry all that was said before.
What the explorer holds after the first tenth of the rollouts is the reference for what it holds at the end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from typing import Any

import psutil

from benchmarks.gateway import gateway

NUM_AGENTS, NUM_ROLLOUTS, NUM_CALLS = 256, 2560, 6
TEXT = "what comes of it is told here, in a line or two of text " * 3
"""What each call adds to the conversation."""
AGAIN_S = 0.05
"""Seconds after which an agent asks again for a rollout that the explorer does not have yet."""


def run() -> list[dict[str, Any]]:
    with gateway(NUM_ROLLOUTS, NUM_AGENTS) as (port, keys, pid):
        early, late, calls_per_s = asyncio.run(_work(port, keys, psutil.Process(pid)))
    name = f"agents: {NUM_AGENTS} at once, {NUM_ROLLOUTS} rollouts of {NUM_CALLS} calls"
    return [
        {
            "name": f"{name}, memory of the explorer",
            "unit": "MiB",
            "ours": late,
            "reference": early,
            "reference_name": "after a tenth of the rollouts",
            "ratio": late / early,
        },
        {
            "name": f"{name}, calls answered",
            "unit": "calls/s",
            "ours": calls_per_s,
            "reference": None,
            "reference_name": None,
            "ratio": None,
        },
    ]


async def _work(port: int, keys: list[str], explorer: psutil.Process) -> tuple[float, float, float]:
    """Return the explorer's MiB after a tenth of the rollouts, its most MiB in the last tenth, and calls per second."""
    left, sizes = deque(keys), dict[int, float]()

    async def agent() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def post(path: str, key: str, values: dict[str, Any]) -> dict[str, Any]:
            body = json.dumps(values).encode()
            while True:
                writer.write(
                    b"POST /v1/%s HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nauthorization: Bearer %s\r\n"
                    b"content-length: %d\r\n\r\n%s" % (path.encode(), key.encode(), len(body), body)
                )
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                answer: dict[str, Any] = json.loads(await reader.readexactly(length))
                if head.startswith(b"HTTP/1.1 200"):
                    return answer
                assert head.startswith(b"HTTP/1.1 503"), (head, answer)
                await asyncio.sleep(AGAIN_S)

        while left:
            key = left.popleft()
            messages = [{"role": "user", "content": "1+1="}]
            for _ in range(NUM_CALLS):
                answer = await post("chat/completions", key, {"model": "m", "messages": messages})
                said = answer["choices"][0]["message"]
                messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": TEXT}]
            await post("rollouts/end", key, {"reward": 1.0})
            sizes[len(sizes) + 1] = explorer.memory_info().rss / 2**20
        writer.close()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AGENTS):
            group.create_task(agent())
    took_s = time.perf_counter() - began
    tenth = len(keys) // 10
    late = max(size for number, size in sizes.items() if number > len(keys) - tenth)
    return sizes[tenth], late, len(keys) * NUM_CALLS / took_s
