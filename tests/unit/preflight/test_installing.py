"""Extras are installed from where rftstream came, by what made the environment; errors name the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from rftstream.commands.manage import doctor
from rftstream.errors import ConfigError, pip_install
from rftstream.preflight import installing

CHECKOUT = {"url": "file:///my%20src/rftstream", "dir_info": {"editable": True}}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make an environment: its origin, whether uv made it, and what is there of pip and uv."""

    def make(origin: object = None, *, by_uv: bool = False, has: tuple[str, ...] = ("pip", "uv"), prefix: str = ""):
        text = None if origin is None else json.dumps(origin)
        extras = SimpleNamespace(get_all=lambda name: ["data", "vllm", "dev"])
        found = SimpleNamespace(read_text=lambda file: text, metadata=extras)
        monkeypatch.setattr(metadata, "distribution", lambda name: found)
        (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n" + "uv = 0.9.1\n" * by_uv)
        monkeypatch.setattr(sys, "prefix", prefix or str(tmp_path))
        monkeypatch.setattr(sys, "executable", "/env/bin/python")
        monkeypatch.setattr(installing.importlib.util, "find_spec", lambda name: name if name in has else None)
        monkeypatch.setattr(shutil, "which", lambda name, path=None: "/bin/uv" if "uv" in has and not path else None)

    return make


PIP, UV = ["/env/bin/python", "-m", "pip", "install"], ["/bin/uv", "pip", "install", "--python", "/env/bin/python"]


@pytest.mark.parametrize(("given", "words"), [
    ({}, [*PIP, "rftstream[data]"]),
    ({"origin": {"url": "https://example.org/rftstream.whl", "archive_info": {}}}, [*PIP, "rftstream[data]"]),
    ({"origin": {"url": "file:///src/rftstream", "dir_info": {}}}, [*PIP, "rftstream[data]"]),
    ({"origin": CHECKOUT}, [*PIP, "-e", "/my src/rftstream[data]"]),
    ({"by_uv": True}, [*UV, "rftstream[data]"]),
    ({"by_uv": True, "has": ("pip",)}, [*PIP, "rftstream[data]"]),
    ({"has": ("uv",), "origin": CHECKOUT}, [*UV, "-e", "/my src/rftstream[data]"]),
])  # fmt: skip
def test_the_command_is_that_of_the_environment(environment, given, words) -> None:
    environment(**given)
    assert installing.install_command("data") == words


@pytest.mark.parametrize(("given", "extra", "said"), [
    ({}, "vlm", "--install: unknown 'vlm'; .*vllm"),
    ({}, "dev", "unknown 'dev'"),
    ({"has": ()}, "data", "has no pip, and there is no uv"),
    ({"prefix": "/home/a/.local/share/uv/tools/rftstream"}, "data", "uv tool install 'rftstream.data.'$"),
    ({"prefix": "/home/a/.cache/uv/archive-v0/x1"}, "data", "uvx --from 'rftstream.data.' rftstream"),
])  # fmt: skip
def test_what_cannot_be_installed_is_said(environment, given, extra, said) -> None:
    environment(**given)
    with pytest.raises(ConfigError, match=said):
        installing.install_command(extra)


WHEEL = {"url": "file:///my%20dist/rftstream-1-py3-none-any.whl", "archive_info": {}}


@pytest.mark.parametrize(("given", "said"), [
    ({"prefix": "/home/a/.cache/uv/archive-v0/x1"}, "uvx rftstream"),
    ({"prefix": "/home/a/.cache/uv/archive-v0/x1", "origin": WHEEL},
     "uvx --from '/my dist/rftstream-1-py3-none-any.whl' rftstream"),
    ({"prefix": "/home/a/.local/share/uv/tools/rftstream"}, os.path.relpath("/env/bin/rftstream")),
])  # fmt: skip
def test_rftstream_is_called_again_as_it_was(environment, monkeypatch, given, said) -> None:
    environment(**given)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert installing.program() == said


@pytest.mark.parametrize(("words", "code", "ran"), [
    (["--install", "data", "--yes"], 7, True),
    (["--install", "data"], 2, False),  # nobody is there to be asked
    (["--install", "studio"], 0, False),
    (["--install", "data", "--json"], 2, False),
])  # fmt: skip
def test_the_command_is_shown_and_run(environment, monkeypatch, words, code, ran) -> None:
    environment()
    calls: list[list[str]] = []

    def run(command: list[str], *, check: bool, env: dict[str, str]) -> SimpleNamespace:
        assert env["PIP_DISABLE_PIP_VERSION_CHECK"] == "1"
        calls.append(command)
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(subprocess, "run", run)
    result = CliRunner().invoke(doctor, words)
    assert (result.exit_code, calls) == (code, [[*PIP, "rftstream[data]", "--quiet"]] if ran else [])


def test_errors_name_a_command_that_works() -> None:
    assert pip_install("rftstream[data]") == "`rftstream doctor --install data`"
    assert pip_install("math-verify") == "pip install math-verify"
