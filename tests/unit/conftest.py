"""What several tests of this folder are given."""

from __future__ import annotations

import pytest

from rftstream.models import server_client
from tests.unit.served import Server


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(server_client, "PAUSE_S", 0.001)
    opened = Server()
    yield opened
    opened.close()
