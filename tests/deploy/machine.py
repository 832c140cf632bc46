"""A bare Debian in a folder, entered with namespaces of its own. Only root may make one. Its network is this machine's.

This machine's settings of package registries, its certificates and its name servers are carried into it, since
registries may be out of reach without them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SUITE = "trixie"
CERTIFICATES = Path("/usr/local/share/ca-certificates")
CARRIED_FILES = ("/etc/hosts", "/etc/resolv.conf", "/etc/pip.conf", "/etc/uv/uv.toml")
CARRIED_FROM_HOME = (
    ".config/pip/pip.conf",
    ".pip/pip.conf",
    ".config/uv/uv.toml",
    ".config/go/env",
    ".m2/settings.xml",
)
CARRIED_VARIABLES = re.compile(
    "(PIP_|UV_|MAVEN_|SSL_CERT_).*|GO(PROXY|SUMDB|NOSUMDB|PRIVATE|FLAGS)|.*_CA_BUNDLE|(HTTPS?|ALL|NO)_PROXY",
    re.IGNORECASE,
)
ENTER = """
set -euo pipefail
root=$1 user=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mkdir -p "$root/old"
cd "$root"
pivot_root . old  # a process that is only in chroot may make no namespaces, and sandboxes make some
umount -l /old
home=$(getent passwd "$user" | cut -d: -f6)
cd "$home/rftstream"
env HOME="$home" setpriv --reuid "$user" --regid "$user" --init-groups "$@" || exit $?
"""
"""Every command has a namespace of processes, so nothing outlives it. Bash is its first process: it reaps orphans."""


class Machine:
    """What `make_machine` made. Root and one user more have a clone of the checkout in their homes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, user: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a user's clone. What it writes to both its streams is in `stdout`."""
        environment = {name: value for name, value in os.environ.items() if CARRIED_VARIABLES.fullmatch(name)}
        environment |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", ENTER, "enter", str(self.root)]
        return subprocess.run(
            [*words, user, *command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def make_machine(root: Path, packages: Sequence[str], user: str, checkout: Path) -> Machine:
    """Make a machine that has these packages and what Debian calls essential, and nothing else."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as options:
        options.write(_output("apt-config", "dump", "Acquire::http", "Acquire::https"))
        options.flush()
        _output("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}",
                f"--aptopt={options.name}", SUITE, str(root), *_sources())  # fmt: skip
    carried = {Path(name): Path(name) for name in CARRIED_FILES}
    carried |= {Path.home() / name: Path("/root") / name for name in CARRIED_FROM_HOME}
    carried |= {path: path for path in CERTIFICATES.glob("*.crt")}
    for source, target in carried.items():
        if source.exists():
            inside = root / target.relative_to("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, inside)
    _output("chroot", str(root), "useradd", "--create-home", "--shell", "/bin/bash", user)
    for home in ("root", f"home/{user}"):
        _clone(checkout, root / home / "rftstream")
    _output("chroot", str(root), "chown", "--recursive", f"{user}:", f"/home/{user}")
    return Machine(root)


def _sources() -> list[str]:
    """Return from where this machine has Debian's packages, for the other release. Nothing: from Debian itself."""
    found = _output("apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Origin: Debian")
    suites = {"Debian": SUITE, "Debian-Security": f"{SUITE}-security"}
    places = sorted({tuple(line.split(" ", 1)) for line in found.splitlines()})
    return [f"deb {place} {suites[label]} main" for place, label in places if label in suites]


def _clone(checkout: Path, clone: Path) -> None:
    """Clone a checkout with what has been changed in it."""
    _output("git", "clone", "--quiet", str(checkout), str(clone))
    listed = _output("git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (checkout / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkout / name, clone / name)
        else:
            (clone / name).unlink(missing_ok=True)


def _output(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: exit {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout
