"""One of the processes that train together: its share of the micro-batches, and its part of masters and optimizer.

Every rank gets the whole batch and the plan and splits it in the same way. With n ranks, it computes each n-th
micro-batch with the denominators of the whole batch; DeepSpeed adds the gradients up. All ranks take the same number of
forward and backward passes, since under ZeRO each pass needs all ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from rftstream.backends.base import CRITIC, POLICY, OptimizerSettings
from rftstream.backends.deepspeed.engine import import_deepspeed
from rftstream.backends.deepspeed.publishing import RankPart
from rftstream.backends.deepspeed.rank_processes import LOOPBACK, RankPlace, distributed
from rftstream.backends.deepspeed.sequence import SequenceGroup, SplitNetwork
from rftstream.backends.deepspeed.settings import CriticStart, RankSettings, share_of
from rftstream.backends.deepspeed.shards import KINDS, REFERENCE, count_anew
from rftstream.backends.deepspeed.trained import Read, TrainedNetwork
from rftstream.backends.torch import lora
from rftstream.backends.torch.critic import ValueNetwork, load_critic
from rftstream.backends.torch.network import (
    Network,
    NetworkSettings,
    load_model,
    network_of,
    recompute_activations,
    same_random,
)
from rftstream.backends.torch.training import BatchTraining
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.weights.checkpoint_names import CheckpointNames, names_of


class Rank(BatchTraining[TrainedNetwork]):
    """One process's part of masters and optimizer, and its share of each batch.

    Rank 0's backend makes one in its own process, and the other processes (rank.py) make one each. All of them get the
    same calls in the same order: `open`, `join`, then any number of `update`, `logprobs`, `values` and calls for the
    reference, and `leave`. Under ZeRO each forward and backward pass needs all ranks."""

    def __init__(
        self,
        place: RankPlace,
        store: Any,
        *,
        model: ModelSpec,
        optimizer: OptimizerSettings,
        settings: RankSettings,
        seed: int,
        images: ImageCache | None = None,
        critic: CriticStart | None = None,
    ) -> None:
        """`store`: rank 0's key-value store, through which the ranks find each other. `images`: pixels of the images
        that rows show; None if they show none. `critic`: None if there is none."""
        device = torch.device(model.device)
        if device.type != "cpu":  # ranks take consecutive GPUs, beginning with that of the run file
            device = torch.device(device.type, (device.index or 0) + place.local_rank)
        share = share_of(place, together=settings.sequence_parallel)
        super().__init__(device, None if critic is None else critic.settings, self._as_reference, share)
        self._store, self._images, self._critic_start = store, images, critic
        self._place, self.spec, self._optimizer = place, model, optimizer
        self._settings, self._seed = settings, seed
        self._group: SequenceGroup | None = None
        """The ranks that compute a micro-batch together with this one; None for this one alone."""
        self._model: Any = None
        self._critic_model: Any = None
        self._parameters: dict[str, nn.Parameter] = {}
        """Trained parameters of the policy, by the names under which they are saved."""
        self.reference: Network | SplitNetwork | None = None
        """The model of version 0, whole in every process; loaded when first needed."""
        self.renewed: list[Tensor] | None = None
        """This process's part of the masters of a renewed reference. None while the reference is version 0."""
        self._linear = torch.nn.functional.linear
        """The function before ZeRO 3 replaced it for the whole process."""
        self._environment: dict[str, str | None] = {}
        """Environment variables that `join` changed -> their values before; None for those that were not set."""
        self.part: RankPart | None = None
        """This rank's part of versions; None before the first that all ranks publish."""
        self.names: CheckpointNames
        """Names of the model's own weights, from `open` on."""

    # ------------------------------------------------------------------------------------------ opening

    def open(self) -> None:
        """Load the whole model, and the critic; DeepSpeed splits them in `join`. Does not wait for other ranks."""
        torch.set_num_threads(self.spec.threads)
        torch.manual_seed(self._seed)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        import_deepspeed(self.device.type)
        self._model = load_model(self.spec, self.device)
        self.names = names_of(self._model, self.spec.folder)
        if self.spec.lora is None:
            self._parameters = dict(self._model.named_parameters())
        else:
            self._parameters = lora.add_adapters(self._model, self.spec, self.names)
        if self._critic_start is not None:
            self._critic_model = _new_critic(self._critic_start, self._model, self.device)
        if self._settings.gradient_checkpointing:
            for model in filter(None, (self._model, self._critic_model)):
                recompute_activations(model)

    def join(self, prefix: str) -> None:
        """Form the process group and DeepSpeed's engines with all ranks. `prefix`: the part of the store for the
        group."""
        deepspeed = import_deepspeed(self.device.type)
        settings = NetworkSettings.of(self._settings, self.device)
        network = self._network_of(self._model, always_sees=self._place.size > 1)
        if self.spec.lora is not None and settings.autocast is not None:
            lora.hold_frozen(self._model, settings.autocast)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=self._settings.timeout_s)
        self._set_environment()
        torch.distributed.init_process_group(
            backend,
            store=distributed.PrefixStore(prefix, self._store),
            rank=self._place.rank,
            world_size=self._place.size,
            timeout=timeout,
        )
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
        if self._settings.sequence_parallel > 1:
            self._group = SequenceGroup(
                self._place.rank,
                self._place.size,
                self._settings.sequence_parallel,
                timeout_s=self._settings.timeout_s,
            )
        networks, parameters = {POLICY: self._split(network)}, {POLICY: self._parameters}
        if self._critic_model is not None:
            networks[CRITIC] = self._split(ValueNetwork(self._critic_model, settings))
            parameters[CRITIC] = dict(self._critic_model.named_parameters())
        count_anew()
        for name, one in networks.items():
            self.trained[name] = TrainedNetwork(name, one, parameters[name], self._optimizer, self._settings)
        for group in [*distributed_c10d._world.pg_map]:  # DeepSpeed makes some with torch's 30 minutes
            distributed_c10d._set_pg_timeout(timeout, group)

    def _split(self, network: Network) -> Network | SplitNetwork:
        """Return the network as the ranks of a sequence group compute it together. ConfigError if the ranks would get
        out of step."""
        if network.computes_alone and self._place.size > 1:
            raise ConfigError(
                f"trainer.backend: 'deepspeed' on {self._place.size} devices cannot compute {self.spec.name}, whose "
                "rows each take a pass of their own; use 'torch', or one device"
            )
        if self._group is None:
            return network
        exact = NetworkSettings.of(self._settings, self.device).autocast is None
        return SplitNetwork(network, self._group, near=1e-3 if exact else 0.1)

    def leave(self) -> None:
        """Leave the process group, free the models, and restore the environment."""
        self._end_part()
        for trained in self.trained.values():
            trained.close()
        torch.nn.functional.linear = self._linear
        opened = self._model is not None
        self._model = self._critic_model = self.reference = self.renewed = self._group = None
        self.trained, self._parameters = {}, {}
        if opened:  # otherwise it is closed twice, and searching all objects takes long
            gc.collect()
        if torch.distributed.is_initialized():
            import deepspeed

            deepspeed.comm.destroy_process_group()
            deepspeed.comm.comm.cdb = None  # otherwise it takes the next group for this one
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment = {}

    def _set_environment(self) -> None:
        """Set the rank and the address to listen on, which DeepSpeed, gloo and NCCL read only from the environment."""
        wanted = {
            "RANK": str(self._place.rank),
            "WORLD_SIZE": str(self._place.size),
            "LOCAL_RANK": str(self.device.index or 0),
        }
        if self._place.host == LOOPBACK and sys.platform == "linux":
            wanted |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        elif "GLOO_SOCKET_IFNAME" not in os.environ:
            # By default gloo listens on the address of this host's own name, which may be the loopback.
            if (interface := self._place.interface()) is not None:
                wanted["GLOO_SOCKET_IFNAME"] = interface
        self._environment = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)

    # ------------------------------------------------------------------------------------------ training

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """Yield a network that computes as the reference.

        A renewed reference replaces the policy meanwhile. If adapters are trained, version 0 is the model without them.
        After an error nothing is restored, since the ranks end then."""
        if self.renewed is not None:
            self.swap_reference()
            yield self.trained[POLICY].network
            self.swap_reference()
        elif self.spec.lora is not None:
            with lora.adapters_off(self._model):
                yield self.trained[POLICY].network
        else:
            yield self._open_reference()

    def _open_reference(self) -> Network | SplitNetwork:
        if self.reference is None:
            with same_random(self.device):
                model = load_model(self.spec, self.device).requires_grad_(False)
                self.reference = self._split(self._network_of(model))
        return self.reference

    def _network_of(self, model: Any, *, always_sees: bool = False) -> Network:
        settings = NetworkSettings.of(self._settings, self.device)
        return network_of(model, settings, self.spec, self._images, always_sees=always_sees)

    def renew_reference(self) -> None:
        """Make the current policy the reference. Does not wait for other ranks."""
        self.renewed, self.reference = self.trained[POLICY].shards.copy_masters(), None

    def swap_reference(self) -> None:
        """Exchange the masters of the policy and of a renewed reference."""
        assert self.renewed is not None
        shards = self.trained[POLICY].shards
        policy = shards.copy_masters()
        shards.restore_masters(self.renewed)
        self.renewed = policy

    # ------------------------------------------------------------------------------------------ state

    def gather(self, network: str, kind: str, name: str) -> Tensor:
        """Return a whole tensor, from the parts of all ranks."""
        return self.trained[network].shards.gather(kind, name)

    def give(self, keep: Callable[[str, str, str, Tensor], None] | None = None) -> None:
        """Read all masters and moments together with the other ranks. Rank 0 passes `keep`, which gets network, kind,
        name and the whole tensor of each."""
        for network, trained in self.trained.items():
            for kind in KINDS:
                for name in trained.shapes:
                    value = trained.shards.gather(kind, name)
                    if keep is not None:
                        keep(network, kind, name, value)

    def take_part(self, name: str, parent: str, store: Mapping[str, Any], prefix: str) -> None:
        """Copy this rank's tensors of a version, which its `part` then writes.

        `name`, `parent`: stems of the names, empty for no parent. `store`, `prefix`: as `RankPart` describes them."""
        if self.part is None or self.part.prefix != prefix:
            self._end_part()
            self.part = RankPart(
                self._place,
                self.trained[POLICY].shards,
                self.names if self.spec.lora is None else None,
                model=self.spec.name,
                dtype=self.spec.dtype,
                threads=self.spec.threads,
                store=store,
                prefix=prefix,
            )
            if self._place.rank:
                self.part.serve(self._place)
        version = VersionName.of_stem(name)
        assert version is not None, "rank 0 made it"
        self.part.take(version, VersionName.of_stem(parent))

    def _end_part(self) -> None:
        if self.part is not None and self._place.rank:
            self.part.end(self._store)
        self.part = None

    def load(self, network: str, moments: bool, num_steps: float, read: Read | None = None) -> None:
        """Restore a network from a checkpoint. Rank 0 passes `read`."""
        self.trained[network].load(moments, num_steps, read)

    def load_reference(self, renewed: bool, read: Read | None = None) -> None:
        """Restore a renewed reference, or go back to version 0. The policy has to be loaded afterwards.

        Rank 0 passes `read`. The others pass None and receive the tensors from rank 0."""
        self.renewed = None
        if renewed:
            self.trained[POLICY].receive(REFERENCE, read)
            self.renew_reference()

    def first_critic(self) -> Read:
        """Return a function that reads the critic's initial weights."""
        assert self._critic_start is not None
        begun = _new_critic(self._critic_start, self._model, torch.device("cpu"))
        tensors = dict(begun.named_parameters())
        return lambda _, name: tensors[name].detach()


def _new_critic(start: CriticStart, policy: Any, device: torch.device) -> Any:
    """Return the initial critic for a policy."""
    with same_random(device):
        return load_critic(Path(start.folder), device, vocabulary=int(policy.config.get_text_config().vocab_size))
