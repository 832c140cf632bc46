"""The inputs of a model's vision tower for an image, and the text that stands for the image in prompts.

Both come from transformers' processor of the model folder. LLaVA 1.5 needs less: its config gives the number of tokens
of every image, so its prompts are made without transformers.

Shapes: C channels, H x W pixels, P patches.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.contracts.tasks import Media
from rftstream.errors import ConfigError, ImageError
from rftstream.models.folders.files import read_json
from rftstream.models.vision.images import check_image, image_name, open_image

if TYPE_CHECKING:
    import numpy as np

CACHE_BYTES = 256 << 20
"""Number of bytes of pixels that an ImageCache holds."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a model folder that define how images are processed."""
TEXT_KEYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of a processor that belong to the text."""
FIXED_TYPES = ("llava",)
"""Model types in which all images have the same number of tokens, given by the config."""

ImageInputs = Mapping[str, "np.ndarray"]
"""Inputs of a vision tower for one image, by argument name. The first dimension of each array counts images or patches:
pixel_values float32 [1, C, H, W] and, for example, pixel_attention_mask; or [P, D] and image_grid_thw [1, 3]."""


class FixedProcessor:
    """The image processor of a model in which all images have the same number of tokens. It is transformers' own, run
    by PIL on the CPU, so that pixels are the same on every host."""

    def __init__(self, folder: Path) -> None:
        self._processor = _image_processor(folder)

    def inputs(self, image: Any) -> ImageInputs:
        """Return the model's inputs for a PIL image. ImageError if the processor refuses it."""
        import numpy as np

        values = _tried(lambda: self._processor(images=[image], return_tensors="np"), image)["pixel_values"]
        return {"pixel_values": np.ascontiguousarray(values, dtype=np.float32)}


class OwnProcessor:
    """The processor of a model folder, which knows how many tokens an image has and what stands between them. PIL
    processes images on the CPU."""

    def __init__(self, folder: Path) -> None:
        self._processor = _open_processor(folder)
        mark = getattr(self._processor, "image_token", None)
        if not isinstance(mark, str):
            raise ConfigError(f"model {folder}: its processor {type(self._processor).__name__} has no image_token")
        self.mark = mark
        """Text that the chat template writes for an image. The processor replaces it."""

    @property
    def mark_id(self) -> int:
        """The id of the mark."""
        return int(self._processor.tokenizer.convert_tokens_to_ids(self.mark))

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return list(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def name_of(self, token_id: int) -> str:
        """Return the text of a token."""
        return str(self._processor.tokenizer.convert_ids_to_tokens(token_id))

    def inputs(self, image: Any) -> ImageInputs:
        """Return the model's inputs for a PIL image. ImageError if the processor refuses it."""
        import numpy as np

        found = _tried(lambda: self._processor(text=[self.mark], images=[image], return_tensors="np"), image)
        arrays = {name: np.asarray(found[name]) for name in found if name not in TEXT_KEYS}
        return {
            name: np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else array.dtype)
            for name, array in arrays.items()
            if array.dtype.kind in "biuf"
        }

    def text(self, width: int, height: int) -> str:
        """Return the text that stands in a prompt for an image of this size. ImageError if the processor refuses it."""
        from PIL import Image

        blank = Image.new("RGB", (width, height), (127, 127, 127))
        wanted = {"return_text_replacement_offsets": True}
        found = _tried(lambda: self._processor(text=[self.mark], images=[blank], **wanted), blank)
        try:
            ((offset,),) = found["text_replacement_offsets"]
            return str(offset["replacement"])
        except (KeyError, ValueError, TypeError):
            raise ConfigError(
                f"model: its processor {type(self._processor).__name__} does not tell what stands for an image in a "
                "prompt (text_replacement_offsets)"
            ) from None

    def example(self, images: list[Any]) -> dict[str, Any]:
        """Return all inputs of the model's forward pass for a text of these images alone, as torch tensors."""
        wanted = {"return_mm_token_type_ids": True, "return_tensors": "pt"}
        return dict(self._processor(text=[self.mark * len(images)], images=images, **wanted))


def processor_of(folder: Path) -> FixedProcessor | OwnProcessor:
    """Return the processor of a model that is shown images. ConfigError if it cannot be opened."""
    fixed = read_json(folder / "config.json").get("model_type") in FIXED_TYPES
    return FixedProcessor(folder) if fixed else OwnProcessor(folder)


def _tried(call: Callable[[], Any], image: Any) -> Any:
    try:
        return call()
    except Exception as error:  # a user's image, e.g. of one pixel
        raise ImageError(f"image of {image.width} x {image.height} pixels: the processor refused it: {error}") from None


def _image_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    loader: Any = AutoImageProcessor
    try:
        return loader.from_pretrained(folder, backend="pil", local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"model {folder}: its image processor cannot be opened: {error}") from None


def _open_processor(folder: Path) -> Any:
    """Return a processor for text and images. Its parts for videos are left out, since they need further packages."""
    from transformers import AutoTokenizer
    from transformers.models.auto import processing_auto

    known: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    named = (read_json(folder / file).get("processor_class") for file in PROCESSOR_FILES)
    kind = read_json(folder / "config.json").get("model_type", "")
    name = next((one for one in named if one), None) or known.get(kind)
    base: Any = None if name is None else processing_auto.processor_class_from_name(name)
    if base is None:
        raise ConfigError(f"model {folder}: transformers has no processor {name!r} for its type {kind!r}")
    tokenizer: Any = AutoTokenizer
    try:
        parts = {
            "image_processor": _image_processor(folder),
            "tokenizer": tokenizer.from_pretrained(folder, local_files_only=True),
        }
        settings, _ = base.get_processor_dict(folder, local_files_only=True)
        made = _without_videos(base).from_args_and_dict(
            [parts.get(attribute) for attribute in base.get_attributes()], settings
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"model {folder}: its processor {name} cannot be opened: {error}") from None
    return made


@functools.cache
def _without_videos(base: Any) -> Any:
    class ForImages(base):  # type: ignore[misc]
        """A processor in which some parts may be missing."""

        def check_argument_for_proper_class(self, name: str, part: Any) -> Any:
            return None if part is None else super().check_argument_for_proper_class(name, part)

    ForImages.__name__ = base.__name__
    return ForImages


class ImageCache:
    """A cache of a vision tower's inputs for the most recently used images. Composition roots make one for a policy or
    a backend, which calls `inputs` from any thread."""

    def __init__(self, fetch: Callable[[Media], bytes], folder: Path, *, max_bytes: int = CACHE_BYTES) -> None:
        """`fetch`: returns an image's bytes; ImageError if they are gone. `folder`: the model's folder."""
        self.fetch = fetch
        self._folder, self._max_bytes = folder, max_bytes
        self._processor: FixedProcessor | OwnProcessor | None = None
        self._held: OrderedDict[str, ImageInputs] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def inputs(self, media: Media) -> ImageInputs:
        """Return the model's inputs for an image. ImageError, whose message begins with the digest, if the image is
        gone or cannot be read; WeightsError if the store does not answer."""
        if (found := self._found(media)) is not None:
            return found
        image = self.opened(media)  # downloads run in parallel; transformers' processors run one at a time
        with self._lock:
            if self._processor is None:
                self._processor = processor_of(self._folder)
            try:
                made = self._processor.inputs(image)
            except ImageError as error:
                raise ImageError(f"{image_name(media)}: {error}") from None
            if media.digest not in self._held:
                self._held[media.digest] = made
                self._num_bytes += num_bytes(made)
            while self._num_bytes > self._max_bytes and len(self._held) > 1:
                self._num_bytes -= num_bytes(self._held.popitem(last=False)[1])
            return made

    def opened(self, media: Media) -> Any:
        """Return an image decoded by PIL, in RGB. Raises the same errors as `inputs`."""
        check_image(media)
        return open_image(self.fetch(media), media)

    def _found(self, media: Media) -> ImageInputs | None:
        with self._lock:
            found = self._held.get(media.digest)
            if found is not None:
                self._held.move_to_end(media.digest)
            return found


def num_bytes(inputs: ImageInputs) -> int:
    """Return the total number of bytes of all arrays."""
    return sum(array.nbytes for array in inputs.values())
