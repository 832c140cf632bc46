"""A causal language model as a backend uses it: from a micro-batch to logprobs, whatever steps its optimizer.

Shapes: B rows, T tokens of the longest, N unmasked tokens of all, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rftstream.algorithms.base import TrainingRow
from rftstream.backends.torch import attention
from rftstream.backends.torch.inputs import Inputs
from rftstream.contracts.tasks import Media
from rftstream.core.logprobs import token_logprobs
from rftstream.errors import ConfigError
from rftstream.models.folder import loading
from rftstream.models.image_inputs import ImageInputs
from rftstream.models.image_tokens import ImageTokens
from rftstream.models.seeing import ImageFeatures, SeeingModel, model_class
from rftstream.models.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """How a network computes. A backend makes it from its config."""

    autocast: torch.dtype | None
    """Dtype of matrix products; None for that of the weights."""
    max_logits_bytes: int
    packing: bool
    """Whether rows are packed, where the model can."""

    @staticmethod
    def of(config: Any, device: torch.device, *, rounded: bool = False) -> NetworkSettings:
        """Return the settings in a backend's config. Autocast "auto" means bfloat16 on GPUs only. `rounded`: whether
        the weights are in bfloat16, which goes with autocast."""
        wished = config.autocast
        half = rounded or wished == "bfloat16" or (wished == "auto" and device.type == "cuda")
        return NetworkSettings(
            autocast=torch.bfloat16 if half else None,
            max_logits_bytes=config.max_logits_bytes,
            packing=config.packing,
        )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Numbers of elements of the model's matrices."""

    body: int
    head: int
    trained_body: int
    trained_head: int

    @staticmethod
    def of(model: Any) -> _Sizes:
        """Count the elements of a model's matrices."""
        head = model.get_output_embeddings()
        linear = [one.weight for one in model.modules() if isinstance(one, nn.Linear) and one is not head]
        by_head = [] if head is None else [head.weight]
        return _Sizes(
            *(
                sum(one.numel() for one in weights if one.requires_grad or not trained)
                for trained in (False, True)
                for weights in (linear, by_head)
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
    ) -> None:
        """`seeing`: the model as one that is shown images, of which `shown` says what it gets; None if it is not.
        `always_sees`: rows without images go through the vision tower with an image that counts for nothing. Processes
        that compute together need that, since all of them have to use the same weights."""
        self.model = model
        self._seeing, self._shown = seeing, shown
        self._always_sees = always_sees and seeing is not None
        self._within: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._settings = settings
        self._device: torch.device = model.device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self._head: nn.Linear | None = model.get_output_embeddings() if _has_plain_head(model) else None
        self._sizes = _Sizes.of(model)
        self._attention_size = _attention_size(model.config.get_text_config())
        looks_ahead = seeing is not None and seeing.looks_ahead
        self.packs = settings.packing and not looks_ahead and _keeps_rows_apart(model)
        """Whether inputs may be packed."""
        if settings.packing and not self.packs:
            log.warning("%s: rows can't be packed for this model, so they are padded", type(model).__name__)

    def logprobs(self, inputs: Inputs, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies [B, T], 0 at masked positions. The head sees only what predicts unmasked
        tokens."""
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
            entropy_gradient=entropy_gradient,
            chunk_tokens=max(self._settings.max_logits_bytes // (4 * self.vocabulary), 1),
            dtype=self._settings.autocast,
        )
        places = (inputs.rows_N, inputs.places_N)
        zeros_BT = torch.zeros(inputs.rows.loss_mask_BT.shape, device=self._device)
        return zeros_BT.index_put(places, logprobs_N), zeros_BT.index_put(places, entropy_N)

    def placed(self, rows: Sequence[TrainingRow]) -> Sequence[TrainingRow]:
        """Return the rows with their masks where this network reads them; here they stay as they are."""
        return rows

    def within(self, change: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Network:
        """Return a network of the same model that computes inside of `change`, for passes without gradients."""
        other = copy.copy(self)
        other._within = change
        return other

    def flops(self, inputs: Inputs, *, backward: bool) -> float:
        """Return the operations of a forward pass, or of both passes, computed from the sizes of the model's matrices.

        Each weight and token counts 2, backward twice that (once for frozen weights), and causal attention is added.
        Experts of a mixture are not counted."""
        attention_size = 4.0 * self._attention_size * sum(length * length for length in inputs.lengths) / 2
        num_tokens, num_targets = sum(inputs.lengths), len(inputs.targets_N)
        forward = 2.0 * (self._sizes.body * num_tokens + self._sizes.head * num_targets)
        if not backward:
            return forward + attention_size
        by_weights = 2.0 * (self._sizes.trained_body * num_tokens + self._sizes.trained_head * num_targets)
        return 2 * forward + by_weights + 3 * attention_size

    def _hidden(self, inputs: Inputs) -> Tensor:
        """Return the states [B, T - 1, D] or [1, P, D]; logits, where the head cannot be taken apart. Padding is on
        the right, where causal attention never looks, so no attention mask is needed."""
        more = {} if inputs.position_ids is None else _packed(inputs.position_ids, inputs.lengths)
        if inputs.images:
            read = self._with_images(inputs)
        elif self._always_sees:
            read = self._embedded_beside_a_blank(inputs)
        else:
            read = {"input_ids": inputs.token_ids}
        more |= read
        if self._head is None:
            return self.model(**more, use_cache=False).logits  # type: ignore[no-any-return]
        return self.model.base_model(**more, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def _with_images(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return what the model reads where images stand: the embeddings of tokens and images, and their positions if
        these are not those of text. An image that several rows show goes through the tower once."""
        seeing = self._seeing
        if seeing is None or self._shown is None:
            raise ConfigError(f"{type(self.model).__name__}: got rows with images, which it is not shown")
        placeholder = seeing.tokens.token_id
        places = [one.start + np.flatnonzero(one.token_ids == placeholder) for one in inputs.shown]
        counts = {one.number: len(found) for one, found in zip(inputs.shown, places, strict=True)}
        images = [self._shown(image) for image in inputs.images]
        features = seeing.features(images, [counts[number] for number in range(len(images))])
        features_ND = torch.cat([features[one.number].features_KD for one in inputs.shown])
        places_N = torch.from_numpy(np.concatenate(places)).to(self._device)
        is_image_BT = torch.zeros_like(inputs.token_ids, dtype=torch.bool)
        is_image_BT.view(-1)[places_N] = True
        read = {"inputs_embeds": seeing.embed(inputs.token_ids, places_N, features_ND), **seeing.attention(is_image_BT)}
        positions = self._positions(inputs, features)
        return read if positions is None else {**read, "position_ids": positions}

    def _positions(self, inputs: Inputs, features: Sequence[ImageFeatures]) -> Tensor | None:
        """Return positions of several dimensions, [3, B, T - 1] or [3, 1, P]; None where they are those of text."""
        assert self._seeing is not None
        shape, found = inputs.token_ids.shape, False
        positions_3F = np.zeros((3, inputs.token_ids.numel()), np.int64)
        for row, (begin, token_ids) in enumerate(zip(inputs.begins, inputs.read, strict=True)):
            own = self._seeing.positions(token_ids, [features[one.number] for one in inputs.shown if one.row == row])
            found = found or own is not None
            positions_3F[:, begin : begin + len(token_ids)] = np.arange(len(token_ids)) if own is None else own
        return torch.from_numpy(positions_3F.reshape(3, *shape)).to(self._device) if found else None

    def _embedded_beside_a_blank(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the embeddings of tokens, to which what a blank image is counts 0 times."""
        assert self._seeing is not None
        nothing = self._seeing.blank_features().sum() * 0.0
        return {"inputs_embeds": self._seeing.text(inputs.token_ids) + nothing}

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._settings.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._settings.autocast)


def _attention_size(config: Any) -> int:
    """Return the number of layers times their width."""
    num_heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // num_heads
    return int(getattr(config, "num_hidden_layers", 0) * num_heads * width)


def load_model(spec: ModelSpec, device: torch.device) -> Any:
    """Load a model in float32. ConfigError unless its weights have the names of the checkpoint, under which they
    travel."""
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with loading(spec):
        model = model_class(spec.folder).from_pretrained(
            spec.folder, dtype=torch.float32, attn_implementation=attention.register(), use_safetensors=True
        )
    model.to(device)
    model.eval()  # samplers have no dropout, so the ratio must not see any either
    if ImageTokens.of(spec.folder) is None:  # others go to no engine but ours, which calls weights as transformers does
        _check_names(spec, dict(model.named_parameters()))
    return model


TOWERS = ("vision_tower", "visual", "vision_model")
"""What models call their vision tower."""


def freeze_vision_tower(model: Any) -> str:
    """Train nothing of the vision tower, and return its name. ConfigError if there is none."""
    found = (getattr(model.base_model, name, None) for name in TOWERS)
    tower = next((one for one in found if isinstance(one, nn.Module)), None)
    if tower is None:
        raise ConfigError("backends.torch.freeze_vision_tower: the model has no vision tower; remove the setting")
    tower.requires_grad_(False)
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    return names[id(tower)]


def recompute_activations(model: Any) -> None:
    """Let the backward pass compute activations again, layer by layer."""
    for module in model.modules():  # transformers does it in training mode only, where there would be dropout
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})


def compile_layers(model: Any) -> None:
    """Compile each layer by itself. Layers are alike, so the code of one serves for all."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)


def sum_embeddings_in_float32(model: Any) -> None:
    """Let gradients of embeddings be added up in float32, and rounded then. torch does so on GPUs; on CPUs it adds one
    token after another in the gradients' dtype, and in bfloat16 frequent tokens lose most of theirs."""
    for module in model.modules():
        if type(module) is nn.Embedding:  # those that do more than look up keep their own
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


def _check_names(spec: ModelSpec, parameters: Mapping[str, Any]) -> None:
    from safetensors import safe_open

    known: set[str] = set()
    for file in spec.folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            known.update(opened.keys())
    if known and (odd := sorted(parameters.keys() - known)):
        raise ConfigError(
            f"model {spec.name}: transformers calls a weight {odd[0]!r}, which its checkpoint does not; models "
            "that are converted while loading can't be trained by the torch backend yet"
        )


def _states(model: Any, token_ids: Tensor) -> Tensor:
    return model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]


def _packed(position_ids: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    return {"position_ids": position_ids, "attention_mask": attention.row_lengths(lengths)}


@torch.no_grad()
def _has_plain_head(model: Any) -> bool:
    """Return whether logits are one matrix product. Models that do more to them (soft caps, scales) are found by
    trying."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        return False
    probe_BT = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    whole = model(input_ids=probe_BT, use_cache=False).logits
    return torch.allclose(head(_states(model, probe_BT)), whole, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def _keeps_rows_apart(model: Any) -> bool:
    """Return whether packed rows give what each gives alone, found by trying."""
    lengths, vocabulary = (5, 3, 4), model.config.get_text_config().vocab_size
    rows = [torch.arange(7 * length, 8 * length, device=model.device)[None] % vocabulary for length in lengths]
    position_ids = torch.cat([torch.arange(length, device=model.device) for length in lengths])[None]
    try:
        together = model(input_ids=torch.cat(rows, dim=1), use_cache=False, **_packed(position_ids, lengths)).logits
    except (TypeError, ValueError, RuntimeError, IndexError) as error:  # it may not know one or the other
        log.info("%s: packed rows were refused: %s", type(model).__name__, error)
        return False
    alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], dim=1)
    return torch.allclose(together, alone, rtol=1e-3, atol=1e-3)
