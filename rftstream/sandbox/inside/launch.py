"""Starts bubblewrap with reduced rights: `python launch.py PLAN`, where PLAN is a JSON object.

In the plan: `owner` is the process that starts this one; `cgroups` are the folders of the place's cgroups; `uid` is the
user to become, or null; `shown` are the folders that bubblewrap is to show, which that user may be unable to reach;
`command` is bubblewrap with its arguments. The child gets its own mount namespace before it becomes bubblewrap, so no
other process sees its mounts.

The parent stays as the keeper of the place. It makes the cgroups, keeps its rights, and waits. When the owner dies, the
kernel signals the keeper, which then ends bubblewrap and removes the cgroups. When the keeper itself is killed, the
kernel ends bubblewrap; the next start then removes the cgroups.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

from rftstream.sandbox.inside import kernel

_WAITED_FOR = (signal.SIGCHLD, signal.SIGTERM)
_PATIENCE_S = 60.0
"""Seconds to wait for killed processes to disappear. On a busy machine they also wait for a processor."""


def main() -> None:
    """Start bubblewrap, and stay as its keeper."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != plan["owner"]:
        return  # the owner died before the signal was set up
    for folder in plan["cgroups"]:
        os.makedirs(folder, exist_ok=True)
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        _keep(pid, plan["cgroups"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)
    _become_bubblewrap(plan, keeper)


def _keep(pid: int, folders: list[str]) -> NoReturn:
    """Wait until the owner has ended, and remove everything of the place.

    If bubblewrap ends first, the owner sees it at its socket, reads the cgroups, removes them, and kills this process.
    The owner may also be dying: the kernel closes its sockets before it reports its death.
    """
    has_ended = signal.sigwait(_WAITED_FOR) == signal.SIGCHLD
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.closerange(3, 1 << 16)  # the other end of the owner's socket
    if has_ended:
        signal.sigwait((signal.SIGTERM,))
    from pathlib import Path

    from rftstream.sandbox.cgroups import remove

    for folder in folders:
        remove(Path(folder), _PATIENCE_S)
    os._exit(0)


def _become_bubblewrap(plan: dict[str, Any], keeper: int) -> None:
    for folder in plan["cgroups"]:
        with open(f"{folder}/cgroup.procs", "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    if plan["uid"] is not None:
        hidden = [path for path in plan["shown"] if _barrier(path) is not None]
        if hidden:
            _open_the_way(hidden)
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # another user's process does not keep this setting
    if os.getppid() != keeper:
        return
    os.execve(plan["command"][0], plan["command"], {})


def _barrier(path: str) -> str | None:
    """Return the first folder above `path` that other users cannot enter."""
    parts = path.strip("/").split("/")
    for count in range(1, len(parts)):
        folder = "/" + "/".join(parts[:count])
        if not os.stat(folder).st_mode & 0o001:
            return folder
    return None


def _open_the_way(paths: list[str]) -> None:
    """Mount an empty folder over each barrier, in this mount namespace only, and show only these paths in it."""
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
