"""The data that agents elsewhere need to take part in a run: the token, and the addresses of the gateways."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec
from rftstream.config.sections import name_of_part
from rftstream.errors import ConfigError
from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys, known_secret
from rftstream.queries.formatting import columns, plural
from rftstream.queries.plain import Report
from rftstream.queries.state.workers import ask_workers
from rftstream.runs.folder import OpenRun, RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGateway(Report):
    """The gateway of a worker that answered. `find_gateways` makes it."""

    JSON = "process base_url rollouts_waiting=num_free"

    process: str
    base_url: str
    """Base URL for clients."""
    num_free: int
    """Number of its rollouts that wait for an agent."""


def find_gateways(folder: RunFolder) -> tuple[LiveGateway, ...]:
    """Return the gateways of the workers that answer on this machine. This waits for the slowest answer."""
    found = []
    for worker in ask_workers(folder):
        health = worker.health or {}
        base_url, num_free = health.get("gateway"), health.get("agents_wanted")
        if isinstance(base_url, str) and base_url and isinstance(num_free, int):
            found.append(LiveGateway(process=worker.process, base_url=base_url, num_free=num_free))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAccess(Report):
    """The addresses and the token for an agent elsewhere. `find_agent_access` makes it."""

    run_id: str
    token: str
    """Token for requesting sessions."""
    gateways: tuple[LiveGateway, ...]
    """Gateways of the workers on this machine that answer."""

    def to_text(self) -> str:
        """Return the addresses and the token as text for people."""
        lines = [f"token     {self.token}"]
        if not self.gateways:
            return "\n".join([*lines, "gateways  none: no worker of this machine with a gateway answers"])
        rows = [
            (gateway.process, gateway.base_url, f"{plural(gateway.num_free, 'rollout')} waiting for an agent")
            for gateway in self.gateways
        ]
        return "\n".join([*lines, "gateways", *columns(rows, left=3, indent="  ")])


def find_agent_access(opened: OpenRun) -> AgentAccess:
    """Return the access data for an agent elsewhere. ConfigError if the run has no agents, or if this machine does not
    have its secret."""
    config = opened.config
    names = {name_of_part(named, where) for where, named in config.environments_named().items()}
    if not any(registry.find_spec(EnvironmentSpec, name).is_agent for name in names):
        raise ConfigError(
            f"{opened.run_id}: no taskset has agents, expected one with an environment as 'agent'; see docs/agents.md"
        )
    secret = known_secret(opened.run_id)
    if secret is None:
        raise ConfigError(
            f"{opened.run_id}: its secret is not here: no explorer of this user has begun on this machine, and "
            f"{SECRET_VARIABLE} is not set; set it as the explorers have it, or start the run first, or ask there"
        )
    return AgentAccess(
        run_id=opened.run_id,
        token=GatewayKeys(secret, opened.run_id).session_token(),
        gateways=find_gateways(opened.folder),
    )
