"""Images in the prompts that `hf` samples from.

Everything that `hf` keeps is found by token ids: prompts that siblings share, turns that a rollout goes on from. The
tokens of an image are the same for every image. So inside of the policy a number made from the image's digest stands in
their place: it is negative, and prompts are equal only if their images are.

Shapes: K tokens of an image, D width."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rftstream.contracts.tasks import Media
from rftstream.errors import ImageError
from rftstream.models.images import ImageCache, ImageTokens
from rftstream.policies.base import SampleRequest
from rftstream.policies.prompts import Features, TokenIds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

MAX_FEATURES = 64
"""Number of images whose features are kept for prompts that come later."""
MAX_MEDIA = 65536
"""Number of references that are kept: those of all active requests, and of many that ended."""
DIGITS = 15
"""Hexadecimal digits of a digest that a number is made from; it fits into 64 bits."""


class PromptImages:
    """The images of the requests that `hf` has. `HfPolicy` makes it, calls `admit` for each request, `features` before
    it computes prompts, and `forget_features` when new weights come."""

    def __init__(
        self, cache: ImageCache | None, tokens: ImageTokens | None, compute: Callable[[Sequence[np.ndarray]], Tensor]
    ) -> None:
        """`cache` and `tokens`: None if the model is not shown images. `compute`: pixels of I images to features [I, K,
        D]."""
        self._cache, self._tokens, self._compute = cache, tokens, compute
        self._media: OrderedDict[int, Media] = OrderedDict()
        self._features: OrderedDict[int, Tensor] = OrderedDict()

    def admit(self, request: SampleRequest) -> TokenIds:
        """Return the request's tokens with numbers in the places of its images. ImageError if an image cannot be
        shown; WeightsError if the store does not answer."""
        token_ids = list(request.token_ids)
        for span in request.images:
            if self._cache is None or self._tokens is None or span.count != self._tokens.per_image:
                raise ImageError(f"image {span.image.digest}: {span.count} tokens, which this model is not shown")
            self._cache.pixels(span.image)
            number = number_of(span.image.digest)
            token_ids[span.start : span.start + span.count] = [number] * span.count
            self._media[number] = span.image
            self._media.move_to_end(number)
        while len(self._media) > MAX_MEDIA:
            self._media.popitem(last=False)
        return tuple(token_ids)

    def features(self, prompts: Iterable[TokenIds]) -> Features:
        """Return the features [K, D] of each image in these prompts, by number. Errors are those of `admit`."""
        found: dict[int, Tensor] = {}
        for number in dict.fromkeys(token for prompt in prompts for token in prompt if token < 0):
            if (features_KD := self._features.get(number)) is None:
                assert self._cache is not None, "nobody else makes such numbers"
                features_KD = self._compute([self._cache.pixels(self._media[number])])[0]
                self._features[number] = features_KD
            self._features.move_to_end(number)
            found[number] = features_KD
        while len(self._features) > MAX_FEATURES:
            self._features.popitem(last=False)
        return found

    def forget_features(self) -> None:
        """Forget what the weights that are replaced have computed."""
        self._features.clear()


def number_of(digest: str) -> int:
    """Return the number that stands for an image: negative, and the same for the same digest."""
    return -1 - int(digest.removeprefix("sha256:")[:DIGITS], 16)
