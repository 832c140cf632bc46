"""What an explorer has beside the ordinary parts if agents call it: the agent loop and the gateway."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from rftstream.config import registry
from rftstream.config.part_specs import EnvironmentSpec
from rftstream.environments import ENVIRONMENTS
from rftstream.environments.launched_agents import agent_of
from rftstream.gateway.addresses import worker_number
from rftstream.gateway.dialects import DIALECTS
from rftstream.gateway.keys import GatewayKeys, run_secret
from rftstream.gateway.server import GatewayServer, GatewaySettings
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Policy
from rftstream.queries.gateways import find_gateways
from rftstream.roles.explorer.agent_calls import AgentLimits
from rftstream.roles.explorer.agent_launcher import AgentLauncher, LaunchedAgents
from rftstream.roles.explorer.agent_loop import AgentLoop
from rftstream.roles.explorer.agent_step import AgentExplorerStep, check_fits
from rftstream.roles.explorer.model_calls import CallInbox
from rftstream.roles.explorer.shared_policy import share_policy
from rftstream.roles.explorer.step import ExplorerStep
from rftstream.roles.explorer.turn_loop import TurnLoop
from rftstream.runs.folder import RunFolder
from rftstream.service.role import RoleContext
from rftstream.service.self_pipe import SelfPipe
from workers.parts import context_length


def is_agent(environment: str) -> bool:
    """Whether the tasks of this environment are agents'."""
    return registry.find_spec(EnvironmentSpec, environment).is_agent


def agent_step_maker(
    context: RoleContext, policy: Policy, loop: TurnLoop, spec: ModelSpec, pipe: SelfPipe | None
) -> Callable[..., ExplorerStep]:
    """Make what agents need, and return what makes the step of the other parts. The turn loop and the agent loop share
    the policy. In a simulated run there is no server; requests are put into the step's inbox."""
    settings = context.config.explorer
    loop.policy, agents_policy = share_policy(policy, lambda request_id: "/call/" not in request_id)
    inbox = CallInbox((lambda: None) if pipe is None else pipe.ring)
    dialects = {dialect.name: dialect for dialect in DIALECTS.values()}
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
        fits=check_fits,
        now=context.clock.now,
    )
    server, keys = _start_gateway(context, spec, inbox)
    return functools.partial(
        AgentExplorerStep,
        agents=agents,
        inbox=inbox,
        agent_environments=[name for name in ENVIRONMENTS if is_agent(name)],
        dialects=dialects,
        renderer=loop.renderer,
        launcher=AgentLauncher(_launched_agents(context, server, keys, pipe), inbox),
        gateway_url="" if server is None else server.base_url,
        close_gateway=(lambda: None) if server is None else server.close,
    )


def _launched_agents(
    context: RoleContext, server: GatewayServer | None, keys: GatewayKeys | None, pipe: SelfPipe | None
) -> LaunchedAgents:
    """Return what the explorer starts itself: nothing in a simulated run, which has no processes."""
    config, sections = context.config, context.config.tasksets.values()
    names = sorted({one.environment for one in sections if is_agent(one.environment)})
    if server is None or keys is None or pipe is None:
        return LaunchedAgents(agents={})
    settings = {name: config.build_part("environment", name)[1] for name in names}
    return LaunchedAgents(
        agents={name: found for name, one in settings.items() if (found := agent_of(one)) is not None},
        anew=[name for name, one in settings.items() if one.on_restart == "anew"],
        base_url=server.local_url,
        public_url=server.base_url,
        key_of=keys.rollout_key,
        ring=pipe.ring,
    )


def _start_gateway(
    context: RoleContext, spec: ModelSpec, inbox: CallInbox
) -> tuple[GatewayServer | None, GatewayKeys | None]:
    """Start the gateway's server. A simulated run has none."""
    if context.simulated:
        return None, None
    settings, run_id = context.config.explorer, context.folder.run_id
    keys = GatewayKeys(run_secret(run_id), run_id)
    server = GatewayServer(
        GatewaySettings(
            address=settings.gateway_address,
            number=worker_number(context.process),
            public_url=settings.gateway_url,
            model=spec.name,
            max_body_bytes=settings.gateway_max_body_bytes,
        ),
        keys,
        inbox,
        others=lambda: _others(context),
    )
    server.start()
    return server, keys


def _others(context: RoleContext) -> Sequence[str]:
    """Return the base URLs of the other gateways on this machine where rollouts wait."""
    found = find_gateways(RunFolder(context.folder.path))
    return [one.base_url for one in found if one.num_free and one.process != context.process]
