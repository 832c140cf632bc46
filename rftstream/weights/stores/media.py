"""Images and other payloads of messages, as objects of the run's store: `media/XX/SHA256`.

Records on the log contain references (`contracts.tasks.Media`). An object's name is the digest of its bytes. So each
payload is written once, and its name means the same in every run. Objects stay as long as the run, since rollouts that
are trained, scored or replayed later refer to them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlparse

from rftstream.contracts.tasks import ChatMessage, Media, Problem
from rftstream.errors import ImageError, WeightsGone
from rftstream.models.vision.images import MAX_IMAGE_BYTES, check_image, decode_data_url, describe_image, digest_of
from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

FOLDER = "media"
"""Folder of the images in the store."""
SCHEME = "store:"
"""Prefix of the url of an object in the run's store."""
MAX_KNOWN = 100_000
"""Most names that are remembered as stored."""


class MediaStore:
    """The images of a run. The feeder calls `keep_problem` for problems, the explorer `keep` for messages of
    environments. Policies and backends call `get`. The methods may be called from any thread."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: dict[str, None] = {}

    def keep_problem(self, problem: Problem) -> Problem:
        """Return the problem with references that every host can resolve. An image that cannot be loaded keeps its
        reference, and its rollouts fail with the reason. WeightsError if the store does not answer."""
        if not any(message.media for message in problem.messages):
            return problem
        return replace(problem, messages=self.keep(problem.messages, files=True))

    def keep(self, messages: Sequence[ChatMessage], *, files: bool = False) -> tuple[ChatMessage, ...]:
        """Return messages whose images are objects of the store. `files` allows urls of this host's files, which only
        our own tasksets write."""
        return tuple(
            replace(message, media=tuple(self._kept(one, files=files) for one in message.media))
            if message.media
            else message
            for message in messages
        )

    def get(self, media: Media) -> bytes:
        """Return the bytes of a payload. ImageError if they are gone or damaged; WeightsError if the store does not
        answer."""
        name = _name_in(media)
        if name is None:
            return read_url(media.url)
        try:
            if (size := self._store.size(name)) > MAX_IMAGE_BYTES:
                raise ImageError(f"image {media.digest}: {size:,} bytes, expected at most {MAX_IMAGE_BYTES:,}")
            data = self._store.get(name)
        except WeightsGone as error:
            raise ImageError(f"image {media.digest}: is not in the store any more: {error}") from None
        if (digest := digest_of(data)) != media.digest:
            raise ImageError(f"image {media.digest}: the object has digest {digest}; it is damaged")
        return data

    def _kept(self, media: Media, *, files: bool) -> Media:
        if _name_in(media) is not None or not media.url.startswith(("data:", "file:") if files else "data:"):
            return media
        try:
            data = read_url(media.url)
            found = describe_image(data, media.url)
            check_image(found)
        except ImageError as error:
            log.warning("%s; the rollouts that show it fail", error)
            return replace(media, url=media.url[:100]) if media.url.startswith("data:") else media
        if media.digest and found.digest != media.digest:
            log.warning(
                "image %s: %s has other bytes now; the rollouts that show it fail", media.digest, media.url[:100]
            )
            return media
        name = f"{FOLDER}/{found.digest.removeprefix('sha256:')[:2]}/{found.digest.removeprefix('sha256:')}"
        if name not in self._known:
            self._store.put(name, data)
            if len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[name] = None
        return replace(found, url=f"{SCHEME}{name}")


def copy_media(source: ObjectStore, target: ObjectStore) -> None:
    """Copy the media of a run to the store of another run, which has records of its rollouts."""
    for name in source.list(f"{FOLDER}/"):
        if not target.exists(name):
            target.put(name, source.get(name))


def read_url(url: str) -> bytes:
    """Return the bytes behind a `data:` or `file:` url. ImageError if there are none or too many."""
    if url.startswith("data:"):
        return decode_data_url(url)
    if not url.startswith("file:"):
        raise ImageError(f"image {url[:200]}: expected an object of the run's store, a file or a data url")
    path = Path(unquote(urlparse(url).path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise ImageError(f"image {path}: {error.strerror or error}") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageError(f"image {path}: more than {MAX_IMAGE_BYTES:,} bytes")
    return data


def _name_in(media: Media) -> str | None:
    return media.url.removeprefix(SCHEME) if media.url.startswith(f"{SCHEME}{FOLDER}/") else None
