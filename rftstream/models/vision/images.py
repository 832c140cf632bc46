"""Images as they are stored: their bytes, digests and references, and the checks that they are valid.

An image is named by the digest of its bytes. In a chat it is a `Media` of its message. In a prompt, `ImageTokens`
(image_tokens.py) replaces it with the model's number of placeholder tokens. `ImageCache` (image_inputs.py) computes the
model's inputs from it. PIL reads images, and reads only their headers until their size is known.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from typing import Any
from urllib.parse import unquote_to_bytes

from rftstream.contracts.tasks import Media
from rftstream.errors import ImageError

IMAGE_MARK = "<image>"
"""Mark in the text of a message at which the message's next image is shown."""
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}
"""Formats of images that are accepted: PIL's names -> media types."""
MAX_IMAGE_BYTES = 32 << 20
"""Largest size of a stored image, in bytes."""
MAX_PIXELS = 50_000_000
"""Largest number of pixels of an image. A small file may decode to far more, which would fill the memory."""


# ------------------------------------------------------------------------------------------------ images


def describe_image(data: bytes, url: str) -> Media:
    """Return the reference to an image with these bytes. Kind and size are empty if the bytes are no image."""
    kind, width, height = _look_at(data)
    return Media(url=url, digest=digest_of(data), kind=kind, num_bytes=len(data), width=width, height=height)


def digest_of(data: bytes) -> str:
    """Return `sha256:<hex>` of an image's bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def data_url(data: bytes, kind: str) -> str:
    """Return a url that holds an image's bytes."""
    return f"data:{kind or 'application/octet-stream'};base64,{base64.b64encode(data).decode()}"


def decode_data_url(url: str) -> bytes:
    """Return the bytes in a `data:` url. ImageError if it holds no bytes, or too many."""
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
    """Raise ImageError if the reference shows that the image cannot be shown."""
    if not media.digest:
        raise ImageError(f"image {media.url[:200]}: it could not be read when its problem was made")
    if media.num_bytes > MAX_IMAGE_BYTES:
        raise ImageError(f"{image_name(media)}: {media.num_bytes:,} bytes, expected at most {MAX_IMAGE_BYTES:,}")
    if media.width * media.height > MAX_PIXELS:
        raise ImageError(f"{image_name(media)}: {media.width} x {media.height} pixels, expected at most {MAX_PIXELS:,}")
    if media.kind and not media.kind.startswith("image/"):
        raise ImageError(f"{image_name(media)}: got {media.kind}, expected an image")
    if not media.kind:
        raise ImageError(
            f"{image_name(media)}: is no image, or one of far too many pixels; expected one of {', '.join(FORMATS)}"
        )


def open_image(data: bytes, media: Media) -> Any:
    """Return a decoded PIL image in RGB. ImageError unless the bytes are those of `media`, and are an image of a
    permitted size."""
    from PIL import Image

    if (digest := digest_of(data)) != media.digest:
        raise ImageError(f"{image_name(media)}: the bytes have digest {digest}; the image is damaged")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's warnings about its own limits, which ours replace
            with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ImageError(
                        f"{image_name(media)}: {image.width} x {image.height} pixels, expected at most {MAX_PIXELS:,}"
                    )
                return image.convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # PIL's decoders raise errors of many kinds
        raise ImageError(f"{image_name(media)}: no image that can be read: {error}") from None


def _look_at(data: bytes) -> tuple[str, int, int]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
                return FORMATS[str(image.format)], image.width, image.height
    except Exception:  # PIL's decoders raise errors of many kinds, one of them for sizes that it does not even tell
        return "", 0, 0


def image_name(media: Media) -> str:
    """Return the name of an image in error messages."""
    return f"image {media.digest}"
