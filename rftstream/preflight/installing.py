"""Installs extras into the environment that this process runs in, by the program that made it: uv or pip."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
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
    tool = re.search(r"/uv/(tools|archive-v\d+)/", f"{sys.prefix}/")
    if tool is not None:
        how = "uv tool install" if tool[1] == "tools" else "uvx --from"
        raise ConfigError(
            f"--install: {sys.prefix} belongs to a tool of uv, expected an environment; {how} 'rftstream[{extra}]'"
            + ("" if tool[1] == "tools" else " rftstream ...")
        )
    checkout = _checkout(distribution)
    what = ["-e", f"{checkout}[{extra}]"] if checkout else [f"rftstream[{extra}]"]
    return [*_installer(), *what]


def _checkout(distribution: importlib.metadata.Distribution) -> str:
    """Return the folder of the checkout that is installed, or the empty text."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return unquote(urlsplit(origin["url"]).path) if origin.get("dir_info", {}).get("editable") else ""


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
