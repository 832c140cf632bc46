"""Images for models that read them: what an image is, the tokens that stand for it, and the numbers that a model gets.

An image is named by the digest of its bytes. In a chat it is a `Media` of its message. In a prompt, `ImageTokens` puts
as many placeholder tokens in its place as the model wants. The model is given `pixels` of an `ImageCache` there.

The first half needs neither torch nor transformers. PIL looks at images, and never at more than their headers before
their size is known.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from rftstream.contracts.rollouts import ImageSpan
from rftstream.contracts.tasks import ChatMessage, Media
from rftstream.errors import ConfigError, ImageError
from rftstream.models.files import digest_files, read_json

if TYPE_CHECKING:
    import numpy as np

IMAGE_MARK = "<image>"
"""Where it stands in the text of a message, the message's next image is shown."""
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}
"""Formats of images that are read, by PIL's names -> media types."""
MAX_IMAGE_BYTES = 32 << 20
"""Largest number of bytes of an image as it is stored."""
MAX_PIXELS = 50_000_000
"""Largest number of pixels of an image. A file of few bytes may stand for far more, which would fill the memory."""
MODEL_TYPES = ("llava",)
"""Model types that are shown images: a fixed number of tokens for each, ordinary positions, causal attention."""
CACHE_BYTES = 256 << 20
"""Bytes of pixels that an ImageCache holds."""


# ------------------------------------------------------------------------------------------------ images


def describe_image(data: bytes, url: str) -> Media:
    """Return the reference to an image with these bytes. Of what is no image, kind and size stay empty."""
    kind, width, height = _look_at(data)
    return Media(url=url, digest=digest_of(data), kind=kind, num_bytes=len(data), width=width, height=height)


def digest_of(data: bytes) -> str:
    """Return `sha256:<hex>` of an image's bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def data_url(data: bytes, kind: str) -> str:
    """Return a url that holds an image's bytes."""
    return f"data:{kind or 'application/octet-stream'};base64,{base64.b64encode(data).decode()}"


def decode_data_url(url: str) -> bytes:
    """Return the bytes in a `data:` url. ImageError if it holds none, or too many."""
    head, comma, body = url.partition(",")
    if not comma:
        raise ImageError(f"image {url[:60]}: no data url, expected data:image/...;base64,...")
    if len(body) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise ImageError(f"image {head[:60]}: more than {MAX_IMAGE_BYTES:,} bytes")
    try:
        return base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except binascii.Error as error:
        raise ImageError(f"image {head[:60]}: no data url: {error}") from None


def check_image(media: Media) -> None:
    """Raise ImageError for an image that cannot be shown, as far as its reference tells."""
    if not media.digest:
        raise ImageError(f"image {media.url[:200]}: it could not be read when its problem was made")
    if media.num_bytes > MAX_IMAGE_BYTES:
        raise ImageError(f"{_name(media)}: {media.num_bytes:,} bytes, expected at most {MAX_IMAGE_BYTES:,}")
    if media.width * media.height > MAX_PIXELS:
        raise ImageError(f"{_name(media)}: {media.width} x {media.height} pixels, expected at most {MAX_PIXELS:,}")
    if media.kind and not media.kind.startswith("image/"):
        raise ImageError(f"{_name(media)}: got {media.kind}, expected an image")
    if not media.kind:
        raise ImageError(
            f"{_name(media)}: is no image, or one of far too many pixels; expected one of {', '.join(FORMATS)}"
        )


def open_image(data: bytes, media: Media) -> Any:
    """Return a decoded PIL image in RGB. ImageError unless the bytes are those of `media`, and an image of bounded
    size."""
    from PIL import Image

    if (digest := digest_of(data)) != media.digest:
        raise ImageError(f"{_name(media)}: the bytes have digest {digest}; the image is damaged")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own limits, which ours stand in for
            with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ImageError(
                        f"{_name(media)}: {image.width} x {image.height} pixels, expected at most {MAX_PIXELS:,}"
                    )
                return image.convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # PIL's decoders raise errors of many kinds
        raise ImageError(f"{_name(media)}: no image that can be read: {error}") from None


def _look_at(data: bytes) -> tuple[str, int, int]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
                return FORMATS[str(image.format)], image.width, image.height
    except Exception:  # PIL's decoders raise errors of many kinds, one of them for sizes that it does not even tell
        return "", 0, 0


def _name(media: Media) -> str:
    return f"image {media.digest}"


# ------------------------------------------------------------------------------------------------ tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """How images stand in the prompts of a model. `of` reads it from the model folder; renderers, policies and
    backends ask it."""

    token_id: int
    """The placeholder. A chat template writes it once for each image, and `expand` repeats it."""
    per_image: int
    """Number of tokens that stand for an image."""
    never_sampled: tuple[int, ...]
    """Ids without a probability: the placeholders. Policies and backends mask their logits alike."""

    @staticmethod
    def of(folder: Path) -> ImageTokens | None:
        """Return what a model folder says; None for a model that is not shown images."""
        config = read_json(folder / "config.json")
        if config.get("model_type") not in MODEL_TYPES or "vision_config" not in config:
            return None
        token_id, per_image = _first(config, "image_token_id", "image_token_index"), config.get("image_seq_length")
        if not isinstance(token_id, int) or not isinstance(per_image, int) or per_image < 1:
            raise ConfigError(
                f"model {folder}: config.json has image_token_index {token_id!r} and image_seq_length {per_image!r}, "
                "expected numbers; save the model anew with transformers"
            )
        others = (config.get(f"{kind}_token_{end}") for kind in ("video", "audio") for end in ("id", "index"))
        never = sorted({token_id, *(one for one in others if isinstance(one, int))})
        return ImageTokens(token_id=token_id, per_image=per_image, never_sampled=tuple(never))

    def expand(self, token_ids: Sequence[int], num_images: int) -> tuple[int, ...]:
        """Return the ids of a text with each placeholder repeated. ConfigError unless the text has one for each
        image."""
        if (found := token_ids.count(self.token_id)) != num_images:
            raise ConfigError(
                f"found {found} placeholders of images in the prompt, expected {num_images}, one for each image: "
                "a text itself has the name of the placeholder in it, or the chat template does not show images"
            )
        if not num_images:
            return tuple(token_ids)
        return tuple(
            one for token in token_ids for one in ([token] * self.per_image if token == self.token_id else [token])
        )

    def spans(self, token_ids: Sequence[int], images: Sequence[Media], start: int = 0) -> tuple[ImageSpan, ...]:
        """Return where images stand in expanded ids, of which the first is at position `start`. ConfigError if there is
        not room for exactly these images."""
        places = [place for place, token in enumerate(token_ids) if token == self.token_id]
        firsts = places[:: self.per_image]
        whole = all(places[i * self.per_image : (i + 1) * self.per_image] == [*range(first, first + self.per_image)]
                    for i, first in enumerate(firsts))  # fmt: skip
        if len(places) != len(images) * self.per_image or not whole:
            raise ConfigError(
                f"found {len(places)} tokens of images, expected {len(images)} images of {self.per_image} tokens each"
            )
        return tuple(
            ImageSpan(start=start + first, count=self.per_image, image=image)
            for first, image in zip(firsts, images, strict=True)
        )


def images_of(messages: Sequence[ChatMessage]) -> tuple[Media, ...]:
    """Return the images of a chat, in the order in which they are shown."""
    return tuple(media for message in messages for media in message.media)


def check_takes_images(folder: Path, place: str, takes: bool, *, advice: str) -> None:
    """Raise ConfigError for a part that is given no images, while the model in `folder` is shown them. `place` names
    the part in the run file."""
    if not takes and ImageTokens.of(folder) is not None:
        raise ConfigError(f"{place}: is given no images, but the model is shown them; {advice}")


def why_no_images(folder: Path) -> str:
    """Return why a model is not shown images, for errors."""
    config = read_json(folder / "config.json")
    kind, known = config.get("model_type", "none"), ", ".join(MODEL_TYPES)
    if "vision_config" not in config:
        return f"it reads text alone; models that are shown images: {known}"
    return (
        f"its type {kind!r} is not among those that are shown images ({known}): its tokens, positions or attention "
        "depend on the image in a way that policy and trainer do not both know"
    )


def _first(values: dict[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


# ------------------------------------------------------------------------------------------------ pixels


def processor_digest(folder: Path) -> str | None:
    """Return `sha256:<hex>` of what turns images into numbers; None for a model that is not shown images."""
    if ImageTokens.of(folder) is None:
        return None
    names = ("preprocessor_config.json", "processor_config.json")
    return digest_files([path for name in names if (path := folder / name).is_file()])


class ImageProcessor:
    """The image processor of a model folder: transformers' own, by PIL on the CPU, so that pixels are the same on every
    host."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor

        loader: Any = AutoImageProcessor
        try:
            self._processor = loader.from_pretrained(folder, backend="pil")
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"model {folder}: its image processor cannot be opened: {error}") from None

    def pixels(self, image: Any) -> np.ndarray:
        """Return the numbers of a PIL image: float32 [C, H, W]. ImageError if the processor refuses it."""
        import numpy as np

        try:
            values = self._processor(images=[image], return_tensors="np")["pixel_values"]
        except Exception as error:  # somebody's image, e.g. of one pixel
            raise ImageError(
                f"image of {image.width} x {image.height} pixels: the processor refused it: {error}"
            ) from None
        return np.ascontiguousarray(values[0], dtype=np.float32)


class ImageCache:
    """The pixels of the images that were asked for last. Composition roots make one for a policy or a backend, which
    calls `pixels` from any thread."""

    def __init__(self, fetch: Callable[[Media], bytes], folder: Path, *, max_bytes: int = CACHE_BYTES) -> None:
        """`fetch` returns an image's bytes; ImageError if they are gone. `folder`: the model's."""
        self.fetch = fetch
        self._folder, self._max_bytes = folder, max_bytes
        self._processor: ImageProcessor | None = None
        self._pixels: OrderedDict[str, np.ndarray] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @staticmethod
    def of(folder: Path, fetch: Callable[[Media], bytes]) -> ImageCache | None:
        """Return a cache for the model of a folder; None if the model is not shown images."""
        return None if ImageTokens.of(folder) is None else ImageCache(fetch, folder)

    def pixels(self, media: Media) -> np.ndarray:
        """Return an image's pixels, float32 [C, H, W]. ImageError, which begins with the digest, if there are none;
        WeightsError if the store does not answer."""
        with self._lock:
            if (found := self._pixels.get(media.digest)) is not None and media.digest:
                self._pixels.move_to_end(media.digest)
                return found
            check_image(media)
            image = open_image(self.fetch(media), media)
            if self._processor is None:
                self._processor = ImageProcessor(self._folder)
            try:
                pixels = self._processor.pixels(image)
            except ImageError as error:
                raise ImageError(f"{_name(media)}: {error}") from None
            self._pixels[media.digest] = pixels
            self._num_bytes += pixels.nbytes
            while self._num_bytes > self._max_bytes and len(self._pixels) > 1:
                self._num_bytes -= self._pixels.popitem(last=False)[1].nbytes
            return pixels
