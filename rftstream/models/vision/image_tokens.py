"""How images stand in prompts: the text that the renderer writes for an image, its span in the tokens, and the tokens
that are never sampled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rftstream.contracts.rollouts import ImageSpan
from rftstream.contracts.tasks import ChatMessage, Media
from rftstream.errors import ConfigError, ImageError
from rftstream.models.folders.files import digest_files, read_json
from rftstream.models.vision.image_inputs import FIXED_TYPES, PROCESSOR_FILES, ImageCache, OwnProcessor
from rftstream.models.vision.images import check_image

NOMINAL_SIZE = (64, 64)
"""Size that is assumed for an image that cannot be shown. Sampling from it fails the rollout, with the reason."""
KEPT_SIZES = 4096
"""Number of image sizes whose texts are kept."""


class ImageTexts:
    """The texts that stand for images in the prompts of a model where the text depends on the image's size.
    `ImageTokens.of` makes it; the first image opens the processor."""

    def __init__(self, folder: Path, token_id: int) -> None:
        self._folder, self._token_id = folder, token_id
        self._of_size = functools.lru_cache(KEPT_SIZES)(self._text)

    @functools.cached_property
    def processor(self) -> OwnProcessor:
        """The model's processor."""
        return OwnProcessor(self._folder)

    def of(self, image: Media) -> tuple[str, int]:
        """Return the text that stands in a prompt for the image, and the number of placeholders in it."""
        try:
            check_image(image)
            return self._of_size(image.width, image.height)
        except ImageError:
            return self._of_size(*NOMINAL_SIZE)

    def around(self, image: Media) -> tuple[int, int]:
        """Return how many tokens of an image stand before its first placeholder and after its last."""
        ids = self.processor.ids_of(self.of(image)[0])
        places = [place for place, token in enumerate(ids) if token == self._token_id]
        return places[0], len(ids) - 1 - places[-1]

    def _text(self, width: int, height: int) -> tuple[str, int]:
        text = self.processor.text(width, height)
        return text, text.count(self.processor.name_of(self._token_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """How images stand in the prompts of a model. `of` reads it from the model folder; renderers, policies and backends
    use it."""

    token_id: int
    """Id of the placeholder. An image has one placeholder for each feature of the vision tower."""
    per_image: int | None
    """Number of placeholders of each image; None if it depends on the image."""
    never_sampled: tuple[int, ...]
    """Ids that are never sampled: placeholders, and tokens that stand for a whole image in a text. Policies and
    backends both mask their logits."""
    texts: ImageTexts | None = field(default=None, repr=False, compare=False)
    """Texts that stand for images, if they depend on the image; else None."""

    @property
    def mark_id(self) -> int:
        """Id of the token that the chat template writes once for an image, before expansion."""
        return self.token_id if self.texts is None else self.texts.processor.mark_id

    @staticmethod
    def of(folder: Path) -> ImageTokens | None:
        """Return how a model folder defines image tokens; None for a model that is not shown images."""
        config = read_json(folder / "config.json")
        if "vision_config" not in config:
            return None
        token_id, per_image = _first(config, "image_token_id", "image_token_index"), None
        if config.get("model_type") in FIXED_TYPES:
            per_image = config.get("image_seq_length")
            if not isinstance(token_id, int) or not isinstance(per_image, int) or per_image < 1:
                raise ConfigError(
                    f"model {folder}: config.json has image_token_index {token_id!r} and image_seq_length "
                    f"{per_image!r}, expected numbers; save the model anew with transformers"
                )
        elif not isinstance(token_id, int) or not any((folder / name).is_file() for name in PROCESSOR_FILES):
            return None
        others = (config.get(f"{kind}_token_{end}") for kind in ("video", "audio", "boi") for end in ("id", "index"))
        never = sorted({token_id, *(other for other in others if isinstance(other, int))})
        texts = ImageTexts(folder, token_id) if per_image is None else None
        return ImageTokens(token_id=token_id, per_image=per_image, never_sampled=tuple(never), texts=texts)

    def expand(self, text: str, images: Sequence[Media], *, placeholder: str) -> str:
        """Return a prompt's text with each image's mark replaced by the image's full text. `placeholder`: the text of
        `token_id`. ConfigError unless the text has one mark for each image."""
        pieces = text.split(placeholder if self.texts is None else self.texts.processor.mark)
        if len(pieces) != len(images) + 1:
            raise ConfigError(
                f"found {len(pieces) - 1} placeholders of images in the prompt, expected {len(images)}, one for each "
                "image: a text itself has the name of the placeholder in it, or the chat template does not show images"
            )
        shown = [
            placeholder * (self.per_image or 0) if self.texts is None else self.texts.of(image)[0] for image in images
        ]
        return pieces[0] + "".join(one + piece for one, piece in zip(shown, pieces[1:], strict=True))

    def around(self, image: Media) -> tuple[int, int]:
        """Return how many tokens of an image stand before its first placeholder and after its last."""
        return (0, 0) if self.texts is None else self.texts.around(image)

    def count(self, image: Media) -> int:
        """Return how many placeholders stand for an image."""
        return (self.per_image or 0) if self.texts is None else self.texts.of(image)[1]

    def spans(self, token_ids: Sequence[int], images: Sequence[Media], start: int = 0) -> tuple[ImageSpan, ...]:
        """Return the spans of images in the ids of an expanded text, each from its first placeholder to its last.
        `start` is the position of the first id. ConfigError unless the placeholders fit exactly these images."""
        places = np.flatnonzero(np.asarray(token_ids, dtype=np.int64) == self.token_id).tolist()
        counts = [self.count(image) for image in images]
        if len(places) != sum(counts):
            expected = ", ".join(map(str, counts)) or "none"
            raise ConfigError(
                f"found {len(places)} tokens of images, expected {len(images)} images of these numbers of tokens: "
                f"{expected}; a text itself has the name of the placeholder in it"
            )
        spans, begin = [], 0
        for image, count in zip(images, counts, strict=True):
            first, last = places[begin], places[begin + count - 1]
            if self.texts is None and last - first != count - 1:
                raise ConfigError(f"found the {count} tokens of an image apart, expected them one after the other")
            spans.append(ImageSpan(start=start + first, count=last - first + 1, image=image))
            begin += count
        return tuple(spans)


def images_of(messages: Sequence[ChatMessage]) -> tuple[Media, ...]:
    """Return the images of a chat, in the order in which they are shown."""
    return tuple(media for message in messages for media in message.media)


def check_takes_images(folder: Path, place: str, takes: bool, *, advice: str) -> None:
    """Raise ConfigError if the model in `folder` is shown images and a part does not take any. `place` names the part
    in the run file."""
    if not takes and ImageTokens.of(folder) is not None:
        raise ConfigError(f"{place}: is given no images, but the model is shown them; {advice}")


def why_no_images(folder: Path) -> str:
    """Return why a model is not shown images, for error messages."""
    config = read_json(folder / "config.json")
    if "vision_config" not in config:
        return "it reads text alone"
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return f"it has a vision tower, but none of {', '.join(PROCESSOR_FILES)}; fetch the model again, whole"
    return (
        f"its type {config.get('model_type', 'none')!r} has no image_token_id in config.json, in whose place images go"
    )


def processor_digest(folder: Path) -> str | None:
    """Return `sha256:<hex>` of the image processor's files; None for a model that is not shown images."""
    if ImageTokens.of(folder) is None:
        return None
    return digest_files([path for name in PROCESSOR_FILES if (path := folder / name).is_file()])


def image_cache(folder: Path, fetch: Callable[[Media], bytes]) -> ImageCache | None:
    """Return a cache of the image inputs of the model in a folder; None if the model is not shown images."""
    return None if ImageTokens.of(folder) is None else ImageCache(fetch, folder)


def _first(values: dict[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)
