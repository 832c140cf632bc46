"""Tools of a user's own, as the tests name them in `tools`."""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.contracts.tasks import Problem
from rftstream.environments.toolset.base import CannotSave, ToolError, ToolResult

released = threading.Event()
"""Set by a test when `wait_for_release` may return."""


def area(width: float, height: Annotated[float, Meta(gt=0)] = 1.0, unit: Literal["m", "cm"] = "m") -> str:
    """Compute the area of a rectangle.

    It is exact.

    Args:
        width: How wide it is,
            in the unit.
        height: How high it is.

    Returns:
        The area.
    """
    return f"{width * height:g} {unit}2"


def look_up(key: str, *, problem: Problem, seed: int) -> str:
    """Look up a key."""
    return f"{problem.info['table'].get(key, 'nothing')} {seed}"


async def slow_echo(text: str) -> str:
    """Say it again."""
    await asyncio.sleep(0)
    return text


def surrogates() -> str:
    """Return what no encoding takes."""
    return "a\ud800b"


def long() -> str:
    """Return much."""
    return "x" * 100_000


def no_plain_value() -> object:
    """Return an object."""
    return object()


def table() -> dict[str, Any]:
    """Return a table."""
    return {"a": [1, 2], "b": None}


def fail(why: str) -> str:
    """Fail."""
    raise KeyError(why)


def refuse() -> str:
    """Refuse."""
    raise ToolError("not today")


def leave() -> str:
    """Leave."""
    raise SystemExit("bye")


def wait_for_release() -> str:
    """Block until a test sets `released`."""
    released.wait()
    return "released"


async def hang() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


def submit(answer: int) -> ToolResult:
    """Hand the answer in."""
    right = float(answer == 42)
    return ToolResult(content="taken", reward=right, parts={"right": right}, done=True)


def no_hint(key) -> str:  # type: ignore[no-untyped-def]
    """Take what has no type hint."""
    return str(key)


def any_number(*keys: str) -> str:
    """Take any number."""
    return " ".join(keys)


not_callable = 3


class Notebook:
    """Keep notes."""

    def __init__(self, *, limit: int = 2, problem: Problem) -> None:
        self._limit, self._notes = limit, [str(problem.answer)]

    def __call__(self, note: str) -> str:
        """Write a note down."""
        if len(self._notes) > self._limit:
            raise ToolError("the notebook is full")
        self._notes.append(note)
        return ", ".join(self._notes)

    def save(self) -> list[str]:
        return self._notes

    def load(self, state: list[str]) -> None:
        self._notes = list(state)


class Schema:
    """A tool with a JSON Schema of its own."""

    tool_name = "by-schema"
    description = "Takes a point."
    parameters: dict[str, Any] = {  # noqa: RUF012  as a user writes it
        "type": "object",
        "properties": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 2}},
        "required": ["point"],
        "$defs": {"elsewhere": {"$ref": "http://localhost:1/schema.json"}},
    }

    def __call__(self, point: list[int]) -> str:
        return str(sum(point))


class NotSaved:
    """A tool whose state cannot be saved."""

    def __call__(self) -> str:
        """Do nothing."""
        return ""

    def save(self) -> None:
        raise CannotSave("a lock")


class Closed:
    """A tool that says when it is closed."""

    closed = 0

    def __call__(self) -> str:
        """Do nothing."""
        return ""

    async def close(self) -> None:
        Closed.closed += 1
        raise OSError("could not be closed")


def closest(answer: str, problem: Problem) -> float:
    """A check for the environment `attempts`."""
    return 1 - abs(float(answer) - float(problem.answer or 0)) / 10


async def closest_later(answer: str, problem: Problem) -> float:
    await asyncio.sleep(0)
    return closest(answer, problem)


def not_finite(answer: str, problem: Problem) -> float:
    return float("nan")
