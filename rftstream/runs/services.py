"""From a run to the services of its roles: what a role is told of the run that it works for."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING

from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.models.device_lock import FileLock
from rftstream.roles.build import role_builder, service_of
from rftstream.runs.folder import RunFolder, open_store
from rftstream.runs.manifest import check_worker
from rftstream.service.role import LockMaker, RoleContext
from rftstream.service.role_spec import RoleSpec
from rftstream.service.service import Service
from rftstream.transport.base import Transport

if TYPE_CHECKING:
    from rftstream.weights.stores.store import ObjectStore

LOOK_S = 0.25
"""Most seconds of one wait of a role that is driven by hand."""
SAY_S = 5.0
"""Seconds between two words on its progress."""

Say = Callable[[str], None]


def role_context(
    *,
    config: RunConfig,
    folder: RunFolder,
    transport: Transport,
    clock: Clock,
    process: str,
    device: str | None = None,
    simulated: bool = False,
    summary_every: int | None = None,
    own_store: ObjectStore | None = None,
    open_lock: LockMaker = FileLock,
) -> RoleContext:
    """Return what a role of this run is built from. `own_store` replaces the store that the run file names, `open_lock`
    the locks of devices that the processes of the machine have."""
    return RoleContext(
        config=config,
        folder=folder,
        clock=clock,
        transport=transport,
        process=process,
        device=device,
        simulated=simulated,
        summary_every=summary_every,
        make_store=lambda patience_s: own_store or open_store(config, folder, patience_s=patience_s),
        open_lock=open_lock,
        check_manifest=lambda manifest: check_worker(manifest, config, {}),
    )


def build_service(role: str | RoleSpec, context: RoleContext) -> Service:
    """Return the service of a role, built-in or your own. TransportError if the log does not answer; nothing stays
    open then."""
    built = role_builder(role)(context)
    try:
        return service_of(built, context)
    except BaseException:
        built.step.close()
        raise


def drive(service: Service, say: Say, progress: Callable[[Service], str]) -> Generator[None]:
    """Work as a role in this process until it is done or the caller leaves: yield after each slice of work, wait where
    there is none, and close the service in the end. `progress` is said now and then, unless it is empty."""
    say_at = time.monotonic() + SAY_S
    with closing(service):
        while not service.done:
            idle_s = service.tick()
            yield
            if time.monotonic() >= say_at and (text := progress(service)):
                say_at = time.monotonic() + SAY_S
                say(text)
            if idle_s > 0 and not service.done:
                service.wait(min(idle_s, LOOK_S))
