"""What an update depends on besides the data: libraries, threads and device decide its bits, and the device its
speed."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rftstream.version import __version__

LIBRARIES = ("numpy", "torch", "transformers")
"""Packages whose versions can change the bits of an update."""
FORMULAS = "3"
"""Number of the formulas. It goes up when an algorithm gives other bits with the same libraries. Runs without a number
used 1: mini-batches in the batch's order with their own denominators, whitening by std + eps, SAPO's gate as one
sigmoid, and log-ratios clipped even where nothing is exponentiated. Runs of 2 did not share the beginnings of rows."""
REPEATED = frozenset({"2", FORMULAS})
"""Formulas by which a replay computes again, to the bit."""


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
"""Part of a device's name -> its peak in TFLOP/s for dense bfloat16 products, from the maker's data sheet. The first
entry that the device's name contains counts."""


def peak_tflops(device: str) -> float | None:
    """Return the peak of a known GPU in TFLOP/s; None for CPUs and unknown devices."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def computed_with(device: str, threads: int) -> dict[str, str]:
    """Return the libraries, threads and device of this process, by name. If torch is not loaded, its processor features
    and GPU are left out."""
    torch: Any = sys.modules.get("torch")
    found = {"rftstream": __version__, "formulas": FORMULAS, **_libraries(), "device": device, "threads": str(threads)}
    found["machine"] = platform.machine()
    if torch is not None:
        found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        if device.startswith("cuda"):
            found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(device)}
    return found


def why_not_equal(recorded: Sequence[Mapping[str, str]], here: Mapping[str, str]) -> list[str]:
    """Return the reasons why the same updates may give other bits here than in the recorded run. If there are none, the
    bits must be equal."""
    reasons: dict[str, None] = {}
    for there in recorded:
        if not there:
            reasons["the run does not say with which libraries and threads it was computed"] = None
        for name, value in sorted({"formulas": formulas_of(there), **there}.items() if there else ()):
            if name in here and value != here[name] and not (name == "formulas" and value in REPEATED):
                changes = " (the changelog says what differs)" if name == "formulas" else ""
                reasons[f"{name}: recorded with {value}, here {here[name]}{changes}"] = None
        if there and there.get("device") != "cpu":
            reasons[f"computed on {there.get('device')}: only one process on a cpu is equal bit for bit"] = None
    return list(reasons)


def shares_prefixes(recorded: Mapping[str, str]) -> bool:
    """Return whether the formulas of a run share the beginnings of rows, where settings do not say otherwise."""
    return formulas_of(recorded) not in ("1", "2")


def formulas_of(recorded: Mapping[str, str]) -> str:
    """Return the number of the formulas that a run used, from what the run recorded about itself."""
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
