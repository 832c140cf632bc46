"""Models that write problems, as the tests want them: scripted ones behind a server of our own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.served import Server

Script = Callable[[str], str]
"""The last message that the model is shown -> what it says."""

SUM = re.compile(r"(\d+)\s*(?:\+|plus)\s*(\d+)")


@contextmanager
def served(script: Script) -> Iterator[Server]:
    """A server whose model says what the script says."""

    def usual(body: dict[str, Any]) -> dict[str, Any]:
        said = script(body["messages"][-1]["content"])
        return {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}

    server = Server(usual)  # type: ignore[no-untyped-call]
    try:
        yield server
    finally:
        server.close()  # type: ignore[no-untyped-call]


def is_request(asked: str) -> bool:
    """Whether it is asked for a problem, and not to solve one."""
    return "Problem:" in asked


def terms(asked: str) -> tuple[int, int]:
    match = SUM.search(asked)
    assert match is not None, asked
    return int(match[1]), int(match[2])


def writer(asked: str) -> str:
    """Reword and vary sums, and solve them."""
    left, right = terms(asked)
    if not is_request(asked):
        return str(left + right)
    if "in other words" in asked:
        return f'Here it is: {{"problem": "{left} plus {right}"}}'
    return json.dumps({"problem": f"{left + 10}+{right}=", "answer": left + right + 10})
