"""Traces of a batch's costs, by torch's profiler."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

log = logging.getLogger(__name__)


@contextlib.contextmanager
def traced(path: Path, device: torch.device) -> Iterator[None]:
    """Trace the code inside this context, and write the trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))
    log.info("a trace is in %s", path)
