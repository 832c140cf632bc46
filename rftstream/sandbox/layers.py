"""The layers of a sandbox: which of them this machine has, and the cost of a missing one."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from rftstream.sandbox import cgroups
from rftstream.sandbox.base import Isolation
from rftstream.sandbox.inside import kernel, syscall_filter

UID_BASE = 2_046_820_352
"""The first of the user ids that programs run as. These users have no names and own nothing."""


_WALLS = ("own user", "seccomp", "landlock")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `find_layers` makes it; `check` and `doctor` show it."""

    name: str
    is_there: bool
    found: str
    cost: str
    """Effect of the layer's absence."""
    is_needed: bool = False
    """Whether no program runs without the layer."""


@functools.cache
def find_layers(isolation: Isolation = Isolation.full) -> tuple[Layer, ...]:
    """Examine this machine, once."""
    memory, pids, cpu = _cgroups(isolation)
    return (_bubblewrap(isolation), _user(isolation), _seccomp(isolation), _landlock(isolation), memory, pids, cpu)


def has(name: str, isolation: Isolation = Isolation.full) -> bool:
    """Return whether this machine has a layer."""
    return any(layer.name == name and layer.is_there for layer in find_layers(isolation))


def missing_text(isolation: Isolation = Isolation.full) -> str | None:
    """Return why this machine can have no sandbox, or None if it can."""
    lacking = [layer for layer in find_layers(isolation) if layer.is_needed and not layer.is_there]
    return f"sandbox: {lacking[0].name}: {lacking[0].found}; {lacking[0].cost}" if lacking else None


def weaknesses(isolation: Isolation = Isolation.full) -> tuple[str, ...]:
    """Return the missing layers whose absence lets a program that breaks out get further, as parts of a scorer's
    version: `without-landlock`. Empty if no program can run here."""
    if missing_text(isolation) is not None:
        return ()
    lacking = [layer.name for layer in find_layers(isolation) if not layer.is_there and layer.name in _WALLS]
    return tuple(f"without-{name.replace(' ', '-')}" for name in lacking)


def own_uid(number: int) -> int:
    """Return the user id of this process's place with a number."""
    return UID_BASE + (os.getpid() * 64 + number) % 1_000_000


def find_bwrap() -> str | None:
    """Return the path of bubblewrap, or None."""
    return shutil.which("bwrap")


def _bubblewrap(isolation: Isolation) -> Layer:
    cost = (
        "no program of a policy can be run here; install the package bubblewrap and allow user namespaces, or use a "
        "machine that has it, by `rftstream sandbox serve` there and sandbox.url here"
    )
    path = find_bwrap() if sys.platform == "linux" else None
    if path is None:
        return Layer("bubblewrap", False, "not found", cost, True)
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, env={}, check=True)
        command = [path, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "/bin/true"]
        user = UID_BASE if drops_user(isolation) else None
        tried = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={}, user=user, group=user, check=False,
            cwd="/", extra_groups=[] if user is not None else None,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return Layer("bubblewrap", False, f"cannot be started: {error}", cost, True)
    if tried.returncode:
        if user is not None:
            cost += '. If only root may make user namespaces here, isolation = "shared_user" does without own users'
        return Layer("bubblewrap", False, tried.stderr.strip() or f"ended with {tried.returncode}", cost, True)
    return Layer("bubblewrap", True, version.stdout.strip(), cost, True)


def drops_user(isolation: Isolation) -> bool:
    """Return whether programs run as a separate user."""
    return os.geteuid() == 0 and isolation is Isolation.full


def _runs_as_root(isolation: Isolation) -> bool:
    """Return whether programs are root outside the sandbox. Then no other layer may be missing."""
    return os.geteuid() == 0 and not drops_user(isolation)


def _user(isolation: Isolation) -> Layer:
    cost = "programs have the rights of this user to files that the sandbox shows, should they break out of it"
    if isolation is Isolation.shared_user:
        return Layer("own user", False, 'given up by isolation = "shared_user"', cost)
    fine = drops_user(isolation)
    return Layer("own user", fine, "dropped before bubblewrap" if fine else "this process is not root", cost)


def _seccomp(isolation: Isolation) -> Layer:
    fine = kernel.machine() in syscall_filter.ARCHITECTURES
    cost = "programs reach all of the kernel that bubblewrap leaves them"
    found = kernel.machine() if fine else f"no filter for {kernel.machine()}"
    return Layer("seccomp", fine, found, cost, _runs_as_root(isolation))


def _landlock(isolation: Isolation) -> Layer:
    version = kernel.landlock_version() if sys.platform == "linux" else 0
    cost = "mounts alone keep programs from writing to the system"
    found = f"version {version}" if version else "the kernel has none"
    return Layer("landlock", version > 0, found, cost, _runs_as_root(isolation))


def _cgroups(isolation: Isolation) -> tuple[Layer, Layer, Layer]:
    parents = cgroups.find_parents() if sys.platform == "linux" else None
    found = parents.by_controller if parents else {}
    memory, pids, cpu = map(found.get, cgroups.CONTROLLERS)
    return (
        Layer(
            "cgroup memory", memory is not None, str(memory or "cannot be written to"),
            "the memory of all processes of a program is looked at every 50 ms, and may be exceeded meanwhile",
        ),
        Layer(
            "cgroup pids", pids is not None, str(pids or "cannot be written to"),
            "RLIMIT_NPROC alone bounds how many processes a program has, and it does not bind root",
            is_needed=_runs_as_root(isolation),
        ),
        Layer(
            "cgroup cpu", cpu is not None, str(cpu or "cannot be written to"),
            "a program with many processes takes processors away from others until its processor time is up",
        ),
    )  # fmt: skip
