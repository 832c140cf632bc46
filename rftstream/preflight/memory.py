"""Estimates the most memory of each role from the run file and the model's config, before anything starts.

`ASSUMED` lists the assumptions for people: layers as in Llama (norms, grouped attention, a gated MLP), every row as
long as the longest prompt and completion, every slot of a policy in use. Rollouts in hand are in in_hand.py; engines
without a model hold nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import psutil

from rftstream.backends.torch.backend import TorchBackend, rounds_parameters
from rftstream.config.loader import sampling_for
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec
from rftstream.config.sections import EvaluationSection, RunConfig, TasksetSection, name_of_part
from rftstream.config.stages import Stages
from rftstream.core.packing import COPIES
from rftstream.models.classifiers import HeldClassifier
from rftstream.models.spec import ModelSpec
from rftstream.preflight.estimate import SERVED_BYTES, ModelSizes, beside_bytes
from rftstream.preflight.in_hand import RolloutsHeld
from rftstream.queries.formatting import columns, size
from rftstream.queries.plain import Report
from rftstream.roles.buffer import BUFFER
from rftstream.roles.evaluator import EVALUATOR
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.feeder import FEEDER
from rftstream.roles.trainer import TRAINER
from rftstream.roles.verifier import VERIFIER

MAIN = "main memory"
SCORING = "scorer"
"""Name in the estimate for a process that computes rewards."""

PROCESS_BYTES = 120 << 20
"""Bytes of a worker that loads no torch."""
TORCH_BYTES = 450 << 20
"""Bytes of a worker that loads torch: the libraries, and the memory that they allocate and keep."""
DEFAULT_BUCKET = 500_000_000
"""Gradients that DeepSpeed exchanges at once if its settings do not say otherwise."""
PINNED = 2
"""Most bytes that torch takes for one pinned byte, since the sizes of its blocks are powers of two."""

ASSUMED = (
    "layers as in Llama, every row as long as the longest prompt and completion, every place of a policy taken, as "
    "many rollouts in hand as the settings allow, libraries 450 MB where torch is used, 120 MB elsewhere"
)


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """The memory of all processes of one role."""

    role: str
    count: int
    """Number of processes."""
    parts: Mapping[str, Mapping[str, int]]
    """Place -> item -> bytes of one process. A place is a device of torch, or main memory."""

    def total(self, place: str) -> int:
        """Return the bytes of all processes of the role at a place."""
        return self.count * sum(self.parts.get(place, {}).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate(Report):
    """The memory of a run. `estimate_memory` makes it; `check` reports it."""

    JSON = "roles machine fits assumed"

    roles: tuple[RoleMemory, ...]
    machine: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each place has. Devices that this machine lacks are left out."""
    in_turns: str | None = None
    """The device that the trainer and engines use in turns, if there is one."""

    def total(self, place: str) -> int:
        """Return the bytes of all roles that use a place at the same time."""
        by_trainer = [role.total(place) for role in self.roles if role.role == TRAINER.name]
        others = sum(role.total(place) for role in self.roles) - sum(by_trainer)
        return max(sum(by_trainer), others) if place == self.in_turns else sum(by_trainer) + others

    @property
    def fits(self) -> bool:
        """Whether every place has the memory that the run may need."""
        return not self.too_much

    @property
    def assumed(self) -> str:
        """Assumptions of the estimate, in words."""
        return ASSUMED

    @property
    def places(self) -> list[str]:
        """Return all places, main memory first."""
        return list(dict.fromkeys([MAIN, *(place for role in self.roles for place in role.parts)]))

    @property
    def too_much(self) -> list[str]:
        """Return the places that have less memory than the run may need."""
        return [place for place in self.places if place in self.machine and self.total(place) > self.machine[place]]


def estimate_memory(
    config: RunConfig,
    spec: ModelSpec,
    longest: int,
    needs: Collection[str],
    options: Mapping[str, Any],
    critic: ModelSizes | None = None,
    held: Sequence[HeldClassifier] = (),
    tasks: Mapping[str, int] | None = None,
) -> MemoryEstimate:
    """Estimate the memory of each role.

    `longest` is the tokens of the longest prompt and completion; `needs` are the algorithms' `needs` of a batch.
    `options` has the Config of `backend`, `policy` and `evaluator`, as far as these parts declare that they are
    estimated. `critic` has the sizes of the trainer's critic, if it has one. `held` are the reward models of all
    tasksets and evaluations. Every scoring process holds all of them. `tasks` has the number of tasks of each
    evaluation.
    """
    sizes = ModelSizes.of(spec.folder, spec.lora)
    in_hand = RolloutsHeld(config, longest, tasks or {}, beside_bytes(config, spec.folder))
    facts = _Facts(config, sizes, spec, longest, needs, options, critic, in_hand)
    devices = Counter(islice(cycle(config.explorer.devices), config.explorer.processes))
    roles = [
        RoleMemory(FEEDER.name, 1, {MAIN: {"process": PROCESS_BYTES}}),
        *(_sampler(facts, EXPLORER.name, count, device) for device, count in devices.items()),
        *_verifiers(facts, held),
        RoleMemory(BUFFER.name, 1, {MAIN: {"process": PROCESS_BYTES, **in_hand.buffer()}}),
        *_trainers(facts),
    ]
    if config.evaluations and config.evaluator.count:
        roles.append(_sampler(facts, EVALUATOR.name, 1, config.evaluator.device))
    places = {place for role in roles for place in role.parts}
    device = _place(config.trainer.device)
    return MemoryEstimate(
        roles=tuple(roles),
        machine={place: num for place in places if (num := _there(place))},
        in_turns=device if config.trainer.in_turns and device != MAIN else None,
    )


def _verifiers(facts: _Facts, held: Sequence[HeldClassifier]) -> list[RoleMemory]:
    """Estimate the verifiers and the processes that compute rewards for them and for the evaluator."""
    config, in_hand = facts.config, facts.in_hand
    process = TORCH_BYTES if held else PROCESS_BYTES
    scoring: dict[str, dict[str, int]] = {MAIN: {"process": process, **in_hand.scorer()}}
    for one in held:
        sizes, width = ModelSizes.of(one.folder, None), SERVED_BYTES[one.dtype]
        whole = sizes.activation_bytes(half=width == 2, recomputed=False) // max(sizes.layers, 1)  # of one layer
        tokens = one.batch_size * min(facts.longest, one.limit or facts.longest)
        at = scoring.setdefault(_place(one.device), {})
        at["reward models"] = at.get("reward models", 0) + width * sizes.parameters
        at["their activations"] = max(at.get("their activations", 0), tokens * whole)
    scores = config.verifier.count + (1 if config.evaluations and config.evaluator.count else 0)
    return [
        RoleMemory(VERIFIER.name, config.verifier.count, {MAIN: {"process": PROCESS_BYTES, **in_hand.verifier()}}),
        RoleMemory(SCORING, scores * config.verifier.processes, scoring),
    ]


def longest_row(config: RunConfig, prompts: Mapping[str, int], context: int | None) -> int:
    """Return the tokens of the longest prompt and completion. `prompts` has the tokens of each taskset's longest
    prompt."""
    found = [
        prompt + sampling_for(config, config.tasksets[name].sampling, where=f"tasksets.{name}.sampling").max_tokens
        for name, prompt in prompts.items()
    ]
    return min(max(found, default=0), context or 1 << 62)


def memory_warnings(memory: MemoryEstimate | None) -> Iterator[str]:
    """Yield a sentence for each place with too little memory."""
    if memory is None:
        return
    for place in memory.too_much:
        yield (
            f"{place}: the run may need {size(memory.total(place))}, and there are {size(memory.machine[place])}; "
            "lower trainer.tokens_per_microbatch or the policy's batch_size, or set gradient_checkpointing"
        )


def place_line(memory: MemoryEstimate, place: str) -> str:
    """Return what all roles need in one place, and what it has."""
    there = f" of {size(memory.machine[place])}" if place in memory.machine else ""
    return f"{place}: up to {size(memory.total(place))}{there}"


def memory_lines(memory: MemoryEstimate) -> list[str]:
    """Return the estimate as lines for a person."""
    lines = []
    for place in memory.places:
        lines.append(place_line(memory, place))
        held = [(role, role.parts[place]) for role in memory.roles if role.total(place)]
        lines += columns(
            [
                (
                    role.role if role.count == 1 else f"{role.count} {role.role}s",
                    size(role.total(place)),
                    ("each " if role.count > 1 else "")
                    + ", ".join(f"{what} {size(num)}" for what, num in parts.items()),
                )
                for role, parts in held
            ],
            left=3,
            indent="  ",
        )
    return [*lines, f"  assumed: {ASSUMED}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread:
    """The distribution of a model over processes, by a stage of ZeRO. Without ZeRO the backend torch is one process."""

    is_zero: bool = False
    processes: int = 1
    stage: int = 0
    bucket: int = 0
    """Gradients that are exchanged at once."""

    @staticmethod
    def of(options: Any) -> _Spread:
        if not hasattr(options, "stage"):
            return _Spread()
        given = options.config.get("zero_optimization")
        zero = given if isinstance(given, dict) else {}
        found = zero.get("reduce_bucket_size")
        num = int(found) if isinstance(found, int | float) else DEFAULT_BUCKET
        bucket = (2 if zero.get("overlap_comm") else 1) * num if options.stage else 0
        return _Spread(is_zero=True, processes=options.processes, stage=options.stage, bucket=bucket)

    def part(self, num: int, *, stage: int) -> int:
        """Return the share of each process in `num` things that are distributed from `stage` on."""
        return -(-num // self.processes) if self.stage >= stage else num


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts that the memory of trainer and samplers depends on."""

    config: RunConfig
    sizes: ModelSizes
    spec: ModelSpec
    longest: int
    """Tokens of the longest prompt and completion."""
    needs: Collection[str]
    """Names of the algorithms' `needs` of a batch."""
    options: Mapping[str, Any]
    """Configs of `backend`, `policy` and `evaluator`, as far as they are known."""
    critic: ModelSizes | None
    """Sizes of the critic, or None if no algorithm has one."""
    in_hand: RolloutsHeld

    @property
    def process(self) -> int:
        """Bytes of a worker whose engine is not known. One without a model loads no torch."""
        return TORCH_BYTES if self.sizes.parameters else PROCESS_BYTES

    @property
    def backend(self) -> Any:
        """Config of the backend, or None if it is unknown."""
        return self.options.get("backend")


def _trainers(facts: _Facts) -> list[RoleMemory]:
    """Estimate the trainer, and the other ranks if it has several processes, each with a GPU of its own."""
    sizes, spec, options = facts.sizes, facts.spec, facts.backend
    in_hand = facts.in_hand.trainer()
    if options is None:
        return [RoleMemory(TRAINER.name, 1, {MAIN: {"process": facts.process, **in_hand}})]
    device, spread = _place(facts.config.trainer.device), _Spread.of(options)
    in_main = {"process": TORCH_BYTES, "published version": SERVED_BYTES[spec.dtype] * sizes.trained, **in_hand}
    if getattr(options, "min_ranks", None) is not None:
        num_critic = 0 if facts.critic is None else facts.critic.parameters
        in_main["state of all ranks"] = 24 * (sizes.trained + num_critic)  # masters and moments, before and after
    on_device, of_optimizer = _of_rank(facts, spread)
    if facts.config.trainer.in_turns or (options.offload_parameters and not spread.is_zero):
        factor = 1 if device == MAIN else PINNED
        in_main["state between batches"] = factor * _leaving(facts, spread, on_device, of_optimizer)

    def role(name: str, count: int, place: str, held: Mapping[str, int]) -> RoleMemory:
        parts: dict[str, dict[str, int]] = {MAIN: dict(held)}
        parts.setdefault(place, {}).update(on_device)
        parts[MAIN if options.offload_optimizer else place].update(of_optimizer)
        return RoleMemory(name, count, _without_nothing(parts))

    kind, _, first = device.partition(":")
    num_others = spread.processes - 1
    places = {f"{kind}:{int(first) + rank}": 1 for rank in range(1, num_others + 1)} if first else {MAIN: num_others}
    others = [role("rank", count, place, {"process": TORCH_BYTES}) for place, count in places.items() if count]
    return [role(TRAINER.name, 1, device, in_main), *others]


def _leaving(facts: _Facts, spread: _Spread, held: Mapping[str, int], of_optimizer: Mapping[str, int]) -> int:
    """Return the bytes of `held` that leave the device between batches. The rest is freed by then."""
    num_critic = 0 if facts.critic is None else facts.critic.parameters
    kept = held["weights"] + held["reference"] + 4 * num_critic
    if facts.backend.offload_optimizer:
        return kept
    renewed = of_optimizer["renewed reference"] // (2 if spread.is_zero else 1)  # the copy of the policy is gone
    gradients = 4 * (facts.sizes.trained + num_critic) if spread.stage == 3 else 0  # whose room is kept
    of_critic = (12 if spread.stage else 8) * num_critic  # from stage 1 on it has masters of its own
    return kept + of_optimizer["masters"] + of_optimizer["moments"] + renewed + gradients + of_critic


def _in_four_bits(sizes: ModelSizes) -> int:
    """Return the bytes by which matrices in four bits, with a scale for 64 values, are smaller than in float32."""
    return 4 * sizes.adapted - (sizes.adapted // 2 + sizes.adapted // 16)


def _of_rank(facts: _Facts, spread: _Spread) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that one process holds on the device, and those where the optimizer is."""
    config, sizes, spec, options, critic = facts.config, facts.sizes, facts.spec, facts.backend, facts.critic
    settings = config.trainer
    gpu = settings.device.startswith("cuda")
    half = options.autocast == "bfloat16" or (options.autocast == "auto" and gpu)
    rounded = isinstance(options, TorchBackend.Config) and rounds_parameters(
        options, spec, settings.device.partition(":")[0]
    )
    half = half or rounded
    rows = config.feeder.groups_per_batch * config.feeder.group_size
    tokens = max(min(settings.tokens_per_microbatch, rows * facts.longest), facts.longest)
    steps = settings.minibatches * settings.updates_per_batch
    reference = any(name.startswith("reference_") for name in facts.needs)
    renewed = settings.reference_every is not None or any(one.own_reference for one in Stages.of(config).all)
    masters = spread.part(4 * sizes.trained, stage=1)
    if options.offload_optimizer and spread.stage in (1, 2):
        masters *= 2  # DeepSpeed moves the masters through a buffer of the same size
    version_0 = (2 if rounded else 4) * sizes.parameters if reference and spec.lora is None else 0
    later = 4 * sizes.trained if reference and renewed else 0
    if spread.is_zero:  # the reference and a copy of the policy, whose place it takes
        later = 2 * spread.part(later, stage=1)
    gone = 0 if options.offload_optimizer else version_0  # then; elsewhere it makes no room
    networks = [sizes] if critic is None else [sizes, critic]  # one after the other
    recomputed = options.gradient_checkpointing
    away = recomputed and getattr(options, "offload_activations", False)  # of each layer's input
    activations = max(
        network.activation_bytes(half=half, recomputed=recomputed) - (4 * network.width * network.layers if away else 0)
        for network in networks
    )
    shares = options.packing and options.share_prefixes and rows * facts.longest > tokens  # else all fit without it
    asked = min(COPIES * tokens, rows * facts.longest) if shares else 0
    copied = max((2 if half else 4) * 2 * one.keys * (1 if recomputed else one.layers) for one in networks)
    split = getattr(options, "sequence_parallel", 1)
    num_critic = 0 if critic is None else critic.parameters
    of_critic = 12 if options.offload_optimizer else 8
    if spread.is_zero:  # moments, and from stage 1 on masters and their gradients
        of_critic = 16 if spread.stage else 8
    undone = sizes.trained + num_critic if steps > 1 else 0
    if spread.is_zero and steps == 1 and critic is not None:
        undone = sizes.trained  # the policy's step is taken before the critic's norm is known
    logits = min(options.max_logits_bytes, 4 * tokens * sizes.vocabulary) // (2 if half else 1)
    kept = half and spec.lora is None and not rounded
    on_device = {
        "weights": (2 if rounded else 4) * sizes.parameters  # of ZeRO 3, too: while they are loaded
        - (_in_four_bits(sizes) if spec.quantize else 2 * sizes.adapted if half and not rounded else 0),
        "weights in bfloat16": 2 * sizes.parameters if kept else 0,  # autocast keeps them
        "gradients": (0 if rounded else spread.part(4 * sizes.trained, stage=2))
        + (4 * sizes.vocabulary * sizes.width if spec.lora is None else 0),
        "gradients in exchange": 4 * (spread.bucket if gpu else min(spread.bucket, sizes.trained)),
        "activations": tokens * activations // split,
        "keys of what rows share": asked * copied // split,
        "logits": logits,
        "reference": version_0 if spread.is_zero else max(version_0, later),
        "critic with gradients": (6 if half else 4) * num_critic + spread.part(4 * num_critic, stage=2),
    }
    of_optimizer = {
        "masters": masters if options.offload_optimizer or spread.stage or rounded else 0,
        "gradients of masters": spread.part(4 * sizes.trained, stage=1) if spread.stage or rounded else 0,
        "moments": spread.part((2 if getattr(options, "moments", "") == "8bit" else 8) * sizes.trained, stage=1),
        "state before the batch": spread.part(12 * undone, stage=1),
        "renewed reference": max(later - gone, 0) if spread.is_zero else 0,
        "critic's optimizer": spread.part(of_critic * num_critic, stage=1),
    }
    return on_device, of_optimizer


def _sampler(facts: _Facts, role: str, count: int, device: str) -> RoleMemory:
    """Estimate a role that samples. With any policy, the role follows the weights."""
    config, sizes, dtype = facts.config, facts.sizes, facts.spec.dtype
    served, evaluates = SERVED_BYTES[dtype], role == EVALUATOR.name
    options = facts.options.get("evaluator" if evaluates else "policy")
    has_turns = _has_turns(config.evaluations if evaluates else config.tasksets)
    process = TORCH_BYTES if options is not None else PROCESS_BYTES
    in_hand = facts.in_hand.evaluator() if evaluates else facts.in_hand.explorer()
    in_main = {"process": process, "version in hand": served * sizes.trained, **in_hand}
    parts: dict[str, dict[str, int]] = {MAIN: in_main}
    if options is not None:
        at_once = config.evaluator.max_concurrent if evaluates else config.explorer.first_concurrent
        rows = min(at_once, options.batch_size)
        parts.setdefault(_place(device), {}).update(
            {
                "weights": served * sizes.parameters,
                "cache": rows * facts.longest * sizes.cache_bytes(dtype),
                "turns": has_turns * getattr(options, "turn_tokens", 0) * sizes.cache_bytes(dtype),
                "logits": rows * sizes.vocabulary * (4 + served),
            }
        )
    return RoleMemory(role, count, _without_nothing(parts))


def _has_turns(sections: Mapping[str, TasksetSection] | Mapping[str, EvaluationSection]) -> bool:
    names = [name_of_part(section.environment, name) for name, section in sections.items()]
    return any(not registry.find_spec(EnvironmentSpec, name).has_one_turn for name in names)


def _place(device: str) -> str:
    return MAIN if device == "cpu" else device if ":" in device else f"{device}:0"


def _there(place: str) -> int | None:
    if place == MAIN:
        return int(psutil.virtual_memory().total)
    import torch

    if not torch.cuda.is_available() or not place.startswith("cuda:"):
        return None
    number = int(place.partition(":")[2])
    return int(torch.cuda.mem_get_info(number)[1]) if number < torch.cuda.device_count() else None


def _without_nothing(parts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    return {place: {what: num for what, num in held.items() if num} for place, held in parts.items()}
