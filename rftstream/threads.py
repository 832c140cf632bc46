"""Thread limits for the array libraries of this process and of the processes that it starts."""

from __future__ import annotations

import os
import sys


def thread_limits(threads: int) -> dict[str, str]:
    """Return environment variables that limit the threads of array libraries. Libraries that are already loaded do not
    read them."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    return dict.fromkeys(names, str(threads)) | {"TOKENIZERS_PARALLELISM": "false"}


def limit_threads(threads: int) -> None:
    """Limit the array libraries of this process, whether they are loaded or not."""
    os.environ.update(thread_limits(threads))
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
