"""A studio over runs in memory, without its threads: a test looks at the runs when it wants to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rftstream.config import loader
from rftstream.gateway.keys import SECRET_VARIABLE
from rftstream.runs.folder import OpenRun
from rftstream.studio.access import StudioRole, TokenFile, Viewer
from rftstream.studio.app import make_app
from rftstream.studio.guard import GuardRules, RateLimits
from rftstream.studio.watched_run import WatchedRun
from rftstream.testing import MemoryRun

CONFIG: dict[str, Any] = {
    "run": {"name": "demo", "steps": 6},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "feeder": {"groups_per_batch": 2, "group_size": 3},
    "explorer": {"policy": "fake"},
    "trainer": {"backend": "fake"},
    "evaluations": {"held-out": {"source": "arithmetic", "options": {"size": 6}, "every": 2}},
    "policies": {"fake": {"fail_share": 0.05}},
    "transport": {"partitions": 4},
}

SECRET = "a secret of at least sixteen bytes"


def make_config(**sections: Any) -> Any:
    return loader.from_dict({**CONFIG, **sections})


def watch(run: MemoryRun, name: str = "demo") -> WatchedRun:
    (run.folder.path / "config.toml").write_text("")  # a run folder, so that its index lies in it
    connections = iter(range(10))
    return WatchedRun(name, lambda: OpenRun(run.folder, run.config, run.transport(f"studio-{next(connections)}")))


def rules(
    tokens: Path | None = None, *, local_role: StudioRole = StudioRole.viewer, limits: RateLimits | None = None
) -> GuardRules:
    return GuardRules(
        hosts=frozenset({"testserver", "127.0.0.1"}),
        tokens=TokenFile(tokens or Path("/nonexistent/tokens.json")),
        local=Viewer(name="ada", role=local_role, is_local=True) if tokens is None else None,
        limits=limits or RateLimits(),
    )


def client(watched: Sequence[WatchedRun], guard: GuardRules | None = None) -> TestClient:
    app = make_app(watched, guard or rules(), follow=False)
    return TestClient(app, follow_redirects=False, raise_server_exceptions=True)


@contextmanager
def shown(make: Callable[[], Any]) -> Iterator[Any]:
    """Make a scene, which has a browser and a run that is watched, and end it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, SECRET)
        scene = make()
        with scene.browser:
            yield scene
        scene.watched.stop()
