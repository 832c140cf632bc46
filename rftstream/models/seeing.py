"""Models that are shown images, in torch: what images are to a model, in the place of the tokens that stand for them.

Policies and backends both compute by it, so that a sampled token's probability is the same in both.

Shapes: I images, C channels, H x W pixels, K tokens of an image, D width, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.errors import ConfigError
from rftstream.models.images import ImageProcessor, ImageTokens

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def model_class(folder: Path) -> Any:
    """Return the class of transformers that opens a model folder: one of language models, or one with a vision
    tower."""
    import transformers

    shown = ImageTokens.of(folder) is not None
    return transformers.AutoModelForImageTextToText if shown else transformers.AutoModelForCausalLM


class SeeingModel:
    """A model of transformers with a vision tower. A policy or a backend makes one for the model that it has loaded."""

    def __init__(self, model: Any, tokens: ImageTokens, blank: np.ndarray) -> None:
        import torch

        self._model, self.tokens = model, tokens
        self.never_sampled = torch.tensor(tokens.never_sampled, device=model.device)
        """Ids that get no probability, int64."""
        self.blank = blank
        """Pixels of an image that says nothing."""

    @staticmethod
    def of(model: Any, folder: Path) -> SeeingModel | None:
        """Return the model that was loaded from a folder; None if it is not shown images. ConfigError if it computes in
        another way than ours with an image."""
        tokens = ImageTokens.of(folder)
        if tokens is None:
            return None
        from PIL import Image

        blank = ImageProcessor(folder).pixels(Image.new("RGB", (64, 48), (200, 120, 40)))
        seeing = SeeingModel(model, tokens, blank)
        seeing._check(folder)
        return seeing

    def features(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """Return what images are to the language model, [I, K, D]. `pixels`: float32 [C, H, W] of each."""
        import numpy as np
        import torch

        pixels_ICHW = torch.from_numpy(np.stack(pixels)).to(self._model.device, self._model.dtype)
        found = self._model.get_image_features(pixel_values=pixels_ICHW)
        found = getattr(found, "pooler_output", found)
        features_IKD = torch.stack(list(found)) if isinstance(found, list | tuple) else found
        if features_IKD.shape[:2] != (len(pixels), self.tokens.per_image):
            raise ConfigError(
                f"model: its vision tower gives {tuple(features_IKD.shape[:2])} features, expected "
                f"{len(pixels)} images of {self.tokens.per_image} (image_seq_length in config.json)"
            )
        return features_IKD

    def embed(self, token_ids_BT: Tensor, places: Tensor, features_IKD: Tensor) -> Tensor:
        """Return embeddings [B, T, D] of tokens, with features at `places`: indices in the flat tokens, K for each
        image in order."""
        embeddings_BTD = self.text(token_ids_BT)
        flat = embeddings_BTD.flatten(0, 1)
        flat = flat.index_put((places,), features_IKD.flatten(0, 1).to(flat.dtype))
        return flat.reshape(embeddings_BTD.shape)

    def text(self, token_ids_BT: Tensor) -> Tensor:
        """Return embeddings [B, T, D] of tokens without images."""
        embeddings: Tensor = self._model.get_input_embeddings()(token_ids_BT)
        return embeddings

    def mask(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] in which placeholders of images have no probability."""
        return logits.index_fill(-1, self.never_sampled, float("-inf"))

    def _check(self, folder: Path) -> None:
        """Compare with the model's own forward pass over an image and some text."""
        import torch

        pixels = self.blank
        count = self.tokens.per_image
        ids = [self.tokens.token_id] * count + [one for one in range(8) if one not in self.tokens.never_sampled]
        token_ids = torch.tensor([ids], device=self._model.device)
        with torch.no_grad():
            features = self.features([pixels])
            places = torch.arange(count, device=self._model.device)
            ours = self._model(inputs_embeds=self.embed(token_ids, places, features), use_cache=False).logits
            values = torch.from_numpy(pixels)[None].to(self._model.device, self._model.dtype)
            theirs = self._model(input_ids=token_ids, pixel_values=values, use_cache=False).logits
        if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2):
            raise ConfigError(
                f"model {folder}: with an image it computes otherwise than from embeddings alone, so that it cannot be "
                "sampled from and trained alike; use another model"
            )
