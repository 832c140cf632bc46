"""A warm interpreter inside a bubblewrap sandbox: it forks a box for each program, into fresh namespaces.

`python zygote.py CONTROL LAYERS`: the number of a socket, and the layers as JSON. Each message {"disk_bytes"} brings
the socket of a new box. The answer is {"started": true} with a pidfd of the box, or {"error"}. When the control socket
is closed, the zygote ends, and with it everything in the sandbox.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from rftstream.sandbox.inside import box, kernel, syscall_filter, wire

_LIKED = """
abc array ast atexit base64 bisect calendar cmath codecs collections collections.abc contextlib copy csv dataclasses
datetime decimal difflib doctest enum fractions functools hashlib heapq hmac inspect io itertools json linecache
math numbers operator pathlib pprint queue random re secrets statistics string struct subprocess tempfile textwrap
threading time timeit traceback types typing unittest uuid zlib
"""
PRELOADED = tuple(_LIKED.split())
"""Modules that programs often import. They are loaded before a program begins."""


def main() -> None:
    """Serve until the control socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    layers: dict[str, Any] = json.loads(sys.argv[2])
    for module in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    program_filter = syscall_filter.build(kernel.machine()) if layers["seccomp"] else None
    layers["landlock"] = layers["landlock"] and kernel.landlock_version() > 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("900")  # if memory runs out, the kernel kills processes in here first
    gc.collect()
    gc.freeze()  # so that programs' garbage collectors do not touch the shared pages
    wire.send(control, {"ready": True, "pid": os.getpid(), "landlock": layers["landlock"]})
    boxes: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control.fileno(), *boxes], [], [])
        for pidfd in boxes.keys() & set(ready):
            os.waitpid(boxes.pop(pidfd), 0)
            os.close(pidfd)
        if control.fileno() in ready:
            _start(control, layers, program_filter, boxes)


def _start(control: socket.socket, layers: dict[str, Any], program_filter: bytes | None, boxes: dict[int, int]) -> None:
    try:
        request, _, descriptors = wire.receive(control)
    except OSError:
        os._exit(0)
    namespaces = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
    try:
        pid = kernel.fork_into(namespaces)
    except OSError as error:
        os.close(descriptors[0])
        wire.send(control, {"error": str(error)})
        return
    if pid == 0:
        try:
            control.close()
            for pidfd in boxes:
                os.close(pidfd)
            box.main(socket.socket(fileno=descriptors[0]), request, layers, program_filter)
        finally:
            os._exit(1)
    os.close(descriptors[0])
    boxes[pidfd := os.pidfd_open(pid)] = pid
    wire.send(control, {"started": True}, descriptors=[pidfd])


if __name__ == "__main__":
    main()
