"""Builds the services of a run's roles, with the context that a role gets from its run."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING

from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.desk import Desk
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
"""Most seconds of one wait of a role that `drive` runs."""
SAY_S = 5.0
"""Seconds between two progress messages."""

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
    desk: Desk | None = None,
) -> RoleContext:
    """Return the context from which a role of this run is built. `own_store` replaces the store that the run file
    names; `open_lock` replaces the device locks that the processes of a machine share. `desk` is that of a joined
    loop."""
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
        desk=desk,
    )


def build_service(role: str | RoleSpec, context: RoleContext) -> Service:
    """Return the service of a role, built-in or the user's own. TransportError if the log does not answer; then nothing
    stays open."""
    built = role_builder(role)(context)
    try:
        return service_of(built, context)
    except BaseException:
        built.step.close()
        raise


def drive(service: Service, say: Say, progress: Callable[[Service], str]) -> Generator[None]:
    """Work as a role in this process until it is done or the caller stops: yield after each slice of work, wait if
    there is none, and close the service at the end. A non-empty `progress` is shown at intervals."""
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
