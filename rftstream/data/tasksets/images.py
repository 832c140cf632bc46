"""Images in rows: file paths, data URLs, bytes, and the values of Hugging Face's `Image` feature.

A row has one image or a list of them, in a column that `columns = { images = ... }` names. Each becomes a `Media` of
the message that shows it. An image that cannot be read does not stop a run: its rollouts fail with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rftstream.contracts.tasks import ChatMessage, Media
from rftstream.errors import ConfigError, ImageError
from rftstream.models.vision.images import IMAGE_MARK, MAX_IMAGE_BYTES, data_url, decode_data_url, describe_image

MAX_IMAGES = 64
"""Largest number of images of a problem."""


def with_images(messages: Sequence[ChatMessage], value: Any, folder: Path, where: str) -> tuple[ChatMessage, ...]:
    """Return the messages with a row's images: at the `<image>` marks of their texts, in order, or, without marks,
    before the text of the first user message. ConfigError if the numbers of marks and images differ."""
    values = _listed(value, where)
    shares = _shares(messages, len(values), where)
    images = [_media(one, folder, where) for one in values]
    placed = []
    for message, count in zip(messages, shares, strict=True):
        placed.append(replace(message, media=tuple(images[:count])) if count else message)
        images = images[count:]
    return tuple(placed)


def check_images(messages: Sequence[ChatMessage], value: Any, folder: Path, where: str) -> None:
    """Raise ConfigError for rows that `with_images` refuses, and for missing files. No file is opened."""
    values = _listed(value, where)
    _shares(messages, len(values), where)
    for one in values:
        found = _path_in(one, folder, where)
        if found is not None and not found.is_file():
            raise ConfigError(f"{where}: no image at {found}; put it there, or set options.image_folder")


def text_of_part(part: Any, *, images: bool) -> str | None:
    """Return a content part as text: its text, or, with `images`, a mark for an image whose bytes are in a separate
    column. None for any other part."""
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "text":
        text = part.get("text")
        return text if isinstance(text, str) else None
    alone = all(value is None for key, value in part.items() if key != "type")
    return IMAGE_MARK if images and part.get("type") == "image" and alone else None


def image_in(data: bytes) -> Media:
    """Return a reference that contains the image itself, until the image is put into a store."""
    found = describe_image(data, "")
    return replace(found, url=data_url(data, found.kind))


def _listed(value: Any, where: str) -> list[Any]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if len(values) > MAX_IMAGES:
        raise ConfigError(f"{where}: {len(values)} images, expected at most {MAX_IMAGES}")
    return values


def _shares(messages: Sequence[ChatMessage], count: int, where: str) -> list[int]:
    """Return the number of the row's images that each message shows."""
    marks = [message.content.count(IMAGE_MARK) for message in messages]
    if sum(marks) == count:
        return marks
    if any(marks):
        raise ConfigError(f"{where}: {sum(marks)} marks {IMAGE_MARK} for {count} images, expected one for each or none")
    first = next((place for place, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise ConfigError(f"{where}: images without a message of the user's, expected one that shows them")
    return [count if place == first else 0 for place in range(len(messages))]


def _media(value: Any, folder: Path, where: str) -> Media:
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        return _of_bytes(value["bytes"], str(value.get("path") or ""))
    if isinstance(value, bytes):
        return _of_bytes(value, "")
    path = _path_in(value, folder, where)
    if path is not None:
        return _of_file(path)
    try:
        return replace(describe_image(decode_data_url(value), ""), url=value)
    except ImageError:
        return Media(url=value[:100], digest="", kind="")


def _of_bytes(data: bytes, name: str) -> Media:
    if len(data) > MAX_IMAGE_BYTES:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        return Media(url=f"bytes:{Path(name).name}", digest=digest, kind="", num_bytes=len(data))
    return image_in(data)


def _of_file(path: Path) -> Media:
    url = path.absolute().as_uri()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
            if len(data) <= MAX_IMAGE_BYTES:
                return describe_image(data, url)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Media(url=url, digest=f"sha256:{digest}", kind="", num_bytes=path.stat().st_size)
    except OSError:  # the file existed when the run began
        return Media(url=url, digest="", kind="")


def _path_in(value: Any, folder: Path, where: str) -> Path | None:
    """Return the path in a value, inside the folder of images; None if the value contains the image itself."""
    if isinstance(value, Mapping) and not isinstance(value.get("bytes"), bytes):
        value = value.get("path")
    if isinstance(value, bytes | Mapping) or (isinstance(value, str) and value.startswith("data:")):
        return None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: an image is {value!r:.80}, expected a path, a data url, or bytes")
    if "://" in value:
        raise ConfigError(f"{where}: an image is {value[:80]!r}, expected a file: fetch it beside the data")
    path, root = (folder / value).resolve(), folder.resolve()
    if not path.is_relative_to(root):
        raise ConfigError(
            f"{where}: an image is at {value[:200]!r}, expected one below {root}, so that data from "
            "elsewhere cannot name any file of this machine; set options.image_folder"
        )
    return path
