"""The sets of tokens that vLLM's sampler could draw, from what it tells of them.

It lists the likeliest tokens with their logprobs, after truncation: those left out have none. So `top_k`, or a small
vocabulary, bounds how many have to be listed. What a grammar leaves is computed again from the tokens.

Shapes: T tokens, L listed tokens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rftstream.config.sampling_ranges import MOST_LISTED
from rftstream.contracts.beside import Columns
from rftstream.core.allowed import column_of, encode_listed, encode_sets
from rftstream.errors import ConfigError
from rftstream.models.spec import ModelSpec
from rftstream.models.tokenizer import open_tokenizer
from rftstream.policies.base import SampleRequest
from rftstream.policies.grammars import AnswerForm, Grammars

log = logging.getLogger(__name__)

TIES = 4
"""Tokens listed beyond top_k. vLLM keeps those that are as likely as the last one."""
ROWS = 64
"""Sets of a grammar that are written at once."""


class SampledSets:
    """The sets that completions were sampled from. `Engine` makes it, asks for `num_listed` when a request begins, and
    for `columns` when there is something of its completion."""

    def __init__(self, spec: ModelSpec, stop_ids: Sequence[int], vocabulary: int) -> None:
        self._spec, self._stop_ids, self._vocabulary = spec, list(stop_ids), vocabulary

    @functools.cached_property
    def grammars(self) -> Grammars | None:
        """The grammars over this model's tokens, for vLLM's backend `guidance`; None if sets are listed, or if
        llguidance does not read the tokenizer."""
        if self._vocabulary <= MOST_LISTED:
            return None
        tokenizer = open_tokenizer(self._spec)
        eos = tokenizer.ids.get(tokenizer.named.get("eos_token", ""))  # with which vLLM ends a form
        try:
            return None if eos is None else Grammars(self._spec, [eos], self._vocabulary)
        except ConfigError as error:
            log.warning("%s; what forms of answers leave out is not recorded", error)
            return None

    def num_listed(self, request: SampleRequest) -> int:
        """Return how many of the likeliest tokens vLLM has to list: 0 for none but the sampled one."""
        sampling = request.sampling
        if not (_truncates(request) or request.constraint or sampling.min_tokens):
            return 0
        if self._vocabulary <= MOST_LISTED:
            return self._vocabulary
        bounded = sampling.top_k if _truncates(request) else 0
        return bounded + TIES if 0 < bounded <= MOST_LISTED else 0

    def columns(self, request: SampleRequest, token_ids: np.ndarray, logprobs: Any) -> Columns:
        """Return the sets of tokens sampled for a request. `logprobs`: vLLM's, with `num_listed` of each."""
        num = len(token_ids)
        if not num:
            return {}
        if listed := self.num_listed(request):
            counts_T = np.asarray(logprobs.end_indices) - np.asarray(logprobs.start_indices)
            rows_L, ids_L = np.repeat(np.arange(num), counts_T), np.asarray(logprobs.token_ids)
            is_left_L = np.isfinite(np.asarray(logprobs.logprobs, dtype=np.float64))
            left_T = np.bincount(rows_L[is_left_L], minlength=num)
            written = encode_listed(rows_L[is_left_L], ids_L[is_left_L], num, self._vocabulary)
            # with none left out among those listed, there may be more: ties, which are as good as never so many
            return column_of([b"" if left > listed else one for left, one in zip(left_T, written, strict=True)])
        if request.constraint is not None and self.grammars is not None:
            form = self.grammars.begin(request.constraint, request)
            return self._of_form(form, request, token_ids)
        early = max(request.sampling.min_tokens - request.num_sampled, 0)
        if not early or not self._stop_ids:
            return {}
        allowed_1V = torch.ones(1, self._vocabulary, dtype=torch.bool)
        allowed_1V[0, self._stop_ids] = False
        [without_stops] = encode_sets(allowed_1V)
        return column_of([without_stops if place < early else b"" for place in range(num)])

    def _of_form(self, form: AnswerForm, request: SampleRequest, token_ids: np.ndarray) -> Columns:
        early = request.sampling.min_tokens - request.num_sampled
        written: list[bytes] = []
        allowed: list[np.ndarray] = []
        for place, token_id in enumerate(token_ids.tolist()):
            allowed.append(~form.forbidden())
            if place < early:
                allowed[-1][self._stop_ids] = False
            form.accept(token_id)
            if len(allowed) == ROWS or place == len(token_ids) - 1:
                written += encode_sets(torch.from_numpy(np.stack(allowed)))
                allowed = []
        return column_of(written)


def _truncates(request: SampleRequest) -> bool:
    sampling = request.sampling
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
