"""What an update depends on, beside the data: its bits on libraries, threads and device, its speed on the device."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rftstream.version import __version__

LIBRARIES = ("numpy", "torch", "transformers")
FORMULAS = "2"
"""Counts up when some algorithm gives other bits with the same libraries. Runs that do not say it were computed by 1:
mini-batches in the batch's order with denominators of their own, whitening by std + eps, SAPO's gate as one sigmoid,
log-ratios cut off where nothing is exponentiated, too."""


PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
}
"""Dense products of bfloat16 by their maker's data sheets; the first name that a device's contains."""


def peak_tflops(device: str) -> float | None:
    """Of a device that is known; None of CPUs and others."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def computed_with(device: str, threads: int) -> dict[str, str]:
    """Of this process. Where torch is not loaded nothing is said of what it would find."""
    torch: Any = sys.modules.get("torch")
    found = {"rftstream": __version__, "formulas": FORMULAS, **_libraries(), "device": device, "threads": str(threads)}
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
        for name, value in sorted({"formulas": formulas_of(there), **there}.items() if there else ()):
            if name in here and value != here[name]:
                changes = " (the changelog says what differs)" if name == "formulas" else ""
                reasons[f"{name}: recorded with {value}, here {here[name]}{changes}"] = None
        if there and there.get("device") != "cpu":
            reasons[f"computed on {there.get('device')}: only one process on a cpu is equal bit for bit"] = None
    return list(reasons)


def formulas_of(recorded: Mapping[str, str]) -> str:
    """By which a run was computed that says this of itself."""
    return recorded.get("formulas", "1")


@functools.cache
def _libraries() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
