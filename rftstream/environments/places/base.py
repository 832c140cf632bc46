"""The interface of places: machines of their own for rollouts.

A place begins as an image, gets files, runs commands one after the other, and is gone when it is closed. It has no
network, except one address at which it reaches the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_SEQUENCE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
MODEL_PORT = 8900
"""Port on the place's loopback at which it reaches the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSettings:
    """Settings of all places of one kind."""

    engine: str = ""
    """The command of the engine: `docker`, `podman`, `kubectl`, or a path. Empty: the usual one of the kind."""
    engine_host: str = ""
    """Address of an engine elsewhere, such as `ssh://USER@HOST`. Empty: the one that the command finds."""
    relay_image: str = "python:3.12-slim"
    """An image with `python3`. The relay to the model runs in it."""
    root: str = ""
    """Folder with a root file system, for `bubblewrap`."""
    namespace: str = ""
    """Namespace of pods, for `kubernetes`. Empty: that of kubectl's context."""
    pod: Mapping[str, Any] = field(default_factory=dict)
    """Fields of pods' `spec`, for `kubernetes`. They replace those of the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLimits:
    """Limits of one place."""

    cpus: float = 1.0
    memory_mb: int = 2048
    disk_mb: int = 10240
    """Largest size of all files that are written in the place."""
    pids: int = 512
    """Largest number of processes and threads at once."""
    life_s: float = 7200.0
    """Seconds after which another process may remove the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSource:
    """The content of a new place: an image, or a folder with a Dockerfile that makes one."""

    image: str = ""
    """Name of an image. Empty: the folder's."""
    folder: Path | None = None
    """Folder with a Dockerfile and the files that it copies."""
    install: str = ""
    """Shell commands that add to the image, run as root with network. The result is kept as an image, too."""
    build_timeout_s: float = 600.0
    """Largest number of seconds to get or build each image."""
    digest: str = ""
    """Digest of the folder, if it is known: then the folder is read only where its image is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOrder:
    """One place to be made."""

    source: PlaceSource
    limits: PlaceLimits = PlaceLimits()
    labels: Mapping[str, str] = field(default_factory=dict)
    """Shown by the engine, for example the run and the rollout."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all commands."""
    model_url: str = ""
    """Address `http://HOST:PORT/...` on this machine that the place reaches at its own MODEL_PORT. Empty: none."""
    has_internet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The end of a command."""

    exit_code: int | None
    """None if it was ended because it took too long."""
    output: str
    """The last part of its stdout and stderr."""

    @property
    def summary(self) -> str:
        """Return how it ended, and its last lines, in one line."""
        end = "it took too long" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{end}: {last_lines(self.output)}"


def last_lines(output: str) -> str:
    """Return the last lines of an output in one line, without characters that a terminal would obey."""
    text = " / ".join(line.strip() for line in _SEQUENCE.sub("", output).strip().splitlines()[-4:])
    return "".join(filter(str.isprintable, text))[-600:] or "no output"


class Place(Protocol):
    """One place. `Places.create` makes it. Its user calls `put`, `run` and `get` in any order, and `close` at the end.

    All raise HostError if the place is lost, and HostedCodeError if it was ended since it exceeded a limit."""

    @property
    def has_called(self) -> bool:
        """Return whether anything in the place has connected to the model."""

    def end_calls(self) -> int:
        """Close the connections to the model, and refuse later ones. Return the number of connections that were refused
        since the first call of this."""

    async def put(self, source: Path, target: str) -> None:
        """Copy the files of a folder into a folder of the place, which is made."""

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        user: str = "",
        cwd: str = "",
    ) -> Ran:
        """Run a shell command to its end. After `timeout_s` all processes that it started are killed."""

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        """Return the content of a file; None if there is no regular file. HostedCodeError if it is larger."""

    async def close(self) -> None:
        """End the place and everything in it."""


class Places(Protocol):
    """Makes places of one kind."""

    async def create(self, order: PlaceOrder) -> Place:
        """Return a new place. ConfigError if the engine is missing or cannot be reached at all; HostError if it fails;
        HostedCodeError if the image cannot be built."""
