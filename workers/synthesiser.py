"""synthesiser: outcomes, verified, tasks or problems -> problems."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rftstream.config import secrets
from rftstream.config.data_pipelines.synthesis import into_taskset
from rftstream.config.loader import sampling_for
from rftstream.config.role_sections import SynthesiserSection
from rftstream.config.sections import name_of_part
from rftstream.data.tasksets.growing import GrowingTasksets
from rftstream.data.tasksets.open import open_taskset
from rftstream.errors import ConfigError
from rftstream.models.rendering import Renderer, open_renderer, own_renderers
from rftstream.models.server_client import ModelServer
from rftstream.models.spec import ModelSpec
from rftstream.roles.explorer.weights_update import WeightsUpdate
from rftstream.roles.synthesiser import SYNTHESISER
from rftstream.roles.synthesiser.models import PolicyModel, ServedModel, SynthesisModel
from rftstream.roles.synthesiser.parents import ParentChooser
from rftstream.roles.synthesiser.step import SynthesiserStep, SynthesisPlan
from rftstream.roles.synthesiser.wording import AnswerReader
from rftstream.roles.trainer.pending_update import DeferredExecutor
from rftstream.service.loops.self_pipe import SelfPipe
from rftstream.service.records.problem_records import ProblemReader
from rftstream.service.role import Role, RoleContext
from workers.parts import context_length, follower, model_spec, scorer, turn_loop

STORE_PATIENCE_S = 5.0
"""Seconds to try to fetch weights. Then the synthesiser continues with the weights that it has, and tries again
later."""


def build(context: RoleContext) -> Role:
    config, settings = context.config, context.config.synthesiser
    if settings is None:
        raise ConfigError("synthesiser: the run file has no [synthesiser], expected one that says what is to be made")
    into = into_taskset(config, settings)
    tasksets = {name: open_taskset(name, section, config) for name, section in config.tasksets.items()}
    spec = model_spec(context, device=settings.device, threads=settings.threads)
    renderer = own_renderers(spec, config.tasksets).get(into) or open_renderer(spec)
    where = f"tasksets.{into}.sampling"
    plan = SynthesisPlan(
        settings=settings,
        into=into,
        run_seed=config.run.seed,
        asking=sampling_for(config, settings.sampling, where="synthesiser.sampling"),
        attempting=sampling_for(config, config.tasksets[into].sampling, where=where),
        reader=AnswerReader(None if settings.pattern is None else re.compile(settings.pattern, re.DOTALL)),
        num_tokens=lambda problem: len(renderer.render(problem.messages, problem.tools)),
        context=context_length(spec, renderer),
    )
    if settings.ask == "server":
        model = _served(context, settings)
    else:
        model = _policy(context, settings, into, spec, renderer)
    step = SynthesiserStep(
        plan,
        model=model,
        scorer=scorer(context),
        parents=ParentChooser(settings, tasksets, into=into, run_seed=config.run.seed),
        growing=GrowingTasksets(tasksets, ProblemReader(context.transport).get),
        clock=context.clock,
    )
    return Role(spec=replace(SYNTHESISER, consumes=SYNTHESISER.chosen(config)), step=step)


def _policy(
    context: RoleContext, settings: SynthesiserSection, into: str, spec: ModelSpec, renderer: Renderer
) -> SynthesisModel:
    config = context.config
    policy_name = settings.policy or config.explorer.policy
    # A question is asked for each kind, and each of them may be attempted at once.
    most = settings.max_concurrent * len(settings.make) * settings.per_parent * settings.check_samples
    policy, loop = turn_loop(context, policy_name, spec, max_concurrent=most)
    following = follower(context, policy_name, spec, context.open_store(patience_s=STORE_PATIENCE_S))
    fetching = DeferredExecutor() if context.simulated else ThreadPoolExecutor(1, thread_name_prefix="weights")
    where = f"tasksets.{into}.environment"
    return PolicyModel(
        policy=policy,
        loop=loop,
        follower=following,
        weights=WeightsUpdate(policy, following, fetching, context.clock, role=SYNTHESISER.name),
        name=spec.name,
        environment=name_of_part(config.tasksets[into].environment, where),
        where=where,
        renderer=renderer,
        now=context.clock.now,
    )


def _served(context: RoleContext, settings: SynthesiserSection) -> SynthesisModel:
    server, section = settings.server, "synthesiser.server"
    assert server is not None, "config checks it"
    key = secrets.reveal({"api_key": server.api_key}, where=section)["api_key"]
    asked = ModelServer(
        server.url,
        "chat/completions",
        api_key=key,
        timeout_s=server.timeout_s,
        tries=server.tries,
        section=section,
    )
    most = settings.max_concurrent * len(settings.make) * settings.per_parent * settings.check_samples
    return ServedModel(
        asked,
        name=server.model,
        extra=server.extra,
        threads=DeferredExecutor() if context.simulated else ThreadPoolExecutor(most, thread_name_prefix="asking"),
        now=context.clock.now,
        pipe=None if context.simulated else SelfPipe(),
    )
