"""Awaits what async rewards return, in one event loop for the life of the process.

A session of aiohttp or httpx belongs to the loop that it was first used in. A loop for each call would break the
sessions that a reward keeps. The loop runs in the caller's thread, since libraries that rewards use set alarms, which
only the main thread may.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

_own = threading.local()


def caught(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Return what a call returns, or what it raises. A reward may raise anything: it may exit, or cancel itself. Only
    the user's ctrl-C goes through."""
    try:
        return function(*arguments, **keywords)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error


def run_together(values: Sequence[Any]) -> list[Any]:
    """Await all awaitables among the values at the same time. Return what each gives or raises, and other values as
    they are."""
    result: list[Any] = _runner().run(_gathered(values))
    return result


def _runner() -> asyncio.Runner:
    if not hasattr(_own, "runner"):
        _own.runner = asyncio.Runner()
        if threading.current_thread() is threading.main_thread():
            atexit.register(functools.partial(caught, _own.runner.close))
    found: asyncio.Runner = _own.runner
    return found


async def _gathered(values: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*map(_outcome, values))


async def _outcome(value: Any) -> Any:
    try:
        return await value if inspect.isawaitable(value) else value
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
