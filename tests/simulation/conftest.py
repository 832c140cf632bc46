"""The roles speak up about all that goes wrong; there is a story to read instead. And each record is decoded once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache

import pytest

from rftstream.contracts import codec

decode = lru_cache(maxsize=4096)(codec.decode)
"""Each record has many readers."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "decode", decode)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
