"""A causal language model as a backend uses it: from a micro-batch to logprobs, independent of the optimizer.

Shapes: B rows, T tokens of the longest, N unmasked tokens of all, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from rftstream.algorithms.base import TrainingRow
from rftstream.backends.torch.inputs import Inputs
from rftstream.backends.torch.paths import Rows, load, packed_inputs, path_of
from rftstream.contracts.beside import Beside
from rftstream.contracts.tasks import Media
from rftstream.contracts.token_values import EXPERTS
from rftstream.core.allowed import AllowedSets, read_sets
from rftstream.core.logprobs import token_logprobs
from rftstream.core.packing import before
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import loading
from rftstream.models.routers import Routed, Routers, Routing
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache, ImageInputs
from rftstream.models.vision.seeing import ImageFeatures, SeeingModel, model_class

FORCED, OTHERS = "forced_experts", "other_experts"
"""Names of what `Network.routed` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """How a network computes. A backend makes it from its config."""

    autocast: torch.dtype | None
    """Dtype of matrix products; None for that of the weights."""
    max_logits_bytes: int
    packing: bool
    """Whether rows are packed, if the model supports it."""
    share_prefixes: bool = True
    """Whether packed rows are trees, if the model supports it."""

    @staticmethod
    def of(config: Any, device: torch.device, *, rounded: bool = False) -> NetworkSettings:
        """Return the settings in a backend's config. Autocast "auto" means bfloat16 only on GPUs. `rounded`: whether
        the weights are in bfloat16, which turns autocast on."""
        wished = config.autocast
        half = rounded or wished == "bfloat16" or (wished == "auto" and device.type == "cuda")
        return NetworkSettings(
            autocast=torch.bfloat16 if half else None,
            max_logits_bytes=config.max_logits_bytes,
            packing=config.packing,
            share_prefixes=config.share_prefixes,
        )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Numbers of elements in the model's matrices."""

    body: int
    head: int
    trained_body: int
    trained_head: int

    @staticmethod
    def of(model: Any) -> _Sizes:
        """Count the elements of a model's matrices."""
        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
        by_head = [] if head is None else [head]
        return _Sizes(
            *(
                sum(one.in_features * one.out_features for one in layers if one.weight.requires_grad or not trained)
                for trained in (False, True)
                for layers in (linear, by_head)
            )
        )


class Network:
    """A model from micro-batch to logprobs. A backend makes it, and calls it from one thread. `model` may also be a
    wrapper that is called like transformers' model."""

    def __init__(
        self,
        model: Any,
        settings: NetworkSettings,
        *,
        seeing: SeeingModel | None = None,
        shown: Callable[[Media], ImageInputs] | None = None,
        always_sees: bool = False,
        routing: Routing | None = None,
    ) -> None:
        """`seeing`: the model with its vision tower; None if it is not shown images. `shown`: returns the model's
        inputs for an image. `always_sees`: rows without images go through the vision tower with a blank image that does
        not count. Processes that compute together need that, since all of them have to use the same weights. `routing`:
        of the model, if the experts that the sampler recorded are forced."""
        self.model = model
        self.routing = routing
        self._seeing, self._shown = seeing, shown
        self._always_sees = always_sees and seeing is not None
        self._within: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._settings = settings
        self._device: torch.device = model.device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        path = path_of(model)
        self._head: nn.Linear | None = model.get_output_embeddings() if path.has_plain_head else None
        self._sizes = _Sizes.of(model)
        self._attention_size = _attention_size(model.config.get_text_config())
        looks_ahead = seeing is not None and seeing.looks_ahead
        self.computes_alone = path.rows is Rows.ALONE
        """Whether each row takes a pass of its own."""
        self.packs = settings.packing and not looks_ahead and path.rows is Rows.PACKED
        """Whether inputs may be packed."""
        self.shares = settings.share_prefixes and self.packs and path.shares
        """Whether packed inputs may be trees."""
        self.routers = Routers.of(model)
        """The routers of a mixture of experts; None for a dense model."""

    def logprobs(self, inputs: Inputs, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies [B, T], 0 at masked positions. The head computes only the positions that
        predict unmasked tokens."""
        head = self._head
        with self._within(self.model), self._autocast():
            hidden_ND = self._hidden(inputs).flatten(0, 1)[inputs.sources_N]
        bias_V: Tensor | None = None if head is None else head.bias
        if self._seeing is not None and head is None:
            hidden_ND = self._seeing.mask(hidden_ND)
        elif self._seeing is not None:  # -inf for placeholders, as the sampler has it; 0 changes no bit of the others
            masked_V = self._seeing.mask(torch.zeros(self.vocabulary, device=self._device))
            bias_V = masked_V if bias_V is None else bias_V + masked_V
        logprobs_N, entropy_N = token_logprobs(
            hidden_ND,
            None if head is None else head.weight,
            inputs.targets_N,
            inputs.temperatures_N,
            bias_V=bias_V,
            allowed=self._allowed(inputs),
            entropy_gradient=entropy_gradient,
            chunk_tokens=max(self._settings.max_logits_bytes // (4 * self.vocabulary), 1),
            dtype=self._settings.autocast,
        )
        places = (inputs.rows_N, inputs.places_N)
        zeros_BT = torch.zeros(inputs.rows.loss_mask_BT.shape, device=self._device)
        return zeros_BT.index_put(places, logprobs_N), zeros_BT.index_put(places, entropy_N)

    def _allowed(self, inputs: Inputs) -> AllowedSets | None:
        """Return the sets that the unmasked tokens were sampled from; None if nothing was left out."""
        if inputs.sets_N is None:
            return None
        return read_sets(inputs.sets_N, inputs.targets_N.cpu().numpy(), self.vocabulary)

    def routed(self) -> dict[str, Tensor]:
        """Return sums of the last pass over tokens and layers: on how many experts were forced, and how many of these
        would have chosen others. Empty if none were forced."""
        if self.routing is None or not self.routing.counts:
            return {}
        forced, others = torch.stack(self.routing.counts).sum(0)
        return {FORCED: forced, OTHERS: others}

    def placed(self, rows: Sequence[TrainingRow]) -> Sequence[TrainingRow]:
        """Return the rows with their masks at the positions that this network reads; here they are unchanged."""
        return rows

    def within(self, change: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Network:
        """Return a network of the same model that computes inside of `change`, for passes without gradients."""
        other = copy.copy(self)
        other._within = change
        return other

    def flops(self, inputs: Inputs, *, backward: bool) -> float:
        """Return the floating-point operations of a forward pass, or of both passes, from the sizes of the model's
        matrices.

        Each weight and token counts 2 in the forward pass and twice that in the backward pass (once for frozen
        weights); causal attention is added. Experts of a mixture are not counted, and tokens that trees hold once
        count once."""
        seen = zip(inputs.lengths, before(inputs.lengths, inputs.parents), strict=True)
        attention_size = 4.0 * self._attention_size * sum(length * (length / 2 + more) for length, more in seen)
        num_tokens, num_targets = sum(inputs.lengths), len(inputs.targets_N)
        forward = 2.0 * (self._sizes.body * num_tokens + self._sizes.head * num_targets)
        if not backward:
            return forward + attention_size
        by_weights = 2.0 * (self._sizes.trained_body * num_tokens + self._sizes.trained_head * num_targets)
        return 2 * forward + by_weights + 3 * attention_size

    def _hidden(self, inputs: Inputs) -> Tensor:
        """Return the states [B, T - 1, D] or [1, P, D], or logits if the head cannot be separated. Padding is on the
        right, where causal attention never looks, so no attention mask is needed."""
        more = {}
        if inputs.position_ids is not None:
            more = packed_inputs(inputs.position_ids, inputs.lengths, inputs.parents)
        if inputs.images:
            read = self._with_images(inputs)
        elif self._always_sees:
            read = self._embedded_beside_a_blank(inputs)
        else:
            read = {"input_ids": inputs.token_ids}
        more |= read
        experts = inputs.beside.get(EXPERTS)
        if self.routing is not None:
            self.routing.counts.clear()
        if not self.computes_alone:
            self._force(experts)
            return self._states(more)
        by_row, width = [], inputs.token_ids.shape[1]
        for row, length in enumerate(inputs.lengths):
            self._force(None if experts is None else experts.cut(row * width, row * width + length))
            by_row.append(self._states({name: _row(name, one, row, length) for name, one in more.items()})[0])
        return nn.utils.rnn.pad_sequence(by_row, batch_first=True)

    def _force(self, experts: Beside | None) -> None:
        if self.routing is not None:
            self.routing.force(experts, self._device)

    def _states(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the states for these inputs, or logits if the head cannot be separated."""
        if self._head is None:
            return self.model(**inputs, use_cache=False).logits  # type: ignore[no-any-return]
        return self.model.base_model(**inputs, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def _with_images(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the model's inputs for rows with images: the embeddings of tokens and images, and their positions if
        these differ from those of text. An image in several rows goes through the tower once."""
        seeing = self._seeing
        if seeing is None or self._shown is None:
            raise ConfigError(f"{type(self.model).__name__}: got rows with images, which it is not shown")
        placeholder = seeing.tokens.token_id
        shown = {int(one.nodes[0]): one for one in inputs.shown}.values()  # rows of a tree may show the same one
        places = [one.nodes[one.token_ids == placeholder] for one in shown]
        counts = {one.number: len(found) for one, found in zip(shown, places, strict=True)}
        images = [self._shown(image) for image in inputs.images]
        features = seeing.features(images, [counts[number] for number in range(len(images))])
        features_ND = torch.cat([features[one.number].features_KD for one in shown])
        places_N = torch.from_numpy(np.concatenate(places)).to(self._device)
        is_image_BT = torch.zeros_like(inputs.token_ids, dtype=torch.bool)
        is_image_BT.view(-1)[places_N] = True
        read = {"inputs_embeds": seeing.embed(inputs.token_ids, places_N, features_ND), **seeing.attention(is_image_BT)}
        positions = self._positions(inputs, features)
        return read if positions is None else {**read, "position_ids": positions}

    def _positions(self, inputs: Inputs, features: Sequence[ImageFeatures]) -> Tensor | None:
        """Return positions of several dimensions, [3, B, T - 1] or [3, 1, P]; None if they are those of text."""
        assert self._seeing is not None
        shape, found = inputs.token_ids.shape, False
        positions_3F = np.zeros((3, inputs.token_ids.numel()), np.int64)
        for row, (nodes, token_ids) in enumerate(zip(inputs.nodes, inputs.read, strict=True)):
            own = self._seeing.positions(token_ids, [features[one.number] for one in inputs.shown if one.row == row])
            found = found or own is not None
            positions_3F[:, nodes] = np.arange(len(token_ids)) if own is None else own
        return torch.from_numpy(positions_3F.reshape(3, *shape)).to(self._device) if found else None

    def _embedded_beside_a_blank(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the embeddings of tokens, plus 0 times the features of a blank image."""
        assert self._seeing is not None
        nothing = self._seeing.blank_features().sum() * 0.0
        return {"inputs_embeds": self._seeing.text(inputs.token_ids) + nothing}

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._settings.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._settings.autocast)


def at_targets(calls: Sequence[Sequence[Routed]], inputs: Inputs) -> list[Routed]:
    """Return what each router gave at the tokens that predict unmasked ones. `calls`: those of one pass over the
    inputs, of each router, as `Routers.watched` keeps them."""
    found = []
    for own in (own for own in calls if own):
        logits, chosen = [one.logits_NE for one in own], [one.chosen_NK for one in own]
        if len(own) > 1:  # each row by itself: put them side by side, as the inputs are
            width = inputs.token_ids.shape[1]
            logits, chosen = (
                [nn.functional.pad(one, (0, 0, 0, width - len(one))) for one in rows] for rows in (logits, chosen)
            )
        logits_NE = _as_logits(torch.cat(logits)[inputs.sources_N])
        found.append(Routed(logits_NE, torch.cat(chosen)[inputs.sources_N]))
    return found


def _as_logits(found_NE: Tensor) -> Tensor:
    """Return logits. Some routers hand out probabilities."""
    are_shares = (found_NE >= 0).all() & ((found_NE.sum(dim=-1) - 1).abs() < 1e-2).all()
    return torch.where(are_shares, found_NE.clamp(min=1e-20).log(), found_NE)


def _row(name: str, inputs: Tensor, row: int, length: int) -> Tensor:
    """Return one row of inputs [B, T, ...], or of positions [3, B, T], without padding."""
    if name == "position_ids":
        return inputs[..., row : row + 1, :length]
    return inputs[row : row + 1, :length]


def _attention_size(config: Any) -> int:
    """Return the number of layers times their width."""
    num_layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    with contextlib.suppress(RuntimeError):  # transformers has no single number if heads differ from layer to layer
        num_heads = getattr(config, "num_attention_heads", None) or 1
        width = num_heads * (getattr(config, "head_dim", None) or width // num_heads)
    return int(num_layers * width)


def load_model(spec: ModelSpec, device: torch.device) -> Any:
    """Load a model in float32. ConfigError unless it is a decoder."""
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with loading(spec):
        return load(model_class(spec.folder), spec.folder, device)


def network_of(
    model: Any, settings: NetworkSettings, spec: ModelSpec, images: ImageCache | None, *, always_sees: bool = False
) -> Network:
    """Return the network of a policy's model, with its vision tower if it has one. `images`: their pixels."""
    seeing = SeeingModel.of(model, spec.folder)
    routing = Routing.of(model, where="trainer.routing") if spec.replays_experts else None
    if routing is not None and model.is_gradient_checkpointing:
        recompute_activations(model, context_fn=routing.recompute)
    return Network(
        model,
        settings,
        seeing=seeing,
        shown=None if images is None else images.inputs,
        always_sees=always_sees,
        routing=routing,
    )


def same_random(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore the random state afterwards, since loading a model may draw random numbers."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


TOWERS = ("vision_tower", "visual", "vision_model")
"""Names of the vision tower in models."""


def freeze_vision_tower(model: Any) -> str:
    """Freeze the vision tower, and return its name. ConfigError if there is none."""
    found = (getattr(model.base_model, name, None) for name in TOWERS)
    tower = next((one for one in found if isinstance(one, nn.Module)), None)
    if tower is None:
        raise ConfigError("backends.torch.freeze_vision_tower: the model has no vision tower; remove the setting")
    tower.requires_grad_(False)
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    return names[id(tower)]


def recomputed_layers(model: Any) -> list[Any]:
    """Return the layers whose activations the backward pass can recompute. ConfigError if there are none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"gradient_checkpointing: {type(model).__name__} has no layers that can be recomputed; leave it off"
        )
    return layers


def recompute_activations(model: Any, **settings: Any) -> None:
    """Let the backward pass recompute activations, layer by layer. ConfigError if the model cannot do so. `settings`:
    further ones of torch's `checkpoint`.

    transformers does that only for layers in training mode, in which there would be dropout, and noise in routers. So
    only the question whether to recompute sees that mode; the layers compute without it."""
    for layer in recomputed_layers(model):
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = partial(_recomputed, layer, settings)


def _recomputed(layer: nn.Module, settings: Any, compute: Callable[..., Any], *inputs: Any) -> Any:
    def compute_without_dropout(*inputs: Any) -> Any:
        layer.training = False
        try:
            return compute(*inputs)
        finally:
            layer.training = True

    return torch.utils.checkpoint.checkpoint(compute_without_dropout, *inputs, use_reentrant=False, **settings)


@contextlib.contextmanager
def activations_away() -> Iterator[None]:
    """Keep what the backward pass needs in main memory, if the forward pass is computed inside this context. Weights
    stay where they are."""

    def put_away(saved: Tensor) -> tuple[torch.device, Tensor]:
        if is_weight(saved) or saved.device.type == "cpu":
            return saved.device, saved
        return saved.device, torch.empty(saved.shape, dtype=saved.dtype, pin_memory=True).copy_(saved)

    def bring(saved: tuple[torch.device, Tensor]) -> Tensor:
        return saved[1].to(saved[0], non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(put_away, bring):
        yield


def is_weight(saved: Tensor) -> bool:
    """Return whether the backward pass needs a weight here. Linear layers save a transposed view of theirs."""
    return isinstance(saved if saved._base is None else saved._base, nn.Parameter)


def compile_layers(model: Any) -> None:
    """Compile each layer by itself. Layers have the same structure, so the code of one serves for all."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)


def sum_embeddings_in_float32(model: Any) -> None:
    """Accumulate gradients of embeddings in float32, and round the sum. torch does so on GPUs. On CPUs it adds one
    token after another in the gradients' dtype, and in bfloat16 frequent tokens lose most of their gradient."""
    for module in model.modules():
        if type(module) is nn.Embedding:  # modules that do more than look up keep their own method
            module.forward = partial(_Embedded.apply, module.weight, module.padding_idx)  # type: ignore[method-assign]


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, padding: int | None, token_ids_BT: Tensor) -> Tensor:
        ctx.save_for_backward(token_ids_BT)
        ctx.size, ctx.padding = weight_VD.shape, padding
        return nn.functional.embedding(token_ids_BT, weight_VD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (token_ids_BT,), (gradient_BTD,) = ctx.saved_tensors, gradients
        sums_VD = torch.zeros(ctx.size, device=gradient_BTD.device)
        sums_VD.index_add_(0, token_ids_BT.flatten(), gradient_BTD.flatten(0, -2).float())
        if ctx.padding is not None:
            sums_VD[ctx.padding] = 0
        return sums_VD.to(gradient_BTD.dtype), None, None
