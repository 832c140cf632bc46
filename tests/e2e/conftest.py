"""A workplace for each test; what was started there ends with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.workplace import FAKE, Workplace


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """With a run file `tiny.toml` in it."""
    workplace = Workplace(tmp_path)
    workplace.write("tiny.toml", FAKE)
    try:
        yield workplace
    finally:
        workplace.end()
