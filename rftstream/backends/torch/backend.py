"""One process, one device: float32 masters and AdamW over any Hugging Face causal language model.

torch is imported by what uses it: the settings are asked for where nothing is trained.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends.base import OptimizerSettings, Update, UpdatePlan
from rftstream.backends.leaving import LeavesDevice
from rftstream.errors import ConfigError
from rftstream.models.folders import folder as model_folder
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.models.vision.image_tokens import ImageTokens
from rftstream.models.vision.seeing import SeeingModel
from rftstream.weights.snapshot import RawTensor

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rftstream.backends.torch.critic import Critic
    from rftstream.backends.torch.learner import Learner
    from rftstream.backends.torch.network import Network, NetworkSettings

log = logging.getLogger(__name__)


def rounds_parameters(config: TorchBackend.Config, spec: ModelSpec, device: str) -> bool:
    """Return whether the model computes with weights in bfloat16 on this kind of device."""
    if config.parameters != "auto" or spec.lora is not None:
        return config.parameters == "bfloat16" and spec.lora is None
    plain = not spec.as_classifier and ImageTokens.of(spec.folder) is None
    return plain and (config.autocast == "bfloat16" or (config.autocast == "auto" and device == "cuda"))


class TorchBackend(LeavesDevice):
    """A backend in one process on one device, as `CriticBackend`, `RenewingBackend` and `OffloadingBackend` describe
    it."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        packing: bool = True
        """Rows are computed one after another in one, without padding, and never see each other; where the model can't
        (it is tried), they are padded, rows of like lengths together."""
        gradient_checkpointing: bool = False
        """Computes activations again in the backward pass: a third slower, and memory of one layer instead of all."""
        autocast: Literal["auto", "none", "bfloat16"] = "auto"
        """Matrix products in bfloat16; auto: on GPUs only. Masters, optimizer and logprobs are float32 always."""
        parameters: Literal["auto", "float32", "bfloat16"] = "auto"
        """Data type of the weights that the model computes with. bfloat16: weights rounded from the float32 masters
        after each step, the same bits that are served in bfloat16; autocast is on then, and gradients of micro-batches
        are added up in float32. Checkpoints hold the masters and are the same either way. auto: bfloat16 where matrix
        products are in bfloat16, but float32 where the model is a classifier or is shown images. Adapters and the
        critic are always float32."""
        max_logits_bytes: Annotated[int, Meta(ge=1 << 16)] = 256 << 20
        """Logits held at once, in float32, forward and backward; those beyond are computed again in the backward
        pass."""
        offload_optimizer: bool = False
        """Masters and moments lie in main memory, 12 bytes a parameter, and the optimizer steps there, on the CPU; the
        device holds weights and gradients, 8 instead of 16. The same bits where the device is a CPU, and no gain."""
        offload_parameters: bool = False
        """Between batches all lies in main memory (pinned where the device is a GPU): parameters, masters, moments, the
        reference and the critic. The device is free for others then; each batch begins and ends with a copy of it all.
        The same bits. While a batch is computed the device holds what it holds without."""
        compile: bool = False
        """Layers are compiled by torch.compile: fewer passes over memory, and minutes before the first batch. On a CPU
        it needs a C++ compiler. Results are rounded otherwise than without it. Passes without a backward pass (rows
        without an advantage) are compiled apart, when the first comes."""
        freeze_vision_tower: bool = False
        """Leaves the vision tower of a model with images as it is; what joins it to the language model is trained all
        the same. Off by default, as in verl (prime-rl freezes it): a tower learns to see what rewards ask for. On,
        backward passes end before the tower."""
        profile: tuple[Annotated[int, Meta(ge=0)], ...] = ()
        """Batches, counted from 0 since the trainer was started, of which a trace is written (batch-2.json), for
        ui.perfetto.dev; such a batch takes longer. The first ones are slower than those that follow."""
        profile_folder: str = "profiles"
        """Where traces go; relative to where the trainer was started."""

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
        self._network: Any = None
        self._masters: Any = None
        self._reference: Network | None = None
        """The reference: version 0, loaded when it is first needed, or a later version."""
        self._renewed: dict[str, torch.Tensor] = {}
        """Weights of a renewed reference, by the names of masters; empty while the reference is version 0."""
        self._critic_from: tuple[CriticConfig, Path] | None = None
        self._critic: Critic | None = None
        self._state = None

    def hold_critic(self, settings: CriticConfig, folder: Path) -> None:
        """Note where the critic begins; `open` loads it."""
        self._critic_from = settings, folder

    def open(self) -> None:
        """Load the model, and the critic if there is one; add adapters if the model has them."""
        import torch

        from rftstream.backends.torch import lora
        from rftstream.backends.torch.network import (
            NetworkSettings,
            compile_layers,
            freeze_vision_tower,
            load_model,
            recompute_activations,
            sum_embeddings_in_float32,
        )
        from rftstream.backends.torch.optimizer import Masters
        from rftstream.models.offload import DeviceState

        torch.set_num_threads(self._spec.threads)
        torch.manual_seed(self._seed)
        model: Any
        parameters: Any
        frozen: str | None = None
        if self._spec.as_classifier:
            from rftstream.backends.torch.scorer import load_scorer

            model, parameters = load_scorer(self._spec, self._device)
        else:
            model = load_model(self._spec, self._device)
            if self._config.freeze_vision_tower:
                frozen = freeze_vision_tower(model)
            parameters = dict(model.named_parameters())  # tied ones once
        settings = NetworkSettings.of(self._config, self._device, rounded=self._rounded)
        self._state = DeviceState(self._device, self._tensors, offload=self._config.offload_parameters)
        if self._spec.lora is not None:
            parameters = lora.add_adapters(model, self._spec, without=frozen)
        if self._config.gradient_checkpointing:
            recompute_activations(model)
        self._network = _network_of(model, settings, self._spec, self._images)
        if self._spec.lora is not None and settings.autocast is not None:
            lora.hold_frozen(model, settings.autocast)
        if self._rounded and self._device.type == "cpu":
            sum_embeddings_in_float32(model)
        if self._config.compile:
            compile_layers(model)
        self._num_updates, self._parameters = 0, parameters
        self._masters = Masters(
            parameters,
            self._settings,
            offload=self._config.offload_optimizer,
            dtype=torch.bfloat16 if self._rounded else torch.float32,
        )
        self._critic = self._open_critic()
        with self.on_device():  # and so off it, if that is asked for
            pass

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        """Train on a batch, and write a trace if the setting `profile` names it."""
        from rftstream.backends.passes import check_needs
        from rftstream.backends.torch.profiling import traced

        check_needs(algorithm, "torch", critic=self._critic is not None, classifier=self._spec.as_classifier)
        number, self._num_updates = self._num_updates, self._num_updates + 1
        if number not in self._config.profile:
            with self.on_device():
                return self._update(rows, algorithm, plan)
        trace = traced(Path(self._config.profile_folder) / f"batch-{number}.json", self._device)
        with self.on_device(), trace:
            return self._update(rows, algorithm, plan)

    def _update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        from rftstream.backends.torch.learner import take_steps

        learners = [self._policy_learner(rows, algorithm, plan)] if plan.trains_policy else []
        if self._critic is not None and "values" in algorithm.needs:
            learners.append(self._critic.learner(rows, plan))
        passes = learners[0].passes
        num_steps = passes.num_steps
        odd = take_steps(learners, algorithm, num_steps)
        if odd is not None:
            return Update(metrics={**odd, "num_tokens": passes.num_tokens}, skipped=True)
        metrics = {
            "num_tokens": passes.num_tokens,
            "optimizer_steps": float(num_steps),
            "lr": plan.lr,
            "microbatches": float(passes.num_microbatches),
        }
        for learner in learners if num_steps else ():
            found = learner.metrics(algorithm)
            metrics |= {**found, "tflop": metrics.get("tflop", 0.0) + found["tflop"]}
        return Update(metrics=metrics)

    def _policy_learner(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Learner:
        from rftstream.backends.passes import ALL_ROWS_LEARN, Passes
        from rftstream.backends.torch.learner import Learner

        passes = Passes(
            self._network,
            self._network.placed(rows),
            plan,
            self._device,
            whole_groups="whole_groups" in algorithm.needs,
            signal_apart=not algorithm.needs & ALL_ROWS_LEARN,
        )
        if passes.wants_proximal(algorithm):
            passes.compute_proximal()
        if "reference_logprobs" in algorithm.needs:
            passes.compute_reference(self._open_reference())
        return Learner(passes, self._masters, plan.lr, plan.max_grad_norm)

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int = 16384) -> list[np.ndarray]:
        """Return the policy's logprobs of each row's unmasked tokens now: float32 [T], 0 elsewhere."""
        from rftstream.backends.passes import row_logprobs

        with self.on_device():
            return row_logprobs(self._network.placed(rows), tokens_per_microbatch, self._network, self._device)

    def reference_logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the same logprobs under the reference."""
        from rftstream.backends.passes import row_logprobs

        with self.on_device():
            return row_logprobs(rows, tokens_per_microbatch, self._open_reference(), self._device)

    def renew_reference(self) -> None:
        """Make the policy as it is now the reference."""
        with self.on_device():
            self._put_reference(self._masters.masters)

    def values(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the critic's values of what stands before each row's unmasked tokens: float32 [T], 0 elsewhere."""
        assert self._critic is not None, "hold_critic comes first"
        with self.on_device():
            return self._critic.values(rows, tokens_per_microbatch)

    def served_tensors(self) -> Mapping[str, RawTensor]:
        """Return the trained weights in the served dtype, each converted when it is asked for."""
        from rftstream.weights.tensors import ServedTensors

        assert self._state is not None, "open comes first"
        return ServedTensors(self._state.readable(self._masters.masters), self._spec.dtype)

    def save(self, folder: Path) -> None:
        """Write masters, moments, random state, a renewed reference and the critic."""
        import torch

        from rftstream.weights.tensors import REFERENCE_FILE, raw, write_tensors

        assert self._state is not None, "open comes first"
        saved = {"masters": self._masters.masters, "optimizer": dict(self._masters.moments())}
        for kind, tensors in saved.items():
            readable = self._state.readable(tensors)
            write_tensors(folder / f"{kind}.safetensors", {name: raw(one) for name, one in readable.items()})
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        write_tensors(folder / "random.safetensors", {name: raw(state) for name, state in random.items()})
        if self._renewed:
            renewed = self._state.readable(self._renewed)
            write_tensors(folder / REFERENCE_FILE, {name: raw(one) for name, one in renewed.items()})
        if self._critic is not None:
            self._critic.save(folder, self._state.readable)
        about = {"backend": "torch", "model": self._spec.name, "torch": torch.__version__}
        (folder / "backend.json").write_text(json.dumps(about) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. ConfigError for another model. A checkpoint without a critic gives a new
        critic."""
        with self.on_device():
            self._load(folder)

    def _load(self, folder: Path) -> None:
        import torch
        from safetensors.torch import load_file

        from rftstream.weights.tensors import REFERENCE_FILE

        device = "cpu" if self._config.offload_optimizer else str(self._device)
        masters = load_file(folder / "masters.safetensors", device=device)
        if masters.keys() != self._masters.masters.keys():
            raise ConfigError(f"{folder}: the checkpoint is of another model than {self._spec.name}; start a new run")
        self._masters.put(masters, load_file(folder / "optimizer.safetensors", device=device))
        if (folder / REFERENCE_FILE).is_file():
            self._put_reference(load_file(folder / REFERENCE_FILE, device=device))
        elif self._renewed:
            self._reference, self._renewed = None, {}
        if self._critic is not None and not self._critic.load(folder, device):
            log.warning("%s: the checkpoint has no critic; it begins anew", folder)
            self._critic = self._open_critic()
        random = load_file(folder / "random.safetensors")
        torch.set_rng_state(random["cpu"])
        if self._device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self._device)

    def export(self, folder: Path) -> None:
        """Write a model folder; with adapters, the merged weights and the adapters apart."""
        from rftstream.backends.torch import lora
        from rftstream.weights.tensors import write_tensors

        model_folder.copy_companions(self._spec, folder)
        served = dict(self.served_tensors())
        if self._spec.lora is None:
            write_tensors(folder / "model.safetensors", served, {"format": "pt"})
        else:
            lora.write_merged(folder, self._spec, served, lora.base_names(self._network.model))

    def close(self) -> None:
        """Drop model, optimizer, reference and critic."""
        self._network, self._masters, self._reference, self._critic = None, None, None, None
        self._renewed, self._parameters, self._state = {}, {}, None

    def _open_reference(self) -> Network:
        """Return the reference. Unless it was renewed, it is loaded from the model folder; with adapters, it is the
        model without them."""
        from rftstream.backends.torch import lora
        from rftstream.backends.torch.network import NetworkSettings, load_model

        if self._reference is None and self._spec.lora is not None:
            self._reference = self._network.within(lora.adapters_off)
        if self._reference is None:
            with _same_random(self._device):
                model = load_model(self._spec, self._device).requires_grad_(False)
                settings = NetworkSettings.of(self._config, self._device, rounded=self._rounded)
                self._reference = _network_of(model, settings, self._spec, self._images)
            for parameter in model.parameters() if self._rounded else ():  # as the policy, which begins as its equal
                parameter.data = parameter.data.bfloat16()
        return self._reference

    def _put_reference(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make these weights the reference. A copy of adapters is held beside the policy's."""
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

    def _open_critic(self) -> Critic | None:
        if self._critic_from is None:
            return None
        from rftstream.backends.torch.critic import open_critic

        settings, folder = self._critic_from
        with _same_random(self._device):
            return open_critic(
                folder, settings, self._config, self._settings, self._device, vocabulary=self._network.vocabulary
            )

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield all that is held, wherever it lies."""
        from rftstream.models.offload import tensors_of

        networks = [one for one in (self._network, self._reference) if one is not None]
        for network in networks:
            yield from tensors_of(network.model)
        yield from self._masters.tensors()
        yield from self._renewed.values()
        if self._critic is not None:
            yield from self._critic.tensors()


def _network_of(model: Any, settings: NetworkSettings, spec: ModelSpec, images: ImageCache | None) -> Network:
    from rftstream.backends.torch.network import Network

    if spec.as_classifier:
        from rftstream.backends.torch.scorer import ScoreNetwork

        return ScoreNetwork(model, settings)
    seeing = SeeingModel.of(model, spec.folder)
    return Network(model, settings, seeing=seeing, shown=None if images is None else images.inputs)


def _same_random(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Keep the random state as it was before, since loading a model may draw numbers."""
    import torch

    return torch.random.fork_rng([device] if device.type == "cuda" else [])
