"""Images in the prompts that `openai` sends to a server.

OpenAI's completions take no images, and its chat endpoint makes the tokens of a prompt itself, so neither is used.
vLLM's `/inference/v1/generate` takes a prompt of tokens together with images, and replaces each image's mark by the
image's tokens. So each image of a prompt is sent as its mark. The prompt that the server reports must then be the
request's own, token by token."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rftstream.contracts.rollouts import ImageSpan
from rftstream.contracts.tasks import Media
from rftstream.errors import ImageError
from rftstream.models.server_client import Refused
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.models.vision.image_tokens import ImageTokens
from rftstream.models.vision.images import data_url, image_name
from rftstream.policies.base import SampleRequest

RESOURCE = "inference/v1/generate"
"""Path of the endpoint below the server's root."""
HINT = (
    "prompts of a model that is shown images go to this endpoint, which vLLM has when it is started with "
    "--enable-scale-out; the policies 'hf' and 'vllm' need no server"
)
"""Advice for the user if the server does not know the endpoint."""
NEVER = -1e30
"""Value added to the logits of tokens that are never sampled: no probability is left in float32. JSON has no
infinity."""
SAMPLING = (
    *("max_tokens", "temperature", "top_p", "seed", "stop_token_ids", "skip_special_tokens", "top_k", "min_p", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "structured_outputs"),
)
"""Fields of completions that are sampling parameters there."""
MAX_IMAGES = 64
"""Number of images that are kept in the form in which they are sent."""


class ServedImages:
    """The images of the requests to a server. `OpenAiPolicy` makes it if the model is shown images. Its threads call
    `body` for each request, then `choice` for the answer."""

    def __init__(self, cache: ImageCache, tokens: ImageTokens) -> None:
        self._cache, self._tokens = cache, tokens
        self._url_of = functools.lru_cache(MAX_IMAGES)(self._as_png)

    def body(self, request: SampleRequest, completions: Mapping[str, Any], label: str) -> dict[str, Any]:
        """Return the body that replaces the body for completions. `label` names the version of the weights, so that the
        server does not reuse image features of another version. ImageError if an image cannot be shown; WeightsError if
        the store does not answer."""
        given = dict(completions)
        top = {name: given.pop(name) for name in ("model", "return_token_ids")}
        for name in ("prompt", "return_tokens_as_token_ids", "logprobs"):
            del given[name]
        sampling = {name: given.pop(name) for name in SAMPLING if name in given}
        sampling |= {"logprobs": 0, "detokenize": bool(sampling.get("stop"))}
        sampling["logit_bias"] = {str(token): NEVER for token in self._tokens.never_sampled}
        parts = [
            {"type": "image_url", "url": self._url_of(span.image), "uuid": f"{span.image.digest}@{label}"}
            for span in request.images
        ]
        shown = {"content_parts": parts} if parts else {}
        token_ids = collapsed(request.token_ids, request.images, self._tokens)
        return {**top, "token_ids": token_ids, **shown, "sampling_params": sampling, **given}

    def choice(self, request: SampleRequest, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer's choice in the form of completions. Refused if the server sampled from another prompt than
        the request's, or sampled an image placeholder."""
        check_prompt(request, answer.get("prompt_token_ids"))
        choice = answer["choices"][0]
        token_ids = choice["token_ids"] or []
        if never := sorted(set(token_ids) & set(self._tokens.never_sampled)):
            raise Refused(f"the server sampled {never[0]}, which stands for an image")
        content = (choice.get("logprobs") or {}).get("content") or []
        if [one["token_id"] for one in content] != token_ids:
            raise Refused(f"the server gave {len(content)} logprobs for {len(token_ids)} tokens, or for other tokens")
        return {**choice, "logprobs": {"token_logprobs": [one["logprob"] for one in content]}}

    def _as_png(self, image: Media) -> str:
        """Return a data url of an image as it was decoded here: servers decode transparency differently."""
        file = io.BytesIO()
        self._cache.opened(image).save(file, "PNG", compress_level=1)
        return data_url(file.getvalue(), "image/png")


def collapsed(token_ids: Sequence[int], images: Sequence[ImageSpan], tokens: ImageTokens) -> list[int]:
    """Return a prompt in which the mark of each image replaces all its tokens. ImageError if the spans do not fit."""
    result: list[int] = []
    done = 0
    for span in sorted(images, key=lambda image: image.start):
        before, behind = tokens.around(span.image)
        start, end = span.start - before, span.start + span.count + behind
        if start < done or end > len(token_ids):
            raise ImageError(f"{image_name(span.image)}: its tokens {start} to {end} are not in the prompt")
        result += [*token_ids[done:start], tokens.mark_id]
        done = end
    return [*result, *token_ids[done:]]


def check_prompt(request: SampleRequest, found: Any) -> None:
    """Raise Refused unless the prompt that a server sampled from equals the request's, token by token."""
    expected = list(request.token_ids)
    if found == expected:
        return
    if not isinstance(found, list):
        raise Refused("the server did not say which tokens it has sampled from (prompt_token_ids)")
    pairs = zip(found, expected, strict=False)
    place = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(found), len(expected)))
    raise Refused(
        f"the server sampled from a prompt of {len(found)} tokens, expected {len(expected)}; the first that differs is "
        f"number {place}: found {found[place : place + 1]}, expected {expected[place : place + 1]}; are its tokenizer "
        "and image processor those of model.path?"
    )
