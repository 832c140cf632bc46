"""The form of requests and answers of OpenAI's completions, with token ids both ways."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.versions import VersionName
from rftstream.models.server_client import Refused
from rftstream.policies.base import Completion, SampleRequest, part_seed


def completion_body(
    request: SampleRequest, room: int, *, model: str, stop_ids: Sequence[int], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a request for at most `room` tokens. Unused settings are left out, since servers refuse
    unknown fields. `extra`: further fields, copied unchanged."""
    sampling, form = request.sampling, request.constraint
    optional = {
        "top_k": (sampling.top_k, 0),
        "min_p": (sampling.min_p, 0.0),
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
        "repetition_penalty": (sampling.repetition_penalty, 1.0),
        "min_tokens": (max(sampling.min_tokens - request.num_sampled, 0), 0),
        "stop": (list(sampling.stop), []),
        "structured_outputs": ({} if form is None else {form.kind: form.value}, {}),
    }
    return {
        "model": model,
        "prompt": list(request.token_ids),
        "max_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": part_seed(request),
        "logprobs": 1,
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **{name: value for name, (value, off) in optional.items() if value != off},
        **extra,
    }


def completion_of(request: SampleRequest, answer: Mapping[str, Any], version: VersionName) -> Completion:
    """Return the completion that an answer holds, sampled by `version`. Refused if it holds none."""
    try:
        choice = answer["choices"][0]
        logprobs = choice.get("logprobs") or {}
        token_ids = choice.get("token_ids") or [_token_id(one) for one in logprobs["tokens"]]
        values = [float(one) for one in logprobs["token_logprobs"]]
        reason = str(choice["finish_reason"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Refused(
            f"the server gave no token ids with logprobs ({type(error).__name__}: {error}); vLLM's does since 0.10, "
            "others may need a setting"
        ) from None
    if len(values) != len(token_ids) or not all(map(math.isfinite, values)):
        raise Refused(f"the server gave {len(values)} logprobs for {len(token_ids)} tokens, or some not finite")
    if reason not in ("stop", "length"):
        raise Refused(f"the server ended it: {reason}")
    span = VersionSpan(start=0, count=len(token_ids), trainer_epoch=version.trainer_epoch, version=version.version)
    return Completion(
        request_id=request.request_id,
        token_ids=np.asarray(token_ids, np.int32),
        behavior_logprobs=np.asarray(values, np.float32),
        versions=(span,) if token_ids else (),
        finish_reason=reason,
    )


def _token_id(token: str) -> int:
    """Return the id in a token's text. vLLM writes `token_id:17`."""
    name, _, number = token.partition(":")
    if name != "token_id":
        raise ValueError(f"a token is {token!r}, expected token_id:NUMBER")
    return int(number)
