"""Checks whether this machine can hold an embedded log: its SQLite, and the file system of the run folder."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from rftstream.transport.findings import Finding, Level

OLDEST_SQLITE = (3, 35, 0)
"""The first version with RETURNING."""

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "fuse.sshfs", "fuse.s3fs"}
"""File systems whose memory is not shared between hosts, as the WAL requires."""


def find(folder: Path) -> list[Finding]:
    """Return findings about SQLite and about the file system. `folder` is the parent of run folders; it may not exist
    yet."""
    fine = sqlite3.sqlite_version_info >= OLDEST_SQLITE
    findings = [
        Finding(
            level=Level.ok if fine else Level.problem,
            what="sqlite",
            found=sqlite3.sqlite_version,
            wanted=f"{'.'.join(map(str, OLDEST_SQLITE))} or newer",
            todo="" if fine else "use a Python that is linked to a newer SQLite",
        )
    ]
    kind = _file_system(folder)
    if kind is not None:
        shared = kind in NETWORK
        findings.append(
            Finding(
                level=Level.warning if shared else Level.ok,
                what="file system of the log",
                found=kind,
                wanted="one of this machine",
                todo="workers on other hosts would damage an embedded log here; "
                'use transport.kind = "kafka" or a local run.folder'
                if shared
                else "",
            )
        )
    return findings


def _file_system(folder: Path) -> str | None:
    """Return the kind of file system of a folder, or None if the system does not tell."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    mounts = {parts[1].replace("\\040", " "): parts[2] for line in lines if len(parts := line.split()) > 2}
    path = folder.resolve()
    return next((mounts[str(parent)] for parent in (path, *path.parents) if str(parent) in mounts), None)
