"""Environments that fail: what their rollouts say of it, and what stands in the explorer's log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.test_explorer import rollouts_of


@pytest.mark.parametrize(("where", "line"), [("start", "does not start"), ("reply", "does not answer")])
def test_the_first_traceback_of_each_kind_stands_in_the_log(
    tmp_path: Path, where: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = "tests.flow.environments:Conversation"
    scene = Scene(tmp_path, environments={name: {"fails_in": where}})
    scene.announce(0)
    scene.admit(0, 1, 2, environment=name)
    with caplog.at_level(logging.WARNING):
        RoleDriver(scene, "explorer").work()
    assert len(rollouts_of(scene)) == 6
    (told,) = [record for record in caplog.records if line in record.getMessage()]
    assert told.getMessage().startswith(
        f"{next(iter(rollouts_of(scene)))}: environment {name}: {where}: RuntimeError: "
    )
    assert told.exc_info is not None
    assert f'in {where}\n    raise RuntimeError("the environment {line}")' in caplog.text
