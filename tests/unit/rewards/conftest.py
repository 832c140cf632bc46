"""What tests of rewards that ask a server are given."""

import pytest


@pytest.fixture
def server(server, request, monkeypatch, tmp_path):
    """A served model that says what the module's `usual` does; what is kept of it is kept for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.usual = request.module.usual
    return server
