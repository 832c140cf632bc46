"""A real sshd on loopback, with keys of its own, for hosts that are all this machine."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.loopback import free_ports
from tests.slurm_cluster import daemon

CACHE = Path(__file__).parents[1] / ".cache" / "ssh"
PACKAGES = ("openssh-server", "libwrap0")
PATIENCE_S = 240.0
USER_OF_ITS_OWN = "sshd:x:74:65534::/run/sshd:/usr/sbin/nologin"
"""What sshd of the superuser needs in /etc/passwd."""

SERVER = """\
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/known.pub
PidFile {folder}/sshd.pid
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 100
SetEnv {environment}
"""
CLIENT = """\
Host *
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  LogLevel ERROR
  StrictHostKeyChecking accept-new
Host * !refuses
  IdentityFile {folder}/known
"""
SPECIAL = """\
Host refuses
  IdentityFile {folder}/unknown
Host silent
  Port {silent}
Host changed
  UserKnownHostsFile {folder}/changed_hosts
  StrictHostKeyChecking yes
"""
"""Hosts that nobody gets into."""


def program() -> tuple[str, str]:
    """Return sshd and the folder of its libraries. Debian's packages are unpacked and not installed: a machine on which
    tests run is not to let people in."""
    if found := shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"):
        return found, ""
    if not CACHE.is_dir():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE.parent) as work:
            got = subprocess.run(("apt-get", "download", *PACKAGES), cwd=work, capture_output=True, text=True)
            assert got.returncode == 0, f"no sshd here, and none to be had: {got.stderr}; install openssh-server"
            for package in Path(work).glob("*.deb"):
                subprocess.run(("dpkg", "-x", package.name, "root"), cwd=work, check=True)
            (Path(work) / "root").rename(CACHE)
    (library,) = CACHE.glob("**/libwrap.so.0")
    return str(CACHE / "usr" / "sbin" / "sshd"), str(library.parent)


@contextmanager
def ssh_server(env: Mapping[str, str]) -> Iterator[Path]:
    """Start the server, and yield the client's config. Every name is a host of it, but for those of SPECIAL. `env`: for
    what is called by ssh."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sshd-")))
        for key in ("host", "known", "unknown"):
            subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)), check=True)
        port, silent = free_ports(2)
        values = {"folder": folder, "port": port, "silent": silent, "user": getpass.getuser()}
        environment = " ".join(f'"{name}={value}"' for name, value in env.items())
        (folder / "server").write_text(SERVER.format(**values, environment=environment))
        (folder / "client").write_text((SPECIAL + CLIENT).format(**values))
        other = (folder / "unknown.pub").read_text().split()[:2]
        (folder / "changed_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(other)}\n")
        sshd, libraries = program()
        command = [sshd, "-D", "-e", "-f", str(folder / "server")]
        if os.geteuid() == 0 and "\nsshd:" not in Path("/etc/passwd").read_text():
            passwd = folder / "passwd"
            passwd.write_text(f"{Path('/etc/passwd').read_text()}{USER_OF_ITS_OWN}\n")
            inside = f"mount --bind {passwd} /etc/passwd && mkdir -p /run/sshd && exec {shlex.join(command)}"
            command = ["unshare", "--mount", "sh", "-c", inside]
        stack.enter_context(daemon(command, {"LD_LIBRARY_PATH": libraries}))
        until = time.monotonic() + PATIENCE_S
        while not _listens(port):
            assert time.monotonic() < until, "sshd does not listen"
            time.sleep(0.05)
        yield folder / "client"


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
