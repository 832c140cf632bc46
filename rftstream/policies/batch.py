"""The rows that `hf` decodes together, and their cache.

Prompts are padded on the left, so that all rows end in the same column: rows that join are padded to the width of the
batch, rows that are done leave when enough of them are.

Shapes: B rows, L columns of the cache, T sampled tokens of a row, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rftstream.messages import VersionName, VersionSpan
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.sampling import Sampler, SamplingTable
from rftstream.rendering import Renderer


class Batch:
    """Requests that are decoded together. Rows that are done stay, unsampled, until `without_done`."""

    def __init__(
        self, requests: Sequence[SampleRequest], renderer: Renderer, stop_ids: np.ndarray, device: torch.device
    ) -> None:
        self._renderer, self._stop_ids, self._device = renderer, stop_ids, device
        self._requests = list(requests)
        lengths_B = np.asarray([len(one.token_ids) for one in requests])
        context = renderer.context or np.iinfo(np.int64).max
        self._limits_B = np.minimum([one.max_tokens for one in requests], context - lengths_B)
        self._starts_B = lengths_B.max() - lengths_B
        self._alive_B = np.ones(len(requests), dtype=bool)
        self._num_sampled_B = np.zeros(len(requests), dtype=np.int64)
        self._tokens_BT = np.zeros((len(requests), 16), dtype=np.int32)
        self._logprobs_BT = np.zeros((len(requests), 16), dtype=np.float32)
        self._versions_BT = np.zeros((len(requests), 16), dtype=np.int32)
        self._table = SamplingTable.of([one.seed for one in requests], [one.sampling for one in requests])
        self.cache: Any = new_cache()
        self.logits_BV: Any = None
        prompts_BL = np.zeros((len(requests), int(lengths_B.max())), dtype=np.int64)
        for row, request in enumerate(requests):
            prompts_BL[row, self._starts_B[row] :] = request.token_ids
        self.prompts_BL = torch.from_numpy(prompts_BL).to(device)
        self._lay_out(prompts_BL.shape[1])

    @property
    def num_rows(self) -> int:
        return len(self._requests)

    @property
    def num_alive(self) -> int:
        return int(self._alive_B.sum())

    def _lay_out(self, num_columns: int) -> None:
        """What follows from which rows there are and how wide the cache is."""
        columns_1L = torch.arange(num_columns, device=self._device)[None]
        starts_B1 = torch.from_numpy(self._starts_B).to(self._device)[:, None]
        self.attended_BL = (columns_1L >= starts_B1).to(torch.int64)
        self.positions_BL = (columns_1L - starts_B1).clamp(min=0)
        self._sampler = Sampler(self._table, self._stop_ids.tolist(), self._device)
        self._with_stops = [row for row, one in enumerate(self._requests) if one.sampling.stop]
        self._seen: tuple[Tensor, Tensor] | None = None

    def append_column(self) -> Tensor:
        """Makes room for the tokens just sampled; they are the next input."""
        ones_B1 = torch.ones((self.num_rows, 1), dtype=torch.int64, device=self._device)
        self.attended_BL = torch.cat([self.attended_BL, ones_B1], dim=1)
        self.positions_BL = self.positions_BL[:, -1:] + 1
        return torch.from_numpy(self._last_B).to(self._device)[:, None]

    def sample(self, version: int) -> list[tuple[int, str]]:
        """One token for each row that is alive; the rows that finished with it, and why."""
        positions_B = self.positions_BL[:, -1].cpu().numpy() + 1
        seen_BV, counts_BV = self._penalty_counts() if self._table.penalises else (None, None)
        tokens_B, logprobs_B = self._sampler.draw(self.logits_BV, positions_B, self._num_sampled_B, seen_BV, counts_BV)
        self._last_B = tokens_B
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

    def completion(self, row: int, reason: str, names: Sequence[VersionName]) -> Completion:
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

    def forget(self, request_id: str) -> None:
        for row, request in enumerate(self._requests):
            if request.request_id == request_id:
                self._alive_B[row] = False

    def without_done(self) -> Batch | None:
        """Only the rows that are alive, and no column that is padding in all of them; None if there are none."""
        rows_B = np.flatnonzero(self._alive_B)
        if not len(rows_B):
            return None
        rows = torch.from_numpy(rows_B).to(self._device)
        cut = int(self._starts_B[rows_B].min())
        width = self.attended_BL.shape[1]
        self._take(rows_B)
        self._starts_B = self._starts_B - cut
        self.logits_BV = self.logits_BV[rows]
        self.cache = new_cache([(keys[rows, :, cut:], values[rows, :, cut:]) for keys, values in _pairs(self.cache)])
        self._lay_out(width - cut)
        return self

    def join(self, other: Batch) -> Batch:
        """The rows of both, those of the narrower one padded on the left."""
        width = max(self.attended_BL.shape[1], other.attended_BL.shape[1])
        gaps = [width - one.attended_BL.shape[1] for one in (self, other)]
        room = max(self._tokens_BT.shape[1], other._tokens_BT.shape[1])
        self._widen(room)
        other._widen(room)
        self._starts_B = np.concatenate([self._starts_B + gaps[0], other._starts_B + gaps[1]])
        self._requests += other._requests
        self._table = self._table.join(other._table)
        for name in ("_limits_B", "_alive_B", "_num_sampled_B", "_tokens_BT", "_logprobs_BT", "_versions_BT"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        self.logits_BV = torch.cat([self.logits_BV, other.logits_BV])
        pairs = zip(_pairs(self.cache), _pairs(other.cache), strict=True)
        self.cache = new_cache([
            (torch.cat([_pad(ours[0], gaps[0]), _pad(theirs[0], gaps[1])]),
             torch.cat([_pad(ours[1], gaps[0]), _pad(theirs[1], gaps[1])]))
            for ours, theirs in pairs
        ])  # fmt: skip
        self._lay_out(width)
        return self

    def _take(self, rows_B: np.ndarray) -> None:
        self._requests = [self._requests[row] for row in rows_B]
        self._table = self._table.take(rows_B)
        for name in ("_limits_B", "_starts_B", "_alive_B", "_num_sampled_B", "_tokens_BT", "_logprobs_BT",
                     "_versions_BT"):  # fmt: skip
            setattr(self, name, getattr(self, name)[rows_B])

    def _widen(self, width: int) -> None:
        for name in ("_tokens_BT", "_logprobs_BT", "_versions_BT"):
            array = getattr(self, name)
            setattr(self, name, np.pad(array, ((0, 0), (0, width - array.shape[1]))))

    def _meets_stop_string(self, row: int) -> bool:
        sampling, count = self._requests[row].sampling, int(self._num_sampled_B[row])
        if count < sampling.min_tokens:
            return False
        reach = 4 * max(len(stop) for stop in sampling.stop) + 4  # a character takes at most four byte tokens
        tail = self._renderer.decode(self._tokens_BT[row, max(0, count - reach) : count].tolist())
        return any(stop in tail for stop in sampling.stop)

    def _penalty_counts(self) -> tuple[Tensor, Tensor]:
        """Which tokens the prompt has, and how often each was sampled: kept while the rows stay the same."""
        if self._seen is None:
            vocabulary = self.logits_BV.shape[1]
            seen_BV = np.zeros((self.num_rows, vocabulary), dtype=bool)
            counts_BV = np.zeros((self.num_rows, vocabulary), dtype=np.float32)
            for row, request in enumerate(self._requests):
                seen_BV[row, list(request.token_ids)] = True
                np.add.at(counts_BV[row], self._tokens_BT[row, : self._num_sampled_B[row]], 1)
            self._seen = (torch.from_numpy(seen_BV).to(self._device), torch.from_numpy(counts_BV).to(self._device))
        return self._seen


class _GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer's cache that doubles its room, instead of being copied for every token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self._rooms: list[Tensor] | None = None
            return self.keys, self.values
        assert self.keys is not None
        assert self.values is not None
        old, new = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if self._rooms is None or new > self._rooms[0].shape[2]:
            room = max(new + 16, new + new // 2)
            self._rooms = [self._enlarged(self.keys, room), self._enlarged(self.values, room)]
        for buffer, states in zip(self._rooms, (key_states, value_states), strict=True):
            buffer[:, :, old:new] = states
        self.keys, self.values = (buffer[:, :, :new] for buffer in self._rooms)
        return self.keys, self.values

    @staticmethod
    def _enlarged(states: Tensor, room: int) -> Tensor:
        buffer = states.new_empty((*states.shape[:2], room, states.shape[3]))
        buffer[:, :, : states.shape[2]] = states
        return buffer


def new_cache(pairs: Sequence[tuple[Tensor, Tensor]] = ()) -> Any:
    cache: Any = DynamicCache()
    cache.layer_class_to_replicate = _GrowingLayer
    for number, (keys, values) in enumerate(pairs):
        cache.update(keys, values, number)
    return cache


def _pairs(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _pad(states: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, columns, 0)) if columns else states
