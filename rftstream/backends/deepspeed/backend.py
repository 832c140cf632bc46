"""Several processes, one model: DeepSpeed's ZeRO over float32 masters and AdamW, in any number of processes.

This process is rank 0. It has the batch and sends it to the others (rank_processes.py), computes its own share like the
others (rank_training.py), publishes versions, and saves checkpoints tensor by tensor. Checkpoints are the same whole
files as those of the torch backend. So any number of processes, any stage and either backend can resume from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends.base import POLICY, OptimizerSettings, Update, UpdatePlan
from rftstream.backends.deepspeed.checkpoint import (
    GatheredTensors,
    Restoring,
    SavedNetwork,
    swapped,
    write_layout,
    write_network,
    write_tensors,
)
from rftstream.backends.deepspeed.publishing import RanksWriter
from rftstream.backends.deepspeed.rank_processes import RankPlace
from rftstream.backends.deepspeed.settings import (
    CriticStart,
    RankSettings,
    check_gpus,
    check_min_ranks,
    check_sequence_parallel,
    deepspeed_config,
    even_budget,
)
from rftstream.backends.deepspeed.shards import MASTER, REFERENCE
from rftstream.backends.deepspeed.wire import algorithm_out, image_bytes
from rftstream.backends.deepspeed.worlds.steady import SteadyRanks
from rftstream.backends.passes import check_needs
from rftstream.backends.torch import lora
from rftstream.backends.torch.training import LearnedBatch, check_saved, in_order
from rftstream.errors import ConfigError, pip_install, require_package
from rftstream.models.folders import folder as model_folder
from rftstream.models.routers import check_sees_all
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.weights.snapshot import RawTensor
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.tensors import REFERENCE_FILE
from rftstream.weights.writer import VersionWriter

log = logging.getLogger(__name__)


class DeepSpeedBackend(SteadyRanks):
    """A backend in several processes, as `CriticBackend`, `RenewingBackend` and, in one process, `OffloadingBackend`
    describe it. The trainer's process is rank 0; the other ranks carry out its calls."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RankSettings):
        processes: Annotated[int, Meta(ge=1)] = 1
        """Ranks on this host: the trainer is the first and starts the others. On GPUs each takes one, from
        `trainer.device` on. If DeepSpeed's launcher starts them, its number counts instead."""
        start_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
        """Seconds that ranks wait for one another while the model is loaded, in the place of `timeout_s`."""
        min_ranks: Annotated[int, Meta(ge=1)] | None = None
        """Fewest ranks with which training goes on when another one dies. Rank 0 then keeps masters and moments in main
        memory, 24 bytes for each trained parameter, and a batch in whose middle a rank died is trained again from
        there. Ranks that come later take part from the next batch on. Null: the trainer starts again from its
        checkpoint when a rank dies, with all ranks."""
        last_call_s: Annotated[float, Meta(ge=0)] = 30.0
        """Seconds to wait for more ranks once there are `min_ranks`."""

    @staticmethod
    def require() -> None:
        """Raise ConfigError if the package deepspeed is not installed."""
        advice = f"{pip_install('rftstream[deepspeed]')} where the trainer runs"
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
        super().__init__(config, model=model, optimizer=optimizer, seed=seed, images=images)
        deepspeed_config(config)  # `Ranks` checks it
        check_min_ranks(config.min_ranks, config.processes, config.sequence_parallel)

    # ------------------------------------------------------------------------------------------ opening

    def hold_critic(self, settings: CriticConfig, folder: Path) -> None:
        self._critic = CriticStart(settings=settings, folder=str(folder))

    def open(self) -> None:
        config, device = self._config, torch.device(self._spec.device)
        place, processes = RankPlace.given(), config.processes
        if place is None:
            processes = check_gpus(processes, device, least=config.min_ranks)
        size = processes if place is None else place.size
        check_sequence_parallel(config.sequence_parallel, size, self._spec)
        model_folder.check_loadable(self._spec)  # before others are started, since all of them would report it
        self._open_ranks(processes, least=config.min_ranks, last_call_s=config.last_call_s)

    def _call_with(self, rows: Sequence[TrainingRow], what: str, **more: Any) -> tuple[Any, list[Any]]:
        """Make a call about rows. Other ranks get the stored bytes of images, which are smaller than pixels, and a
        description of the algorithm from which they can build it."""
        here = {"rows": rows, **more}
        if self._ranks.place.size == 1:
            return self._call(what, None, here)
        if "algorithm" in more:
            more["algorithm"] = algorithm_out(more["algorithm"])
        return self._call(what, {"rows": rows, "media": image_bytes(rows, self._images), **more}, here)

    # ------------------------------------------------------------------------------------------ training

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        check_needs(algorithm, "deepspeed", critic=self._critic is not None)
        if plan.router_aux_coef:
            check_sees_all(self._config.sequence_parallel)
        return self._steadily(lambda: self._update(rows, algorithm, plan))

    def _update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        size = self._ranks.place.size
        groups = size // self._config.sequence_parallel
        plan = dataclasses.replace(
            plan,
            tokens_per_microbatch=even_budget(rows, plan, groups, shared=self._rank.trained[POLICY].network.shares),
        )
        batch: LearnedBatch
        batch, others = self._call_with(rows, "update", algorithm=algorithm, plan=plan)
        for parts in others:
            for learner, part in zip(batch.learners, parts, strict=True):
                learner.passes.add_part(part)
        more = {} if self._members is None else {"rank_world": float(self._ranks.place.world)}
        update = batch.update(algorithm, plan, ranks=float(size), **more)
        if self._kept is not None and not update.skipped:
            self._keep(self._kept.reference)
        return update

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int = 16384) -> list[np.ndarray]:
        """Return the policy's logprobs of each row's unmasked tokens now: float32 [T], 0 elsewhere."""
        return self._by_row(rows, "logprobs", tokens_per_microbatch=tokens_per_microbatch)

    def reference_logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the same logprobs under the reference."""
        return self._by_row(rows, "logprobs", tokens_per_microbatch=tokens_per_microbatch, reference=True)

    def values(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        return self._by_row(rows, "values", tokens_per_microbatch=tokens_per_microbatch)

    def _by_row(self, rows: Sequence[TrainingRow], what: str, **more: Any) -> list[np.ndarray]:
        """Return the values that all ranks together computed for the rows: float32 [T] of each."""
        found, others = self._steadily(lambda: self._call_with(rows, what, **more))
        for part in others:
            found |= part
        return in_order(rows, found)

    def leave_device(self) -> None:
        if self._members is not None:
            raise ConfigError(
                "trainer.colocate: found backends.deepspeed.min_ranks, expected none of it, for one device is had in "
                "turns; leave one of them out"
            )
        if self._ranks.place.size > 1:
            raise ConfigError(
                f"trainer.colocate: DeepSpeed's launcher started {self._ranks.place.size} ranks, expected one process, "
                "for one device is had in turns; start the trainer alone, or leave colocate out"
            )
        super().leave_device()

    def renew_reference(self) -> None:
        """Make the current policy the reference. It stays distributed over the processes as the masters are."""
        self._steadily(lambda: self._call("renew_reference"))
        if self._kept is not None:
            self._kept.renew_reference()

    # ------------------------------------------------------------------------------------------ state

    def served_tensors(self) -> Mapping[str, RawTensor]:
        names = self._rank.names if self._spec.lora is None else None
        return GatheredTensors(self._rank.trained[POLICY].shapes, self._gather, self._spec.dtype, names)

    def version_writer(self, store: ObjectStore) -> VersionWriter | None:
        """Return the writer of versions by all ranks, as `PublishingBackend` describes it."""
        place = RankPlace.given()
        size = self._config.processes if place is None else place.size
        on_this_host = place is None or os.environ.get("LOCAL_WORLD_SIZE") == str(size)
        if self._config.min_ranks is not None:
            return None  # this process has the whole state, and a rank may be lost at any time
        if size == 1 or store.is_private or (store.is_local and not on_this_host):
            return None
        return RanksWriter(store, self._call, lambda: (self._ranks, self._rank))

    def _gather(self, kind: str, name: str, *, network: str = POLICY) -> Tensor:
        shards = self._rank.trained[network].shards
        if (held := self._held) is not None:
            return held.read(network, kind, name)
        if kind == MASTER and self._config.stage < 3:  # here already
            return shards.gather(kind, name)  # type: ignore[no-any-return]
        found, _ = self._call("gather", {"network": network, "kind": kind, "name": name})
        return found  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """Write the same files as the torch backend."""
        for network, trained in self._rank.trained.items():
            gather = functools.partial(self._gather, network=network)
            num_steps = trained.shards.num_steps if self._held is None else self._held.num_steps(network)
            write_network(folder, network, trained.shapes, num_steps, gather)
        if self._rank.renewed is not None:
            with contextlib.nullcontext(REFERENCE) if self._held is not None else swapped(self._call) as kind:
                masters = functools.partial(self._gather, kind)
                write_tensors(folder / REFERENCE_FILE, self._rank.trained[POLICY].shapes, "float32", masters)
        random = {"cpu": torch.get_rng_state()}
        write_tensors(folder / "random.safetensors", {"cpu": random["cpu"].shape}, "uint8", random.__getitem__)
        about = {
            "backend": "deepspeed",
            "model": self._spec.name,
            "torch": torch.__version__,
            "stage": self._config.stage,
            "processes": self._ranks.place.size,
        }
        (folder / "backend.json").write_text(json.dumps(about) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore what this backend or the torch backend saved, with any stage and number of processes."""
        self._steadily(lambda: self._load(folder))

    def _load(self, folder: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file

        restoring = Restoring(folder, self._rank, self._call)
        with SavedNetwork(folder, POLICY) as saved:
            check_saved(folder, POLICY, self._spec, saved.shapes, self._rank.trained[POLICY].shapes)
            restoring.load_reference()
            restoring.load(POLICY, saved.steps, saved.read)
        if self._critic is not None:
            restoring.load_critic()
        with safe_open(folder / "random.safetensors", framework="pt") as random:
            torch.set_rng_state(random.get_tensor("cpu"))
        if self._members is not None:
            path = folder / REFERENCE_FILE
            self._keep(load_file(path) if path.is_file() else None)

    def export(self, folder: Path) -> None:
        model_folder.copy_companions(self._spec, folder)
        layout, served = self._rank.names.layout(self._spec.dtype), self.served_tensors()
        if self._spec.lora is not None:
            lora.write_merged(folder, self._spec, dict(served), layout)
            return
        write_layout(folder / "model.safetensors", layout, served.__getitem__, {"format": "pt"})
