"""One process, one device: float32 masters and AdamW over any Hugging Face causal language model.

torch is imported only by functions that use it, since the settings are also read where nothing is trained.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends.base import CRITIC, MASTERS_FILE, MOMENTS_FILE, POLICY, OptimizerSettings, Update, UpdatePlan
from rftstream.backends.leaving import LeavesDevice
from rftstream.backends.stopping import UpdateStop
from rftstream.models.folders import folder as model_folder
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.models.vision.image_tokens import ImageTokens
from rftstream.weights.snapshot import RawTensor

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rftstream.backends.torch.network import Network
    from rftstream.backends.torch.optimizer import Masters

log = logging.getLogger(__name__)


def rounds_parameters(config: TorchBackend.Config, spec: ModelSpec, device: str) -> bool:
    """Return whether the model computes with bfloat16 weights on this kind of device."""
    if config.parameters != "auto" or spec.lora is not None:
        return config.parameters == "bfloat16" and spec.lora is None
    plain = not spec.as_classifier and ImageTokens.of(spec.folder) is None
    return plain and (config.autocast == "bfloat16" or (config.autocast == "auto" and device == "cuda"))


class TorchBackend(LeavesDevice):
    """A backend in one process on one device, as `CriticBackend`, `RenewingBackend`, `OffloadingBackend` and
    `StoppableBackend` describe it."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        packing: bool = True
        """Concatenate rows into one sequence without padding; they do not attend to each other. If the model cannot do
        that (this is tried), rows of similar lengths are padded together."""
        share_prefixes: bool = True
        """Compute tokens with which packed rows begin alike once: the prompt of siblings, histories that segments
        repeat. Rows give what they give by themselves; where the model cannot do that (this is tried), nothing is
        shared. Beginnings of fewer than 16 tokens are not shared."""
        gradient_checkpointing: bool = False
        """Recompute activations in the backward pass: a third slower, with the memory of one layer instead of all."""
        autocast: Literal["auto", "none", "bfloat16"] = "auto"
        """Matrix products in bfloat16; auto: only on GPUs. Masters, optimizer and logprobs are always float32."""
        parameters: Literal["auto", "float32", "bfloat16"] = "auto"
        """Data type of the weights that the model computes with. bfloat16: the weights are rounded from the float32
        masters after each step, to the same bits that are served in bfloat16; autocast is then on, and gradients of
        micro-batches are added up in float32. Checkpoints hold the masters and are the same in both cases. auto:
        bfloat16 if matrix products are in bfloat16, but float32 if the model is a classifier or is shown images.
        Adapters and the critic are always float32."""
        max_logits_bytes: Annotated[int, Meta(ge=1 << 16)] = 256 << 20
        """Bytes of float32 logits held at once, forward and backward. Further logits are recomputed in the backward
        pass."""
        offload_activations: bool = False
        """Keep what the backward pass needs in main memory until it comes (pinned if the device is a GPU). Together
        with `gradient_checkpointing` that is the input of each layer: long rows then take the memory of one layer. The
        bits are the same."""
        moments: Literal["float32", "8bit"] = "float32"
        """How AdamW's moments are held. 8bit: 2 bytes a parameter instead of 8, by bitsandbytes (the extra `quantize`);
        steps are rounded differently. A run keeps what it began with."""
        offload_optimizer: bool = False
        """Keep masters and moments in main memory, 12 bytes a parameter, and run the optimizer there, on the CPU. The
        device then holds weights and gradients, 8 bytes a parameter instead of 16. If the device is a CPU, the bits are
        the same and nothing is gained."""
        offload_parameters: bool = False
        """Keep everything in main memory between batches (pinned if the device is a GPU): parameters, masters, moments,
        the reference and the critic. The device is then free for others; each batch begins and ends with a copy of
        everything. The bits are the same. During a batch the device holds as much as without this setting."""
        compile: bool = False
        """Compile layers with torch.compile: fewer passes over memory, but minutes before the first batch. On a CPU
        this needs a C++ compiler. Results are rounded differently than without it. Passes without a backward pass (rows
        without an advantage) are compiled separately, when the first one comes."""
        freeze_vision_tower: bool = False
        """Keep the vision tower of a model with images unchanged; the layers that join it to the language model are
        still trained. Off by default, as in verl (prime-rl freezes it), so that the tower learns to see what rewards
        need. If on, backward passes end before the tower."""
        profile: tuple[Annotated[int, Meta(ge=0)], ...] = ()
        """Batches, counted from 0 since the trainer's start, for which a trace is written (batch-2.json), for
        ui.perfetto.dev. Such a batch takes longer. The first batches are slower than later ones."""
        profile_folder: str = "profiles"
        """Folder of the traces, relative to the folder in which the trainer was started."""

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
        import torch

        self._images = images
        self._config, self._spec, self._settings, self._seed = config, model, optimizer, seed
        self._device = torch.device(model.device)
        self._rounded = rounds_parameters(config, model, self._device.type)
        self.stopping = UpdateStop(closely=self._device.type == "cpu" and not config.compile)
        self._network: Any = None
        self._names: Any = None
        self._masters: Any = None
        self._trained: dict[str, Any] = {}
        """Network -> its masters."""
        self._training: Any = None
        self._reference: Network | None = None
        """The reference: version 0, loaded when it is first needed, or a later version."""
        self._renewed: dict[str, torch.Tensor] = {}
        """Weights of a renewed reference, by the names of masters; empty while the reference is version 0."""
        self._critic_from: tuple[CriticConfig, Path] | None = None
        self._state = None

    def hold_critic(self, settings: CriticConfig, folder: Path) -> None:
        """Record the initial state of the critic; `open` loads it."""
        self._critic_from = settings, folder

    def open(self) -> None:
        """Load the model, and the critic if there is one; add adapters if the model has them."""
        import torch

        from rftstream.backends.torch import lora
        from rftstream.backends.torch.network import (
            NetworkSettings,
            compile_layers,
            recompute_activations,
            sum_embeddings_in_float32,
        )
        from rftstream.backends.torch.optimizer import Masters
        from rftstream.backends.torch.training import BatchTraining
        from rftstream.models.offload import DeviceState

        torch.set_num_threads(self._spec.threads)
        torch.manual_seed(self._seed)
        model, parameters = self._load_model()
        self._state = DeviceState(self._device, self._tensors, offload=self._config.offload_parameters)
        autocast = NetworkSettings.of(self._config, self._device, rounded=self._rounded).autocast
        if self._config.gradient_checkpointing:
            recompute_activations(model)
        self._network = self._network_of(model)
        if self._spec.lora is not None and autocast is not None:
            lora.hold_frozen(model, autocast)
        if self._rounded and self._device.type == "cpu":
            sum_embeddings_in_float32(model)
        if self._config.compile:
            compile_layers(model)
        self.stopping.watch(model)
        self._num_updates, self._parameters = 0, parameters
        self._masters = self._trained[POLICY] = Masters(
            self._network,
            parameters,
            self._settings,
            offload=self._config.offload_optimizer,
            dtype=torch.bfloat16 if self._rounded else torch.float32,
            moments=self._config.moments,
        )
        if self._critic_from is not None:
            self._trained[CRITIC] = self._new_critic(*self._critic_from)
        self._training = BatchTraining(
            self._device,
            None if self._critic_from is None else self._critic_from[0],
            lambda: contextlib.nullcontext(self._open_reference()),
            trained=self._trained,
        )
        with self.on_device():  # and so leave it, if that is set
            pass

    def _load_model(self) -> tuple[Any, Any]:
        """Return the model and its trained parameters; tied ones once."""
        import torch

        from rftstream.backends.torch import lora
        from rftstream.backends.torch.network import freeze_vision_tower, load_model
        from rftstream.backends.torch.quantized import hold_in_four_bits
        from rftstream.backends.torch.scorer import load_scorer
        from rftstream.weights.checkpoint_names import names_of
        from rftstream.weights.tensors import SERVED

        model: Any
        parameters: Any
        frozen: str | None = None
        if self._spec.as_classifier:
            model, parameters, self._names = load_scorer(self._spec, self._device)
        else:
            quantized = self._spec.quantize is not None
            model = load_model(self._spec, torch.device("cpu") if quantized else self._device)
            self._names = names_of(model, self._spec.folder)
            if quantized:
                hold_in_four_bits(model, SERVED[self._spec.dtype], self._device)
            if self._config.freeze_vision_tower:
                frozen = freeze_vision_tower(model)
            parameters = dict(model.named_parameters())
        if self._spec.lora is not None:
            parameters = lora.add_adapters(model, self._spec, self._names, without=frozen)
        return model, parameters

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        """Train on a batch, and write a trace if the setting `profile` names the batch."""
        from rftstream.backends.passes import check_needs
        from rftstream.backends.torch.network import activations_away
        from rftstream.backends.torch.profiling import traced

        check_needs(algorithm, "torch", critic=CRITIC in self._trained, classifier=self._spec.as_classifier)
        number, self._num_updates = self._num_updates, self._num_updates + 1
        trace: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if number in self._config.profile:
            trace = traced(Path(self._config.profile_folder) / f"batch-{number}.json", self._device)
        away = activations_away() if self._config.offload_activations else contextlib.nullcontext()
        with self.on_device(), trace, away:
            batch = self._training.update(self._network.placed(rows), algorithm, plan)
            update: Update = batch.update(algorithm, plan)
            return update

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int = 16384) -> list[np.ndarray]:
        """Return the policy's logprobs of each row's unmasked tokens now: float32 [T], 0 elsewhere."""
        return self._in_order(rows, lambda: self._training.logprobs(self._network.placed(rows), tokens_per_microbatch))

    def reference_logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the same logprobs under the reference."""
        return self._in_order(rows, lambda: self._training.logprobs(rows, tokens_per_microbatch, reference=True))

    def values(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the critic's values of what stands before each row's unmasked tokens: float32 [T], 0 elsewhere."""
        return self._in_order(rows, lambda: self._training.values(rows, tokens_per_microbatch))

    def _in_order(
        self, rows: Sequence[TrainingRow], compute: Callable[[], Mapping[int, np.ndarray]]
    ) -> list[np.ndarray]:
        from rftstream.backends.torch.training import in_order

        with self.on_device():
            return in_order(rows, compute())

    def renew_reference(self) -> None:
        """Make the current policy the reference."""
        with self.on_device():
            self._put_reference(self._masters.masters)

    def served_tensors(self) -> Mapping[str, RawTensor]:
        """Return the trained weights in the served dtype. Each is converted when it is read."""
        from rftstream.weights.tensors import ServedTensors

        assert self._state is not None, "open comes first"
        masters = self._state.readable(self._masters.masters)
        if self._spec.lora is not None:
            return ServedTensors(masters, self._spec.dtype)
        return ServedTensors(self._names.read(masters), self._spec.dtype, self._names.kept_tensors)

    def save(self, folder: Path) -> None:
        """Write masters, moments, random state, a renewed reference and the critic."""
        import torch

        from rftstream.weights.tensors import REFERENCE_FILE, raw, write_tensors

        assert self._state is not None, "open comes first"
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        saved: dict[str, Mapping[str, torch.Tensor]] = {"random.safetensors": random}
        for name, trained in self._trained.items():
            saved |= {MASTERS_FILE[name]: trained.masters, MOMENTS_FILE[name]: dict(trained.moments())}
        if self._renewed:
            saved[REFERENCE_FILE] = self._renewed
        for file, tensors in saved.items():
            write_tensors(folder / file, {name: raw(one) for name, one in self._state.readable(tensors).items()})
        about = {"backend": "torch", "model": self._spec.name, "torch": torch.__version__}
        (folder / "backend.json").write_text(json.dumps(about) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. ConfigError for another model. If the checkpoint has no critic, the critic starts
        anew."""
        import torch
        from safetensors.torch import load_file

        from rftstream.backends.torch.training import check_saved
        from rftstream.weights.tensors import REFERENCE_FILE

        with self.on_device():
            device = "cpu" if self._config.offload_optimizer else str(self._device)
            for name, trained in self._trained.items():
                if name == CRITIC and not (folder / MASTERS_FILE[name]).is_file():
                    log.warning("%s: the checkpoint has no critic; it begins anew", folder)
                    assert self._critic_from is not None
                    self._trained[CRITIC] = self._new_critic(*self._critic_from)
                    continue
                masters = load_file(folder / MASTERS_FILE[name], device=device)
                check_saved(folder, name, self._spec, {key: one.shape for key, one in masters.items()}, trained.shapes)
                trained.put(masters, load_file(folder / MOMENTS_FILE[name], device=device))
            if (folder / REFERENCE_FILE).is_file():
                self._put_reference(load_file(folder / REFERENCE_FILE, device=device))
            elif self._renewed:
                self._reference, self._renewed = None, {}
            random = load_file(folder / "random.safetensors")
            torch.set_rng_state(random["cpu"])
            if self._device.type == "cuda" and "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"], self._device)

    def export(self, folder: Path) -> None:
        """Write a model folder. With adapters, write the merged weights, and the adapters separately."""
        from rftstream.backends.torch import lora
        from rftstream.weights.tensors import write_tensors

        model_folder.copy_companions(self._spec, folder)
        served = dict(self.served_tensors())
        if self._spec.lora is None:
            write_tensors(folder / "model.safetensors", served, {"format": "pt"})
        else:
            lora.write_merged(folder, self._spec, served, self._names.layout(self._spec.dtype))

    def close(self) -> None:
        """Drop model, optimizer, reference and critic."""
        self._network = self._masters = self._training = self._reference = self._state = None
        self._trained, self._renewed, self._parameters = {}, {}, {}

    def _open_reference(self) -> Network:
        """Return the reference. If it was not renewed, it is loaded from the model folder; with adapters, it is the
        model without them."""
        from rftstream.backends.torch import lora
        from rftstream.backends.torch.network import load_model, same_random

        if self._reference is None and self._spec.lora is not None:
            self._reference = self._network.within(lora.adapters_off)
        if self._reference is None:
            with same_random(self._device):
                model = load_model(self._spec, self._device).requires_grad_(False)
                self.stopping.watch(model)
                self._reference = self._network_of(model)
            for parameter in model.parameters() if self._rounded else ():  # rounded like the policy
                parameter.data = parameter.data.bfloat16()
        return self._reference

    def _put_reference(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make these weights the reference. With adapters, a copy of them is held beside the policy's."""
        import torch

        from rftstream.backends.torch import lora

        if self._spec.lora is not None:
            self._renewed = {name: one.detach().to(self._device, copy=True) for name, one in tensors.items()}
            self._reference = self._network.within(lambda _: lora.adapters_as(self._parameters, self._renewed))
            return
        self._renewed = dict(self._open_reference().model.named_parameters())
        with torch.no_grad():
            for name, one in self._renewed.items():
                one.copy_(tensors[name])

    def _network_of(self, model: Any) -> Network:
        from rftstream.backends.torch.network import NetworkSettings, network_of
        from rftstream.backends.torch.scorer import ScoreNetwork

        settings = NetworkSettings.of(self._config, self._device, rounded=self._rounded)
        if self._spec.as_classifier:
            return ScoreNetwork(model, settings)
        return network_of(model, settings, self._spec, self._images)

    def _new_critic(self, settings: CriticConfig, folder: Path) -> Masters:
        from rftstream.backends.torch.critic import ValueNetwork, load_critic
        from rftstream.backends.torch.network import (
            NetworkSettings,
            compile_layers,
            recompute_activations,
            same_random,
        )
        from rftstream.backends.torch.optimizer import Masters

        with same_random(self._device):
            model = load_critic(folder, self._device, vocabulary=self._network.vocabulary)
        if self._config.gradient_checkpointing:
            recompute_activations(model)
        network = ValueNetwork(model, NetworkSettings.of(self._config, self._device))
        if self._config.compile:
            compile_layers(model)
        self.stopping.watch(model)
        parameters = dict(model.named_parameters())
        offload, moments = self._config.offload_optimizer, self._config.moments
        return Masters(network, parameters, self._settings, offload=offload, moments=moments)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that the backend holds, wherever they are."""
        from rftstream.models.offload import tensors_of

        for trained in self._trained.values():
            yield from trained.tensors()
        if self._reference is not None:
            yield from tensors_of(self._reference.model)
        yield from self._renewed.values()
