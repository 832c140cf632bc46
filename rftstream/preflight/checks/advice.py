"""Advice on settings that are probably unintended. They are allowed, but `check` shows a sentence for each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from rftstream.algorithms.policy_gradient import CORRECTIONS
from rftstream.config.colocation import is_shared
from rftstream.config.loader import sampling_for
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import AlgorithmSpec, PolicySpec
from rftstream.config.parts.reward_uses import reward_names, reward_uses
from rftstream.config.sampling_ranges import inexact_settings
from rftstream.config.sections import EvaluationSection, RunConfig, TasksetSection, name_of_part
from rftstream.config.stages import Stages
from rftstream.contracts.tasks import Sampling
from rftstream.errors import ConfigError
from rftstream.preflight.checks.check_report import TasksetLine
from rftstream.preflight.estimate import DiskEstimate
from rftstream.queries.formatting import plural, size
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.folder import lies_in_folder

FEW_TOKENS = 8
"""A limit of tokens below which many answers do not fit."""


def find_warnings(
    config: RunConfig, measured: Mapping[str, TasksetLine], disk: DiskEstimate | None, context: int | None
) -> list[str]:
    """Return a sentence for each setting that looks unintended. `measured` maps `tasksets.NAME` and `evaluations.NAME`
    to the findings there."""
    return [
        *_processes(config),
        *_turns(config),
        *_groups(config),
        *_algorithm(config),
        *_sampling(config),
        *_overlong(config),
        *_rewards(config),
        *_unused_tables(config),
        *_lengths(config, measured, context),
        *_characters(measured),
        *_end(config, measured),
        *_disk(disk),
    ]


def _processes(config: RunConfig) -> Iterator[str]:
    partitions = config.transport.partitions
    for role, count in ((EXPLORER.name, config.explorer.processes), (VERIFIER.name, config.verifier.count)):
        if count > partitions:
            yield (
                f"{role}.count: {count} workers share {partitions} partitions, so {count - partitions} of them will "
                "have nothing to do; raise transport.partitions (fixed once the run exists)"
            )
        if count == 0:
            yield f"{role}.count: 0, so the run waits until `rftstream worker --role {role}` is started by hand"
    if config.experts is not None and config.experts.source is None:
        yield "experts.source: unset, so the run waits until `rftstream experts load` brings some"
    if config.evaluations and config.evaluator.count == 0:
        yield "evaluator.count: 0, so nothing is evaluated until `rftstream worker --role evaluator` is started by hand"
    cores = len(os.sched_getaffinity(0))
    sections = (config.explorer, config.verifier, config.trainer)
    if (most := max(section.threads for section in sections)) > cores:
        yield f"threads: a process wants {most}, but there are {plural(cores, 'core')}"
    shares, devices = config.explorer.processes, len(config.explorer.devices)
    if devices > shares > 0:
        yield f"explorer.devices: {devices} given for {plural(shares, EXPLORER.name)}; the rest stays idle"


def _turns(config: RunConfig) -> Iterator[str]:
    """Yield a warning for an evaluator that hardly gets the device that it shares with the trainer."""
    in_turns = config.evaluations and is_shared(config, config.evaluator.device)
    if in_turns and not all(stage.takes_rollouts for stage in Stages.of(config).all):
        yield (
            "evaluator.device: the trainer's, which leaves it (trainer.colocate) when no batch is ready; batches of "
            "demonstrations alone always are, so versions are evaluated when all of them are trained; name another "
            "device to see results earlier"
        )


def _groups(config: RunConfig) -> Iterator[str]:
    if config.without_tasks:
        return
    group_size, least = config.feeder.group_size, config.buffer.min_siblings
    if group_size < least:
        yield (
            f"feeder.group_size: {group_size} is below buffer.min_siblings = {least}; "
            f"{plural(group_size, 'scored sibling')} will do"
        )
    comparing = [name for name, spec in _algorithms_of(config).items() if spec.compares_siblings]
    if group_size == 1 and comparing:
        name = comparing[0]
        yield f"feeder.group_size: 1, but {name} compares siblings: there will be no gradient; use 4 or more"
    if config.trainer.minibatches > config.feeder.groups_per_batch:
        yield (
            f"trainer.minibatches: {config.trainer.minibatches}, but a batch has only "
            f"{plural(config.feeder.groups_per_batch, 'group')}, which stay together"
        )
    if config.trainer.lr == 0:
        yield "trainer.lr: 0, so nothing is learned"


def _algorithm(config: RunConfig) -> Iterator[str]:
    if config.trainer.lr_schedule != "constant" and config.run.steps is None and not config.stages:
        yield (
            f"trainer.lr_schedule: {config.trainer.lr_schedule!r} falls until run.steps, which is unset, so the "
            "learning rate stays constant; set run.steps"
        )
    for name, spec in _algorithms_of(config).items():
        if spec.replaces_groups and config.buffer.zero_variance == "keep" and config.feeder.group_size > 1:
            yield f'buffer.zero_variance: "keep", but dynamic sampling is a part of {name}; set it to "replace"'
        if setting := spec.max_tokens_setting:
            default = getattr(registry.resolve("algorithm", name).Config(), setting)
            value = config.algorithms.get(name, {}).get(setting, default)
            if value != (most := config.sampling.max_tokens):
                yield (
                    f"algorithms.{name}.{setting}: {value}, but sampling.max_tokens is {most}; "
                    "the loss is scaled by their ratio, set both alike"
                )


def _sampling(config: RunConfig) -> Iterator[str]:
    """Yield a warning if a correction would take tokens that sampling leaves out for a difference between policies."""
    for place, algorithm, sampling in _learned(config):
        correction = getattr(algorithm, "correction", "none")
        changed = [key for key in inexact_settings(sampling, config) if key not in ("min_tokens", "temperature")]
        odd = [f"{key} = {getattr(sampling, key):g}" for key in changed]
        if not odd or correction == "none":
            continue
        cut = [one for one in odd if "penalty" not in one]
        how = "rho is too small by the share that was left" if cut else "rho is another one at each token"
        how += f" ({sampling.top_p:g} to 1)" if cut == odd == [f"top_p = {sampling.top_p:g}"] else ""
        advice = ""
        if cut and config.trainer.masks == "own":
            advice = ', or trainer.masks = "replay"'
        elif cut and registry.find_spec(PolicySpec, config.explorer.policy).lists_sets:
            advice = ", or set top_k as well (256, say): policy 'vllm' lists what could be sampled, up to it"
        what = "drops tokens by it" if CORRECTIONS[correction][0] == "drop" else "weighs tokens by it"
        yield (
            f"{place}: sampled with {', '.join(odd)}, so recorded logprobs are of another distribution than the "
            f"trainer's: {how}, and correction = {correction!r} {what}, whoever sampled; leave these settings to "
            f'evaluations, or set correction = "none"{advice}'
        )


def _overlong(config: RunConfig) -> Iterator[str]:
    """Yield a warning if a penalty for long completions starts within the length of a right answer."""
    for place, algorithm, sampling in _learned(config):
        share, most = getattr(algorithm, "overlong_share", 0.0), sampling.max_tokens
        if 0 < share * most < FEW_TOKENS:
            yield (
                f"{place}: overlong_share = {share:g} takes from the reward of completions of more than "
                f"{most * (1 - share):g} tokens, their end among them, since max_tokens is {most}; if right answers "
                "are so long, set it to 0, or raise max_tokens"
            )


def _learned(config: RunConfig) -> Iterator[tuple[str, Any, Sampling]]:
    """Yield each taskset's place, the settings of its algorithm, and its sampling."""
    for name, section in config.tasksets.items():
        place = f"tasksets.{name}"
        where = f"{place}.algorithm" if section.algorithm else "trainer.algorithm"
        with suppress(ConfigError):  # reported elsewhere
            algorithm = config.build_algorithm(where)[1]
            yield place, algorithm, sampling_for(config, section.sampling, where=f"{place}.sampling")


def _rewards(config: RunConfig) -> Iterator[str]:
    for place, section in _sections(config):
        counted = [use for use in reward_uses(section.reward, place) if use.use in ("sum", "minimum")]
        zero = [one.name for one in counted if one.weight == 0]
        if zero and len(zero) == len(counted):
            yield f"{place}.reward: every weight is 0, so every reward is 0 and nothing can be learned from it"
        elif zero:
            yield f"{place}.reward: {', '.join(zero)} with weight 0 is computed and recorded, and does not count"
    for name, taskset in config.tasksets.items():
        if taskset.weight == 0:
            yield f"tasksets.{name}.weight: 0, so no task of it is ever drawn"


def _unused_tables(config: RunConfig) -> Iterator[str]:
    """Yield a warning for settings of parts that the run does not use. Most often their names are misspelt."""
    rewards = {name for _, section in _sections(config) for name in reward_names(section.reward)}
    used = {
        "policies": {config.explorer.policy, config.evaluator.policy or config.explorer.policy},
        "backends": {config.trainer.backend},
        "algorithms": set(_algorithms_of(config)),
        "rewards": rewards,
        "environments": {name_of_part(named, where) for where, named in config.environments_named().items()},
    }
    for kind, table in ((kind, getattr(config, kind)) for kind in used):
        for name in table:
            if name not in used[kind]:
                known = registry.table("policy" if kind == "policies" else kind.removesuffix("s"))
                wrong = [repr(one) for one in sorted(used[kind]) if ":" not in one and one not in known]
                said = f"the run uses {', '.join(wrong)}; is that misspelt?" if name in known and wrong else ""
                yield f"{kind}.{name}: nothing uses it; {said or registry.suggest(name, sorted(used[kind]))}"
    for key in ("servers", "options"):
        if lies_in_folder(config) and getattr(config.transport, key):
            yield f"transport.{key}: nothing uses it, since transport.kind is {config.transport.kind!r}"


def _lengths(config: RunConfig, measured: Mapping[str, TasksetLine], context: int | None) -> Iterator[str]:
    for place, section in _sections(config):
        found = measured.get(place)
        if found is None or context is None:
            continue
        if found.too_long and found.too_long_means:
            yield (
                f"{place}: {plural(found.too_long, 'prompt')} of {found.problems:,} longer than the context of "
                f"{context:,}, {found.too_long_means}"
            )
        wanted = sampling_for(config, section.sampling, where=f"{place}.sampling").max_tokens
        room = context - min(found.longest, context - 1)
        if found.longest and room < wanted:
            yield (
                f"{place}: the longest prompt ({found.longest:,} tokens) leaves {plural(room, 'token')} of the "
                f"context for a completion, less than max_tokens = {wanted:,}"
            )


def _characters(measured: Mapping[str, TasksetLine]) -> Iterator[str]:
    for place, found in measured.items():
        if found.unknown:
            least = "at least " if found.num_rendered < found.problems else ""
            yield (
                f"{place}: {least}{plural(len(found.unknown), 'prompt')} with characters that the tokenizer does not "
                f"know, the first in problem {found.unknown[0]}; the model cannot tell them apart: "
                "use another tokenizer"
            )


def _end(config: RunConfig, measured: Mapping[str, TasksetLine]) -> Iterator[str]:
    drawn = {f"tasksets.{name}": section for name, section in config.tasksets.items() if section.weight}
    if config.steps is None or not drawn or not all(place in measured and one.passes for place, one in drawn.items()):
        return
    groups = sum((section.passes or 0) * measured[place].problems for place, section in drawn.items())
    batches = groups // config.feeder.groups_per_batch
    try:
        wanted = Stages.of(config).batches_of_rollouts(0, config.steps)
    except ConfigError:  # the algorithm is unknown, and another check reports it
        return
    if batches < wanted:
        yield (
            f"{'stages' if config.stages else 'run.steps'}: {wanted:,}, but the tasksets end after "
            f"{plural(groups, 'group')}, which make {batches:,} batches; raise passes or lower steps"
        )


def _disk(disk: DiskEstimate | None) -> Iterator[str]:
    if disk is not None and not disk.fits:
        yield (
            f"disk: the run may need {size(disk.total_bytes)}, and {size(disk.free_bytes)} are free; free some, set "
            "run.folder, or lower keep_checkpoints and weights.keep"
        )


def _algorithms_of(config: RunConfig) -> dict[str, AlgorithmSpec]:
    """Return the declarations of the run's algorithms, by their sorted names."""
    names = {name_of_part(named, where) for where, named in config.algorithms_named().items()}
    return {name: registry.find_spec(AlgorithmSpec, name) for name in sorted(names)}


def _sections(config: RunConfig) -> Iterator[tuple[str, TasksetSection | EvaluationSection]]:
    yield from ((f"tasksets.{name}", section) for name, section in config.tasksets.items())
    yield from ((f"evaluations.{name}", section) for name, section in config.evaluations.items())
