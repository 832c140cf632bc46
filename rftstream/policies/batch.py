"""The rows that `hf` decodes together: what was sampled of each, and how far each is. A row that is done leaves at
once.

Prompts are padded on the left, so that all rows end in the same column of the cache.

Shapes: B rows, N rows that join, W columns of the cache in use, T sampled tokens of a row, V vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.versions import VersionName
from rftstream.models.rendering import Renderer
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.cache import LayerStates, RowCache
from rftstream.policies.prompts import Block, TokenIds
from rftstream.policies.sampling import Sampler, SamplingTable
from rftstream.policies.turns import KeptTurn

ARRAYS = (
    "_limits_B",
    "_lengths_B",
    "_shifts_B",
    "_alive_B",
    "_before_B",
    "_num_sampled_B",
    "_tokens_BT",
    "_logprobs_BT",
    "_versions_BT",
)
"""Names of the arrays with an entry for each row."""


class DecodingBatch:
    """Requests that are decoded together, one row each.

    `HfPolicy` makes it when it lets requests in. Requests `join`; then each decoding step is `leave`, `inputs` for
    the model, and `sample`. `completion` is called for a row that has finished, before the next `leave`."""

    def __init__(self, renderer: Renderer, stop_ids: np.ndarray, device: torch.device, max_rows: int) -> None:
        self._renderer, self._stop_ids, self._device = renderer, stop_ids, device
        self._requests: list[SampleRequest] = []
        self._limits_B = np.zeros(0, dtype=np.int64)
        self._lengths_B = np.zeros(0, dtype=np.int64)
        """Number of tokens of each row in the cache."""
        self._shifts_B = np.zeros(0, dtype=np.int64)
        """By how much the positions of sampled tokens differ from their numbers in the row."""
        self._alive_B = np.zeros(0, dtype=bool)
        self._before_B = np.zeros(0, dtype=np.int64)
        """Number of tokens of each row that were sampled elsewhere and came with its request."""
        self._num_sampled_B = np.zeros(0, dtype=np.int64)
        self._tokens_BT = np.zeros((0, 16), dtype=np.int32)
        self._logprobs_BT = np.zeros((0, 16), dtype=np.float32)
        self._versions_BT = np.zeros((0, 16), dtype=np.int32)
        self._table = SamplingTable.of([], [])
        self._seen: tuple[Tensor, Tensor] | None = None
        self._max_rows = max_rows
        self._cache = RowCache(max_rows)
        self.logits_BV: Any = None
        """Logits of the next token of each row; the policy sets them."""

    @property
    def num_rows(self) -> int:
        """Number of rows, those that are done included."""
        return len(self._requests)

    @property
    def requests(self) -> Sequence[SampleRequest]:
        """The requests of the rows, those that are done included."""
        return tuple(self._requests)

    @property
    def num_alive(self) -> int:
        """Number of rows that have not finished."""
        return int(self._alive_B.sum())

    # ------------------------------------------------------------------------------------------ who is in it

    def join(self, requests: Sequence[SampleRequest], block: Block, which_N: np.ndarray) -> None:
        """Add requests as new rows. Their prompts are numbers `which_N` of the block."""
        num = len(requests)
        lengths_N = np.asarray([len(one.token_ids) for one in requests])
        context = self._renderer.context or np.iinfo(np.int64).max
        joining = {
            "_limits_B": np.minimum([one.max_tokens for one in requests], context - lengths_N),
            "_lengths_B": lengths_N,
            "_shifts_B": block.shifts_U[which_N],
            "_alive_B": np.ones(num, dtype=bool),
            "_before_B": np.asarray([one.num_sampled for one in requests], dtype=np.int64),
            "_num_sampled_B": np.zeros(num, dtype=np.int64),
        }
        for name in ARRAYS:
            array = getattr(self, name)
            empty = np.zeros((num, *array.shape[1:]), dtype=array.dtype)
            setattr(self, name, np.concatenate([array, joining.get(name, empty)]))
        self._requests += requests
        self._table = self._table.join(
            SamplingTable.of([one.seed for one in requests], [one.sampling for one in requests])
        )
        self._cache.add(block.states, which_N)
        logits_NV = block.logits_UV[torch.from_numpy(which_N).to(self._device)]
        self.logits_BV = logits_NV if self.logits_BV is None else torch.cat([self.logits_BV, logits_NV])
        self._seen = None
        self._bind()

    def leave(self) -> None:
        """Remove the rows that are done. The last rows take their places."""
        num_alive = self.num_alive
        if num_alive == self.num_rows:
            return
        targets = np.flatnonzero(~self._alive_B[:num_alive])
        sources = num_alive + np.flatnonzero(self._alive_B[num_alive:])
        order_B = np.arange(num_alive)
        order_B[targets] = sources
        for name in ARRAYS:
            setattr(self, name, getattr(self, name)[order_B])
        self._requests = [self._requests[row] for row in order_B]
        self._table = self._table.take(order_B)
        order = torch.from_numpy(order_B).to(self._device)
        self.logits_BV = self.logits_BV[order]
        if self._seen is not None:
            self._seen = (self._seen[0][order], self._seen[1][order])
        self._cache.keep(num_alive, sources, targets)
        self._cache.narrow(int(self._lengths_B.max(initial=0)))
        self._bind()

    def contexts(self) -> list[TokenIds]:
        """Return, for each row, the tokens that the cache holds: all but the newest."""
        tokens = zip(self._requests, self._tokens_BT, self._num_sampled_B, strict=True)
        return [(*one.token_ids, *row[: count - 1].tolist()) for one, row, count in tokens]

    def renew(self, states: Iterable[LayerStates]) -> None:
        """Replace the cache by keys and values of `contexts` that were computed anew: row after row, in any number
        of parts."""
        self._cache = RowCache(self._max_rows)
        for part in states:
            self._cache.add(part, np.arange(len(part[0][0])))
        self._cache.narrow(int(self._lengths_B.max(initial=0)))

    def forget(self, request_id: str) -> None:
        """Mark a request's row as done, so that it leaves without a completion. Unknown ids are ignored."""
        for row, request in enumerate(self._requests):
            if request.request_id == request_id:
                self._alive_B[row] = False

    def _bind(self) -> None:
        """Make anew what depends on which rows there are."""
        self._sampler = Sampler(self._table, self._stop_ids.tolist(), self._device)
        self._with_stops = [row for row, one in enumerate(self._requests) if one.sampling.stop]

    # ------------------------------------------------------------------------------------------ one token of each

    def inputs(self) -> dict[str, Any]:
        """Return what the model is given for the next token: the last token of each row, which the cache does not
        hold yet."""
        last_B = self._tokens_BT[np.arange(self.num_rows), self._num_sampled_B - 1].astype(np.int64)
        lengths_B = torch.from_numpy(self._lengths_B.copy()).to(self._device)
        positions_B = torch.from_numpy(self._lengths_B + self._shifts_B).to(self._device)
        self._lengths_B += 1
        width = self._cache.width + 1
        columns_1W = torch.arange(width, device=self._device)[None]
        return {
            "input_ids": torch.from_numpy(last_B).to(self._device)[:, None],
            "position_ids": positions_B[:, None],
            "attention_mask": columns_1W >= (width - 1 - lengths_B)[:, None],
            "past_key_values": self._cache.for_model,
        }

    def sample(self, version: int) -> list[tuple[int, str]]:
        """Sample a token for each row that is alive. Return the rows that finished with it, each with the reason.

        `version` is the token's index in the list of versions that `completion` is given."""
        seen_BV, counts_BV = self._penalty_counts() if self._table.penalises else (None, None)
        tokens_B, logprobs_B = self._sampler.draw(
            self.logits_BV, self._lengths_B, self._before_B + self._num_sampled_B, seen_BV, counts_BV
        )
        if counts_BV is not None:
            rows_B = torch.arange(self.num_rows, device=self._device)
            counts_BV[rows_B, torch.from_numpy(tokens_B).to(self._device)] += 1
        broken_B = self._alive_B & ~np.isfinite(logprobs_B)
        alive_B = np.flatnonzero(self._alive_B & ~broken_B)
        places_B = self._num_sampled_B[alive_B]
        if places_B.max(initial=0) >= self._tokens_BT.shape[1]:
            self._widen(2 * self._tokens_BT.shape[1])
        self._tokens_BT[alive_B, places_B] = tokens_B[alive_B]
        self._logprobs_BT[alive_B, places_B] = logprobs_B[alive_B]
        self._versions_BT[alive_B, places_B] = version
        self._num_sampled_B[alive_B] += 1
        stopped_B = self._alive_B & np.isin(tokens_B, self._stop_ids)
        for row in self._with_stops:
            if self._alive_B[row] and not stopped_B[row]:
                stopped_B[row] = self._meets_stop_string(row)
        ended_B = stopped_B | broken_B | (self._alive_B & (self._num_sampled_B >= self._limits_B))
        self._alive_B &= ~ended_B
        return [
            (int(row), "error" if broken_B[row] else "stop" if stopped_B[row] else "length")
            for row in np.flatnonzero(ended_B)
        ]

    def so_far(self, request_id: str, names: Sequence[VersionName]) -> Completion | None:
        """Return what was sampled for a request so far; None if it is unknown or done."""
        for row, request in enumerate(self._requests):
            if request.request_id == request_id and self._alive_B[row]:
                return self.completion(row, "unfinished", names)
        return None

    def completion(self, row: int, reason: str, names: Sequence[VersionName]) -> Completion:
        """Return a row's completion. `names` are the versions that `sample` was given indices of."""
        count = int(self._num_sampled_B[row])
        versions_T = self._versions_BT[row, :count]
        edges = [0, *(np.flatnonzero(np.diff(versions_T)) + 1).tolist(), count]
        return Completion(
            request_id=self._requests[row].request_id,
            token_ids=self._tokens_BT[row, :count].copy(),
            behavior_logprobs=self._logprobs_BT[row, :count].copy(),
            versions=tuple(
                VersionSpan(start=start, count=end - start, trainer_epoch=name.trainer_epoch, version=name.version)
                for start, end in itertools.pairwise(edges if count else ())
                for name in [names[int(versions_T[start])]]
            ),
            finish_reason=reason,
            error="the model's logits are not finite" if reason == "error" else None,
        )

    def turn(self, row: int) -> KeptTurn | None:
        """Return what the cache holds of a row that has finished, if its rollout may go on. None if its weights changed
        meanwhile: keys and values of old weights end with their request."""
        request, count = self._requests[row], int(self._num_sampled_B[row])
        versions_T = self._versions_BT[row, :count]
        if not request.may_go_on or not count or versions_T[0] != versions_T[-1]:
            return None
        token_ids = (*request.token_ids, *self._tokens_BT[row, : count - 1].tolist())
        return KeptTurn(token_ids, self._cache.row(row, len(token_ids)))

    def _widen(self, width: int) -> None:
        for name in ("_tokens_BT", "_logprobs_BT", "_versions_BT"):
            array = getattr(self, name)
            setattr(self, name, np.pad(array, ((0, 0), (0, width - array.shape[1]))))

    def _meets_stop_string(self, row: int) -> bool:
        request, count, before = self._requests[row], int(self._num_sampled_B[row]), int(self._before_B[row])
        sampling = request.sampling
        if before + count < sampling.min_tokens:
            return False
        reach = 4 * max(len(stop) for stop in sampling.stop) + 4  # a character takes at most four byte tokens
        tokens = self._tokens_BT[row, max(0, count - reach) : count].tolist()
        if (earlier := min(before, reach - count)) > 0:
            tokens = [*request.token_ids[-earlier:], *tokens]
        tail = self._renderer.decode(tokens)
        return any(stop in tail for stop in sampling.stop)

    def _penalty_counts(self) -> tuple[Tensor, Tensor]:
        """Return which tokens the prompt has, and how often each token was sampled. Both are kept while the rows
        stay the same."""
        if self._seen is None:
            vocabulary = self.logits_BV.shape[1]
            seen_BV = np.zeros((self.num_rows, vocabulary), dtype=bool)
            counts_BV = np.zeros((self.num_rows, vocabulary), dtype=np.float32)
            for row, request in enumerate(self._requests):
                prompt = len(request.token_ids) - request.num_sampled
                seen_BV[row, [token for token in request.token_ids[:prompt] if token >= 0]] = True
                np.add.at(counts_BV[row], list(request.token_ids[prompt:]), 1)
                np.add.at(counts_BV[row], self._tokens_BT[row, : self._num_sampled_B[row]], 1)
            self._seen = (torch.from_numpy(seen_BV).to(self._device), torch.from_numpy(counts_BV).to(self._device))
        return self._seen
