"""Rules of the program that are others while it runs: what mutants are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

changed = patch.object

Change = Callable[[], AbstractContextManager[Any]]
"""Makes what changes the program as long as it is entered."""


def instead(owner: Any, **values: Any) -> Change:
    """Give attributes of a class or a module other values."""
    return lambda: patch.multiple(owner, **values)


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Change]:
    """Have a function take the place of this one, which it gets before its own arguments."""
    original = getattr(owner, name)

    def decorate(function: Callable[..., Any]) -> Change:
        return instead(owner, **{name: lambda *given, **named: function(original, *given, **named)})

    return decorate


def together(*changes: Change) -> Change:
    """Make several changes as one."""

    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change())
            yield

    return all_of_them
