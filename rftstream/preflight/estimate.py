"""Estimates the disk space that a run will need, from its settings and from one encoded rollout of each taskset."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rftstream.config.data_pipelines.pipelines import operator_places
from rftstream.config.loader import sampling_for
from rftstream.config.sections import LoraSection, RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts import codec
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus, Segment, Turn, VersionSpan
from rftstream.contracts.tasks import Problem, RolloutIds, Sampling, Task
from rftstream.contracts.token_values import EXPERTS, TokenValues
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.models.folders.files import read_json
from rftstream.models.folders.folder import tensor_headers
from rftstream.models.spec import ModelSpec
from rftstream.queries.plain import Report
from rftstream.weights.stores.store import place_on_disk

SERVED_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder, from its config and the headers of its weights. `of` makes it."""

    parameters: int
    trained: int
    """Parameters that are trained: those of the adapters if the run trains adapters."""
    adapted: int
    """Parameters of the matrices that have adapters."""
    layers: int
    width: int
    inner: int
    """Width of the MLP."""
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together."""
    vocabulary: int

    @staticmethod
    def of(folder: Path, lora: LoraSection | None) -> ModelSizes:
        """Read the sizes of the model in a folder."""
        config = read_json(folder / "config.json")
        config = config.get("text_config", config)
        shapes = _shapes(folder)
        parameters = sum(math.prod(shape) for shape in shapes.values())
        adapted = [] if lora is None else [shape for name, shape in shapes.items() if _has_adapter(name, shape, lora)]
        rank = 0 if lora is None else lora.rank
        heads = int(config.get("num_attention_heads") or 1)
        width = int(config.get("hidden_size") or 0)
        head_width = int(config.get("head_dim") or width // heads)
        return ModelSizes(
            parameters=parameters,
            trained=parameters if lora is None else sum(rank * (rows + columns) for rows, columns in adapted),
            adapted=sum(math.prod(shape) for shape in adapted),
            layers=int(config.get("num_hidden_layers") or 0),
            width=width,
            inner=int(config.get("intermediate_size") or 4 * width),
            queries=heads * head_width,
            keys=int(config.get("num_key_value_heads") or heads) * head_width,
            vocabulary=int(config.get("vocab_size") or 0),
        )

    def activation_bytes(self, *, half: bool, recomputed: bool) -> int:
        """Return the bytes per token that the backward pass needs.

        For every layer, these are two norms in float32 (each with its input and its normalised input). In the type of
        matrix products, these are the inputs of all matrices; queries, keys, values and output of attention; and the
        MLP's gate before and after its activation, its other half and their product. With `recomputed`, these are the
        input of every layer, and one complete layer.
        """
        of_products = 3 * self.width + 2 * self.queries + 2 * self.keys + 4 * self.inner
        layer = 4 * (4 * self.width) + (2 if half else 4) * of_products
        return 4 * self.width * self.layers + layer if recomputed else layer * self.layers

    def cache_bytes(self, dtype: str) -> int:
        """Return the bytes of the keys and values of one token."""
        return 2 * self.keys * self.layers * SERVED_BYTES[dtype]


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the folder's safetensors files; empty if there are none."""
    return {
        name: tuple(tensor["shape"])
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in tensor_headers(file).items()
        if name != "__metadata__"
    }


def _has_adapter(name: str, shape: tuple[int, ...], lora: LoraSection) -> bool:
    module = name.removesuffix(".weight")
    if len(shape) != 2 or module == name:
        return False
    if lora.targets == "all-linear":
        return not module.endswith(("lm_head", "embed_tokens", "wte", "wpe"))
    return any(module == target or module.endswith(f".{target}") for target in lora.targets)


EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
"""Names in a model's config for the experts of a token in a layer."""


def beside_bytes(config: RunConfig, folder: Path) -> int:
    """Return the bytes that the recorded experts of a token take at most; 0 if they are not replayed. Sets of tokens
    are not counted, since their sizes depend on the texts."""
    if EXPERTS not in config.trainer.replayed:
        return 0
    model = read_json(folder / "config.json")
    model = model.get("text_config", model)
    chosen = next((int(model[name]) for name in EXPERTS_PER_TOKEN if isinstance(model.get(name), int)), 1)
    most = max((value for name, value in model.items() if "experts" in name and isinstance(value, int)), default=0)
    return int(model.get("num_hidden_layers") or 0) * chosen * (1 if most <= 256 else 2)


MASTER_BYTES = 12
"""Bytes per parameter in a checkpoint: master and two moments, float32."""

CHARACTERS_PER_TOKEN = 4
"""Assumed characters per token of completions, before any is known."""

REFERENCE_BYTES = 4
"""Bytes per parameter in a checkpoint for a reference that is not version 0."""

LOG_OVERHEAD = 1.15
"""Factor for the pages and indexes of the embedded log beside its records."""
JOURNAL_BYTES = 64 << 20
"""Most bytes that the journal of the embedded log keeps, in which its newest records stand once more."""


DELTA_SHARES = ((1e-6, 1 / 621), (5e-6, 1 / 335), (2e-5, 1 / 122), (1e-3, 1.0))
"""Learning rate -> bytes of a delta as a share of a snapshot in bfloat16 (docs/weights-format.md, "Why it is small").
Where nearly all weights change, at the last one and in float32, it was 0.78 and 0.92 in runs of tiny models."""


def delta_share(config: RunConfig) -> float:
    """Return the most bytes of a delta as a share of a snapshot. One that is not smaller is not written."""
    if config.model.dtype != "bfloat16" or config.model.lora is not None:
        return 1.0
    rate = max(stage.trainer.lr for stage in Stages.of(config).all)
    rates, shares = zip(*DELTA_SHARES, strict=True)
    return float(np.exp(np.interp(math.log(max(rate, rates[0])), np.log(rates), np.log(shares))))


def num_deltas(config: RunConfig) -> int:
    """Return the most deltas that are held at once: those since the oldest of the newest anchors, and of each other
    version that is kept those since its anchor."""
    every, others = config.weights.anchor_every, config.trainer.keep_checkpoints + len(config.evaluations)
    held = 0 if every == 1 else config.weights.keep * every + others * (every - 1)
    return held if config.steps is None else min(held, config.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEstimate(Report):
    """The disk that a run may need. `estimate_disk` makes it; `check` reports it."""

    JSON = "* total_bytes fits"

    rollouts: int | None
    """Rollouts of the whole run, without those of filtered groups. None if the run has no known end."""
    filters: tuple[str, ...]
    """Settings by which groups are filtered, and others sampled in their place: nobody knows before how many."""
    bytes_per_rollout: int
    """Bytes of a rollout on all topics together, with a completion of the greatest length."""
    saved_bytes: int
    """Bytes of it on `partials`, if a rollout takes longer than the interval at which unfinished ones are saved."""
    log_bytes: int | None
    journal_bytes: int
    """Most bytes of the embedded log's journal; 0 on Kafka."""
    parameters: int
    snapshot_bytes: int
    snapshots: int
    """Most snapshots that are held at once."""
    delta_bytes: int
    deltas: int
    """Most deltas that are held at once."""
    checkpoint_bytes: int
    checkpoints: int
    store_is_local: bool
    free_bytes: int
    """Bytes that are free at the place of the run folder."""

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of snapshots, deltas and checkpoints together."""
        versions = self.snapshot_bytes * self.snapshots + self.delta_bytes * self.deltas
        return versions + self.checkpoint_bytes * self.checkpoints

    @property
    def total_bytes(self) -> int:
        """Return the known bytes on this disk. `final/` counts as one more snapshot."""
        weights = self.weights_bytes if self.store_is_local else 0
        return (self.log_bytes or 0) + self.journal_bytes + weights + self.snapshot_bytes

    @property
    def fits(self) -> bool:
        """Return whether the disk has room for the run."""
        return self.total_bytes <= self.free_bytes


def estimate_disk(
    config: RunConfig,
    spec: ModelSpec,
    context: int | None,
    samples: Mapping[str, tuple[Problem, int]],
    sizes: Mapping[str, int],
    critic: ModelSizes | None = None,
) -> DiskEstimate:
    """Estimate the disk space of a run. `samples` has one problem of each taskset with the length of its prompt;
    `sizes` has the number of problems of each taskset; `critic` has the sizes of the trainer's critic, if it has
    one."""
    weights = {name: config.tasksets[name].weight for name in samples}
    total = sum(weights.values()) or 1.0

    def per_rollout(saves: bool) -> float:
        return LOG_OVERHEAD * sum(
            rollout_bytes(
                problem,
                num_prompt,
                sampling_for(config, config.tasksets[name].sampling, where=name),
                context=context,
                group_size=config.feeder.group_size,
                run=config.run.name,
                saves=saves,
                beside=beside_bytes(config, spec.folder),
            )
            * weights[name]
            / total
            for name, (problem, num_prompt) in samples.items()
        )

    saves = config.explorer.partial_every_s > 0
    num_bytes = per_rollout(saves)
    rollouts = num_rollouts(config, sizes)
    journal = JOURNAL_BYTES if config.transport.kind == "embedded" else 0
    sizes_of_model = ModelSizes.of(spec.folder, spec.lora)
    snapshot = sizes_of_model.trained * SERVED_BYTES[spec.dtype]
    renewed = config.trainer.reference_every is not None or any(one.own_reference for one in Stages.of(config).all)
    of_reference = REFERENCE_BYTES * sizes_of_model.trained if renewed else 0
    return DiskEstimate(
        rollouts=rollouts,
        filters=_filters(config),
        bytes_per_rollout=round(num_bytes),
        saved_bytes=round(num_bytes - per_rollout(False)),
        log_bytes=None if rollouts is None else round(rollouts * num_bytes),
        journal_bytes=journal if rollouts is None else min(journal, round(rollouts * num_bytes)),
        parameters=sizes_of_model.parameters,
        snapshot_bytes=snapshot,
        # The newest, those of checkpoints, the best of each evaluation, version 0, and one that is being written.
        snapshots=config.weights.keep + config.trainer.keep_checkpoints + len(config.evaluations) + 2,
        delta_bytes=round(snapshot * delta_share(config)),
        deltas=num_deltas(config),
        checkpoint_bytes=(sizes_of_model.trained + (0 if critic is None else critic.parameters)) * MASTER_BYTES
        + of_reference,
        checkpoints=config.trainer.keep_checkpoints + 1,
        store_is_local=place_on_disk(config.weights.store, Path()) is not None,
        free_bytes=free_bytes(Path(config.base) / config.run.folder),
    )


def _filters(config: RunConfig) -> tuple[str, ...]:
    zero = ["buffer.zero_variance"] if config.buffer.zero_variance == "replace" else []
    return (*zero, *(place.where for place in operator_places(config) if place.side == "experience"))


START_S = 10.0
"""Seconds until the processes of a run work, and until they have left."""
ROLLOUT_CPU_S = 1.5e-3
"""Processor seconds that all roles together spend on a rollout of a few tokens: examples/arithmetic.toml took 94 s for
64,000."""
SMALL_PARAMETERS = 1_000_000
"""Parameters up to which the model's own computing does not count beside that."""


def estimate_seconds(disk: DiskEstimate) -> float | None:
    """Return roughly how long a run of a small model takes on this machine. None for others: their time depends on the
    lengths of completions and on the device, and `try` measures it."""
    if disk.rollouts is None or not 0 < disk.parameters <= SMALL_PARAMETERS:
        return None
    return START_S + disk.rollouts * ROLLOUT_CPU_S / min(2, os.cpu_count() or 1)


def num_rollouts(config: RunConfig, sizes: Mapping[str, int]) -> int | None:
    """Return the rollouts of the whole run, if steps or passes determine them. Filtered groups are not included."""
    groups: list[int] = []
    if config.steps is not None:
        groups.append(Stages.of(config).batches_of_rollouts(0, config.steps) * config.feeder.groups_per_batch)
    drawn = {name: section for name, section in config.tasksets.items() if section.weight}
    if all(section.passes is not None and name in sizes for name, section in drawn.items()):
        groups.append(sum((section.passes or 0) * sizes[name] for name, section in drawn.items()))
    return min(groups) * config.feeder.group_size if groups else None


def _by_reference(problem: Problem) -> Problem:
    """Return the problem in the form of the log: its images are in the store."""
    url = f"store:media/00/{'0' * 64}"
    messages = (
        replace(message, media=tuple(replace(media, url=url) for media in message.media))
        for message in problem.messages
    )
    return replace(problem, messages=tuple(messages))


def rollout_bytes(
    problem: Problem,
    num_prompt: int,
    sampling: Sampling,
    *,
    context: int | None,
    group_size: int,
    run: str,
    saves: bool = False,
    beside: int = 0,
) -> int:
    """Return the bytes of one rollout on all its topics, in the records that the roles would write. `saves`: all of it
    is saved before it is finished. `beside`: bytes that stand beside a token."""
    problem = _by_reference(problem)
    room = sampling.max_tokens if context is None else context - num_prompt
    num_sampled = max(1, min(sampling.max_tokens, room))
    ids = RolloutIds.of("t/0/100000/0", taskset="t", group_size=group_size, sequence=100_000, min_version=1_000)
    tokens = zeros(num_prompt + num_sampled)
    span = VersionSpan(start=num_prompt, count=num_sampled, trainer_epoch=1, version=1_000)
    segment = Segment(
        token_ids=tokens["int32"],
        behavior_logprobs=tokens["float32"],
        loss_mask=tokens["uint8"],
        versions=(span,),
        beside=zeros_beside(num_prompt + num_sampled, beside) if beside else {},
    )
    summary = RolloutSummary(
        rollout_id=ids.rollout_id, num_tokens=num_sampled, status=RolloutStatus.completed, reward=1.0
    )
    outcome = GroupOutcome(
        group_id=ids.group_id,
        taskset=ids.taskset,
        sequence=1,
        result=GroupResult.batched,
        reason="complete",
        rollouts=(summary,) * group_size,
        batch_sequence=1_000,
    )
    messages = _messages_of_rollout(ids, problem, sampling, segment, num_sampled)
    if not saves:
        del messages["partials"]
    sizes = [codec.to_record(message, topic, 0, run=run).num_bytes for topic, message in messages.items()]
    return sum(sizes) + math.ceil(codec.to_record(outcome, "outcomes", 0, run=run).num_bytes / group_size)


def _messages_of_rollout(
    ids: RolloutIds, problem: Problem, sampling: Sampling, segment: Segment, num_sampled: int
) -> dict[str, Message]:
    said = "x" * CHARACTERS_PER_TOKEN * num_sampled
    rollout = Rollout(
        ids=ids,
        status=RolloutStatus.completed,
        problem=problem,
        segments=(segment,),
        num_tokens=num_sampled,
        turns=(Turn(role="assistant", content=said, num_tokens=num_sampled, finish_reason="stop"),),
        sampling=sampling,
        started_at=1.0,
        finished_at=1.0,
    )
    verdict = Verdict(reward=1.0, scorer="exact", scorer_version="1" * 16, parts={"exact": 1.0})
    return {
        "tasks": Task(ids=ids, problem=problem, sampling=sampling, seed=1 << 60),
        "rollouts": rollout,
        "verified": VerifiedRollout(ids=ids, rollout=rollout, verdict=verdict),
        "batches": Experience(
            ids=ids,
            batch_sequence=1_000,
            share=0,
            position=0,
            loss_kind=LossKind.rl,
            segments=(segment,),
            reward=1.0,
            sampling=sampling,
        ),
        "partials": PartialRollout(ids=ids, piece=0, turns=(), segments=(segment,), num_tokens=num_sampled),
    }


def zeros(num_tokens: int) -> dict[str, Array]:
    """Return arrays of zeros, as a segment has them."""
    widths = {"int32": 4, "float32": 4, "uint8": 1}
    return {d: Array(dtype=d, shape=(num_tokens,), data=bytes(num_tokens * width)) for d, width in widths.items()}


def zeros_beside(num_tokens: int, count: int) -> dict[str, TokenValues]:
    """Return `count` bytes beside each token, as a segment has them."""
    values = Array(dtype="uint8", shape=(num_tokens * count,), data=bytes(num_tokens * count))
    return {EXPERTS: TokenValues(runs=Array.of([[num_tokens, count]], "int32"), values=values)}


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk where the folder is or will be."""
    existing: Sequence[Path] = [path for path in (folder, *folder.resolve().parents) if path.exists()]
    return shutil.disk_usage(existing[0]).free
