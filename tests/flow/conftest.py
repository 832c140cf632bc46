"""The roles speak up about all that tests do to them; that is nothing to read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.scene import Scene


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)
