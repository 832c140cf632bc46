"""The way into bubblewrap: `python launch.py PLAN`, a JSON object, becomes bubblewrap with the user's rights dropped.

In the plan: `cgroups` are files to write this process's id into; `uid` is the user to become, or null; `shown` are the
folders that bubblewrap is to show, which that user may be unable to reach; `command` is bubblewrap with its arguments.
This process has a mount namespace of its own by then, so what it mounts is seen by nobody else.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rftstream.sandbox.inside import kernel


def main() -> None:
    """Become bubblewrap."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    for path in plan["cgroups"]:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    if plan["uid"] is not None:
        hidden = [path for path in plan["shown"] if _barrier(path) is not None]
        if hidden:
            _open_the_way(hidden)
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    os.execve(plan["command"][0], plan["command"], {})


def _barrier(path: str) -> str | None:
    """Return the first folder above `path` that other users may not pass."""
    parts = path.strip("/").split("/")
    for count in range(1, len(parts)):
        folder = "/" + "/".join(parts[:count])
        if not os.stat(folder).st_mode & 0o001:
            return folder
    return None


def _open_the_way(paths: list[str]) -> None:
    """Put a bare folder over each barrier, in this mount namespace alone, in which only these paths are."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    opened = [(path, os.open(path, os.O_PATH)) for path in paths]
    for barrier in sorted({barrier for path in paths if (barrier := _barrier(path)) is not None}):
        kernel.mount("tmpfs", barrier, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    os.umask(0o022)
    for path, descriptor in opened:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(f"/proc/self/fd/{descriptor}", path, None, kernel.MS_BIND | kernel.MS_REC)
        os.close(descriptor)


if __name__ == "__main__":
    main()
