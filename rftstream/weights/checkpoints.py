"""Checkpoints in the object store. The files are written first, the manifest last. Without a manifest a checkpoint does
not exist."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream import faults
from rftstream.contracts.control import Trimmed
from rftstream.contracts.versions import VersionName
from rftstream.errors import StoreUnreachable, WeightsError
from rftstream.weights.publisher import Fault
from rftstream.weights.stores.store import CHUNK_BYTES, ObjectStore

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """The files of a checkpoint that is not written yet. `CheckpointStore.stage` makes it. Its owner may pass it to
    `write_staged`, and always calls `drop` at the end."""

    folder: Path
    """A temporary folder of the store."""
    drop: Callable[[], None]
    """Removes the folder."""


class CheckpointStore:
    """The checkpoints of a run in its object store.

    A checkpoint is in `checkpoints/<epoch>-<version>/`. Its `manifest.json` has digest and size of each file. The
    trainer calls `stage`, `write_staged` and `delete`; tools call `write`. Tools and trainers that start call `newest`,
    `verify` and `read`."""

    def __init__(self, store: ObjectStore, *, fault: Fault = faults.at) -> None:
        self._store = store
        self._fault = fault

    def write(self, name: VersionName, fill: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Save the files that `fill` writes into the given folder, together with `state` (plain JSON values).

        The checkpoint is complete and durable when this returns. WeightsError if it exists already."""
        staged = self.stage(fill)
        try:
            self.write_staged(name, staged, state)
        finally:
            staged.drop()

    def stage(self, fill: Callable[[Path], None]) -> StagedCheckpoint:
        """Let `fill` write its files into a temporary folder, and return them."""
        with ExitStack() as stack:
            folder = stack.enter_context(self._store.scratch())
            fill(folder)
            return StagedCheckpoint(folder, stack.pop_all().close)

    def write_staged(self, name: VersionName, staged: StagedCheckpoint, state: dict[str, Any]) -> None:
        """Save staged files as `write` does."""
        folder = _folder(name)
        if self._store.exists(f"{folder}/manifest.json"):
            raise WeightsError(f"{folder}: exists already, and no checkpoint is written twice")
        for leftover in self._store.list(f"{folder}/"):  # left by an attempt that did not write its manifest
            self._store.delete(leftover)
        files: dict[str, dict[str, Any]] = {}
        for path in sorted(path for path in staged.folder.rglob("*") if path.is_file()):
            file = path.relative_to(staged.folder).as_posix()
            self._fault("before_checkpoints")
            stored = self._store.put_file(f"{folder}/files/{file}", path)
            files[file] = {"bytes": stored.num_bytes, "digest": stored.digest}
        self._fault("checkpoint_files_written")
        manifest = {
            "format": FORMAT,
            "trainer_epoch": name.trainer_epoch,
            "version": name.version,
            "files": files,
            "state": state,
        }
        self._fault("before_checkpoints")
        text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False)
        self._store.put(f"{folder}/manifest.json", text.encode())
        self._fault("checkpoint_manifest_written")

    def names(self) -> list[VersionName]:
        """Return the names of all complete checkpoints, oldest first."""
        manifests = [name for name in self._store.list("checkpoints/") if name.endswith("/manifest.json")]
        return sorted(filter(None, map(_parse, manifests)))

    def newest(
        self,
        in_force: Callable[[VersionName], bool] = lambda name: True,
        fits: Callable[[VersionName, dict[str, Any]], bool] = lambda name, state: True,
        *,
        folder: Path | None = None,
    ) -> tuple[VersionName, dict[str, Any]] | None:
        """Return the newest undamaged checkpoint in force whose state `fits`, and that state. Its files are read once:
        they are verified and, with an empty `folder`, copied into it. Damaged checkpoints are skipped with a
        warning. StoreUnreachable if the store does not answer: that says nothing of a checkpoint."""
        for name in reversed(self.names()):
            if not in_force(name):
                continue
            try:
                if not fits(name, self.state(name)):
                    continue
                return name, self.verify(name) if folder is None else self.read(name, folder)
            except StoreUnreachable:
                raise
            except WeightsError as error:
                logger.warning("checkpoint skipped, the one before is taken: %s", error)
                if folder is not None:
                    _empty(folder)
        return None

    def verify(self, name: VersionName) -> dict[str, Any]:
        """Read and verify all files of a checkpoint, and return its state. WeightsError if a file is missing or
        damaged."""
        manifest = self._manifest(name)
        for file in manifest["files"]:
            self._copy(name, manifest, file, target=None)
        return manifest["state"]  # type: ignore[no-any-return]

    def read(self, name: VersionName, folder: Path) -> dict[str, Any]:
        """Copy the checkpoint's files into an existing folder, verify them, and return its state."""
        manifest = self._manifest(name)
        for file in manifest["files"]:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            self._copy(name, manifest, file, target=target)
        return manifest["state"]  # type: ignore[no-any-return]

    def state(self, name: VersionName) -> dict[str, Any]:
        """Return the checkpoint's state without reading its files."""
        return self._manifest(name)["state"]  # type: ignore[no-any-return]

    def older_than(self, name: VersionName) -> set[VersionName]:
        """Return the older checkpoints that have any object in the store, complete or not.

        Newer ones are left out, since another process may be writing them."""
        found = filter(None, map(_parse, self._store.list("checkpoints/")))
        return {other for other in found if other < name}

    def delete(self, name: VersionName) -> None:
        """Delete a checkpoint. The manifest is deleted first; from then on the checkpoint does not exist."""
        self._store.delete(f"{_folder(name)}/manifest.json")
        for text in self._store.list(f"{_folder(name)}/"):
            self._store.delete(text)

    def _manifest(self, name: VersionName) -> dict[str, Any]:
        where = f"{_folder(name)}/manifest.json"
        try:
            manifest = json.loads(self._store.get(where))
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"{where}: not JSON: {error}; the checkpoint is damaged") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise WeightsError(f"{where}: not a manifest of format {FORMAT}; was it written by a newer rftstream?")
        if (manifest.get("trainer_epoch"), manifest.get("version")) != (name.trainer_epoch, name.version):
            raise WeightsError(f"{where}: belongs to another version; the checkpoint is damaged")
        files, state = manifest.get("files"), manifest.get("state")
        if not isinstance(files, dict) or not isinstance(state, dict) or not all(map(_is_entry, files.values())):
            raise WeightsError(f"{where}: without files and state; the checkpoint is damaged")
        return manifest

    def _copy(self, name: VersionName, manifest: dict[str, Any], file: str, *, target: Path | None) -> None:
        """Read a file of the checkpoint, copy it to `target` if given, and verify it against the manifest."""
        where = f"{_folder(name)}/files/{file}"
        sha256, num_bytes = hashlib.sha256(), 0
        with self._store.open(where) as source, open(target or "/dev/null", "wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                sha256.update(chunk)
                num_bytes += len(chunk)
                sink.write(chunk)
        expected = manifest["files"][file]
        if (num_bytes, f"sha256:{sha256.hexdigest()}") != (expected["bytes"], expected["digest"]):
            raise WeightsError(f"{where}: found {num_bytes} other bytes, expected {expected['bytes']}; it is damaged")


def is_gone(name: VersionName, said: Trimmed | None) -> bool:
    """Return whether a checkpoint was given up, whether or not its files still exist.

    `said` is the newest record of deletions, or None."""
    return said is not None and name not in said.checkpoints and name < said.name


def _empty(folder: Path) -> None:
    """Remove the files of a checkpoint from a folder after it turned out to be damaged."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _folder(name: VersionName) -> str:
    return f"checkpoints/{name.stem}"


def _parse(text: str) -> VersionName | None:
    """Return the checkpoint to which an object belongs, or None."""
    return VersionName.of_stem(text.removeprefix("checkpoints/").partition("/")[0])


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("bytes")) is int and isinstance(value.get("digest"), str)
