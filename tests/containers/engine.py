"""A Docker engine of its own for a test, and docker-compose.yml on it: the tools of this folder.

`scripts/docker` is the engine. Two of them have nothing in common but the files that they run in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.surroundings import ROOT

SCRIPT = ROOT / "scripts" / "docker"
PYTHON, KAFKA, S3 = "python:3.12.12-slim-bookworm", "apache/kafka:4.1.1", "versity/versitygw:v1.8.0"
DOCKERFILE = "deploy/docker/Dockerfile"
PATIENCE_S = 1800.0
"""Only a hang takes as long."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return what a condition is at last, asked about once a second."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s in vain for {what}"
        time.sleep(1.0)
    return found


class Engine:
    """`running` makes one. It begins with the images that are built upon, pulled or stand-ins of the same names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "STATE": str(folder)}
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "engine.log").open("ab") as log:
            command = ["setpriv", "--pdeathsig", "KILL", SCRIPT, "keep"]
            self._keeper = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self.call(SCRIPT, "images")

    def stop(self) -> None:
        """End it as a machine that is shut down does: containers are asked to leave first."""
        if self._keeper is not None:
            self._keeper.terminate()
            self._keeper.wait()
            self._keeper = None

    def call(self, *command: str | Path, env: Mapping[str, str] = {}, check: bool = True) -> str:
        """Return what a command prints on both streams. AssertionError if it fails."""
        done = subprocess.run(
            command, env={**self.environment, **env}, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{command}: exit {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout.strip()

    @property
    def root(self) -> Path:
        """The engine's file system, as its first process sees it."""
        return Path("/proc", (self.folder / "engine.pid").read_text().strip(), "root")

    def docker(self, *words: str, env: Mapping[str, str] = {}, check: bool = True) -> str:
        return self.call(SCRIPT, "cli", *words, env=env, check=check)

    def inside(self, *command: str, check: bool = True) -> str:
        """Run a command where the engine runs, with its processes and mounts."""
        return self.call("nsenter", "-t", self.root.parent.name, "-m", "-n", "-p", *command, check=check)

    @property
    def has_stand_ins(self) -> bool:
        """Whether no registry gives images. Those that the files name by digest have to be named otherwise then."""
        return bool(self.docker("image", "ls", "--quiet", PYTHON))

    def build(self, target: str) -> str:
        """Build an image of the Dockerfile, and return its name."""
        name = f"rftstream:local-{target}"
        base = ["--build-arg", f"PYTHON_IMAGE={PYTHON}"] if self.has_stand_ins else []
        self.docker("build", "-f", DOCKERFILE, "--target", target, "-t", name, *base, ".")
        return name


@contextmanager
def running(folder: Path) -> Iterator[Engine]:
    """Have an engine, whose state is in a folder of this checkout's file system: not in memory."""
    folder.mkdir(parents=True)
    made = Engine(folder)
    try:
        made.start()
        yield made
    finally:
        with suppress(AssertionError):
            if left := made.docker("ps", "--quiet").split():
                made.docker("kill", *left)
        made.stop()
        shutil.rmtree(folder)


class Project:
    """docker-compose.yml on an engine, with a run file of its own."""

    def __init__(self, engine: Engine, name: str, run_file: str, *overrides: str) -> None:
        """`overrides`: more compose files, as texts."""
        self.engine, self.name = engine, name
        files = engine.folder / name
        files.mkdir()
        (files / "run.toml").write_text(run_file)
        self._words = ["compose", "-p", name, "--project-directory", str(ROOT), "-f", str(ROOT / "docker-compose.yml")]
        for index, text in enumerate(overrides):
            (files / f"{index}.yml").write_text(text)
            self._words += ["-f", str(files / f"{index}.yml")]
        self._environment = {"RFTSTREAM_FILES": str(files), "RFTSTREAM_FILE": "run.toml"}
        if engine.has_stand_ins:
            self._environment |= {"KAFKA_IMAGE": KAFKA, "S3_IMAGE": S3}
        self._deaths = files / "deaths"
        self._seen = 0

    def compose(self, *words: str, check: bool = True) -> str:
        return self.engine.docker(*self._words, *words, env=self._environment, check=check)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record with what codes containers end, until the engine does."""
        command = [SCRIPT, "cli", "events", "--filter", "type=container", "--filter", "event=die", "--format",
                   "{{json .Actor.Attributes}}"]  # fmt: skip
        with self._deaths.open("ab") as out:
            process = subprocess.Popen(command, env=self.engine.environment, stdout=out, cwd=ROOT)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def deaths(self) -> list[tuple[str, int]]:
        """Return services and exit codes of the containers that have ended since the last call."""
        lines = self._deaths.read_text().splitlines()[self._seen :]
        self._seen += len(lines)
        found = [json.loads(line) for line in lines]
        return [
            (one["com.docker.compose.service"], int(one["exitCode"])) for one in found
            if one.get("com.docker.compose.project") == self.name and one.get("com.docker.compose.oneoff") == "False"
        ]  # fmt: skip

    def containers(self) -> list[dict[str, Any]]:
        """Return what compose knows of each, ended ones included."""
        return [json.loads(line) for line in self.compose("ps", "--all", "--format", "json").splitlines()]

    def exit_codes(self, services: Sequence[str]) -> dict[str, int]:
        return {one["Name"]: one["ExitCode"] for one in self.containers()
                if one["Service"] in services and one["State"] == "exited"}  # fmt: skip

    def kill(self, service: str) -> None:
        """Kill the first container's processes by the id of their first one: the engine is not asked."""
        [name, *_] = sorted(one["Name"] for one in self.containers() if one["Service"] == service)
        pid = self.engine.docker("inspect", "--format", "{{.State.Pid}}", name)
        self.engine.inside("kill", "-KILL", pid)

    def volume(self, name: str) -> Path:
        """Return where what is on a volume can be read."""
        return self.engine.root / "var/lib/docker/volumes" / f"{self.name}_{name}" / "_data"

    def rftstream(self, *words: str) -> str:
        """Run a command of rftstream in a container beside the workers."""
        return self.compose("run", "--rm", "--no-deps", "create", *words)
