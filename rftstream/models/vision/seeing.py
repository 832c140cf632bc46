"""Models that are shown images, in torch: the features of images in place of their placeholder tokens.

Policies and backends both use this module, so that they compute the same probability for a sampled token.

Shapes: I images, K placeholders of an image, N placeholders of all images, D width, B rows, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rftstream.contracts.tasks import Media
from rftstream.errors import ConfigError
from rftstream.models.vision.image_inputs import FixedProcessor, ImageInputs, OwnProcessor, processor_of
from rftstream.models.vision.image_tokens import ImageTokens

if TYPE_CHECKING:
    from torch import Tensor

TRIED_SIZES = ((64, 48), (33, 90))
"""Width and height of the images on which a model is tried."""


def model_class(folder: Path) -> Any:
    """Return the class of transformers that opens a model folder: one for language models, or one with a vision
    tower."""
    import transformers

    shown = ImageTokens.of(folder) is not None
    return transformers.AutoModelForImageTextToText if shown else transformers.AutoModelForCausalLM


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """The features of an image for the language model. `SeeingModel` makes it."""

    features_KD: Tensor
    """Output of the tower for each placeholder, float [K, D]."""
    layout: ImageInputs
    """Inputs from which the positions of the image's tokens are computed; empty if these are positions of text."""


class SeeingModel:
    """A model of transformers with a vision tower. A policy or a backend makes one for the model that it has loaded."""

    def __init__(self, model: Any, tokens: ImageTokens, blank: tuple[ImageInputs, int]) -> None:
        """`blank`: the inputs of a blank image, and its number of placeholders."""
        import torch

        self._model, self.tokens = model, tokens
        vocabulary = int(model.config.get_text_config().vocab_size)
        never = [one for one in tokens.never_sampled if one < vocabulary]
        self.never_sampled = torch.tensor(never, device=model.device)
        """Ids that are never sampled, int64."""
        self._blank = blank
        self._tower_takes = _names_in(getattr(model, "get_image_features", None))
        self._rope_index = getattr(model.base_model, "get_rope_index", None)
        self._rope_takes = _names_in(self._rope_index)
        self.looks_ahead = "token_type_ids" in _names_in(model.base_model.forward)
        """Whether the tokens of an image attend to each other in both directions."""

    @staticmethod
    def of(model: Any, folder: Path) -> SeeingModel | None:
        """Return the model that was loaded from a folder; None if it is not shown images. ConfigError if it computes
        images differently than this module."""
        tokens = ImageTokens.of(folder)
        if tokens is None:
            return None
        processor = processor_of(folder)
        images = [_noise(size) for size in TRIED_SIZES]
        seeing = SeeingModel(model, tokens, (processor.inputs(images[0]), tokens.count(_reference_to(images[0]))))
        _check_alike(seeing, model, processor, images, folder)
        return seeing

    def features(self, images: Sequence[ImageInputs], counts: Sequence[int]) -> tuple[ImageFeatures, ...]:
        """Return the features of images for the language model. `counts`: the number of placeholders of each image. All
        images go through the tower together."""
        import torch

        joined = {name: array for name, array in _joined(images).items() if name in self._tower_takes}
        tensors = {name: torch.from_numpy(array).to(self._model.device) for name, array in joined.items()}
        tensors = {name: one.to(self._model.dtype) if one.is_floating_point() else one for name, one in tensors.items()}
        found = self._model.get_image_features(**tensors)
        found = getattr(found, "pooler_output", found)
        parts = found if isinstance(found, list | tuple) else [found]
        features_ND = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        if len(features_ND) != sum(counts):
            raise ConfigError(
                f"model: its vision tower gives {len(features_ND)} features for images with {list(counts)} tokens, "
                "expected one for each; config.json and the processor's files are not of the same model"
            )
        return tuple(
            ImageFeatures(part, {name: array for name, array in image.items() if name in self._rope_takes})
            for part, image in zip(features_ND.split(list(counts)), images, strict=True)  # type: ignore[no-untyped-call]
        )

    def blank_features(self) -> Tensor:
        """Return the features of a blank image, [K, D]."""
        image, count = self._blank
        return self.features([image], [count])[0].features_KD

    def text(self, token_ids_BT: Tensor) -> Tensor:
        """Return embeddings [B, T, D] of tokens without images."""
        embeddings: Tensor = self._model.get_input_embeddings()(token_ids_BT)
        return embeddings

    def embed(self, token_ids_BT: Tensor, places_N: Tensor, features_ND: Tensor) -> Tensor:
        """Return embeddings [B, T, D] of tokens, with features at `places_N`, which are indices in the flattened
        tokens."""
        flat = token_ids_BT.flatten().index_fill(0, places_N, 0)  # a placeholder may lie beyond the vocabulary
        embeddings_BTD = self.text(flat.reshape(token_ids_BT.shape))
        flat_D = embeddings_BTD.flatten(0, 1).index_put((places_N,), features_ND.to(embeddings_BTD.dtype))
        return flat_D.reshape(embeddings_BTD.shape)

    def positions(self, token_ids: np.ndarray, images: Sequence[ImageFeatures]) -> np.ndarray | None:
        """Return the positions of a row's tokens, int64 [3, T], by the model's own formula; None if they are positions
        of text. `images`: the images in the row, in order."""
        import torch

        if self._rope_index is None or not images:
            return None
        ids_1T = torch.from_numpy(token_ids.astype(np.int64))[None]
        layouts = {name: torch.from_numpy(array) for name, array in _joined([image.layout for image in images]).items()}
        kinds = {"mm_token_type_ids": (ids_1T == self.tokens.token_id).int()} if self._knows_kinds else {}
        found, _ = self._rope_index(ids_1T, **layouts, **kinds)
        positions: np.ndarray = found[:, 0].numpy()
        return positions

    @property
    def _knows_kinds(self) -> bool:
        return "mm_token_type_ids" in self._rope_takes

    def attention(self, is_image_BT: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the model's forward pass that say which tokens belong to images."""
        return {"token_type_ids": is_image_BT.long()} if self.looks_ahead else {}

    def mask(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] with the placeholders of images masked out."""
        return logits.index_fill(-1, self.never_sampled, float("-inf"))

    def logits(self, token_ids: np.ndarray, images: Sequence[ImageInputs], counts: Sequence[int]) -> Tensor:
        """Return the logits [1, T, V] of one row that shows these images."""
        import torch

        shown = self.features(images, counts)
        ids_1T = torch.from_numpy(token_ids)[None].to(self._model.device)
        is_image_1T = ids_1T == self.tokens.token_id
        features_ND = torch.cat([one.features_KD for one in shown])
        positions_3T = self.positions(token_ids, shown)
        more = (
            {} if positions_3T is None else {"position_ids": torch.from_numpy(positions_3T)[:, None].to(ids_1T.device)}
        )
        logits: Tensor = self._model(
            inputs_embeds=self.embed(ids_1T, is_image_1T.flatten().nonzero()[:, 0], features_ND),
            use_cache=False,
            **self.attention(is_image_1T),
            **more,
        ).logits
        return logits


def _check_alike(
    seeing: SeeingModel, model: Any, processor: FixedProcessor | OwnProcessor, images: Sequence[Any], folder: Path
) -> None:
    """Compare our logits with the model's own forward pass over images and some text. ConfigError if they differ."""
    import torch

    tokens = seeing.tokens
    text = [one for one in range(8) if one not in tokens.never_sampled]
    try:
        given, counts = _example(processor, tokens, images)
        images = images[: len(counts)]
        ids_1T = _apart(given.pop("input_ids")[0].tolist(), text, tokens.token_id, counts[0])
        kinds = {name: (ids_1T == tokens.token_id).long() for name in ("token_type_ids", "mm_token_type_ids")}
        taken = _names_in(model.base_model.forward).keys() - {"attention_mask"}
        given = {name: one.to(model.device) for name, one in {**given, **kinds}.items() if name in taken}
        given["input_ids"] = ids_1T.to(model.device)
        given = {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in given.items()}
        with torch.no_grad():
            theirs = model(**given, use_cache=False).logits
            ours = seeing.logits(ids_1T[0].numpy(), [processor.inputs(image) for image in images], counts)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"model {folder}: its type cannot be shown images here: {type(error).__name__}: {error}; use another model"
        ) from error
    finally:
        if hasattr(model.base_model, "rope_deltas"):
            model.base_model.rope_deltas = None  # the model would add them to the positions of later rows
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2):
        raise ConfigError(
            f"model {folder}: with images it computes otherwise than from embeddings and positions alone, so that it "
            "cannot be sampled from and trained alike; use another model"
        )


def _example(
    processor: FixedProcessor | OwnProcessor, tokens: ImageTokens, images: Sequence[Any]
) -> tuple[dict[str, Any], list[int]]:
    """Return the inputs of the model's own forward pass for a text of images alone, and the number of placeholders of
    each image. If all images have the same number, one image is used, since more would show nothing new."""
    import torch

    if isinstance(processor, OwnProcessor):
        return processor.example(list(images)), [tokens.count(_reference_to(image)) for image in images]
    pixels = {name: torch.from_numpy(array) for name, array in processor.inputs(images[0]).items()}
    count = tokens.per_image or 0
    return {"input_ids": torch.tensor([[tokens.token_id] * count]), **pixels}, [count]


def _apart(token_ids: Sequence[int], text: Sequence[int], placeholder: int, count: int) -> Tensor:
    """Return ids [1, T] with text after the first image, which has `count` placeholders, and at the end."""
    import torch

    behind = [place for place, token in enumerate(token_ids) if token == placeholder][count - 1] + 1
    return torch.tensor([[*token_ids[:behind], *text, *token_ids[behind:], *text]])


def _noise(size: tuple[int, int]) -> Any:
    from PIL import Image

    width, height = size
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _reference_to(image: Any) -> Media:
    return Media(url="", digest="sha256:", kind="image/png", width=image.width, height=image.height)


def _joined(images: Sequence[ImageInputs]) -> dict[str, np.ndarray]:
    """Return the arrays of several images, concatenated. If one image has more tiles than another, the others are
    padded with zero tiles, as transformers' processors do."""
    return {name: _end_to_end([image[name] for image in images]) for name in images[0]}


def _end_to_end(arrays: Sequence[np.ndarray]) -> np.ndarray:
    shapes = np.asarray([array.shape[1:] for array in arrays]).reshape(len(arrays), -1)
    if (shapes == shapes[:1]).all():
        return np.concatenate(arrays)
    rooms = shapes.max(axis=0) - shapes
    return np.concatenate(
        [np.pad(array, [(0, 0), *((0, int(more)) for more in room)]) for array, room in zip(arrays, rooms, strict=True)]
    )


def _names_in(function: Any) -> Mapping[str, Any]:
    return {} if function is None else inspect.signature(function).parameters
