"""The object store: write once, read by name, on this machine's disk or behind any URL that fsspec supports.

An object's name is never reused for other bytes, so a name means the same to every reader for ever. On disk a write is
atomic and durable: a temporary file, its fsync, a link to the name, and an fsync of the folder. Elsewhere
(store_remote.py) the guarantees are those of the store's own put; on S3 it is atomic and durable, too."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from rftstream.errors import REFUSED_BY_SYSTEM, ConfigError, StoreRefused, WeightsError, WeightsGone
from rftstream.process_state import is_alive
from rftstream.weights.stores.store_remote import RemoteFiles, TriedInVain

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 4 * 1024 * 1024
"""Number of bytes that are read at once."""
INCOMING = ".incoming"
"""Folder of a local store where objects are written before they get their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object as it was put into the store."""

    name: str
    num_bytes: int
    digest: str
    """`sha256:<hex>` of the bytes."""


def place_on_disk(url: str, base: Path) -> Path | None:
    """Return the folder of a store on this machine's disks, or None for a store elsewhere. Relative paths are relative
    to `base`."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return base / url
    return base / rest if scheme == "file" else None


class ObjectStore:
    """A store of named objects: `file://PATH`, `memory://NAME`, `s3://BUCKET/PREFIX`, ...

    A process makes it from `weights.store`. All methods may be called from any thread. Errors are WeightsErrors:
    WeightsGone for a missing object, StoreRefused and StoreUnreachable for the store."""

    def __init__(self, url: str, *, base: Path, patience_s: float = 120.0, timeout_s: float = 30.0) -> None:
        """A relative PATH is relative to `base`, the run folder. `patience_s` and `timeout_s` are for stores elsewhere,
        as in [weights]."""
        place = place_on_disk(url, base)
        self.url = url
        self.settings = {"url": url, "base": str(base), "patience_s": patience_s, "timeout_s": timeout_s}
        """Arguments from which another process makes the same store."""
        self.is_local = place is not None
        """Whether the store is on this machine's disks (or mounted there), so that reading costs no more than a
        copy."""
        self._files: _Files = (
            _LocalFiles(place) if place is not None else RemoteFiles(url, patience_s=patience_s, timeout_s=timeout_s)
        )

    @property
    def is_private(self) -> bool:
        """Whether only this process reaches the store."""
        return self.url.startswith("memory:")

    def put(self, name: str, data: Buffer) -> StoredObject:
        """Write an object from bytes, like `write`."""
        return self.write(name, lambda file: file.write(data))

    def put_file(self, name: str, path: Path) -> StoredObject:
        """Write an object from a file. A file made in `scratch()` is linked, not copied, so it must not be changed
        afterwards."""
        digest, num_bytes = _digest_file(path)
        return self._finish(path, StoredObject(name=_checked(name), num_bytes=num_bytes, digest=digest))

    def write(self, name: str, fill: Callable[[IO[bytes]], object]) -> StoredObject:
        """Write an object as a stream: `fill` writes to the given file.

        Readers see the object only when it is complete. WeightsError if it exists with other bytes."""
        _checked(name)
        with self.scratch() as folder:
            path = folder / "object"
            with self._errors(name), open(path, "wb") as file:
                hashing = _HashingFile(file)
                fill(hashing)  # type: ignore[arg-type]
            digest = f"sha256:{hashing.sha256.hexdigest()}"
            return self._finish(path, StoredObject(name=name, num_bytes=hashing.num_bytes, digest=digest))

    def get(self, name: str) -> bytes:
        """Return an object's bytes. WeightsGone if there is no such object."""
        with self.open(name) as file, self._errors(name):
            return file.read()

    def open(self, name: str) -> IO[bytes]:
        """Open an object for reading; the caller closes it. WeightsGone if there is no such object."""
        with self._errors(name):
            return self._files.open(_checked(name), lambda: self._errors(name))

    def exists(self, name: str) -> bool:
        """Return whether there is such an object."""
        return self._size_or_none(name) is not None

    def size(self, name: str) -> int:
        """Return an object's size in bytes. WeightsGone if there is no such object."""
        size = self._size_or_none(name)
        if size is None:
            raise self._gone(name)
        return size

    def check(self, stored: StoredObject, *, read: bool = True) -> None:
        """Raise WeightsGone unless the object is there unchanged. With `read`, all its bytes are compared."""
        where = self._place(stored.name)
        if (found := self.size(stored.name)) != stored.num_bytes:
            raise WeightsGone(f"{where}: {found} bytes, expected {stored.num_bytes}; it is damaged")
        if read and (digest := self._digest(stored.name)) != stored.digest:
            raise WeightsGone(f"{where}: digest {digest}, expected {stored.digest}; it is damaged")

    def list(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted."""
        folder = prefix.rpartition("/")[0]
        with self._errors(prefix or "the list of objects"):
            return sorted(name for name in self._files.walk(folder) if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """Delete an object. An object that is not there is ignored."""
        with contextlib.suppress(WeightsGone), self._errors(name):
            self._files.delete(_checked(name))

    def remove_scratch(self) -> None:
        """Remove the place of temporary folders in a store on disk. It stays if a process uses it."""
        if isinstance(self._files, _LocalFiles):
            self._files.remove_scratch()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Give a temporary folder for files on their way into the store. The folder is removed at the end."""
        with self._errors("a temporary folder"):
            folder = self._files.make_scratch()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _finish(self, path: Path, stored: StoredObject) -> StoredObject:
        try:
            with self._errors(stored.name):
                added = self._files.add(stored.name, path)
        except WeightsGone as error:
            raise StoreRefused(
                f"{self._place(stored.name)}: {error.__cause__}, expected a bucket or folder to write to; make it, or "
                "change weights.store"
            ) from error.__cause__
        if not added and self._digest(stored.name) != stored.digest:
            raise WeightsError(
                f"{self._place(stored.name)}: exists with other bytes, and no object is written twice; "
                "does another run use the same weights.store?"
            )
        return stored

    def _digest(self, name: str) -> str:
        with self.open(name) as file, self._errors(name):
            return _digest_stream(file)[0]

    def _size_or_none(self, name: str) -> int | None:
        try:
            with self._errors(name):
                return self._files.size(_checked(name))
        except WeightsGone:
            return None

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Convert errors of the store's client to ours."""
        try:
            yield
        except (WeightsError, ConfigError):
            raise
        except FileNotFoundError as error:
            raise self._gone(name) from error
        except Exception as error:
            if not isinstance(error, OSError) and not self._files.foreign_errors:
                raise
            what = str(error) if isinstance(error, TriedInVain) else f"{type(error).__name__}: {error}"
            kind = self._files.kind_of(error)
            todo = "is the store reachable, with room and rights?"
            if what.startswith("NoCredentialsError"):
                todo = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what else boto finds"
            raise kind(f"{self._place(name)}: {what}; {todo}") from error

    def _gone(self, name: str) -> WeightsGone:
        return WeightsGone(f"{self._place(name)}: no such object; it was deleted, or weights.store names another place")

    def _place(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"


class _Files(Protocol):
    """The calls in which a local disk and other stores differ. Only `ObjectStore` makes and calls such an object. Names
    are checked before."""

    foreign_errors: bool
    """Whether the store's client raises exceptions other than OSErrors."""

    def kind_of(self, error: Exception) -> type[WeightsError]:
        """Return our error type for an error of the client: refused for good, given up, or an error of that object."""

    def make_scratch(self) -> Path:
        """Make a temporary folder for files on their way into the store."""

    def add(self, name: str, path: Path) -> bool:
        """Give the file's contents the name. Return False if the name is taken."""

    def open(self, name: str, errors: Callable[[], AbstractContextManager[None]]) -> IO[bytes]:
        """Open an object. If reading may fail later, its errors go through `errors`."""

    def size(self, name: str) -> int:
        """Return an object's size in bytes. FileNotFoundError if there is none."""

    def walk(self, folder: str) -> Iterator[str]:
        """Yield the names of all objects below a folder."""

    def delete(self, name: str) -> None:
        """Delete an object."""


class _LocalFiles:
    """The files of a store on this machine's disks."""

    foreign_errors = False

    def kind_of(self, error: Exception) -> type[WeightsError]:
        return StoreRefused if isinstance(error, OSError) and error.errno in REFUSED_BY_SYSTEM else WeightsError

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = itertools.count()
        self._host = socket.gethostname()

    def make_scratch(self) -> Path:
        incoming = self._root / INCOMING
        incoming.mkdir(parents=True, exist_ok=True)
        number = next(self._numbers)
        if number == 0:
            self._sweep(incoming)
        folder = incoming / f"{self._host}+{os.getpid()}+{id(self):x}-{number}"
        folder.mkdir()
        return folder

    def remove_scratch(self) -> None:
        incoming = self._root / INCOMING
        with contextlib.suppress(OSError):  # it is not there, or other processes write into the store
            self._sweep(incoming)
            incoming.rmdir()

    def add(self, name: str, path: Path) -> bool:
        target = self._root / name
        if self._root not in path.parents:  # a file from outside: copied, since links do not work across file systems
            scratch = self.make_scratch()
            try:
                return self.add(name, Path(shutil.copyfile(path, scratch / "copy")))
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        new_folders = [folder for folder in target.parents if not folder.exists()]
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            added = _link(path, target)
        except FileNotFoundError:  # another process's delete removed the empty folder
            target.parent.mkdir(parents=True, exist_ok=True)
            added = _link(path, target)
        for folder in (target.parent, *(folder.parent for folder in new_folders)):
            _sync_folder(folder)
        return added

    def open(self, name: str, errors: Callable[[], AbstractContextManager[None]]) -> IO[bytes]:
        return open(self._root / name, "rb")

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size

    def walk(self, folder: str) -> Iterator[str]:
        for path, folders, files in os.walk(self._root / folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in files:
                if not file.startswith("."):
                    yield (Path(path) / file).relative_to(self._root).as_posix()

    def delete(self, name: str) -> None:
        path = self._root / name
        path.unlink()
        with contextlib.suppress(OSError):  # stop at the first folder that is not empty
            for folder in path.parents:
                if folder == self._root:
                    break
                folder.rmdir()

    def _sweep(self, incoming: Path) -> None:
        """Remove files that killed processes of this host left behind."""
        for folder in incoming.iterdir():
            host, _, rest = folder.name.partition("+")
            pid = rest.partition("+")[0]
            if host == self._host and pid.isdigit() and not is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


class _HashingFile:
    """A file that computes the digest of the bytes that it passes on to another file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Pass bytes on, and add them to the digest."""
        view = memoryview(data)
        self._file.write(view)
        self.sha256.update(view)
        self.num_bytes += view.nbytes
        return view.nbytes


def _checked(name: str) -> str:
    parts = name.split("/")
    if not all(parts) or any(part.startswith(".") or "\\" in part or "\0" in part for part in parts):
        raise WeightsError(f"object name {name!r}: expected parts joined by /, none empty or beginning with a dot")
    return name


def _digest_file(path: Path) -> tuple[str, int]:
    with open(path, "rb") as file:
        return _digest_stream(file)


def _digest_stream(file: IO[bytes]) -> tuple[str, int]:
    sha256, num_bytes = hashlib.sha256(), 0
    while chunk := file.read(CHUNK_BYTES):
        sha256.update(chunk)
        num_bytes += len(chunk)
    return f"sha256:{sha256.hexdigest()}", num_bytes


def _link(path: Path, target: Path) -> bool:
    """Give a file a second name, without replacing an existing one. Return False if the name is taken."""
    try:
        os.link(path, target)
    except FileExistsError:
        return False
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links: atomic, but not safe against two writers of one name
        if target.exists():
            return False
        os.replace(path, target)
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
