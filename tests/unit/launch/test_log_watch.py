"""A worker's looks at its topics: twice a minute, whatever else it is busy with."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from rftstream.errors import RecordsDeleted
from rftstream.launch.log_watch import LOOK_AT_LOG_S, LogWatch
from rftstream.roles import role_spec
from rftstream.service.service import Service
from tests.flow.scene import Scene
from tests.waiting import wait_until

pytestmark = pytest.mark.law("lost")


def test_a_look_is_told_while_the_worker_is_busy_and_acted_on_when_it_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker is in a step, or in a commit that does not end: it calls nothing."""
    assert LOOK_AT_LOG_S <= 30, "told within a minute"
    scene = Scene(tmp_path, manifest=False)
    watch = LogWatch(scene.config, "flow", role_spec("buffer"))
    with closing(watch):
        watch.start(scene.transport, every_s=0.001)
        scene.transport().admin.delete_topics(["outcomes"])
        wait_until(lambda: "outcomes: is gone, expected the topic" in caplog.text)
    with pytest.raises(RecordsDeleted, match="flow: outcomes: is gone"):
        watch.act(cast(Service, None))
