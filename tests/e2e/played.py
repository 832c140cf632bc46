"""Roles of a run that are played in the test's own process, where it is not processes that a test is about."""

from __future__ import annotations

from collections.abc import Callable

from rftstream.clock import SystemClock
from rftstream.runs.folder import open_transport
from rftstream.runs.services import build_service, role_context
from tests.e2e.workplace import RunView

MAX_TICKS = 100_000
WAIT_S = 0.05


def play(view: RunView, *roles: str, until: Callable[[], bool]) -> None:
    """Let these roles work in turns until something is so, then leave as after a SIGTERM. Nobody else may work."""
    transports = [open_transport(view.config, view.folder, user=role) for role in roles]
    services = [
        build_service(
            role,
            role_context(
                config=view.config, folder=view.folder, transport=transport, clock=SystemClock(), process=f"{role}-0"
            ),
        )
        for role, transport in zip(roles, transports, strict=True)
    ]
    for _ in range(MAX_TICKS):
        if until():
            break
        if (idle_s := min([service.tick() for service in services if not service.done], default=WAIT_S)) > 0:
            services[0].wait(min(idle_s, WAIT_S))
    else:
        raise AssertionError(f"it never was so: {[service.health() for service in services]}")
    for service in services:
        service.drain()
        while not service.done:
            service.tick()
        service.close()
    for transport in transports:
        transport.close()
