"""explorer: tasks -> rollouts."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

from rftstream.models.rendering import open_parsers, own_renderers
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.explorer.agents.step import AgentExplorerStep
from rftstream.roles.explorer.concurrency import MOST, concurrency_controller
from rftstream.roles.explorer.saved.partials import Partials
from rftstream.roles.explorer.saved.saved_states import SavedStates
from rftstream.roles.explorer.saved.stored import StoredRollouts
from rftstream.roles.explorer.step import ExplorerStep
from rftstream.roles.trainer.pending_update import DeferredExecutor
from rftstream.service.loops.self_pipe import SelfPipe
from rftstream.service.role import Role, RoleContext
from workers.agents import GatewayAddress, agent_parts
from workers.parts import device_lock, engine_share, follower, model_spec, turn_loop

STORE_PATIENCE_S = 5.0
"""Seconds to try to fetch weights. Then the explorer continues with the weights that it has, and tries again later."""
STATES_PATIENCE_S = 30.0
"""Seconds to try to fetch a large state of an environment. Without the state the rollout starts again."""


def build(context: RoleContext) -> Role:
    config, settings = context.config, context.config.explorer
    controller = concurrency_controller(settings)
    spec = model_spec(context, device=settings.devices[0], threads=settings.threads)
    pipe = None if context.simulated else SelfPipe()
    lock = device_lock(context, spec)
    policy, loop = turn_loop(
        context,
        settings.policy,
        spec,
        max_concurrent=settings.first_concurrent if controller is None else MOST,
        ring=(lambda: None) if pipe is None else pipe.ring,
        lock=lock,
        records=config.trainer.replayed,
        says_load=controller is not None,
    )
    renderers = own_renderers(spec, config.tasksets)
    open_parsers([loop.renderer, *renderers.values()])
    agents = agent_parts(
        context,
        policy,
        loop,
        spec,
        policy_name=settings.policy,
        places={name: f"tasksets.{name}.environment" for name in config.tasksets},
        address=GatewayAddress(EXPLORER.name, settings.gateway_address, settings.gateway_url),
        ring=(lambda: None) if pipe is None else pipe.ring,
    )
    make_step = ExplorerStep if agents is None else functools.partial(AgentExplorerStep, parts=agents)
    step = make_step(
        policy=loop.policy,  # the turn loop's part, if agents have the other part
        loop=loop,
        follower=follower(context, settings.policy, spec, context.open_store(patience_s=STORE_PATIENCE_S)),
        settings=settings,
        renderers=renderers,
        truncate=[name for name, section in config.tasksets.items() if section.too_long == "truncate"],
        fetch_rollout=StoredRollouts(context.transport).get,
        partials=Partials(context.transport),
        states=SavedStates(
            context.open_store(patience_s=STATES_PATIENCE_S),
            run_id=context.folder.run_id,
            process=context.process,
            clock=context.clock,
            executor=DeferredExecutor() if context.simulated else ThreadPoolExecutor(1, thread_name_prefix="states"),
            make_durable=context.transport.admin.make_durable,
        ),
        process=context.process,
        clock=context.clock,
        fetching=DeferredExecutor() if context.simulated else ThreadPoolExecutor(1, thread_name_prefix="weights"),
        pipe=pipe,
        share=engine_share(policy, lock, role=EXPLORER.name),
        controller=controller,
        engine_load=getattr(policy, "engine_load", None),
    )
    return Role(spec=EXPLORER, step=step)
