"""Tar files, by which files come into containers and out of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

TAR_BYTES = 10 * tarfile.RECORDSIZE
"""Bytes of a tar file that are enough for everything but the content of its first file."""


def pack_folder(folder: Path, target: str) -> bytes:
    """Return a folder as a tar file whose bytes depend only on its content."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[f"{target}/{path.relative_to(folder).as_posix()}"] = path
    return pack_files(
        {name: path.read_bytes() for name, path in files.items()},
        {name: path.stat().st_mode for name, path in files.items()},
    )


def pack_files(files: Mapping[str, bytes], modes: Mapping[str, int] | None = None) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755 if (modes or {}).get(name, 0) & 0o100 else 0o644
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def unpack_file(data: bytes) -> tuple[tarfile.TarInfo | None, bytes | None]:
    """Return the first file of a tar file and its content, or None for each if the first entry is no regular file. The
    content is None, too, if the data ends before it does."""
    if not data:
        return None, None
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.next()
        if member is None or not member.isreg():
            return None, None
        end = member.offset_data + member.size
        return member, data[member.offset_data : end] if end <= len(data) else None
