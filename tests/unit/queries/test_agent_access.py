"""The token and the gateways of a run, as agents elsewhere are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from rftstream.commands import cli
from rftstream.config import loader
from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys, run_secret, secret_file
from rftstream.launch import start
from rftstream.launch.health import Health, HealthServer
from rftstream.runs.folder import RunFolder

RUN = """
[run]
name = "tiny"
steps = 1
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
environment = "agent"
[explorer]
policy = "fake"
[trainer]
backend = "fake"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    (tmp_path / "tiny.toml").write_text(RUN)
    found, _ = start.create(loader.load([tmp_path / "tiny.toml"]))
    return found


@pytest.fixture
def workers(folder: RunFolder) -> Iterator[None]:
    """Two explorers that answer, one of them without a gateway, and one that is gone."""
    servers = []
    folder.logs.mkdir(exist_ok=True)
    for name, values in (
        ("explorer-0", {"gateway": "http://127.0.0.1:8900/v1", "agents_wanted": 3}),
        ("explorer-1", {"gateway": "", "agents_wanted": 0}),
        ("feeder-0", {}),
    ):
        health = Health()
        health.update({"process": name, **values})
        servers.append(HealthServer(health, port=0, host="127.0.0.1", file=folder.logs / f"{name}.port"))
    (folder.logs / "explorer-2.port").write_text("9")
    yield
    for server in servers:
        server.close()


def token(folder: RunFolder, *options: str) -> str:
    done = CliRunner().invoke(cli, ["token", str(folder.path), *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_token_and_gateways(folder: RunFolder, workers: None) -> None:
    expected = GatewayKeys(run_secret(folder.run_id), folder.run_id).session_token()
    gateways = [{"process": "explorer-0", "base_url": "http://127.0.0.1:8900/v1", "rollouts_waiting": 3}]
    assert json.loads(token(folder, "--json")) == {"run_id": "tiny", "token": expected, "gateways": gateways}
    lines = token(folder).splitlines()
    assert lines[0].split() == ["token", expected]
    assert lines[2].strip() == "explorer-0  http://127.0.0.1:8900/v1  3 rollouts waiting for an agent"


def test_a_secret_of_the_environment(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret for this test alone")
    keys = GatewayKeys(b"a secret for this test alone", folder.run_id)
    assert json.loads(token(folder, "--json"))["token"] == keys.session_token()
    assert token(folder).splitlines()[1].startswith("gateways  none: ")
    assert not secret_file(folder.run_id).exists()


def test_no_secret_is_made(folder: RunFolder) -> None:
    done = CliRunner().invoke(cli, ["token", str(folder.path)])
    assert done.exit_code == 2 and "tiny: its secret is not here: " in done.output
    assert not secret_file(folder.run_id).exists()


def test_a_run_without_agents_has_none(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RUN.replace('environment = "agent"', ""))
    folder, _ = start.create(loader.load([tmp_path / "tiny.toml"]))
    done = CliRunner().invoke(cli, ["token", str(folder.path)])
    assert done.exit_code == 2 and "no taskset has agents" in done.output
