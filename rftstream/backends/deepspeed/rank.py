"""One of the processes that train together: its share of the micro-batches, and its part of masters and optimizer.

Every rank is told the whole batch and the plan, splits it as all others do, and computes each n-th micro-batch with
denominators of the whole; DeepSpeed adds the gradients up. All ranks take the same number of forward and backward
passes, since under ZeRO each of these is a meeting of all.

As a process it does what rank 0 says (deepspeed_ranks.py), which starts it so, or a launcher did: that starts all of
them alike, and the first becomes the command that is given.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import OptimizerSettings, UpdatePlan
from rftstream.backends.deepspeed.rank_processes import FOREVER, LOOPBACK, RankPlace, distributed, is_of_others
from rftstream.backends.deepspeed.shards import KINDS, MASTER, MOMENTS, REFERENCE, count_anew, shards_of
from rftstream.backends.deepspeed.wire import algorithm_in, array_out, pack, row_in, spec_in, unpack
from rftstream.backends.passes import Passes, micro_inputs
from rftstream.backends.torch import lora
from rftstream.backends.torch.inputs import Inputs, make_inputs
from rftstream.backends.torch.network import Network, NetworkSettings, load_model, recompute_activations
from rftstream.backends.torch.optimizer import adamw
from rftstream.errors import RftError
from rftstream.models.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The same for all ranks."""

    stage: int
    deepspeed: Mapping[str, Any]
    """DeepSpeed's configuration, whole."""
    packing: bool
    gradient_checkpointing: bool
    autocast: str
    max_logits_bytes: int
    timeout_s: float
    seed: int


class SharedPasses(Passes):
    """Of one rank: it keeps its share of the micro-batches, with denominators of all."""

    def __init__(
        self,
        network: Any,
        rows: Sequence[TrainingRow],
        plan: UpdatePlan,
        device: torch.device,
        *,
        whole_groups: bool,
        rank: int,
        size: int,
    ) -> None:
        super().__init__(network, rows, plan, device, whole_groups=whole_groups)
        self.num_of_all = self.num_microbatches
        self.num_rounds = [-(-len(one.inputs) // size) for one in self.minibatches]
        """Of each mini-batch: the forward and backward passes that every rank takes."""
        for one in self.minibatches:
            one.inputs = one.inputs[rank::size]
            one.proximal = one.reference = [None] * len(one.inputs)
        self.num_idle = sum(self.num_rounds) - self.num_microbatches
        """Of a pass over the batch: those that this rank takes for the sake of the others."""

    def part(self) -> dict[str, Any]:
        """What this rank added up, as plain numbers."""
        return {
            "losses": self._losses,
            "sums": {name: float(value) for name, value in self._sums.items()},
            "flops": self._flops,
            "num_read": self._num_read,
        }

    def add_part(self, part: Mapping[str, Any]) -> None:
        """Of another rank. Its tokens count already, since the denominators are of all."""
        self._losses = [mine + theirs for mine, theirs in zip(self._losses, part["losses"], strict=True)]
        self._add(part["sums"])
        self._flops += part["flops"]
        self._num_read += part["num_read"]


@dataclass(slots=True)
class RankUpdate:
    """What came of an update, in one rank; norms and skipping are the same in all."""

    passes: SharedPasses
    norms: list[float]
    skipped: bool


class _Module(nn.Module):
    """What DeepSpeed wraps: from inputs to logprobs, so that all weights are used inside of its forward pass."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.model = network.model
        self._network = network

    def forward(self, *, inputs: Inputs, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        return self._network.logprobs(inputs, entropy_gradient=entropy_gradient)


class _EngineNetwork:
    """A network for `Passes` that computes by DeepSpeed's engine."""

    def __init__(self, engine: Any, network: Network) -> None:
        self._engine = engine
        self.packs, self.flops = network.packs, network.flops

    def logprobs(self, inputs: Inputs, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        return self._engine(inputs=inputs, entropy_gradient=entropy_gradient)  # type: ignore[no-any-return]


class Rank:
    def __init__(
        self, place: RankPlace, *, model: ModelSpec, optimizer: OptimizerSettings, settings: RankSettings
    ) -> None:
        self._place, self._spec, self._optimizer, self._settings = place, model, optimizer, settings
        self.device = torch.device(model.device)
        if self.device.type != "cpu":  # ranks take the GPUs from the run file's one on
            self.device = torch.device(self.device.type, (self.device.index or 0) + place.local_rank)
        self._model: Any = None
        self._parameters: dict[str, nn.Parameter] = {}
        """That are trained, by the names that they travel under."""
        self._network: Any = None
        self._reference: Network | None = None
        """Version 0, whole in every process, loaded when it is first needed."""
        self._renewed: list[Tensor] | None = None
        """Masters of a later one: this process's part. None: it is version 0."""
        self._engine: Any = None
        self.shards: Any = None
        self._rounds_left = 0
        self._environment: dict[str, str | None] = {}
        """As it was before."""
        self.shapes: dict[str, torch.Size] = {}
        """Of all parameters, by name; tied ones once. Of adapters, where those are trained."""
        self.base_names: list[str] = []
        """Of the model's own weights, where adapters are trained."""

    # ------------------------------------------------------------------------------------------ opening

    def load_model(self) -> None:
        """Whole, in every process: DeepSpeed takes it apart afterwards. Meets nobody."""
        torch.set_num_threads(self._spec.threads)
        torch.manual_seed(self._settings.seed)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        _import_deepspeed(self.device.type)
        self._model = load_model(self._spec, self.device)
        if self._spec.lora is None:
            self._parameters = dict(self._model.named_parameters())
        else:
            self._parameters = lora.add_adapters(self._model, self._spec)
            self.base_names = lora.base_names(self._model)
        if self._settings.gradient_checkpointing:
            recompute_activations(self._model)

    def join(self, store: Any) -> None:
        """All ranks together from here on. `store`: a key-value store of torch's, with which they find each other."""
        deepspeed = _import_deepspeed(self.device.type)
        settings = NetworkSettings.of(self._settings, self.device)
        network = Network(self._model, settings)
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
        self.shapes = {name: one.shape for name, one in parameters.items()}
        module = _Module(network)
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
            for one in () if head is None else head.parameters(recurse=False):
                deepspeed.zero.register_external_parameter(module, one)  # used outside of its own module
        self.shards = shards_of(self._engine, self._settings.stage, parameters, self.shapes)
        self._network = _EngineNetwork(self._engine, network)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
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
        """DeepSpeed reads where it is from the environment, and nowhere else; gloo and NCCL where to listen."""
        wanted = {
            "RANK": str(self._place.rank),
            "WORLD_SIZE": str(self._place.size),
            "LOCAL_RANK": str(self.device.index or 0),
        }
        if self._place.host == LOOPBACK and sys.platform == "linux":
            wanted |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        self._environment = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)

    # ------------------------------------------------------------------------------------------ training

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> RankUpdate:
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
        """DeepSpeed takes the mean over ranks, the loss is a share of a sum. A loss that is not finite makes every
        gradient a NaN, in this rank and so in all, and all leave the step out."""
        self._rounds_left -= 1
        self._engine.set_gradient_accumulation_boundary(self._rounds_left == 0)
        factor = torch.where(loss.detach().isfinite(), float(self._place.size), math.nan)
        self._engine.backward(loss * factor, scale_wrt_gas=False)

    def _idle_loss(self, entropy_gradient: bool) -> Tensor:
        """Nothing, through all that the other ranks' losses go through: ZeRO 3 counts which outputs have a gradient,
        and a rank that counted otherwise would wait for the others for ever."""
        outputs = self._network.logprobs(self._idle_inputs(), entropy_gradient=entropy_gradient)
        nothing: Tensor = (outputs[0].sum() + outputs[1].sum()) * 0.0
        return nothing

    def logprobs(
        self, rows: Sequence[TrainingRow], tokens_per_microbatch: int, *, reference: bool
    ) -> list[tuple[int, np.ndarray]]:
        """Of this rank's share of the rows: number and float32 [T]."""
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
        """Forward passes for the sake of the other ranks, unless each computes alone."""
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
        """A network that computes as the reference does. A renewed one takes the policy's place meanwhile; of version 0
        it is the model without adapters, where those are trained. After an error nothing is put back, for then it is
        over with the ranks."""
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
                self._reference = Network(model, NetworkSettings.of(self._settings, self.device))
        return self._reference

    @property
    def renewed(self) -> bool:
        """Whether the reference is no longer version 0."""
        return self._renewed is not None

    def renew_reference(self) -> None:
        """It becomes the policy as it is now. Meets nobody."""
        self._renewed, self._reference = self.shards.copy_masters(), None

    def swap_reference(self) -> None:
        """A renewed one and the policy change places."""
        assert self._renewed is not None
        policy = self.shards.copy_masters()
        self.shards.restore_masters(self._renewed)
        self._renewed = policy

    # ------------------------------------------------------------------------------------------ state

    def load(self, moments: bool, num_steps: float, renewed: bool, read: Callable[[str, str], Tensor] | None) -> None:
        """All masters, and moments if there are any, and a renewed reference. Rank 0 reads, the others get them from
        it."""
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


def _import_deepspeed(device: str) -> Any:
    os.environ["DS_ACCELERATOR"] = device  # else it takes a GPU where there is one
    mlflow, sys.modules["mlflow"] = sys.modules.get("mlflow"), None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
    finally:  # its tuner would import it where it is installed, which takes longer than all else together
        sys.modules.pop("mlflow")
        if mlflow is not None:
            sys.modules["mlflow"] = mlflow
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls them
    # It would be compiled first, and whoever waits in it for a process that died waits without end; gloo doesn't.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


# --------------------------------------------------------------------------------------------- as a process


class _Calls:
    """What rank 0 may ask for."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._store = place.connect()
        self._rank: Any = None

    def open(self, model: dict[str, Any], optimizer: dict[str, Any], settings: dict[str, Any]) -> None:
        self._rank = Rank(
            self._place,
            model=spec_in(model),
            optimizer=msgspec.convert(optimizer, OptimizerSettings),
            settings=msgspec.convert(settings, RankSettings),
        )
        self._rank.load_model()

    def join(self, prefix: str) -> None:
        self._rank.join(distributed.PrefixStore(prefix, self._store))

    def update(self, rows: list[Any], algorithm: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
        taken = self._rank.update(
            [row_in(row) for row in rows], algorithm_in(algorithm), msgspec.convert(plan, UpdatePlan)
        )
        return taken.passes.part()  # type: ignore[no-any-return]

    def logprobs(self, rows: list[Any], tokens_per_microbatch: int, reference: bool) -> list[Any]:
        found = self._rank.logprobs([row_in(row) for row in rows], tokens_per_microbatch, reference=reference)
        return [(number, array_out(array)) for number, array in found]

    def gather(self, kind: str, name: str) -> None:
        self._rank.shards.gather(kind, name)

    def renew_reference(self) -> None:
        self._rank.renew_reference()

    def swap_reference(self) -> None:
        self._rank.swap_reference()

    def load(self, moments: bool, num_steps: float, renewed: bool) -> None:
        self._rank.load(moments, num_steps, renewed, None)

    def leave(self) -> None:
        self._rank.close()

    def end(self) -> None:
        """The process ends, too."""


def main() -> None:
    place = RankPlace.given()
    if place is None:
        raise SystemExit(
            "rftstream.backends.deepspeed.rank: found no RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, "
            "expected those of a launcher; for ranks on one host set backends.deepspeed.processes instead"
        )
    if place.rank == 0:
        os.execv(sys.executable, [sys.executable, "-m", "rftstream", *sys.argv[1:]])
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # rank 0 says when it is over
    serve(place)


def serve(place: RankPlace) -> None:
    """Does what rank 0 says until it says that it is over. Ends with it, however it ends."""
    threading.Thread(target=_end_with_rank_0, args=(place.connect(),), daemon=True).start()
    store, calls = place.connect(), _Calls(place)
    for number, what, arguments in _asked(store):
        try:
            result = getattr(calls, what)(**arguments)
        except Exception as error:
            log.debug("%s", what, exc_info=True)
            text = str(error) if isinstance(error, RftError) else f"{type(error).__name__}: {error}"
            store.set(f"failed/{place.rank}", pack({"what": what, "error": text, "of_others": is_of_others(error)}))
            raise SystemExit(1) from None
        store.set(f"done/{number}/{place.rank}", pack(result))
        if what == "end":
            return


def _asked(store: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    number = 0
    while True:
        store.wait([f"call/{number}"], FOREVER)
        what, arguments = unpack(store.get(f"call/{number}"))
        yield number, what, arguments
        number += 1


def _end_with_rank_0(store: Any) -> None:
    """Also while this process waits for others."""
    try:
        store.wait(["never"], FOREVER)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
