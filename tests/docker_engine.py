"""A real Docker for tests: the one that DOCKER_HOST names or that runs here, else one of `scripts/docker`."""

from __future__ import annotations

import functools
import os
import subprocess

from tests.surroundings import ROOT

LABEL = "rftstream.place"


@functools.cache
def start_engine() -> None:
    """Have an engine that answers, and the image `python:3.12-slim`. One that is started here stays up for later
    tests: `scripts/docker down` ends it."""
    if _answers():
        return
    script = ROOT / "scripts" / "docker"
    address = subprocess.run([script, "address"], capture_output=True, text=True).stdout.strip()
    os.environ["DOCKER_HOST"] = address
    if not address or not _answers():
        done = subprocess.run([script, "up"], capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr
        os.environ["DOCKER_HOST"] = done.stdout.strip().splitlines()[-1]


def docker(*arguments: str, check: bool = True) -> str:
    """Return the output of a command of Docker."""
    return subprocess.run(["docker", *arguments], check=check, capture_output=True, text=True).stdout.strip()


def places_left() -> list[str]:
    """Return the names of the containers of places."""
    return docker("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}").split()


def _answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0
