"""evaluator: weights -> evals."""

from __future__ import annotations

from rftstream.data.tasksets.open import open_taskset
from rftstream.models.rendering import own_renderers
from rftstream.roles.evaluator import EVALUATOR
from rftstream.roles.evaluator.agents import AgentSamples
from rftstream.roles.evaluator.due import build_evaluation
from rftstream.roles.evaluator.step import EvaluatorStep
from rftstream.service.role import Role, RoleContext
from workers.agents import GatewayAddress, agent_parts
from workers.parts import device_lock, engine_share, follower, model_spec, scorer, turn_loop


def build(context: RoleContext) -> Role:
    config, settings = context.config, context.config.evaluator
    spec = model_spec(context, device=settings.device, threads=settings.threads)
    policy_name = settings.policy or config.explorer.policy
    lock = device_lock(context, spec)
    policy, loop = turn_loop(context, policy_name, spec, max_concurrent=settings.max_concurrent, lock=lock)
    agents = agent_parts(
        context,
        policy,
        loop,
        spec,
        policy_name=policy_name,
        places={name: f"evaluations.{name}.environment" for name in config.evaluations},
        address=GatewayAddress(EVALUATOR.name, settings.gateway_address, settings.gateway_url),
    )
    store = context.open_store()
    renderers = own_renderers(spec, config.evaluations)
    evaluations = {
        name: build_evaluation(
            name, section, open_taskset(f"eval:{name}", section, config), config, renderers.get(name)
        )
        for name, section in config.evaluations.items()
    }
    step = EvaluatorStep(
        config=config,
        evaluations=evaluations,
        policy=loop.policy,  # the turn loop's part, if agents have the other part
        loop=loop,
        agents=None
        if agents is None
        else AgentSamples(agents, now=context.clock.now, patience_s=config.explorer.idle_timeout_s),
        scorer=scorer(context),
        follower=follower(context, policy_name, spec, store),
        store=store,
        clock=context.clock,
        share=engine_share(policy, lock, role=EVALUATOR.name),
    )
    return Role(spec=EVALUATOR, step=step)
