"""Hosts for tests: an environment that does what it is told, and a look at what is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.environments.hosted import HostedEnvironment
from rftstream.environments.hosts.guard import descendants
from rftstream.environments.hosts.pool import close_pools
from tests.unit.environments.hosts.scene import FOREIGN, PROBLEM
from tests.waiting import wait_until


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """The file with foreign code. At the end all hosts are closed, and nothing of them is left."""
    before = descendants(os.getpid())  # of other tests: sandboxes stay warm, and start processes when they like
    path = tmp_path / "foreign.py"
    path.write_text(FOREIGN)
    yield path
    close_pools()
    wait_until(lambda: not descendants(os.getpid()) - before.union(*map(descendants, before)))


Made = Callable[..., HostedEnvironment]


@pytest.fixture
def make(foreign: Path) -> Made:
    """Makes a hosted environment of the class `Told`, or another one of the file."""

    def made(name: str = "Told", *, seed: int = 0, options: dict[str, Any] | None = None, **settings: Any) -> Any:
        config = HostedEnvironment.Config(target=f"{foreign}:{name}", options=options or {}, **settings)
        return HostedEnvironment(config, problem=PROBLEM, seed=seed)

    return made
