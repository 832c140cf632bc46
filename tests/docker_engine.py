"""A real Docker for tests: the one that DOCKER_HOST names or that runs here, else one of `scripts/docker`, whose client
is taken where the machine has none."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

from tests.surroundings import OWN, ROOT, link_to

LABEL = "rftstream.place"


@functools.cache
def start_engine() -> None:
    """Have an engine that answers, and the image `python:3.12-slim`. One that is started here stays up for later
    tests: `scripts/docker down` ends it."""
    if shutil.which("docker") is None:
        link_to(_script("client"), OWN / "bin" / "docker")
    if _answers():
        return
    os.environ["DOCKER_HOST"] = _script("address")
    if not _answers():
        os.environ["DOCKER_HOST"] = _script("up")


def docker(*arguments: str, check: bool = True) -> str:
    """Return the output of a command of Docker."""
    return subprocess.run(["docker", *arguments], check=check, capture_output=True, text=True).stdout.strip()


def places_left() -> list[str]:
    """Return the names of the containers of places."""
    return docker("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}").split()


def _script(word: str) -> str:
    done = subprocess.run([ROOT / "scripts" / "docker", word], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rpartition("\n")[2]


def _answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0
