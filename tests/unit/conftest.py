"""What several tests of this folder are given."""

import pytest

from rftstream.models import server_client
from tests.commands import write_run_file
from tests.unit.served import Server


@pytest.fixture
def anyio_backend():
    """How tests that are coroutines are run."""
    return "asyncio"


@pytest.fixture
def run_file(tmp_path):
    return write_run_file(tmp_path)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(server_client, "PAUSE_S", 0.001)
    opened = Server()
    yield opened
    opened.close()
