"""Parts that several roles use."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection
from typing import Any, cast

from rftstream import metrics
from rftstream.config.colocation import is_shared
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec, PolicySpec
from rftstream.config.sections import RunConfig
from rftstream.config.stages import demonstration_passes, taken_kinds
from rftstream.contracts.tasks import Problem
from rftstream.environments.base import Environment
from rftstream.environments.call_workers import CallWorkers
from rftstream.environments.calls import EnvironmentCalls
from rftstream.errors import ConfigError
from rftstream.models.device_lock import DeviceLock
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import Renderer, open_renderer
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_tokens import check_takes_images, image_cache
from rftstream.policies.base import Policy
from rftstream.policies.colocated import EngineShare, SleepingPolicy
from rftstream.rewards.base import Scorer
from rftstream.rewards.version import environment_version
from rftstream.roles.buffer.demonstrations import DemonstrationQueue
from rftstream.roles.explorer.turn_loop import TurnLoop
from rftstream.roles.trainer.training import Training
from rftstream.roles.trainer.watches.held_out import HeldOut
from rftstream.service.role import RoleContext
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.stores.anchors import AnchorCache
from rftstream.weights.stores.media import MediaStore
from rftstream.weights.stores.store import ObjectStore

MEDIA_PATIENCE_S = 30.0
"""Seconds to try to fetch an image. Without the image its rollout fails."""


def model_spec(context: RoleContext, *, device: str = "cpu", threads: int = 1) -> ModelSpec:
    config = context.config
    return prepare_model(
        config.model, context.folder.model, config.run.seed, device=context.device or device, threads=threads
    )


def context_length(spec: ModelSpec, renderer: Renderer) -> int | None:
    """Return the longest prompt + completion: from the run file, else from the model's config."""
    return spec.context if spec.context is not None else renderer.context


def turn_loop(
    context: RoleContext,
    policy_name: str,
    spec: ModelSpec,
    *,
    max_concurrent: int,
    ring: Callable[[], None] = lambda: None,
    lock: DeviceLock | None = None,
    records: Collection[str] = (),
    says_load: bool = False,
) -> tuple[Policy, TurnLoop]:
    """Return a turn loop. `max_concurrent`: rollouts that are sampled at once. `ring` is called, in any thread, when an
    environment has answered. `lock`: the lock of the device, if it is shared with a trainer; the loop then holds it.
    `records`: kinds of values beside tokens that the policy records, if it can. `says_load`: whether its engine has to
    say how busy it is."""
    config, settings = context.config, context.config.explorer
    renderer = open_renderer(spec)
    policy_class, options = config.build_part("policy", policy_name)
    if lock is not None:
        if hasattr(options, "sleeps"):
            options = dataclasses.replace(options, sleeps=True)
        lock.wait_shared()
    if says_load and hasattr(options, "says_load"):
        options = dataclasses.replace(options, says_load=True)
    media = MediaStore(context.open_store(patience_s=MEDIA_PATIENCE_S))
    policy_spec = registry.find_spec(PolicySpec, policy_name)
    takes = policy_spec.takes_images
    check_takes_images(spec.folder, f"policy {policy_name!r}", takes, advice="use 'hf', 'vllm' or 'openai'")
    more: dict[str, Any] = {"images": image_cache(spec.folder, media.get)} if takes else {}
    if policy_spec.records:
        more["records"] = frozenset(policy_spec.records).intersection(records)
    if policy_spec.is_joined:
        more |= {"desk": context.desk, "max_concurrent": max_concurrent}
    policy: Policy = policy_class(options, model=spec, renderer=renderer, clock=context.clock, **more)
    version_of = environment_versions(config)
    loop = TurnLoop(
        policy=policy,
        renderer=renderer,
        make_environment=environment_maker(config, version_of),
        version_of=version_of,
        context=context_length(spec, renderer),
        now=context.clock.now,
        calls=EnvironmentCalls(
            now=context.clock.now if context.simulated else time.monotonic,
            timeout_s=settings.reply_timeout_s,
            workers=None if context.simulated else CallWorkers(max_threads=max_concurrent, ring=ring),
            observe=_observe_call,
        ),
        is_immediate=functools.cache(lambda name: registry.find_spec(EnvironmentSpec, name).is_immediate),
        has_one_turn=functools.cache(lambda name: registry.find_spec(EnvironmentSpec, name).has_one_turn),
        reply_timeout_s=settings.reply_timeout_s,
        rollout_timeout_s=settings.rollout_timeout_s,
        keep=media.keep,
    )
    return policy, loop


def device_lock(context: RoleContext, spec: ModelSpec) -> DeviceLock | None:
    """Return the lock of the device, for an engine that shares it with the trainer; else None."""
    return context.open_lock(spec.device) if is_shared(context.config, spec.device) else None


def engine_share(policy: Policy, lock: DeviceLock | None, *, role: str) -> EngineShare | None:
    """Return the share of the device, for an engine with such a lock; else None."""
    return None if lock is None else EngineShare(cast(SleepingPolicy, policy), lock, role=role)


# Looking a labelled metric up costs more than counting.
_environment_seconds = functools.cache(metrics.ENVIRONMENT_SECONDS.labels)


def _observe_call(method: str, seconds: float, timed_out: bool) -> None:
    _environment_seconds(method).observe(seconds)
    if timed_out:
        metrics.ABANDONED_CALLS.labels(method).inc()


def follower(context: RoleContext, policy_name: str, spec: ModelSpec, store: ObjectStore) -> WeightsFollower:
    """Return a follower of the run's weights. What it fetches from a remote store is kept beside the run, for all
    workers of this machine."""
    cache = None if store.is_local or context.simulated else AnchorCache(context.folder.anchors)
    # Adapters are no weights yet: the policy makes something of them.
    shared = spec.lora is None and registry.find_spec(PolicySpec, policy_name).reads_shared
    return WeightsFollower(store, spec.name, cache=cache, threads=spec.threads, shared=shared, forgets=True)


def demonstrations(context: RoleContext) -> DemonstrationQueue | None:
    """Return the demonstrations for the buffer, if the run has any. ConfigError if its algorithm takes none."""
    config, section = context.config, context.config.experts
    if section is None or config.run.imported_versions is not None:
        return None  # or its batches exist already
    spec = model_spec(context)
    renderer = open_renderer(spec)
    return DemonstrationQueue(
        section,
        seed=config.run.seed,
        passes=demonstration_passes(config),
        kinds=taken_kinds(config),
        transport=context.transport,
        renderer=renderer,
        context=context_length(spec, renderer),
        clock=context.clock,
    )


def held_out(context: RoleContext, training: Training) -> HeldOut | None:
    """Return the held-out demonstrations for the trainer, if the run has any."""
    section = context.config.experts
    if section is None or not section.held_out:
        return None
    return HeldOut(section, renderer=open_renderer(model_spec(context)), training=training)


def environment_versions(config: RunConfig) -> Callable[[str, str], str]:
    """Return a function from place and name of an environment to the digest of its settings and code. Each is read
    once, since the code that was imported stays as it was."""
    return functools.cache(lambda where, name: environment_version(config, where, name))


def environment_maker(
    config: RunConfig, version_of: Callable[[str, str], str]
) -> Callable[[str, str, Problem, int], Environment]:
    """Return a function that builds environments by their place in the run file. Each Config is checked once, and its
    version is read when its code is imported."""
    named = config.environments_named()

    @functools.cache
    def build(where: str, name: str) -> tuple[Any, Any]:
        built = config.build_environment(where, name)
        version_of(where, name)
        return built

    def make(where: str, name: str, problem: Problem, seed: int) -> Environment:
        part, options = build(where, name)
        try:
            environment: Environment = part(options, problem=problem, seed=seed)
        except ConfigError as error:
            raise ConfigError(config.as_written(str(error), "environment", named.get(where, name), where)) from None
        return environment

    return make


def scorer(context: RoleContext) -> Scorer:
    """Return a scorer with child processes; in a simulated run, which has none, the rewards run inline.
    With a desk, the loop of a user scores."""
    from rftstream.rewards.joined import JoinedScorer
    from rftstream.rewards.scorer import InlineScorer, ProcessScorer

    if context.desk is not None:
        return JoinedScorer(context.desk)
    if context.simulated:
        return InlineScorer(context.config, clock=context.clock)
    return ProcessScorer(context.config)
