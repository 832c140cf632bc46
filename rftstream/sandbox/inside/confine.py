"""Restrictions that a program's process applies to itself just before the program begins: rights, system calls, and
most limits."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

from rftstream.sandbox.inside import kernel

HOME = "/box"
"""The folder in which a program begins. It shares one small tmpfs with /tmp and /dev/shm."""
OUTER_PROC = "/outer-proc"
"""The place where bubblewrap shows its own /proc if root starts it. Bubblewrap then covers parts of the /proc that it
mounts, and the kernel forbids mounting another /proc without an uncovered one. A box covers this place with an empty
folder."""
WRITABLE = (HOME, "/tmp", "/dev/shm")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts", "/dev/ptmx")
MAX_DESCRIPTORS = 256
_PROMISED = {
    resource.RLIMIT_AS: "ulimit -v",
    resource.RLIMIT_CPU: "ulimit -t",
    resource.RLIMIT_FSIZE: "ulimit -f",
    resource.RLIMIT_NOFILE: "ulimit -n",
    resource.RLIMIT_NPROC: "ulimit -u",
    resource.RLIMIT_STACK: "ulimit -s",
}
"""Limits that a program must get in full."""
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python turns into errors. Other programs get them unchanged."""


def confine(limits: dict[str, Any], layers: dict[str, Any], program_filter: bytes | None) -> None:
    """Confine this process and everything that it starts. The filter comes last: it denies calls that the other steps
    need."""
    os.setsid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # pid 1 is not dumpable, so /proc/self would belong to nobody
    _limit(limits)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if layers["landlock"]:
        kernel.landlock(["/"], [*WRITABLE, *DEVICES])
    if program_filter is not None:
        kernel.install_filter(program_filter)


def _limit(limits: dict[str, Any]) -> None:
    cpu_s = int(limits["cpu_s"]) + 2
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: int(limits["file_bytes"]),
        resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
        resource.RLIMIT_NPROC: int(limits["processes"]) + 2,  # the zygote and pid 1 count as well
        resource.RLIMIT_STACK: int(limits["stack_bytes"]),
        resource.RLIMIT_MEMLOCK: 64 << 10,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
    }
    if limits["address_bytes"]:
        wanted[resource.RLIMIT_AS] = int(limits["address_bytes"])
    for name, value in wanted.items():
        _, hard = resource.getrlimit(name)
        if hard != resource.RLIM_INFINITY and hard < value:
            if name in _PROMISED:  # otherwise a program that reaches it would seem to be at fault
                raise OSError(
                    f"{_PROMISED[name]} is {hard} in the sandbox itself, below the program's limit of {value}"
                )
            value = hard
        resource.setrlimit(name, (value, value))
