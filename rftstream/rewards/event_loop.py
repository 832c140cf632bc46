"""Awaits the results of async rewards, in one event loop for the life of the process.

A session of aiohttp or httpx belongs to the loop in which it was first used. A loop for each call would break sessions
that a reward keeps. The loop runs in the caller's thread, since libraries in rewards set alarms, which only the main
thread may do.
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
    """Return what a call returns or raises. A reward may raise anything: it may exit, or cancel itself. Only the user's
    ctrl-C passes through."""
    try:
        return function(*arguments, **keywords)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error


def run_together(values: Sequence[Any]) -> list[Any]:
    """Await all awaitables among the values at the same time. Return what each returns or raises, and other values
    unchanged."""
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
