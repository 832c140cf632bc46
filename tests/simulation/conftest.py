"""The roles speak up about all that goes wrong; there is a story to read instead. And each record is decoded once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache

import pytest

from rftstream.contracts import codec
from tests.simulation.seeds import draw_seed

decode = lru_cache(maxsize=4096)(codec.decode)
"""Each record has many readers."""


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Of the run that the test plays; see tests/simulation/seeds.py."""
    return draw_seed(request.param) if callable(request.param) else request.param


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "decode", decode)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
