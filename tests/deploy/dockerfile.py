"""Reads the Dockerfile as data, and makes its image `roles` without a builder.

No builder runs where the tests do. So bubblewrap runs the steps of a stage, in a file system that has the paths of the
image: the same commands, in the same order, with the same files and environment. Three things differ. The base is the
Python of this machine. Packages come from uv's cache, where scripts/setup has put them. Steps that fetch Debian's
packages or uv itself are left out, since scripts/setup has installed those.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.deploy.conftest import ROOT

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
UV = Path(sys.executable).with_name("uv")
SYSTEM = [path for path in map(Path, ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc")) if path.exists()]
PYTHON = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
USER = 1000
QUICK = {"UV_NO_CACHE": "0", "UV_LINK_MODE": "symlink", "UV_COMPILE_BYTECODE": "0"}
"""Files stay in the cache, and are compiled by those who import them: a minute less, and the same packages."""
CACHE_IS_MISSING = "network was disabled"


@dataclass(frozen=True)
class Stage:
    name: str
    base: str
    """Another stage, or an image."""
    steps: Sequence[tuple[str, str]]
    """Instruction and arguments, as they stand there."""

    def all(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.steps if name == instruction]


def read_stages(path: Path = DOCKERFILE) -> dict[str, Stage]:
    """Return the stages of a Dockerfile by their names."""
    stages: dict[str, Stage] = {}
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    steps: list[tuple[str, str]] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, arguments = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            steps = []
            stages[name] = Stage(name, base, steps)
        elif instruction:
            steps.append((instruction, " ".join(arguments.split())))
    return stages


@dataclass
class Image:
    """Folders that are bound where the image has them, and the environment that its processes have."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    """Absolute paths in the image; each is a folder of the same name below `root`."""
    workdir: str = "/"

    def folder(self, path: str) -> Path:
        """Return where a folder of the image lies on this machine."""
        top = "/" + path.strip("/").split("/")[0]
        self.folders.add(top)
        place = self.root / path.strip("/")
        place.mkdir(parents=True, exist_ok=True)
        return place

    def run(
        self,
        command: Sequence[str],
        *,
        mounts: Mapping[str, Path],
        user: int = 0,
        is_writable: bool = True,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 1200,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the image. `mounts`: path there -> path here, writable whatever `is_writable` says."""
        bind = "--bind" if is_writable else "--ro-bind"
        words = ["bwrap", "--die-with-parent", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
        words += ["--perms", "1777", "--tmpfs", "/tmp"]
        for path in reversed([*Path(sys.base_prefix).parents, *(up for one in mounts for up in Path(one).parents)]):
            if path != Path("/") and not any(one in (path, *path.parents) for one in (*SYSTEM, Path("/tmp"))):
                words += ["--perms", "0755", "--dir", str(path)]  # which it would make for root alone
        for path in (*SYSTEM, Path(sys.base_prefix)):
            words += ["--ro-bind", str(path), str(path)]
        for path in sorted(self.folders):
            words += [bind, str(self.root / path.strip("/")), path]
        for there, here in mounts.items():
            for inner in (Path(one) for one in mounts if Path(there) in Path(one).parents):  # as a cache below /tmp
                (here / inner.relative_to(there)).mkdir(parents=True, exist_ok=True)  # bwrap would: for root alone
            words += ["--bind", str(here), there]
        path = f"{self.environment.get('PATH', '')}:{PYTHON.parent}:/uv:/usr/bin:/bin".strip(":")
        for name, value in {**self.environment, "PATH": path, **(environment or {})}.items():
            words += ["--setenv", name, value]
        if not is_writable:
            words += ["--remount-ro", "/"]
        if user and os.geteuid() != 0:
            words += ["--unshare-user", "--uid", str(user), "--gid", str(user)]
        words += ["--chdir", self.workdir, "--"]
        if user and os.geteuid() == 0:
            words += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs",
                      "--bounding-set=-all", "--inh-caps=-all"]  # fmt: skip
        return subprocess.run([*words, *command], capture_output=True, text=True, timeout=timeout_s)


def build(name: str, root: Path, mounted: Mapping[str, Path], *, stages: Mapping[str, Stage] | None = None) -> Image:
    """Run the steps of a stage, and of those that it begins from. `mounted`: name of a stage -> its folder `root`."""
    stages = stages or read_stages()
    chain = [stages[name]]
    while chain[0].base in stages:
        chain.insert(0, stages[chain[0].base])
    image = Image(root)
    for instruction, arguments in (step for stage in chain for step in stage.steps):
        if instruction == "WORKDIR":
            image.workdir = arguments
            image.folder(arguments)
        elif instruction == "ENV":
            image.environment.update(environment(arguments, image.environment))
        elif instruction == "COPY":
            _copy(image, arguments, mounted)
        elif instruction == "RUN" and not _is_there_already(arguments):
            _run(image, arguments, mounted)
    return image


def environment(arguments: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an ENV line."""
    pairs = (word.split("=", 1) for word in shlex.split(arguments))
    return {name: value.replace(":$PATH", known.get("PATH", "")) for name, value in pairs}


def _is_there_already(command: str) -> bool:
    return "apt-get" in command or command.startswith("pip install")


def _copy(image: Image, arguments: str, mounted: Mapping[str, Path]) -> None:
    words = arguments.split()
    begin = ROOT
    if words[0].startswith("--from="):
        begin = mounted[words.pop(0).partition("=")[2]]
    *sources, target = words
    place = image.folder(os.path.normpath(os.path.join(image.workdir, target)))
    for source in (begin / one.strip("/") for one in sources):
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so")
            shutil.copytree(source, place, dirs_exist_ok=True, symlinks=True,
                            ignore=ignored if begin == ROOT else None)  # fmt: skip
        else:
            shutil.copy(source, place)


def _run(image: Image, command: str, mounted: Mapping[str, Path]) -> None:
    cache = uv_cache()
    mounts = {"/uv/uv": UV, str(cache): cache}  # under its own path: there are links from it into itself
    while command.startswith("--mount="):
        option, _, command = command.partition(" ")
        mount = dict(pair.split("=", 1) for pair in option.removeprefix("--mount=").split(","))
        mounts[mount["target"]] = mounted[mount["from"]] / mount["source"].strip("/")
    target = image.environment.get("VIRTUAL_ENV")
    for folder in (target, *_written(command)):
        if folder:
            image.folder(folder)
    for offline in ("1", "0"):
        cached = {"UV_CACHE_DIR": str(cache), "UV_OFFLINE": offline, **QUICK}
        done = image.run(["bash", "-euo", "pipefail", "-c", command], mounts=mounts, environment=cached)
        if CACHE_IS_MISSING not in done.stderr.lower():
            break
    assert done.returncode == 0, f"RUN {command}\n{done.stdout}{done.stderr}"


def _written(command: str) -> Iterable[str]:
    """Folders that an option of the command names."""
    words = command.split()
    return [after for word, after in pairwise(words) if word == "--out-dir"]


def uv_cache() -> Path:
    found = subprocess.run([UV, "cache", "dir"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())
