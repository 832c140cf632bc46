"""What several tests of this folder are given."""

from __future__ import annotations

import pytest

from rftstream import modelserver
from tests.unit.served import Server


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(modelserver, "PAUSE_S", 0.001)
    opened = Server()
    yield opened
    opened.close()
