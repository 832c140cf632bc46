"""Images in the prompts that `hf` samples from.

`hf` finds kept prompts of siblings and kept turns by their token ids. But the tokens of an image are the same for every
image. So inside the policy, a number made from the image's digest replaces them. The number is negative, and prompts
are equal only if their images are.

Only placeholders are replaced; tokens that a processor writes between the parts of an image stay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from rftstream.contracts.tasks import Media
from rftstream.errors import ImageError
from rftstream.models.vision.image_inputs import ImageCache, ImageInputs
from rftstream.models.vision.images import image_name
from rftstream.models.vision.seeing import ImageFeatures, SeeingModel
from rftstream.policies.base import SampleRequest
from rftstream.policies.hf.prompts import Features, TokenIds

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 4
"""Number of images that are fetched at once."""
MAX_FEATURES = 64
"""Number of images whose features are kept for later prompts."""
MAX_MEDIA = 65536
"""Number of references that are kept: those of all active requests, and of many ended ones."""
DIGITS = 15
"""Hexadecimal digits of a digest that make a number; it fits into 64 bits."""


class PromptImages:
    """The images of `hf`'s requests. `HfPolicy` makes it. It calls `fetch` for each request, `admit` when its images
    have come, `features` before it computes prompts, `forget_features` for new weights, and `close`. Threads fetch and
    decode images during sampling."""

    def __init__(self, cache: ImageCache | None, seeing: SeeingModel | None) -> None:
        """Both are None if the model is not shown images."""
        self._cache, self._seeing = cache, seeing
        self._shown: OrderedDict[int, tuple[Media, int]] = OrderedDict()
        """Number of an image -> its reference, and its number of placeholders."""
        self._features: OrderedDict[int, ImageFeatures] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="images")
        self._fetching: dict[str, Future[ImageInputs]] = {}
        """Digest -> the image that is being fetched."""

    def fetch(self, request: SampleRequest) -> tuple[Future[ImageInputs], ...]:
        """Start fetching the request's images, each once for all requests. Raises the same errors as `admit`."""
        if self._cache is None:
            return ()
        self._fetching = {digest: one for digest, one in self._fetching.items() if not one.done()}
        images = {span.image.digest: span.image for span in request.images}
        for digest, image in images.items():
            if digest not in self._fetching:
                self._fetching[digest] = self._threads.submit(self._cache.inputs, image)
        return tuple(self._fetching[digest] for digest in images)

    def admit(self, request: SampleRequest) -> TokenIds:
        """Return the request's tokens with numbers in place of its images. ImageError if an image cannot be shown;
        WeightsError if the store does not answer."""
        token_ids = list(request.token_ids)
        for span in request.images:
            if self._cache is None or self._seeing is None:
                raise ImageError(f"{image_name(span.image)}: the model is not shown images")
            self._cache.inputs(span.image)
            placeholder, number = self._seeing.tokens.token_id, number_of(span.image.digest)
            places = [one for one in range(span.start, span.start + span.count) if token_ids[one] == placeholder]
            if len(places) != (expected := self._seeing.tokens.count(span.image)):
                raise ImageError(f"{image_name(span.image)}: {len(places)} tokens, expected {expected}")
            for place in places:
                token_ids[place] = number
            self._shown[number] = (span.image, expected)
            self._shown.move_to_end(number)
        while len(self._shown) > MAX_MEDIA:
            self._shown.popitem(last=False)
        return tuple(token_ids)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the device."""
        return (known.features_KD for known in self._features.values())

    def features(self, prompts: Iterable[TokenIds]) -> Features:
        """Return the features of each image in these prompts, by number. Raises the same errors as `admit`."""
        found: dict[int, ImageFeatures] = {}
        for number in dict.fromkeys(token for prompt in prompts for token in prompt if token < 0):
            if (known := self._features.get(number)) is None:
                assert self._cache is not None and self._seeing is not None, "nobody else makes such numbers"
                image, count = self._shown[number]
                (known,) = self._seeing.features([self._cache.inputs(image)], [count])
                self._features[number] = known
            self._features.move_to_end(number)
            found[number] = known
        while len(self._features) > MAX_FEATURES:
            self._features.popitem(last=False)
        return found

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def forget_features(self) -> None:
        """Drop the features that the old weights computed."""
        self._features.clear()


def number_of(digest: str) -> int:
    """Return the number that stands for an image: negative, and determined by the digest."""
    return -1 - int(digest.removeprefix("sha256:")[:DIGITS], 16)
