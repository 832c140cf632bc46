"""Images in the prompts that `vllm` samples from.

By default vLLM inserts the tokens of an image itself. Here its processor gets each image once, in a prompt that
contains only the image. The request's tokens for an image must be those that vLLM makes. Then the engine gets the
request's own tokens, and the processor's output for the image.

vLLM caches the tower's output for an image under a name. Our name is the image's digest with the version of the
weights, so that no version meets the output of another one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.rollouts import ImageSpan
from rftstream.contracts.tasks import Media
from rftstream.errors import ConfigError, ImageError
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.models.vision.image_tokens import ImageTokens
from rftstream.models.vision.images import image_name
from rftstream.policies.base import SampleRequest

MAX_IMAGES = 64
"""Number of images that are kept for later requests."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """An image after vLLM's processor. `EngineImages.prepare` makes it."""

    item: Any
    """Item for the engine, a MultiModalKwargsItem."""
    token_ids: tuple[int, ...]
    """Tokens of the image in a prompt, from its first placeholder to its last."""


class EngineImages:
    """The images of an engine's requests. `Engine` makes it if the model is shown images. For each request it calls
    `prepare`, then `prompt` when the request enters the engine. Both run in the event loop's thread; other threads
    fetch and decode images."""

    def __init__(self, cache: ImageCache, tokens: ImageTokens) -> None:
        self._cache, self._tokens = cache, tokens
        self._known: OrderedDict[str, asyncio.Task[PreparedImage]] = OrderedDict()
        """Digest -> the image, which may still be in preparation."""

    async def prepare(self, images: Sequence[ImageSpan], renderer: Any) -> tuple[PreparedImage, ...]:
        """Return vLLM's items for a request's images, in order; `renderer` is the engine's. ImageError if an image
        cannot be shown; WeightsError if the store does not answer."""
        return tuple([await self._prepared(span.image, renderer) for span in images])

    async def _prepared(self, image: Media, renderer: Any) -> PreparedImage:
        task = self._known.get(image.digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.get_running_loop().create_task(self._make(image, renderer))
            self._known[image.digest] = task
        self._known.move_to_end(image.digest)
        while len(self._known) > MAX_IMAGES:
            self._known.popitem(last=False)
        return await asyncio.shield(task)  # others may wait for it

    async def _make(self, image: Media, renderer: Any) -> PreparedImage:
        opened = await asyncio.to_thread(self._cache.opened, image)
        prompt = {
            "prompt_token_ids": [self._tokens.mark_id],
            "multi_modal_data": {"image": [opened]},
            "multi_modal_uuids": {"image": [image.digest]},
        }
        try:
            (made,) = await renderer.render_cmpl_async([prompt])
            (item,) = made["mm_kwargs"]["image"]
            (place,) = made["mm_placeholders"]["image"]
        except Exception as error:  # errors of the model's own processor, of any kind
            raise ImageError(f"{image_name(image)}: vllm refused it: {type(error).__name__}: {error}") from None
        return PreparedImage(item, self._between(made["prompt_token_ids"], place, image))

    def _between(self, token_ids: Sequence[int], place: Any, image: Media) -> tuple[int, ...]:
        """Return the tokens of an image. ConfigError if features belong to other tokens than its placeholders."""
        end = place.offset + place.length
        places = [one for one in range(place.offset, end) if token_ids[one] == self._tokens.token_id]
        shown = list(range(place.offset, end))
        if place.is_embed is not None:
            shown = [one for one, is_shown in zip(shown, place.is_embed.tolist(), strict=True) if is_shown]
        if shown != places or not places:
            raise ConfigError(
                f"policy vllm: {image_name(image)}: vLLM puts features in the place of {len(shown)} tokens of which "
                f"{len(set(shown) & set(places))} are placeholders {self._tokens.token_id}, expected these alone; use "
                "policy 'hf'"
            )
        return tuple(token_ids[places[0] : places[-1] + 1])

    def prompt(self, request: SampleRequest, prepared: Sequence[PreparedImage], label: str) -> Any:
        """Return a request in the engine's form, under the version `label`. ImageError if vLLM makes other tokens for
        an image than those in the request."""
        import torch
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ranges = []
        for span, image in zip(request.images, prepared, strict=True):
            found = request.token_ids[span.start : span.start + span.count]
            check_tokens(found, image.token_ids, span.image)
            is_placeholder = torch.tensor(found) == self._tokens.token_id
            is_embed = None if bool(is_placeholder.all()) else is_placeholder
            ranges.append(PlaceholderRange(offset=span.start, length=span.count, is_embed=is_embed))
        return mm_input(
            list(request.token_ids),
            MultiModalKwargsItems({"image": [image.item for image in prepared]}),
            {"image": [name_under(span.image, label) for span in request.images]},
            {"image": ranges},
            cache_salt=label,
        )


def check_tokens(found: Sequence[int], expected: Sequence[int], image: Media) -> None:
    """Raise ImageError unless the tokens of an image in a prompt are those that vLLM makes for it."""
    if tuple(found) != tuple(expected):
        place = next((n for n, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
        where = "" if place is None else f"; the first that differs is number {place}"
        raise ImageError(
            f"{image_name(image)}: has {len(found)} tokens in the prompt, expected the {len(expected)} that vllm makes "
            f"of it{where}; use policy 'hf'"
        )


def name_under(image: Media, label: str) -> str:
    """Return the name under which vLLM caches the image features of a version."""
    return f"{image.digest}@{label}"
