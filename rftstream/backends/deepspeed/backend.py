"""Several processes, one model: DeepSpeed's ZeRO over float32 masters and AdamW, in as many processes as one likes.

This process is rank 0. It has the batch, tells the others of it (rank_processes.py), does its share as they do
(rank_training.py), publishes and keeps checkpoints, tensor by tensor. These are the torch backend's files, whole, so
that any number of processes, any stage and either backend goes on from them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import OptimizerSettings, Update, UpdatePlan
from rftstream.backends.deepspeed.rank_processes import RankPlace, Ranks
from rftstream.backends.deepspeed.rank_training import Rank, RankSettings
from rftstream.backends.deepspeed.shards import MASTER, MOMENTS, REFERENCE
from rftstream.backends.deepspeed.shared_passes import RankUpdate
from rftstream.backends.deepspeed.wire import algorithm_out, array_in, image_bytes, row_out, spec_out
from rftstream.backends.passes import check_needs
from rftstream.backends.torch import lora
from rftstream.errors import BackendError, ConfigError, require_package
from rftstream.models import folder as model_folder
from rftstream.models.image_inputs import ImageCache
from rftstream.models.spec import ModelSpec
from rftstream.weights.snapshot import DTYPES, ITEM_BYTES, RawTensor, write_snapshot
from rftstream.weights.tensors import REFERENCE_FILE, SERVED, raw

log = logging.getLogger(__name__)

OWNED = {
    "train_batch_size": "a batch is what the feeder makes: feeder.groups_per_batch and feeder.group_size",
    "train_micro_batch_size_per_gpu": "trainer.tokens_per_microbatch",
    "gradient_accumulation_steps": "trainer.tokens_per_microbatch",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "trainer.adam_betas, trainer.adam_eps and trainer.weight_decay",
    "scheduler": "trainer.lr and its schedule",
    "fp16": "masters are float32; backends.deepspeed.autocast",
    "bf16": "masters are float32; backends.deepspeed.autocast",
    "amp": "backends.deepspeed.autocast",
    "torch_autocast": "backends.deepspeed.autocast",
    "zero_optimization.stage": "backends.deepspeed.stage",
    "zero_optimization.compute_grad_norm": "the norm is always needed",
    "zero_optimization.zenflow": "nothing: a step ends before the next begins",
}
"""Of DeepSpeed's settings those that are made here -> what to set instead."""


class DeepSpeedBackend:
    """A backend in several processes, as `RenewingBackend` describes it. The trainer's process is rank 0; the others
    do what it says."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        processes: Annotated[int, Meta(ge=1)] = 1
        """Ranks on this host: the trainer is the first and starts the others. On GPUs each takes one, from
        `trainer.device` on. Where DeepSpeed's launcher starts them, it says how many there are."""
        stage: Literal[0, 1, 2, 3] = 2
        """Of ZeRO, what is spread over the processes: 0 nothing, 1 masters and moments, 2 gradients too, 3 weights
        too."""
        offload_optimizer: bool = False
        """Masters and moments lie in main memory and the optimizer steps there. From stage 1 on."""
        offload_parameters: bool = False
        """The weights lie in main memory while they are not computed with. Stage 3 only."""
        config: dict[str, Any] = field(default_factory=dict)
        """DeepSpeed's own settings, merged into what is made of the others, e.g. `{ zero_optimization = {
        overlap_comm = true } }`. Batch sizes, clipping, optimizer and number formats are set elsewhere in the run
        file."""
        timeout_s: Annotated[float, Meta(gt=0)] = 45.0
        """How long ranks wait for one another before the trainer gives up and starts again. A rank may be behind by as
        much as a micro-batch of `trainer.tokens_per_microbatch` takes."""
        start_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
        """The same for loading the model."""
        packing: bool = True
        """As `backends.torch.packing`."""
        gradient_checkpointing: bool = False
        """Computes activations again in the backward pass."""
        autocast: Literal["auto", "none", "bfloat16"] = "auto"
        """Matrix products in bfloat16; auto: on GPUs only. Weights and masters are float32 always."""
        max_logits_bytes: Annotated[int, Meta(ge=1 << 16)] = 256 << 20
        """Logits that a rank holds at once, in float32."""

    @staticmethod
    def require() -> None:
        """Raise ConfigError if the package deepspeed is not installed."""
        advice = "pip install 'rftstream[deepspeed]' where the trainer runs"
        require_package("backend deepspeed", "deepspeed", advice=advice)

    def __init__(
        self,
        config: Config,
        *,
        model: ModelSpec,
        optimizer: OptimizerSettings,
        seed: int,
        images: ImageCache | None = None,
    ) -> None:
        """`images`: pixels of the images that rows show; None if they show none."""
        self.require()
        self._images = images
        self._config, self._spec, self._optimizer = config, model, optimizer
        self._settings = RankSettings(
            stage=config.stage,
            deepspeed=deepspeed_config(config),
            packing=config.packing,
            gradient_checkpointing=config.gradient_checkpointing,
            autocast=config.autocast,
            max_logits_bytes=config.max_logits_bytes,
            timeout_s=config.timeout_s,
            seed=seed,
        )
        self._ranks: Any = None
        self._rank: Any = None

    # ------------------------------------------------------------------------------------------ opening

    def open(self) -> None:
        if RankPlace.given() is None:
            self._check_gpus()
        model_folder.check_loadable(self._spec)  # before others are started, which would all say so
        self._ranks = Ranks(self._config.processes, threads=self._spec.threads, timeout_s=self._config.timeout_s)
        self._rank = Rank(
            self._ranks.place,
            model=self._spec,
            optimizer=self._optimizer,
            settings=self._settings,
            images=self._images,
        )
        arguments = {"model": spec_out(self._spec), "optimizer": self._optimizer, "settings": self._settings}
        prefix = secrets.token_hex(4)  # ranks may have met before
        try:
            self._call("open", arguments, self._rank.load_model, timeout_s=self._config.start_timeout_s)
            self._call("join", {"prefix": prefix}, lambda: self._rank.join(self._ranks.within(prefix)))
        except BaseException:
            self.close()
            raise

    def _call(
        self, what: str, arguments: Mapping[str, Any], local: Callable[[], Any], *, timeout_s: float | None = None
    ) -> tuple[Any, list[Any]]:
        if self._rank.device.type == "cuda":
            torch.cuda.set_device(self._rank.device)  # which each thread has its own of, and DeepSpeed asks for
        return self._ranks.call(what, arguments, local, timeout_s=timeout_s)  # type: ignore[no-any-return]

    def _call_with(
        self, rows: Sequence[TrainingRow], what: str, more: Callable[[], Mapping[str, Any]], local: Callable[[], Any]
    ) -> tuple[Any, list[Any]]:
        """Make a call that has the rows, their images, and more as arguments. Nothing is packed if there are no other
        ranks. They get images as they are stored, which is less than their pixels."""
        if self._ranks.place.size == 1:
            return self._call(what, {}, local)
        media = image_bytes(rows, self._images)
        return self._call(what, {"rows": [row_out(row) for row in rows], "media": media, **more()}, local)

    def _check_gpus(self) -> None:
        size, device = self._config.processes, torch.device(self._spec.device)
        if device.type == "cuda" and (device.index or 0) + size > (found := torch.cuda.device_count()):
            raise ConfigError(
                f"backends.deepspeed.processes: {size} from trainer.device {self._spec.device} on, but there are "
                f"{found} GPUs; each process needs one"
            )

    def close(self) -> None:
        if self._ranks is None:
            return
        ranks, rank = self._ranks, self._rank
        self._ranks = self._rank = None
        try:
            if not ranks.ended:
                ranks.call("leave", {}, rank.close)
        except BackendError as error:
            log.warning("%s", error)  # it has nothing more to do
        finally:
            rank.close()
            ranks.end()

    # ------------------------------------------------------------------------------------------ training

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        check_needs(algorithm, "deepspeed")
        size = self._ranks.place.size
        plan = dataclasses.replace(plan, tokens_per_microbatch=even_budget(rows, plan, size))
        taken: RankUpdate
        taken, others = self._call_with(
            rows,
            "update",
            lambda: {"algorithm": algorithm_out(algorithm), "plan": plan},
            lambda: self._rank.update(rows, algorithm, plan),
        )
        passes = taken.passes
        for part in others:
            passes.add_part(part)
        if taken.skipped:
            found = {"loss": passes.part()["losses"][-1], "grad_norm": taken.norms[-1], "num_tokens": passes.num_tokens}
            return Update(metrics=found, skipped=True)
        metrics = {
            "num_tokens": passes.num_tokens,
            "optimizer_steps": float(len(taken.norms)),
            "lr": plan.lr,
            "microbatches": float(passes.num_of_all),
            "ranks": float(size),
        }
        if taken.norms:
            metrics |= {"grad_norm": sum(taken.norms) / len(taken.norms), **passes.metrics(algorithm)}
        return Update(metrics=metrics)

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int = 16384) -> list[np.ndarray]:
        """Return the policy's logprobs of each row's unmasked tokens now: float32 [T], 0 elsewhere."""
        return self._logprobs(rows, tokens_per_microbatch, reference=False)

    def reference_logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the same logprobs under the reference."""
        return self._logprobs(rows, tokens_per_microbatch, reference=True)

    def _logprobs(
        self, rows: Sequence[TrainingRow], tokens_per_microbatch: int, *, reference: bool
    ) -> list[np.ndarray]:
        mine, others = self._call_with(
            rows,
            "logprobs",
            lambda: {"tokens_per_microbatch": tokens_per_microbatch, "reference": reference},
            lambda: self._rank.logprobs(rows, tokens_per_microbatch, reference=reference),
        )
        found = dict(mine)
        for part in others:
            found.update((number, array_in(array)) for number, array in part)
        return [found.get(number, np.zeros(len(row.token_ids), np.float32)) for number, row in enumerate(rows)]

    def renew_reference(self) -> None:
        """Make the policy as it is now the reference. It stays spread over the processes as the masters are."""
        self._call("renew_reference", {}, self._rank.renew_reference)

    # ------------------------------------------------------------------------------------------ state

    def served_tensors(self) -> Mapping[str, RawTensor]:
        return _Served(self._rank.shapes, self._gather, self._spec.dtype)

    def _gather(self, kind: str, name: str) -> Tensor:
        if kind == MASTER and self._config.stage < 3:  # here already
            return self._rank.shards.gather(kind, name)  # type: ignore[no-any-return]
        found, _ = self._call("gather", {"kind": kind, "name": name}, lambda: self._rank.shards.gather(kind, name))
        return found  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """Write the same files as the torch backend does."""
        shapes = self._rank.shapes
        _write(folder / "masters.safetensors", shapes, "float32", lambda name: self._gather(MASTER, name))
        moments = {f"{kind}/{name}": shape for kind in MOMENTS for name, shape in shapes.items()}
        moments |= {f"step/{name}": torch.Size(()) for name in shapes}
        num_steps = torch.tensor(self._rank.shards.num_steps, dtype=torch.float32)

        def moment(key: str) -> Tensor:
            kind, _, name = key.partition("/")
            return num_steps if kind == "step" else self._gather(kind, name)

        _write(folder / "optimizer.safetensors", moments, "float32", moment)
        if self._rank.renewed:
            with self._swapped():
                _write(folder / REFERENCE_FILE, shapes, "float32", lambda name: self._gather(MASTER, name))
        random = {"cpu": torch.get_rng_state()}
        _write(folder / "random.safetensors", {"cpu": random["cpu"].shape}, "uint8", random.__getitem__)
        about = {
            "backend": "deepspeed",
            "model": self._spec.name,
            "torch": torch.__version__,
            "stage": self._config.stage,
            "processes": self._ranks.place.size,
        }
        (folder / "backend.json").write_text(json.dumps(about) + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        """Put the reference in place of the policy inside of this context."""
        self._call("swap_reference", {}, self._rank.swap_reference)
        try:
            yield
        finally:
            self._call("swap_reference", {}, self._rank.swap_reference)

    def load(self, folder: Path) -> None:
        """Take over what this backend or the torch backend saved, with any stage and number of processes."""
        from safetensors import safe_open

        renewed, no_reference = (folder / REFERENCE_FILE).is_file(), cast(Any, contextlib.nullcontext())
        with (
            safe_open(folder / "masters.safetensors", framework="pt") as masters,
            safe_open(folder / "optimizer.safetensors", framework="pt") as moments,
            safe_open(folder / REFERENCE_FILE, framework="pt") if renewed else no_reference as reference,
        ):
            if set(masters.keys()) != self._rank.shapes.keys():
                raise ConfigError(
                    f"{folder}: the checkpoint is of another model than {self._spec.name}; start a new run"
                )
            known = set(moments.keys())
            steps = [float(moments.get_tensor(key)) for key in known if key.startswith("step/")]
            num_steps = max(steps, default=0.0)

            def read(kind: str, name: str) -> Tensor:
                if kind == MASTER:
                    return masters.get_tensor(name)  # type: ignore[no-any-return]
                if kind == REFERENCE:
                    return reference.get_tensor(name)  # type: ignore[no-any-return]
                key = f"{kind}/{name}"
                return moments.get_tensor(key) if key in known else torch.zeros(self._rank.shapes[name])

            self._call(
                "load",
                {"moments": bool(steps), "num_steps": num_steps, "renewed": renewed},
                lambda: self._rank.load(bool(steps), num_steps, renewed, read),
            )
        with safe_open(folder / "random.safetensors", framework="pt") as random:
            torch.set_rng_state(random.get_tensor("cpu"))

    def export(self, folder: Path) -> None:
        model_folder.copy_companions(self._spec, folder)
        if self._spec.lora is not None:
            lora.write_merged(folder, self._spec, dict(self.served_tensors()), self._rank.base_names)
            return
        dtype = SERVED[self._spec.dtype]
        _write(
            folder / "model.safetensors",
            self._rank.shapes,
            self._spec.dtype,
            lambda name: self._gather(MASTER, name).to(dtype),
            {"format": "pt"},
        )


class _Served(Mapping[str, RawTensor]):
    """The weights in the served dtype. Each is gathered when it is asked for."""

    def __init__(self, names: Iterable[str], gather: Callable[[str, str], Tensor], dtype: str) -> None:
        self._names, self._gather, self._dtype = dict.fromkeys(names), gather, SERVED[dtype]

    def __getitem__(self, name: str) -> RawTensor:
        if name not in self._names:
            raise KeyError(name)
        return raw(self._gather(MASTER, name).detach().to(self._dtype, copy=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write(
    path: Path,
    shapes: Mapping[str, torch.Size],
    dtype: str,
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file. Each tensor is read once, when it is written."""
    known = DTYPES[dtype]
    layout = {
        name: RawTensor(known, tuple(shape), np.broadcast_to(np.uint8(0), math.prod(shape) * ITEM_BYTES[known]).data)
        for name, shape in shapes.items()
    }
    with path.open("wb") as file:
        write_snapshot(file, layout, metadata, read=lambda name: raw(read(name)))


def deepspeed_config(settings: DeepSpeedBackend.Config) -> dict[str, Any]:
    """Return DeepSpeed's whole configuration."""
    for key, instead in OWNED.items():
        section, _, name = key.rpartition(".")
        table = settings.config.get(section, {}) if section else settings.config
        if isinstance(table, dict) and name in table:
            raise ConfigError(f"backends.deepspeed.config.{key}: is not to be set here; set instead {instead}")
    if settings.offload_optimizer and settings.stage == 0:
        raise ConfigError("backends.deepspeed.offload_optimizer: needs a stage of at least 1, got 0")
    if settings.offload_parameters and settings.stage != 3:
        raise ConfigError(f"backends.deepspeed.offload_parameters: needs stage 3, got {settings.stage}")
    zero: dict[str, Any] = {"stage": settings.stage}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    made = {
        "train_micro_batch_size_per_gpu": 1,  # a formality: what is computed at once is decided by its tokens
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # set for each step; without ZeRO it would clip at 1 by itself
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    merged = _merged(made, settings.config)
    for name in ("offload_optimizer", "offload_param"):
        table = merged["zero_optimization"].get(name)
        if isinstance(table, dict) and table.get("device") == "nvme":
            raise ConfigError(
                f"backends.deepspeed.config.zero_optimization.{name}.device: 'nvme' is not supported, for checkpoints "
                "are read from memory; use 'cpu'"
            )
    return merged


def _merged(made: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(made)
    for key, value in given.items():
        known = result.get(key)
        result[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return result


def even_budget(rows: Sequence[TrainingRow], plan: UpdatePlan, size: int) -> int:
    """Return the tokens of a micro-batch, at most what the plan says, so that all ranks have about as much to do."""
    if size == 1:
        return plan.tokens_per_microbatch
    lengths = [len(row.token_ids) for row in rows if row.loss_mask.any()]
    tokens = sum(lengths) / plan.minibatches
    num_rounds = max(math.ceil(tokens / (size * plan.tokens_per_microbatch)), 1)
    fair = tokens / (size * num_rounds) + max(lengths, default=0) / 2  # rows are not cut, so bins are not quite full
    return min(plan.tokens_per_microbatch, max(math.ceil(fair), 1))
