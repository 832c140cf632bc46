"""Installs extras into the environment that this process runs in, by the program that made it: uv or pip."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rftstream.config.parts.registry import suggest
from rftstream.errors import ConfigError

INCLUDED = ("studio", "hf", "kafka", "torch")
"""Words that users may try, for what every installation has."""


def install_command(extra: str) -> list[str] | None:
    """Return the command that installs an extra, from the checkout if rftstream came from one; None if nothing is
    missing for it. ConfigError for an unknown extra, or without pip and uv."""
    if extra in INCLUDED:
        return None
    distribution = importlib.metadata.distribution("rftstream")
    extras = [one for one in distribution.metadata.get_all("Provides-Extra") or [] if one != "dev"]
    if extra not in extras:
        raise ConfigError(f"--install: unknown {extra!r}; {suggest(extra, extras)}")
    if tool := _uv_tool():
        how = "uv tool install" if tool == "tools" else "uvx --from"
        raise ConfigError(
            f"--install: {sys.prefix} belongs to a tool of uv, expected an environment; {how} 'rftstream[{extra}]'"
            + ("" if tool == "tools" else " rftstream ...")
        )
    checkout = _checkout(distribution)
    what = ["-e", f"{checkout}[{extra}]"] if checkout else [f"rftstream[{extra}]"]
    return [*_installer(), *what]


def program() -> str:
    """Return how a shell calls rftstream again. What uvx puts into PATH is gone when its command ends."""
    if _uv_tool().startswith("archive"):
        origin = _origin(importlib.metadata.distribution("rftstream"))
        return shlex.join(["uvx", "--from", _path(origin["url"]), "rftstream"]) if "url" in origin else "uvx rftstream"
    beside = Path(sys.executable).with_name("rftstream")  # of a checkout whose environment is not activated
    return "rftstream" if shutil.which("rftstream") else os.path.relpath(beside)


def _uv_tool() -> str:
    """Return the folder of uv that has the environment of a tool, `tools` or `archive-v0`; the empty text elsewhere."""
    found = re.search(r"/uv/(tools|archive-v\d+)/", f"{sys.prefix}/")
    return found[1] if found else ""


def _checkout(distribution: importlib.metadata.Distribution) -> str:
    """Return the folder of the checkout that is installed, or the empty text."""
    origin = _origin(distribution)
    return _path(origin["url"]) if origin.get("dir_info", {}).get("editable") else ""


def _origin(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    """Return what the installer wrote of a distribution that came from an address; empty for one of a registry."""
    found: dict[str, Any] = json.loads(distribution.read_text("direct_url.json") or "{}")
    return found


def _path(url: str) -> str:
    return unquote(urlsplit(url).path) if url.startswith("file:") else url


def _installer() -> list[str]:
    """Return the first words of the command. An environment of uv has no pip, as a rule."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    settings = Path(sys.prefix, "pyvenv.cfg")
    by_uv = settings.is_file() and re.search(r"(?m)^uv\s*=", settings.read_text(encoding="utf-8")) is not None
    if importlib.util.find_spec("pip") is not None and not (by_uv and uv):
        return [sys.executable, "-m", "pip", "install"]
    if uv is None:
        raise ConfigError(f"--install: {sys.prefix} has no pip, and there is no uv; install one of them")
    return [uv, "pip", "install", "--python", sys.executable]
