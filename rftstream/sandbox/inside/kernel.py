"""Linux system calls that Python has no function for."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
MS_REMOUNT = 32
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2

_SIGCHLD = 17
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CAP_VERSION_3 = 0x20080522

_libc = ctypes.PyDLL(None, use_errno=True)


def machine() -> str:
    """Return the name of the processor as this package's tables write it."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def fork_into(namespaces: int) -> int:
    """Fork into fresh namespaces. Like os.fork; this process must have no other thread."""
    number = _SYS_CLONE[machine()]
    arguments = [ctypes.c_ulong(namespaces | _SIGCHLD), *[ctypes.c_ulong(0)] * 4]
    ctypes.pythonapi.PyOS_BeforeFork()  # takes the locks that the other two release
    pid = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _checked(pid, "clone")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system. OSError names the target."""
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    data = options.encode() if options is not None else None
    _checked(int(_libc.mount(*encoded, ctypes.c_ulong(flags), data)), f"mount {target}")


def unshare(flags: int) -> None:
    """Move this process to new namespaces of these kinds."""
    _checked(int(_libc.unshare(ctypes.c_int(flags))), "unshare")


def prctl(option: int, *arguments: int) -> None:
    """Set an attribute of this process."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    _checked(int(_libc.prctl(ctypes.c_int(option), *map(ctypes.c_ulong, padded))), f"prctl {option}")


def drop_capabilities() -> None:
    """Drop all capabilities permanently."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    number = 0
    while True:
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError:
            break  # the kernel has no further capabilities, or this process may not drop them and has none
        number += 1
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAP_VERSION_3, 0))
    data = ctypes.create_string_buffer(bytes(24))
    _checked(int(_libc.syscall(ctypes.c_long(_SYS_CAPSET[machine()]), header, data)), "capset")


def install_filter(program: bytes) -> None:
    """Install a seccomp filter from `syscall_filter.build` for this process and its children."""
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HL", len(program) // 8, ctypes.addressof(code)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


# ------------------------------------------------------------------------------------------------ Landlock


_READ = (1 << 0) | (1 << 2) | (1 << 3)  # execute, read a file, read a folder
_FILE = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)
"""Rights that apply to files; the others apply only to folders."""


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has, or 0."""
    return max(0, int(_libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def landlock(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Restrict this process and its children to these paths, without network. Needs PR_SET_NO_NEW_PRIVS."""
    version = landlock_version()
    if version == 0:
        return
    files = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        files |= (1 << bit) if version >= since else 0
    network = 0b11 if version >= 4 else 0
    scopes = 0b11 if version >= 6 else 0
    attributes = struct.pack("=QQQ", files, network, scopes)
    attributes = attributes[: 8 if version < 4 else 16 if version < 6 else 24]
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    size = ctypes.c_size_t(len(attributes))
    ruleset = _checked(
        int(_libc.syscall(ctypes.c_long(_CREATE_RULESET), buffer, size, ctypes.c_uint(0))), "landlock_create_ruleset"
    )
    try:
        for paths, rights in ((readable, _READ), (writable, files)):
            for path in paths:
                _add_path(ruleset, path, rights & files)
        _checked(int(_libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint(0))), "landlock")
    finally:
        os.close(ruleset)


def _add_path(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a missing path needs no right
    try:
        if not os.path.isdir(path):
            rights &= _FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        arguments = (ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0))
        _checked(int(_libc.syscall(ctypes.c_long(_ADD_RULE), *arguments)), f"landlock {path}")
    finally:
        os.close(descriptor)
