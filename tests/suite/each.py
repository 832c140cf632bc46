"""A table of rows in one test. `pytest.mark.parametrize` makes a test of each row, which costs more than
a row does that is a comparison or two.

    @each("page", PAGES, ids=shown)
    def test_links_lead_somewhere(page: Path) -> None: ...

All rows are tried, and the failure names those that failed. What the test is given beside them is made once for all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(
    names: str | tuple[str, ...], rows: Iterable[Any], *, ids: Callable[[Any], str] | Iterable[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator. Its arguments are those of `pytest.mark.parametrize`."""
    words = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    is_one = isinstance(names, str) and len(words) == 1
    table = [(row,) if is_one else tuple(row) for row in rows]
    given = None if ids is None or callable(ids) else list(ids)

    def label(number: int, row: tuple[Any, ...]) -> str:
        return given[number] if given else " ".join(ids(one) if callable(ids) else repr(one) for one in row)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**others: Any) -> None:
            failures: list[BaseException] = []
            for number, row in enumerate(table):
                try:
                    test(**dict(zip(words, row, strict=True)), **others)
                except (Exception, BaseExceptionGroup, pytest.fail.Exception) as error:
                    error.add_note(f"of the row {label(number, row)[:200]}")
                    failures.append(error)
            if failures:
                raise failures[0] if len(failures) == 1 else BaseExceptionGroup(f"{len(failures)} rows", failures)

        signature = inspect.signature(test)
        left = [one for name, one in signature.parameters.items() if name not in words]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        for name in ("__module__", "__name__", "__qualname__", "__doc__", "pytestmark"):
            if hasattr(test, name):
                setattr(run, name, getattr(test, name))
        return run

    return decorate
