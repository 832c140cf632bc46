"""Reads tasks in the format of Harbor, its schema versions 1.0 to 1.4. One folder is one task:

task.toml                  time limits, resources, variables
instruction.md             the prompt
environment/Dockerfile     the machine; or `docker_image` in task.toml names an image
tests/test.sh              writes the reward to /logs/verifier/reward.txt (a number) or reward.json (named numbers)
solution/solve.sh          a solution, which `check` runs
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rftstream.config.toml_files import read_toml
from rftstream.errors import ConfigError, HostedCodeError

Seconds = Annotated[float, Meta(gt=0)]
Megabytes = Annotated[int, Meta(gt=0)]
ImageName = Annotated[str, Meta(pattern=r"\A[^-\s]\S*\Z")]
"""No option, and nothing that ends a line of a Dockerfile."""

MAX_BYTES = 1 << 30
"""Largest size of all files of a task."""
_CANARY = re.compile(r"(<!--|#).*canary", re.IGNORECASE)
_SIZE = {"K": 1 / 1024, "M": 1, "G": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborPhase:
    """The settings of the agent, or of the tests."""

    timeout_sec: Seconds | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | int | None = None
    network_mode: str | None = None
    environment_mode: Literal["shared"] | None = None
    environment: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborMachine:
    """The settings of the machine."""

    build_timeout_sec: Seconds = 600.0
    docker_image: ImageName | None = None
    os: Literal["linux"] = "linux"
    cpus: Annotated[float, Meta(gt=0)] | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    gpus: Literal[0] | None = None
    tpu: None = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    healthcheck: None = None
    workdir: str | None = None
    network_mode: Literal["no-network", "public", "allowlist"] = "public"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborSolution:
    """The settings of the solution."""

    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborSettings:
    """The settings in task.toml that have an effect here. Others are read past."""

    agent: HarborPhase = HarborPhase()
    verifier: HarborPhase = HarborPhase()
    environment: HarborMachine = HarborMachine()
    solution: HarborSolution = HarborSolution()
    steps: Annotated[list[Any], Meta(max_length=0)] = field(default_factory=list)


msgspec.convert({}, HarborSettings)  # inspected here, and not by the first threads: contracts/codec.py says why


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """One task. `read_task` makes it."""

    folder: Path
    instruction: str
    settings: HarborSettings

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.folder.name


def find_tasks(folder: Path, where: str) -> list[Path]:
    """Return the folders of the tasks below a folder, or the folder itself if it is one task."""
    if not folder.is_dir():
        raise ConfigError(f"{where}: there is no folder {folder}; name one with Harbor tasks")
    if (folder / "task.toml").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/task.toml"))
    if not found:
        raise ConfigError(f"{where}: no task in {folder}, expected folders with a task.toml each")
    return found


def read_task(folder: Path) -> HarborTask:
    """Return the task of a folder. ConfigError if it is not one, or needs what does not exist here."""
    values = _renamed(read_toml(folder / "task.toml"))
    where = folder / "task.toml"
    try:
        settings = msgspec.convert(values, HarborSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explained(str(error))}") from None
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: there is no {name}, expected one in each task")
    machine = folder / "environment"
    if any(machine.glob("docker-compose.y*ml")):
        raise ConfigError(
            f"{machine}: found a compose file, expected a Dockerfile alone; several machines are not made"
        )
    if settings.environment.docker_image is None and not (machine / "Dockerfile").is_file():
        raise ConfigError(f"{machine}: there is no Dockerfile, and {where} names no docker_image; expected one of them")
    try:
        text = (folder / "instruction.md").read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{folder}/instruction.md: not UTF-8: {error}; save it as UTF-8") from None
    instruction = _without_canary(text)
    if not instruction.strip():
        raise ConfigError(f"{folder}/instruction.md: is empty, expected the agent's prompt")
    return HarborTask(folder=folder, instruction=instruction, settings=settings)


def digest_task(folder: Path) -> str:
    """Return the digest of all files of a task. ConfigError if they are too large, or if one lies elsewhere."""
    found, num_bytes = hashlib.sha256(), 0
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder.resolve()):
            raise ConfigError(f"{path}: is a link out of the task, expected its own files; copy the file")
        if path.is_file():
            num_bytes += path.stat().st_size
            if num_bytes > MAX_BYTES:
                raise ConfigError(
                    f"{folder}: has more than {MAX_BYTES >> 20} MB; let the Dockerfile fetch what is large"
                )
            head = [path.relative_to(folder).as_posix(), bool(path.stat().st_mode & 0o100)]
            found.update(json.dumps(head).encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def read_rewards(text: bytes | None, named: bytes | None) -> tuple[float | None, dict[str, float]]:
    """Return the reward and its parts from reward.txt and reward.json, of which the latter counts if both are there.

    Of named numbers, the one called `reward` is the reward; a single number is, whatever its name. Otherwise there are
    parts alone. HostedCodeError if there is no file, or anything but finite numbers in it."""
    if named is None and text is None:
        raise HostedCodeError("the tests wrote no reward, expected /logs/verifier/reward.txt or reward.json")
    name = "reward.txt" if named is None else "reward.json"
    data = (text if named is None else named) or b""
    try:
        found = {"reward": float(data.decode())} if named is None else json.loads(data)
        if not isinstance(found, dict) or not found:
            raise ValueError("expected an object of numbers")
        parts = {str(key): _number(value) for key, value in found.items()}
    except (ValueError, OverflowError, RecursionError) as error:
        shown = data[:80].decode(errors="replace")
        raise HostedCodeError(f"{name}: got {shown!r}, expected finite numbers: {error}") from None
    reward = parts.get("reward", next(iter(parts.values())) if len(parts) == 1 else None)
    return reward, {key: value for key, value in parts.items() if key != "reward"}


def resolve_variables(values: Mapping[str, str], where: str, here: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` replaced by those of this machine. HostedCodeError if one
    is missing."""
    found = {}
    for key, value in values.items():
        match = re.fullmatch(r"\$\{(\w+)(?::-(.*))?\}", value)
        if match and match[1] not in here and match[2] is None:
            raise HostedCodeError(
                f"{where}: {key} wants the variable {match[1]}, which the explorer does not have; set it"
            )
        found[key] = here.get(match[1], match[2] or "") if match else value
    return found


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"found {value!r}")
    return float(value)


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an older schema under today's names."""
    machine = values.get("environment")
    if not isinstance(machine, dict):
        return values
    machine = dict(machine)
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        size = machine.pop(old, None)
        if isinstance(size, str) and (match := re.fullmatch(r"([\d.]+)\s*([KMG])B?", size.strip().upper())):
            machine.setdefault(new, max(1, int(float(match[1]) * _SIZE[match[2]])))
    if machine.pop("allow_internet", True) is False:
        machine.setdefault("network_mode", "no-network")
    return {**values, "environment": machine}


def _explained(error: str) -> str:
    """Return msgspec's sentence with the setting in front."""
    text, _, path = error.partition(" - at `$")
    setting = path.rstrip("`").lstrip(".") or "task.toml"
    unsupported = (
        "steps",
        "mcp_servers",
        "tpu",
        "gpus",
        "environment_mode",
        "verifier.environment",
        "healthcheck",
        "os",
    )
    hint = "; this is not supported here" if setting.endswith(unsupported) else ""
    return f"{setting}: {text[:1].lower()}{text[1:]}{hint}"


def _without_canary(text: str) -> str:
    """Return an instruction without the marks in front by which copies of a benchmark are found."""
    lines = text.split("\n")
    number = 0
    while number < len(lines) and _CANARY.match(lines[number].strip()):
        number += 1
    return "\n".join(lines[number:]).lstrip("\n") if number else text
