"""One of the processes that train together: its share of the micro-batches, and its part of masters and optimizer.

Every rank is told the whole batch and the plan, splits it as all others do, and computes each n-th micro-batch with the
denominators of the whole; DeepSpeed adds the gradients up. All ranks take the same number of forward and backward
passes, since under ZeRO each of these is a meeting of all.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import OptimizerSettings, UpdatePlan
from rftstream.backends.deepspeed.engine import EngineModule, EngineNetwork, import_deepspeed
from rftstream.backends.deepspeed.rank_processes import LOOPBACK, RankPlace
from rftstream.backends.deepspeed.shards import KINDS, MASTER, MOMENTS, REFERENCE, count_anew, shards_of
from rftstream.backends.deepspeed.shared_passes import RankUpdate, SharedPasses
from rftstream.backends.passes import micro_inputs
from rftstream.backends.torch import lora
from rftstream.backends.torch.inputs import Inputs, make_inputs
from rftstream.backends.torch.network import Network, NetworkSettings, load_model, recompute_activations
from rftstream.backends.torch.optimizer import adamw
from rftstream.models.image_inputs import ImageCache
from rftstream.models.seeing import SeeingModel
from rftstream.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Settings of the backend that are the same for all ranks."""

    stage: int
    deepspeed: Mapping[str, Any]
    """The whole configuration of DeepSpeed's engine."""
    packing: bool
    gradient_checkpointing: bool
    autocast: str
    max_logits_bytes: int
    timeout_s: float
    seed: int


class Rank:
    """One process's part of masters and optimizer, and its share of each batch.

    Rank 0's backend makes one in its own process, and the other processes (rank.py) make one each. The calls come in
    the same order in all of them: `load_model`, `join`, then `update`, `logprobs`, `load` and the calls for the
    reference in any number, and `close`. Under ZeRO each forward and backward pass is a meeting of all ranks."""

    def __init__(
        self,
        place: RankPlace,
        *,
        model: ModelSpec,
        optimizer: OptimizerSettings,
        settings: RankSettings,
        images: ImageCache | None = None,
    ) -> None:
        """`images`: pixels of the images that rows show; None if they show none."""
        self._images = images
        self._place, self._spec, self._optimizer, self._settings = place, model, optimizer, settings
        self.device = torch.device(model.device)
        if self.device.type != "cpu":  # ranks take the GPUs from that of the run file on
            self.device = torch.device(self.device.type, (self.device.index or 0) + place.local_rank)
        self._model: Any = None
        self._parameters: dict[str, nn.Parameter] = {}
        """Trained parameters, by the names that they are published and saved under."""
        self._network: Any = None
        self._reference: Network | None = None
        """The model of version 0, whole in every process; loaded when it is first needed."""
        self._renewed: list[Tensor] | None = None
        """This process's part of the masters of a renewed reference. None while the reference is version 0."""
        self._engine: Any = None
        self.shards: Any = None
        self._rounds_left = 0
        self._linear = torch.nn.functional.linear
        """As it was before ZeRO 3 put its own in its place, for the whole process."""
        self._environment: dict[str, str | None] = {}
        """Environment variables that `join` changed, as they were before; None for those that were not set."""
        self.shapes: dict[str, torch.Size] = {}
        """Shapes of all trained parameters (of adapters, where those are trained), by name; tied ones once."""
        self.base_names: list[str] = []
        """Names of the model's own weights, where adapters are trained."""

    # ------------------------------------------------------------------------------------------ opening

    def load_model(self) -> None:
        """Load the whole model; DeepSpeed takes it apart in `join`. Does not wait for other ranks."""
        torch.set_num_threads(self._spec.threads)
        torch.manual_seed(self._settings.seed)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        import_deepspeed(self.device.type)
        self._model = load_model(self._spec, self.device)
        if self._spec.lora is None:
            self._parameters = dict(self._model.named_parameters())
        else:
            self._parameters = lora.add_adapters(self._model, self._spec)
            self.base_names = lora.base_names(self._model)
        if self._settings.gradient_checkpointing:
            recompute_activations(self._model)

    def join(self, store: Any) -> None:
        """Form the process group and DeepSpeed's engine with all ranks.

        `store` is a key-value store of torch, by which the ranks find each other."""
        deepspeed = import_deepspeed(self.device.type)
        settings = NetworkSettings.of(self._settings, self.device)
        network = self._network_of(self._model, always_sees=self._place.size > 1)
        if self._spec.lora is not None and settings.autocast is not None:
            lora.hold_frozen(self._model, settings.autocast)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._set_environment()
        torch.distributed.init_process_group(
            backend,
            store=store,
            rank=self._place.rank,
            world_size=self._place.size,
            timeout=timedelta(seconds=self._settings.timeout_s),
        )
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
        parameters = self._parameters
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        module = EngineModule(network)
        count_anew()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports a compiler
            self._engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=adamw(list(parameters.values()), self._optimizer),
                config=dict(self._settings.deepspeed),
                dist_init_required=False,
            )
        if self._settings.stage == 3:
            head = network.model.get_output_embeddings()
            for parameter in () if head is None else head.parameters(recurse=False):
                deepspeed.zero.register_external_parameter(module, parameter)  # used outside of its own module
        self.shards = shards_of(self._engine, self._settings.stage, parameters, self.shapes)
        self._network = EngineNetwork(self._engine, network)

    def close(self) -> None:
        """Leave the process group, free the model, and put the environment back."""
        if self._engine is not None:
            self._engine.destroy()
        torch.nn.functional.linear = self._linear
        self._network = self._engine = self.shards = self._model = self._reference = None
        self._renewed = None
        self._parameters = {}
        gc.collect()
        if torch.distributed.is_initialized():
            import deepspeed

            deepspeed.comm.destroy_process_group()
            deepspeed.comm.comm.cdb = None  # else it takes the next group for this one
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment = {}

    def _set_environment(self) -> None:
        """Set what DeepSpeed, gloo and NCCL read only from the environment: the rank, and where to listen."""
        wanted = {
            "RANK": str(self._place.rank),
            "WORLD_SIZE": str(self._place.size),
            "LOCAL_RANK": str(self.device.index or 0),
        }
        if self._place.host == LOOPBACK and sys.platform == "linux":
            wanted |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        elif "GLOO_SOCKET_IFNAME" not in os.environ:
            # By itself gloo listens where this host's own name leads, which may be the loopback.
            if (interface := self._place.interface()) is not None:
                wanted["GLOO_SOCKET_IFNAME"] = interface
        self._environment = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)

    # ------------------------------------------------------------------------------------------ training

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> RankUpdate:
        """Train on a batch. All ranks get the same rows and plan, and take the same number of passes."""
        passes = SharedPasses(
            self._network,
            rows,
            plan,
            self.device,
            whole_groups="whole_groups" in algorithm.needs,
            rank=self._place.rank,
            size=self._place.size,
        )
        before = self.shards.copy() if passes.num_steps > 1 else None
        if passes.wants_proximal(algorithm):
            passes.compute_proximal()
            self._look(passes.num_idle, self._network)
        if "reference_logprobs" in algorithm.needs:
            with self._as_reference() as reference:
                passes.compute_reference(reference)
                self._look(passes.num_idle, reference)
        taken = RankUpdate(passes, [], False)
        for step in range(passes.num_steps):
            number = step % len(passes.minibatches)
            minibatch, self._rounds_left = passes.minibatches[number], passes.num_rounds[number]
            passes.accumulate(minibatch, algorithm, backward=self._backward)
            while self._rounds_left:
                self._backward(self._idle_loss("entropy" in algorithm.needs))
            taken.norms.append(self.shards.step(plan.lr, plan.max_grad_norm))
            if not math.isfinite(taken.norms[-1]):
                if before is not None:
                    self.shards.restore(before)
                taken.skipped = True
                break
        return taken

    def _backward(self, loss: Tensor) -> None:
        """Compute gradients of a share of the loss.

        DeepSpeed takes the mean over ranks, and the loss is a share of a sum, so it is multiplied by their number. A
        loss that is not finite makes every gradient a NaN, in this rank and so in all: all leave the step out."""
        self._rounds_left -= 1
        self._engine.set_gradient_accumulation_boundary(self._rounds_left == 0)
        factor = torch.where(loss.detach().isfinite(), float(self._place.size), math.nan)
        self._engine.backward(loss * factor, scale_wrt_gas=False)

    def _idle_loss(self, entropy_gradient: bool) -> Tensor:
        """Return a loss of zero that went through the same outputs as the losses of the other ranks.

        ZeRO 3 counts which outputs have a gradient. A rank that counted others would wait for ever."""
        outputs = self._network.logprobs(self._idle_inputs(), entropy_gradient=entropy_gradient)
        nothing: Tensor = (outputs[0].sum() + outputs[1].sum()) * 0.0
        return nothing

    def logprobs(
        self, rows: Sequence[TrainingRow], tokens_per_microbatch: int, *, reference: bool
    ) -> list[tuple[int, np.ndarray]]:
        """Return the logprobs of this rank's share of the rows: (number of the row, float32 [T])."""
        parts = micro_inputs(rows, tokens_per_microbatch, self._network, self.device)
        share = parts[self._place.rank :: self._place.size]
        result = []
        with self._as_reference() if reference else contextlib.nullcontext(self._network) as network:
            for numbers, inputs in share:
                with torch.no_grad():
                    logprobs_BT = network.logprobs(inputs)[0].float().cpu().numpy()
                for place, number in enumerate(numbers.tolist()):
                    result.append((number, logprobs_BT[place, : len(rows[number].token_ids)]))
            self._look(-(-len(parts) // self._place.size) - len(share), network)
        return result

    def _look(self, count: int, network: Any) -> None:
        """Take forward passes only because the other ranks take them; none where each rank computes alone."""
        for _ in range(count if network is self._network else 0):
            with torch.no_grad():
                network.logprobs(self._idle_inputs())

    def _idle_inputs(self) -> Inputs:
        ones = np.ones(2, np.float32)
        row = TrainingRow(
            token_ids=np.zeros(2, np.int32),
            loss_mask=np.asarray([0, 1], np.float32),
            behavior_logprobs=ones,
            advantages=ones,
        )
        return make_inputs([row], self.device, packed=self._network.packs)

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """Give a network that computes as the reference does.

        A renewed reference takes the policy's place meanwhile. Where adapters are trained, version 0 is the model
        without them. After an error nothing is put back, since the ranks end then."""
        if self._renewed is not None:
            self.swap_reference()
            yield self._network
            self.swap_reference()
        elif self._spec.lora is not None:
            with lora.adapters_off(self._model):
                yield self._network
        else:
            yield self._open_reference()

    def _open_reference(self) -> Network:
        if self._reference is None:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                model = load_model(self._spec, self.device).requires_grad_(False)
                self._reference = self._network_of(model)
        return self._reference

    def _network_of(self, model: Any, *, always_sees: bool = False) -> Network:
        return Network(
            model,
            NetworkSettings.of(self._settings, self.device),
            seeing=SeeingModel.of(model, self._spec.folder),
            shown=None if self._images is None else self._images.inputs,
            always_sees=always_sees,
        )

    @property
    def renewed(self) -> bool:
        """Whether the reference is a later version than 0."""
        return self._renewed is not None

    def renew_reference(self) -> None:
        """Make the policy as it is now the reference. Does not wait for other ranks."""
        self._renewed, self._reference = self.shards.copy_masters(), None

    def swap_reference(self) -> None:
        """Exchange the masters of the policy and of a renewed reference."""
        assert self._renewed is not None
        policy = self.shards.copy_masters()
        self.shards.restore_masters(self._renewed)
        self._renewed = policy

    # ------------------------------------------------------------------------------------------ state

    def load(self, moments: bool, num_steps: float, renewed: bool, read: Callable[[str, str], Tensor] | None) -> None:
        """Take over all masters, moments if there are any, and a renewed reference.

        Rank 0 gives `read`, a function from kind and name to the whole tensor. The others give None and receive the
        tensors from rank 0."""
        self.shards.forget_moments()
        self._renewed = None
        if renewed:
            self._receive(REFERENCE, read)
            self.renew_reference()
        for kind in KINDS if moments else (MASTER,):
            self._receive(kind, read)
        self.shards.num_steps = num_steps

    def _receive(self, kind: str, read: Callable[[str, str], Tensor] | None) -> None:
        for name, shape in self.shapes.items():
            if read is None:
                value = torch.empty(shape, dtype=torch.float32, device=self.device)
            else:
                value = read(kind, name).to(self.device, torch.float32).contiguous()
            torch.distributed.broadcast(value, src=0)
            with torch.no_grad():
                self.shards.put(MASTER if kind == REFERENCE else kind, name, value)
        if kind not in MOMENTS:
            self.shards.refresh()
