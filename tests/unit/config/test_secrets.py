"""Secrets of a run file: nothing that is written down has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rftstream.config import loader, secrets
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.runs.folder import RunFolder, open_transport, read_config
from rftstream.runs.making.create import write_config
from rftstream.runs.manifest import make_manifest
from tests.suite.each import each

PASSWORD = "hunter2-is-not-written"

RUN_FILE = """
[run]
name = "tiny"
steps = 1
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[transport]
kind = "kafka"
servers = "127.0.0.1:1"
options = { sasl_mechanism = "PLAIN", sasl_plain_username = "me" }
"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RFTSTREAM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RUN_FILE)
    return path


def from_file(path: Path) -> RunConfig:
    path.write_text(RUN_FILE.replace('"me"', f'"me", sasl_plain_password = "{PASSWORD}"'))
    return loader.load([path], env={})


def from_set(path: Path) -> RunConfig:
    return loader.load([path], sets=[f"transport.options.sasl_plain_password={PASSWORD}"], env={})


def from_environment(path: Path) -> RunConfig:
    os.environ["RFTSTREAM__TRANSPORT__OPTIONS__SASL_PLAIN_PASSWORD"] = PASSWORD
    return loader.load([path])


def from_a_name(path: Path) -> RunConfig:
    os.environ["MY_KAFKA_PASSWORD"] = PASSWORD
    return loader.load([path], sets=["transport.options.sasl_plain_password=env:MY_KAFKA_PASSWORD"])


def from_python(path: Path) -> RunConfig:
    options = {"sasl_plain_password": PASSWORD}
    given = {
        **loader.to_dict(loader.load([path])),
        "transport": {"kind": "kafka", "servers": "x:1", "options": options},
    }
    config = loader.from_dict(given)
    assert options == {"sasl_plain_password": PASSWORD}  # what is the caller's stays as it was
    return config


@pytest.mark.parametrize("load", [from_file, from_set, from_environment, from_a_name, from_python])
def test_what_is_written_names_it_and_clients_get_it(load: object, run_file: Path, tmp_path: Path) -> None:
    config: RunConfig = load(run_file)  # type: ignore[operator]
    folder = RunFolder(tmp_path / "runs" / "tiny")
    folder.path.mkdir(parents=True)
    write_config(config, folder)
    assert PASSWORD not in folder.config_file.read_text()
    assert PASSWORD not in repr(config) + repr(make_manifest(config, "tiny", {}, 0.0))
    # A worker: its environment is its parent's, its settings are those of the folder.
    again = read_config(folder)
    transport = open_transport(again, folder)
    assert transport._clients._options["sasl_plain_password"] == PASSWORD  # type: ignore[attr-defined]
    transport.close()


def test_another_shell_is_told_what_to_set(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_set(run_file)
    name = config.transport.options["sasl_plain_password"].removeprefix("env:")
    assert name == "RFTSTREAM_SECRET__TRANSPORT__OPTIONS__SASL_PLAIN_PASSWORD"
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=rf"transport\.options\.sasl_plain_password: {name} is not set"):
        open_transport(config, RunFolder(tmp_path))


def test_a_later_setting_wins_over_the_environment(run_file: Path) -> None:
    os.environ["RFTSTREAM__TRANSPORT__OPTIONS__SASL_PLAIN_PASSWORD"] = "older"
    config = loader.load([run_file], sets=[f"transport.options.sasl_plain_password={PASSWORD}"])
    assert secrets.reveal(config.transport.options, where="o")["sasl_plain_password"] == PASSWORD
    assert os.environ["RFTSTREAM__TRANSPORT__OPTIONS__SASL_PLAIN_PASSWORD"] == "older"


def test_two_runs_in_one_process_keep_their_own(run_file: Path) -> None:
    first, second = (
        loader.load([run_file], sets=[f"transport.options.sasl_plain_password={each}"], env={}) for each in "ab"
    )
    assert secrets.reveal(first.transport.options, where="o")["sasl_plain_password"] == "a"
    assert secrets.reveal(second.transport.options, where="o")["sasl_plain_password"] == "b"


@each("key", ["max_tokens", "eos_token", "ssl_keyfile", "sasl_plain_username", "tokens"])
def test_what_is_no_secret_stays(key: str) -> None:
    values = {"transport": {"options": {key: "plain"}}}
    secrets.hide(values)
    assert values == {"transport": {"options": {key: "plain"}}}


@each("key", ["sasl_plain_password", "ssl_password", "api_key", "apikey", "aws_secret_access_key"])
def test_what_is_secret_goes(key: str) -> None:
    values = {"policies": {"openai": {key: "1234", "url": "http://x"}}}
    secrets.hide(values)
    assert values["policies"]["openai"][key].startswith("env:RFTSTREAM_SECRET__POLICIES__OPENAI__")
    assert secrets.reveal(values, where="") == {"policies": {"openai": {key: "1234", "url": "http://x"}}}


def test_a_text_that_is_written_down_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "0123456789abc")
    monkeypatch.setenv("HARMLESS", "refused")
    found = secrets.hidden("0123456789abc and 0123456789 refused by https://me:word@host:1/api, http://host/a@b")
    assert found == "*** and *** refused by https://***@host:1/api, http://host/a@b"
