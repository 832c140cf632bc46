"""What the bits of an update depend on, beside the data: versions of libraries, threads, device, cpu."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rftstream

LIBRARIES = ("numpy", "torch", "transformers")


def computed_with(device: str, threads: int) -> dict[str, str]:
    """Of this process. Where torch is not loaded nothing is said of what it would find."""
    torch: Any = sys.modules.get("torch")
    found = {"rftstream": rftstream.__version__, **_libraries(), "device": device, "threads": str(threads)}
    found["machine"] = platform.machine()
    if torch is not None:
        found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        if device.startswith("cuda"):
            found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(device)}
    return found


def why_not_equal(recorded: Sequence[Mapping[str, str]], here: Mapping[str, str]) -> list[str]:
    """Reasons why the same updates may give other bits here than they gave there; empty if they have to be equal."""
    reasons: dict[str, None] = {}
    for there in recorded:
        if not there:
            reasons["the run does not say with which libraries and threads it was computed"] = None
        for name in sorted(there):
            if name in here and there[name] != here[name]:
                reasons[f"{name}: recorded with {there[name]}, here {here[name]}"] = None
        if there and there.get("device") != "cpu":
            reasons[f"computed on {there.get('device')}: only one process on a cpu is equal bit for bit"] = None
    return list(reasons)


@functools.cache
def _libraries() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
