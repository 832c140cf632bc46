"""The seccomp filter of a sandbox, as a program of classic BPF.

It denies calls that a computing program does not need and that expose much of the kernel: other processes, namespaces,
mounts, keys, io_uring, bpf, System V IPC, changes of its own priority (they would fake an overloaded machine), limits
of other processes, and sockets other than AF_UNIX. Everything else is allowed, since Java and Node.js need many calls.
"""

from __future__ import annotations

import errno
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Supported processors -> the kernel's number for each."""

DENIED = """
ptrace 101 117 | process_vm_readv 310 270 | process_vm_writev 311 271 | pidfd_getfd 438 438 | kcmp 312 272 |
process_madvise 440 440 | unshare 272 97 | setns 308 268 | mount 165 40 | umount2 166 39 | pivot_root 155 41 |
chroot 161 51 | move_mount 429 429 | open_tree 428 428 | fsopen 430 430 | fsconfig 431 431 | fsmount 432 432 |
fspick 433 433 | mount_setattr 442 442 | keyctl 250 219 | add_key 248 217 | request_key 249 218 | bpf 321 280 |
perf_event_open 298 241 | userfaultfd 323 282 | kexec_load 246 104 | kexec_file_load 320 294 | init_module 175 105 |
finit_module 313 273 | delete_module 176 106 | swapon 167 224 | swapoff 168 225 | reboot 169 142 | syslog 103 116 |
acct 163 89 | quotactl 179 60 | quotactl_fd 443 443 | personality 135 92 | sethostname 170 161 | setdomainname 171
162 | settimeofday 164 170 | clock_settime 227 112 | clock_adjtime 305 266 | adjtimex 159 171 | ioperm 173 - | iopl
172 - | modify_ldt 154 - | lookup_dcookie 212 18 | nfsservctl 180 42 | vhangup 153 58 | open_by_handle_at 304 265 |
name_to_handle_at 303 264 | fanotify_init 300 262 | fanotify_mark 301 263 | sched_setscheduler 144 119 |
sched_setparam 142 118 | sched_setattr 314 274 | sched_setaffinity 203 122 | setpriority 141 140 | ioprio_set 251 30
| mbind 237 235 | set_mempolicy 238 237 | migrate_pages 256 238 | move_pages 279 239 | set_mempolicy_home_node 450
450 | memfd_secret 447 447 | shmget 29 194 | shmat 30 196 | shmctl 31 195 | semget 64 190 | semop 65 193 | semctl 66
191 | semtimedop 220 192 | msgget 68 186 | msgsnd 69 189 | msgrcv 70 188 | msgctl 71 187 | mq_open 240 180 |
landlock_create_ruleset 444 444 | setuid 105 146 | setgid 106 144 | setreuid 113 145 | setregid 114 143 | setresuid
117 147 | setresgid 119 149 | setgroups 116 159 | setfsuid 122 151 | setfsgid 123 152 | seccomp 317 277
"""
"""Call, its number on x86_64, and on aarch64; - if there is no such call. The program gets EPERM."""

MISSING = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "clone3": (435, 435),
}
"""Calls that appear not to exist, so that libraries use older ones (the filter cannot read clone3's flags)."""

NEWEST = 463
"""The first call number that appears not to exist: calls of later kernels."""

_CLONE, _SOCKET, _IOCTL, _PRLIMIT = (56, 220), (41, 198), (16, 29), (302, 261)
_NEW_NAMESPACES = 0x7E020000
_AF_UNIX = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def build(machine: str) -> bytes | None:
    """Return the filter for a processor, or None if the processor is not supported."""
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    deny, missing = _step(_RETURN, _ERRNO | errno.EPERM), _step(_RETURN, _ERRNO | errno.ENOSYS)
    allow = _step(_RETURN, _ALLOW)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, NEWEST, 0, 1),  # includes x32's numbers, which begin at 1 << 30
        missing,
    ]
    for number in denied(machine):
        steps += [_step(_EQUAL, number, 0, 1), deny]
    for numbers in MISSING.values():
        steps += [_step(_EQUAL, numbers[column], 0, 1), missing]
    first, second = _step(_LOAD, _FIRST), _step(_LOAD, _SECOND)
    steps += [_step(_EQUAL, _CLONE[column], 0, 4), first, _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), deny, allow]
    steps += [_step(_EQUAL, _SOCKET[column], 0, 4), first, _step(_EQUAL, _AF_UNIX, 1, 0), deny, allow]
    # only its own limits: changing those of process 1 would break the box
    steps += [_step(_EQUAL, _PRLIMIT[column], 0, 4), first, _step(_EQUAL, 0, 1, 0), deny, allow]
    steps += [_step(_EQUAL, _IOCTL[column], 0, 5), second]
    steps += [_step(_EQUAL, _TIOCSTI, 1, 0), _step(_EQUAL, _TIOCLINUX, 0, 1), deny, allow]
    return b"".join([*steps, allow])


def denied(machine: str) -> list[int]:
    """Return the numbers of the denied calls on a processor."""
    column = 1 + list(ARCHITECTURES).index(machine)
    numbers = [entry.split()[column] for entry in DENIED.replace("\n", " ").split("|")]
    return [int(number) for number in numbers if number != "-"]
