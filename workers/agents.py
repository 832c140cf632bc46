"""The parts that a role needs if agents call it: the agent loop, the launcher and the gateway."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec, TransportSpec
from rftstream.config.sections import RunConfig, name_of_part
from rftstream.environments import ENVIRONMENTS
from rftstream.environments.launched_agents import RunsAgent, agent_of
from rftstream.errors import ConfigError
from rftstream.gateway.addresses import worker_number
from rftstream.gateway.dialects import DIALECTS
from rftstream.gateway.keys import GatewayKeys, run_secret
from rftstream.gateway.server import GatewayServer, GatewaySettings
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Policy
from rftstream.policies.grammars import checker_of
from rftstream.queries.state.agent_access import find_gateways
from rftstream.roles.explorer.agents.calls import AgentLimits
from rftstream.roles.explorer.agents.launcher import AgentLauncher, LaunchedAgents
from rftstream.roles.explorer.agents.loop import AgentLoop
from rftstream.roles.explorer.agents.parts import AgentParts, share_policy
from rftstream.roles.explorer.model_calls import CallInbox
from rftstream.roles.explorer.turn_loop import TurnLoop
from rftstream.runs.folder import RunFolder
from rftstream.service.role import RoleContext
from workers.parts import context_length, environment_versions


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The gateway's address of a role, from the role's section."""

    section: str
    address: str
    public_url: str


def agent_parts(
    context: RoleContext,
    policy: Policy,
    loop: TurnLoop,
    spec: ModelSpec,
    *,
    policy_name: str,
    places: Mapping[str, str],
    address: GatewayAddress,
    ring: Callable[[], object] = lambda: None,
) -> AgentParts | None:
    """Return the parts for agents; None if no environment is an agent. The turn loop and the agent loop share the
    policy.

    `places`: name of each taskset or evaluation -> the place in the run file that names its environment. `ring` is
    called, in any thread, when a request arrives. In a simulated run there is no server and no agent; requests are put
    into the inbox.
    """
    agents_places = _of_agents(context.config, places)
    if not agents_places:
        return None
    settings, inbox, version_of = context.config.explorer, CallInbox(ring), environment_versions(context.config)
    loop.policy, agents_policy = share_policy(policy, lambda request_id: "/call/" not in request_id)
    agents = AgentLoop(
        policy=agents_policy,
        inbox=inbox,
        limits=AgentLimits(
            max_calls=settings.max_calls,
            max_in_flight=settings.max_calls_at_once,
            idle_timeout_s=settings.idle_timeout_s,
            rollout_timeout_s=settings.rollout_timeout_s,
        ),
        context=context_length(spec, loop.renderer),
        explorer=context.process,
        now=context.clock.now,
        check_form=checker_of(policy_name),
        version_of=lambda name, environment: version_of(places.get(name, ""), environment),
    )
    keys = None if context.simulated else _keys(context)
    server = None if keys is None else _start_gateway(context, spec, inbox, keys, address)
    launched = LaunchedAgents(agents={})
    if server is not None and keys is not None:
        launched = _launched_agents(context.config, agents_places, server, keys, ring)
        launched = dataclasses.replace(launched, run_id=context.folder.run_id)
    return AgentParts(
        loop=agents,
        inbox=inbox,
        launcher=AgentLauncher(launched, inbox),
        environments=frozenset(name for name, spec in ENVIRONMENTS.items() if spec.is_agent),
        dialects={dialect.name: dialect for dialect in DIALECTS.values()},
        renderer=loop.renderer,
        gateway_url="" if server is None else server.base_url,
        close_gateway=(lambda: None) if server is None else server.close,
    )


def _of_agents(config: RunConfig, places: Mapping[str, str]) -> dict[str, str]:
    """Return the places that name an environment of agents."""
    named = config.environments_named()
    names = {name: name_of_part(named[where], where) for name, where in places.items()}
    return {name: places[name] for name, one in names.items() if registry.find_spec(EnvironmentSpec, one).is_agent}


def _launched_agents(
    config: RunConfig,
    places: Mapping[str, str],
    server: GatewayServer,
    keys: GatewayKeys,
    ring: Callable[[], object],
) -> LaunchedAgents:
    """Return the agents that are started or called here for the tasks of these places."""
    named = config.environments_named()

    def as_written(name: str, error: str) -> str:
        return config.as_written(error, "environment", named[places[name]], places[name])

    def runs(name: str, options: Any) -> RunsAgent | None:
        try:
            return agent_of(options)
        except ConfigError as error:
            raise ConfigError(as_written(name, str(error))) from None

    settings = {name: config.build_environment(where)[1] for name, where in places.items()}
    return LaunchedAgents(
        agents={name: found for name, one in settings.items() if (found := runs(name, one)) is not None},
        anew=[name for name, one in settings.items() if one.on_restart == "anew"],
        as_written=as_written,
        base_url=server.local_url,
        public_url=server.base_url,
        key_of=keys.rollout_key,
        ring=ring,
    )


def _keys(context: RoleContext) -> GatewayKeys:
    """Return the keys of the run. If no other process can open its log, a random secret is enough."""
    run_id, kind = context.folder.run_id, context.config.transport.kind
    is_shared = registry.find_spec(TransportSpec, kind).is_shared
    return GatewayKeys(run_secret(run_id) if is_shared else secrets.token_bytes(32), run_id)


def _start_gateway(
    context: RoleContext, spec: ModelSpec, inbox: CallInbox, keys: GatewayKeys, address: GatewayAddress
) -> GatewayServer:
    server = GatewayServer(
        GatewaySettings(
            section=address.section,
            address=address.address,
            number=worker_number(context.process),
            public_url=address.public_url,
            model=spec.name,
            max_body_bytes=context.config.explorer.gateway_max_body_bytes,
        ),
        keys,
        inbox,
        others=lambda: _others(context),
    )
    server.start()
    return server


def _others(context: RoleContext) -> Sequence[str]:
    """Return the base URLs of the other gateways on this machine that have waiting rollouts."""
    found = find_gateways(RunFolder(context.folder.path))
    return [one.base_url for one in found if one.num_free and one.process != context.process]
