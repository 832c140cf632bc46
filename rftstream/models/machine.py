"""Reads what this machine has: GPUs, cores, memory, and whether vLLM is installed for them.

torch is asked in a process of its own, since it would keep memory of each GPU in this one. It decides what counts: it
knows `CUDA_VISIBLE_DEVICES`, parts of GPUs (MIG) and the order of the GPUs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from functools import lru_cache

import psutil

from rftstream.config.placement import Gpu, Machine

SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""Files of drivers. Without any of them there is no GPU, and torch is not asked."""
TIMEOUT_S = 300.0
_ASK = """
import json, torch
cuda = torch.cuda
found = [cuda.get_device_properties(i) for i in range(cuda.device_count() if cuda.is_available() else 0)]
print(json.dumps([[one.name, one.total_memory, one.major, one.minor] for one in found]))
"""


def read_machine() -> Machine:
    """Return what this machine has, as far as this process may use it."""
    gpus, trouble = _gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if any(map(os.path.exists, SIGNS)) else ((), "")
    return Machine(
        gpus=gpus,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        has_vllm=bool(gpus) and _has_vllm(),
        trouble=trouble,
    )


@lru_cache(maxsize=4)
def _gpus(visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that torch sees, and why it sees none. `visible` is the value of CUDA_VISIBLE_DEVICES."""
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return (), ""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"{type(error).__name__}: {error}"
    except (ValueError, IndexError):
        return (), (done.stderr.strip().splitlines() or ["torch says nothing"])[-1]
    gpus = tuple(Gpu(name=name, memory_bytes=num, capability=(major, minor)) for name, num, major, minor in found)
    said = done.stderr.strip().splitlines()
    return gpus, "" if gpus else said[0] if said else "a torch for CPUs, or no right to the device"


def _has_vllm() -> bool:
    """Return whether a vLLM is installed that was not built for CPUs."""
    if importlib.util.find_spec("vllm") is None:
        return False
    try:
        return "cpu" not in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True
