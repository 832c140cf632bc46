"""One engine for all tests of this folder, and the image `roles` on it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.containers.engine import Engine, running
from tests.suite.told import say

__all__ = ["say"]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if os.geteuid() != 0:
        pytest.skip("only root may start an engine of its own")
    with running(tmp_path_factory.mktemp("docker") / "engine") as made:
        yield made


@pytest.fixture(scope="session")
def roles(engine: Engine) -> str:
    return engine.build("roles")
