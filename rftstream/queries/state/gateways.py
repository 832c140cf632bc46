"""The gateways for agents of a run's workers on this machine, as they themselves say on `/health`."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.queries.plain import Report
from rftstream.queries.state.workers import ask_workers
from rftstream.runs.folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGateway(Report):
    """The gateway of a worker that answers. `find_gateways` makes it."""

    JSON = "process base_url rollouts_waiting=num_free"

    process: str
    base_url: str
    """Base URL for clients."""
    num_free: int
    """Rollouts there that wait for an agent."""


def find_gateways(folder: RunFolder) -> tuple[LiveGateway, ...]:
    """Return the gateways of the workers that answer on this machine. This waits for the slowest answer."""
    found = []
    for worker in ask_workers(folder):
        health = worker.health or {}
        base_url, num_free = health.get("gateway"), health.get("agents_wanted")
        if isinstance(base_url, str) and base_url and isinstance(num_free, int):
            found.append(LiveGateway(process=worker.process, base_url=base_url, num_free=num_free))
    return tuple(found)
