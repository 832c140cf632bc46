"""Several hosts on one machine: each has a network of its own, with one address, and a folder of its own.

Only the superuser can make them. Nothing of it is seen by the rest of the machine. What hosts share is what a machine
that was just installed has: programs and packages. `/tmp`, `/dev/shm`, the home folder and the working folder are each
host's own."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SWITCH = Path(__file__).with_name("switch.py")
MTU = 9000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000

INSIDE = """
mount --bind "$1" /mnt && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && cd /mnt && shift && exec "$@"
"""
"""What a shell does on a host before it becomes the program."""


def is_possible() -> bool:
    """Return whether hosts can be made here."""
    return os.geteuid() == 0 and os.access("/dev/net/tun", os.R_OK | os.W_OK)


@dataclass(frozen=True, slots=True)
class Output:
    """A program on a host, and what it says."""

    popen: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def end(self, timeout_s: float) -> int:
        return self.popen.wait(timeout_s)


@dataclass
class Host:
    """One of a `Network`."""

    name: str
    number: int
    folder: Path
    """Its working folder, /mnt to its programs."""
    namespace: str
    device: int
    environment: dict[str, str] = field(default_factory=dict)
    programs: list[Output] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    def start(self, *command: str | Path, env: dict[str, str] | None = None) -> Output:
        out, err = (self.folder / f"{len(self.programs)}.{name}" for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            popen = subprocess.Popen(
                self._words(command), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                env={**os.environ, **self._own(), **(env or {})},
            )  # fmt: skip
        self.programs.append(Output(popen, out, err))
        return self.programs[-1]

    def call(self, *command: str | Path, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._words(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
            env={**os.environ, **self._own()},
        )  # fmt: skip

    def _own(self) -> dict[str, str]:
        home = {"HOME": "/mnt/home", "TMPDIR": "/tmp", "XDG_CACHE_HOME": "/mnt/home/.cache"}
        return {**home, **self.environment}

    def _words(self, command: Sequence[str | Path]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", INSIDE, "sh", str(self.folder), *map(str, command)]

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(word) for word in found.stdout.split()]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread, and threads that it starts, open meanwhile are the host's."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            with open(f"/run/netns/{self.namespace}", encoding="ascii") as other:
                _set_namespace(other.fileno())
            try:
                yield
            finally:
                _set_namespace(own)
        finally:
            os.close(own)


class Network:
    """Makes hosts and the cables between them. `close` ends all that lives on them."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.hosts: dict[str, Host] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        try:
            for number, name in enumerate(names, 1):
                self.hosts[name] = self._made(folder / name, name, number)
            devices = {host.number: host.device for host in self.hosts.values()}
            self._switch = subprocess.Popen(
                [sys.executable, SWITCH, json.dumps(devices)], stdin=subprocess.PIPE, pass_fds=list(devices.values())
            )
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def _made(self, folder: Path, name: str, number: int) -> Host:
        (folder / "home").mkdir(parents=True)
        namespace, label = f"rft-{os.getpid()}-{number}", f"t{os.getpid()}-{number}"
        _ip("netns", "add", namespace)
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", label.encode(), IFF_TUN | IFF_NO_PI))
        host = Host(name, number, folder, namespace, device)
        self.hosts[name] = host
        _ip("link", "set", label, "netns", namespace)  # the file stays open
        inside = ("-n", namespace)
        _ip(*inside, "link", "set", label, "name", "eth0", "mtu", str(MTU), "txqueuelen", "5000")
        _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "set", "eth0", "up")
        return host

    # ------------------------------------------------------------------------------------------ what goes wrong

    def connect(self, one: str, other: str, **cable: Any) -> None:
        """Change the cable between two hosts: `delay_s`, `lost`, `cut`; a good one without any of these."""
        assert self._switch is not None and self._switch.stdin is not None and self._switch.poll() is None
        rule = {"hosts": [self.hosts[one].number, self.hosts[other].number], **cable}
        self._switch.stdin.write(json.dumps(rule).encode() + b"\n")
        self._switch.stdin.flush()

    def connect_all(self, **cable: Any) -> None:
        """Change all cables."""
        names = list(self.hosts)
        for index, one in enumerate(names):
            for other in names[index + 1 :]:
                self.connect(one, other, **cable)

    def down(self, name: str) -> None:
        """The host is gone: its network first, so that nobody there can say anything, then all that it runs."""
        host = self.hosts[name]
        _ip("-n", host.namespace, "link", "set", "eth0", "down")
        self._end(host)

    def up(self, name: str) -> None:
        """The host comes back, with its folder and without any program."""
        _ip("-n", self.hosts[name].namespace, "link", "set", "eth0", "up")

    def _end(self, host: Host) -> None:
        deadline = time.monotonic() + 60
        while pids := host.pids():
            assert time.monotonic() < deadline, f"{host.name}: {pids} cannot be ended"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for program in host.programs:
                program.popen.poll()
            time.sleep(0.05)
        for program in host.programs:
            program.popen.wait(60)

    def report(self) -> str:
        """The ends of what all programs said, for whoever has to find out why a test failed."""
        texts = []
        for host in self.hosts.values():
            for path in [*sorted(host.folder.glob("*.err")), *sorted(host.folder.rglob("logs/*.log"))]:
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
                texts += [f"--- {host.name} {path.relative_to(host.folder)}", *lines]
        return "\n".join(texts)

    def close(self) -> None:
        for host in self.hosts.values():
            self._end(host)
        if self._switch is not None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            self._switch.wait(60)
        for host in self.hosts.values():
            os.close(host.device)
            _ip("netns", "del", host.namespace)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _set_namespace(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
