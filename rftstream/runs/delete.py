"""Deletes a run: its topics and groups, its objects, its folder. Only things that a run makes are ever touched."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rftstream.config.sections import RunConfig
from rftstream.contracts.control import Claim
from rftstream.errors import ConfigError, RftError
from rftstream.roles import role_specs
from rftstream.runs.folder import (
    PARTS,
    RunFolder,
    consumer_groups,
    find_run,
    lies_in_folder,
    open_store,
    open_transport,
    sharing_store,
)
from rftstream.service.control_view import read_control
from rftstream.service.role_spec import RoleKind
from rftstream.trackers import folders_of_trackers
from rftstream.transport.base import Transport
from rftstream.transport.findings import ServerLook
from rftstream.weights.stores.store import ObjectStore, place_on_disk

OBJECTS = ("versions/", "checkpoints/", "evals/", "states/", "media/")
"""Folders that a run makes in its object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """The plan of deleting a run. `plan_deletion` makes it, a person confirms it, `delete_run` carries it out."""

    folder: RunFolder
    parts: dict[str, int]
    """Name in the run folder -> size in bytes."""
    links: dict[str, str]
    """Links among the parts -> their targets. The target of a link stays."""
    kept: tuple[str, ...]
    """Names in the folder that no run makes. They stay, and so does the folder."""
    topics: tuple[str, ...]
    """Topics on servers. An embedded log is a part of the folder instead."""
    groups: tuple[str, ...]
    servers: str | None
    store: str | None
    """URL of an object store outside the folder."""
    objects: tuple[str, ...]
    """Names of the run's objects in that store."""
    shared_with: tuple[str, ...] = ()
    """Runs beside this one with the same store. If there are any, all objects stay."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the parts in the run folder."""
        return sum(self.parts.values())

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a dict for JSON, with the number of objects in place of their names."""
        return {
            "run": self.folder.run_id,
            "run_dir": str(self.folder.path),
            "parts": dict(self.parts),
            "links": dict(self.links),
            "kept": list(self.kept),
            "servers": self.servers,
            "topics": list(self.topics),
            "groups": list(self.groups),
            "store": self.store,
            "objects": len(self.objects),
            "shared_with": list(self.shared_with),
        }


def plan_deletion(path: Path) -> Deletion:
    """Return the plan for deleting the run. ConfigError if `path` is no run folder, or if somebody works on the run."""
    folder, config = _checked(path)
    with _opened(config, folder) as transport:
        _check_nobody(folder, who_is_alive(folder, transport))
        remote = transport is not None and not lies_in_folder(config)
        topics = sorted(transport.admin.topics()) if transport is not None and remote else []
    store = _store_outside(config, folder)
    shared_with = () if store is None else tuple(sharing_store(config, folder))
    there, parts = sorted(folder.path.iterdir()), _parts(config, folder)
    return Deletion(
        folder=folder,
        parts={one.name: _num_bytes(one) for one in there if one.name in parts},
        links={one.name: os.readlink(one) for one in there if one.name in parts and one.is_symlink()},
        kept=tuple(one.name for one in there if one.name not in parts),
        topics=tuple(topics),
        groups=tuple(consumer_groups(config)) if remote else (),
        servers=config.transport.servers if remote else None,
        store=None if store is None else store.url,
        shared_with=shared_with,
        objects=()
        if store is None or shared_with
        else tuple(name for prefix in OBJECTS for name in store.list(prefix)),
    )


def delete_run(plan: Deletion) -> None:
    """Delete what the plan lists, under the run's lock. An interrupted deletion can be repeated and continues."""
    folder, config = _checked(plan.folder.path)
    with folder.held():
        with _opened(config, folder) as transport:
            _check_nobody(folder, _workers_alive(folder, transport))  # some may have started meanwhile
            if transport is not None and (plan.topics or plan.groups):
                there = transport.admin.topics()
                transport.admin.delete_topics([name for name in plan.topics if name in there])
                look: ServerLook | None = getattr(transport.admin, "look", None)
                if look is not None:
                    look.delete_groups(plan.groups)
        if plan.store is not None and not plan.shared_with:
            store = open_store(config, folder)
            for name in plan.objects:
                store.delete(name)
            store.remove_scratch()
            place = place_on_disk(plan.store, folder.path)
            if place is not None and config.weights.store.endswith("{run}"):
                with contextlib.suppress(OSError):  # it has other content
                    place.rmdir()
        for name in _parts(config, folder):
            _remove(folder.path / name)
    with contextlib.suppress(OSError):  # it has other content
        folder.path.rmdir()


def who_is_alive(folder: RunFolder, transport: Transport | None) -> list[str]:
    """Return the live processes of a run, as far as this host can see, in a few words each."""
    alive: list[str] = []
    if folder.is_live():
        pid = folder.lock_file.read_text(encoding="ascii", errors="replace").strip()
        alive.append(f"`run` or `resume`, process {pid or 'unknown'} here")
    return alive + _workers_alive(folder, transport)


def _workers_alive(folder: RunFolder, transport: Transport | None) -> list[str]:
    if transport is None:
        return []
    alive: list[str] = []
    pids: set[int] = set()
    topics = transport.admin.topics()
    for claim in read_control(transport).claims.values() if "control" in topics else ():  # else half deleted
        if is_claimant_alive(claim) is True:
            pids.add(claim.pid)
            alive.append(f"{claim.process}, process {claim.pid} here")
    if (lock_holder := getattr(transport, "lock_holder", None)) and (holder := lock_holder()) is not None:
        alive.append(f"process {holder.pid}, which writes to the log")
    for group, names in (read_members(transport) if topics else {}).items():
        alive += [f"{group} {name}" for name in names]
    return alive + [f"a worker, process {pid} here" for pid in _workers(folder) if pid not in pids]


def _check_nobody(folder: RunFolder, alive: list[str]) -> None:
    if alive:
        raise ConfigError(
            f"{folder.path}: somebody is at work on this run: {'; '.join(alive)}; stop it first "
            "(ctrl-C, SIGTERM, or `rftstream drain` and wait)"
        )


def read_members(transport: Transport) -> dict[str, list[str]]:
    """Return role -> the workers that share its work and whose heartbeats the log gets, wherever they are. A log of
    servers names each with its host."""
    look = getattr(transport.admin, "look", transport.admin)
    members = getattr(look, "members", None)
    roles = tuple(spec.name for spec in role_specs() if spec.kind is RoleKind.concurrent)
    return {} if members is None else {role: names for role, names in members(roles).items() if names}


def is_claimant_alive(claim: Claim) -> bool | None:
    """Return whether the process that claimed a role is still alive; None if it is on another host."""
    if claim.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(claim.pid)
        is_the_same = process.create_time() <= claim.claimed_at + 1.0  # not a later process with the same pid
        # A killed process loses its command line at once. It becomes a zombie only when its memory is given back.
        return bool(is_the_same and process.cmdline())
    except psutil.Error:
        return False


def _workers(folder: RunFolder) -> list[int]:
    """Return the pids of workers whose command line names this run. Explorers and verifiers make no claim and may join
    late."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        arguments = process.info["cmdline"] or []
        if "worker" in arguments and str(folder.path) in arguments and process.info["pid"] != os.getpid():
            found.append(process.info["pid"])
    return found


# --------------------------------------------------------------------------------------------- the parts of a run


def _checked(path: Path) -> tuple[RunFolder, RunConfig]:
    if path.is_symlink():
        raise ConfigError(f"{path}: is a link to {path.resolve()}; name that folder itself to delete the run there")
    folder, config = find_run(path)
    if folder.path.is_symlink():
        raise ConfigError(f"{folder.path}: is a link to {folder.path.resolve()}; name that folder itself")
    if not folder.exists():
        raise ConfigError(
            f"{folder.run_id}: has topics at {config.transport.servers}, but no run folder here, and who is at work on"
            " it cannot be seen without; delete it on the host that has its folder; if that is lost, "
            "`rftstream resume` of the run files (more run.steps if it has ended) makes one here: then ctrl-C, delete"
        )
    if not folder.lock_file.is_file() or folder.config_file.is_symlink():
        raise ConfigError(
            f"{folder.path}: has a config.toml but no run.lock, so no run was ever made in it; expected a run folder, "
            "e.g. runs/<name>"
        )
    return folder, config


def _parts(config: RunConfig, folder: RunFolder) -> tuple[str, ...]:
    """Return the names that this run makes in its folder, with the folders of its trackers, and with files that a full
    disk left half written."""
    partial = (one.name for one in folder.path.glob("*.partial") if re.fullmatch(r"[a-z]+\.\d+\.partial", one.name))
    return (*(name for name in folders_of_trackers(config) if name not in (*PARTS, "..")), *PARTS, *partial)


@contextlib.contextmanager
def _opened(config: RunConfig, folder: RunFolder) -> Iterator[Transport | None]:
    """Open the run's log. Yield None if an embedded log is gone or damaged."""
    is_elsewhere = not lies_in_folder(config)
    try:
        transport = open_transport(config, folder, create=is_elsewhere)
    except RftError:
        if is_elsewhere:
            raise
        yield None
    else:
        with contextlib.closing(transport):
            yield transport


def _store_outside(config: RunConfig, folder: RunFolder) -> ObjectStore | None:
    place = place_on_disk(config.weights.store, folder.path)
    if place is not None and place.absolute().is_relative_to(folder.path) and ".." not in place.parts:
        return None  # it is deleted with the folder, or stays at the target of a link
    return open_store(config, folder)


def _num_bytes(path: Path) -> int:
    """Return the total bytes below a path. Links are not followed."""
    total = path.lstat().st_size if not path.is_dir() or path.is_symlink() else 0
    if path.is_dir() and not path.is_symlink():
        for base, _, files in os.walk(path):
            for file in files:
                with contextlib.suppress(OSError):  # gone meanwhile
                    total += os.lstat(os.path.join(base, file)).st_size
    return total


def _remove(path: Path) -> None:
    """Remove a file or folder. Links are removed and never followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
