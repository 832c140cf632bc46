"""Any Hugging Face causal language model as a policy: batched sampling with a cache, one decoding step at a time.

Prompts are padded on the left, so that all rows of the batch end in the same column: rows that join are padded to its
length, rows that are done leave when enough of them are. Weights are exchanged in place between two steps; the cache
of what was computed before is kept.

Shapes: B rows of the batch, L columns of its cache, T sampled tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, logging
from transformers.cache_utils import DynamicLayer

from rftstream.clock import Clock
from rftstream.errors import PolicyError, WeightsError
from rftstream.messages import VersionName, VersionSpan
from rftstream.models import ModelSpec
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.sampling import Sampler, SamplingTable
from rftstream.rendering import Renderer
from rftstream.weights.snapshot import DTYPES, RawTensor

SERVED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HfPolicy:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        batch_size: Annotated[int, Meta(ge=1)] = 256
        """Requests sampled at once; more wait."""
        prefill_tokens: Annotated[int, Meta(ge=1)] = 8192
        """Prompt tokens, padding included, taken into the batch in one step (a longer prompt goes alone)."""
        join_every: Annotated[int, Meta(ge=1)] = 8
        """Waiting requests join after so many steps, or at once when a quarter of the batch is free."""

    def __init__(self, config: Config, *, model: ModelSpec, renderer: Renderer, clock: Clock) -> None:
        self._config, self._spec, self._renderer = config, model, renderer
        torch.set_num_threads(model.threads)
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model.folder, dtype=SERVED[model.dtype], attn_implementation="sdpa"
        )
        self._model.to(model.device).eval()
        self._device = torch.device(model.device)
        self._parameters = dict(self._model.named_parameters())
        self._stop_ids = np.asarray(sorted(renderer.stop_token_ids), dtype=np.int64)
        self._versions: list[VersionName] = []
        self._waiting: deque[SampleRequest] = deque()
        self._refused: list[Completion] = []
        self._batch: _Batch | None = None
        self._steps_since_join = 0

    @property
    def version(self) -> VersionName | None:
        return self._versions[-1] if self._versions else None

    @property
    def slots(self) -> int:
        return self._config.batch_size

    @property
    def num_active(self) -> int:
        active = self._batch.num_alive if self._batch is not None else 0
        return active + len(self._waiting) + len(self._refused)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        where = f"weights {name.trainer_epoch}/{name.version} of {self._spec.name}"
        if odd := sorted(tensors.keys() ^ self._parameters.keys()):
            side = "is missing" if odd[0] in self._parameters else "is not of this model"
            raise WeightsError(f"{where}: {odd[0]!r} {side} ({len(odd)} names differ); is it another model's?")
        for key, parameter in self._parameters.items():
            tensor = tensors[key]
            if tensor.dtype != DTYPES[str(parameter.dtype).removeprefix("torch.")] or tensor.shape != parameter.shape:
                raise WeightsError(
                    f"{where}: {key} is {tensor.dtype} {tensor.shape}, expected {parameter.dtype} "
                    f"{tuple(parameter.shape)}; is it another model's?"
                )
        for key, parameter in self._parameters.items():
            if parameter.numel():
                parameter.copy_(_tensor(tensors[key], parameter))
        self._versions.append(name)

    def submit(self, request: SampleRequest) -> None:
        context = self._renderer.context
        room = request.max_tokens if context is None else min(request.max_tokens, context - len(request.token_ids))
        if not request.token_ids or not all(0 <= one < self._model.config.vocab_size for one in request.token_ids):
            self._refused.append(_without_tokens(request, "error", "the prompt is empty or has ids out of range"))
        elif room <= 0:
            self._refused.append(_without_tokens(request, "length", None))
        else:
            self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)
        self._refused = [one for one in self._refused if one.request_id != request_id]
        if self._batch is not None:
            self._batch.forget(request_id)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        done, self._refused = self._refused, []
        if self._versions:
            self._let_in()
            if self._batch is not None:
                done.extend(self._advance(self._batch))
        return done

    def close(self) -> None:
        self._batch, self._model, self._parameters = None, None, {}
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------ the batch

    def _let_in(self) -> None:
        """Rows that are done leave, rows that wait join; seldom, since both copy the cache."""
        batch = self._batch
        if batch is not None and batch.num_alive * 4 <= batch.num_rows * 3:
            self._batch = batch = batch.without_done()
        self._steps_since_join += 1
        free = self._config.batch_size - (batch.num_alive if batch is not None else 0)
        due = batch is None or free * 4 >= self._config.batch_size or self._steps_since_join >= self._config.join_every
        if not (self._waiting and free and due):
            return
        self._steps_since_join = 0
        new = _Batch(self._choose(free), self._renderer, self._stop_ids, self._device)
        new.logits_BV = self._forward(new, new.prompts_BL)
        self._batch = new if batch is None else batch.join(new)

    def _choose(self, free: int) -> list[SampleRequest]:
        chosen: list[SampleRequest] = []
        longest = 0
        while self._waiting and len(chosen) < free:
            longest = max(longest, len(self._waiting[0].token_ids))
            if chosen and longest * (len(chosen) + 1) > self._config.prefill_tokens:
                break
            chosen.append(self._waiting.popleft())
        return chosen

    def _forward(self, batch: _Batch, token_ids_BL: Tensor) -> Tensor:
        """Logits of the next token, [B, V]; the cache grows by the given columns."""
        try:
            output = self._model(
                input_ids=token_ids_BL, attention_mask=batch.attended_BL,
                position_ids=batch.positions_BL[:, -token_ids_BL.shape[1] :],
                past_key_values=batch.cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        except RuntimeError as error:  # out of memory, for one
            raise PolicyError(f"policy hf: the model failed at {tuple(token_ids_BL.shape)} tokens: {error}") from error
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def _advance(self, batch: _Batch) -> list[Completion]:
        """Samples one token of each row, and computes the logits of the next if anything is left to sample."""
        finished = batch.sample(len(self._versions) - 1)
        done = [batch.completion(row, reason, self._versions) for row, reason in finished]
        if batch.num_alive:
            batch.logits_BV = self._forward(batch, batch.append_column())
        else:
            self._batch = None
            self._versions = self._versions[-1:]
        return done


class _Batch:
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
        self.cache: Any = _new_cache()
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
        tokens_B, logprobs_B = self._sampler.draw(
            self.logits_BV, positions_B, self._num_sampled_B, seen_BV, counts_BV
        )  # fmt: skip
        self._last_B = tokens_B
        if counts_BV is not None:
            rows_B = torch.arange(self.num_rows, device=self._device)
            counts_BV[rows_B, torch.from_numpy(tokens_B).to(self._device)] += 1
        alive_B = np.flatnonzero(self._alive_B)
        places_B = self._num_sampled_B[alive_B]
        if places_B.max() >= self._tokens_BT.shape[1]:
            self._widen(2 * self._tokens_BT.shape[1])
        self._tokens_BT[alive_B, places_B] = tokens_B[alive_B]
        self._logprobs_BT[alive_B, places_B] = logprobs_B[alive_B]
        self._versions_BT[alive_B, places_B] = version
        self._num_sampled_B[alive_B] += 1
        stopped_B = self._alive_B & np.isin(tokens_B, self._stop_ids)
        for row in self._with_stops:
            if self._alive_B[row] and not stopped_B[row]:
                stopped_B[row] = self._meets_stop_string(row)
        ended_B = stopped_B | (self._alive_B & (self._num_sampled_B >= self._limits_B))
        self._alive_B &= ~ended_B
        return [(int(row), "stop" if stopped_B[row] else "length") for row in np.flatnonzero(ended_B)]

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
                for start, end in zip(edges, edges[1:], strict=False)
                for name in [names[int(versions_T[start])]]
            ),
            finish_reason=reason,
        )

    def forget(self, request_id: str) -> None:
        for row, request in enumerate(self._requests):
            if request.request_id == request_id:
                self._alive_B[row] = False

    def without_done(self) -> _Batch | None:
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
        self.cache = _new_cache([(keys[rows, :, cut:], values[rows, :, cut:]) for keys, values in _pairs(self.cache)])
        self._lay_out(width - cut)
        return self

    def join(self, other: _Batch) -> _Batch:
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
        self.cache = _new_cache([
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


class _GrowingLayer(DynamicLayer):
    """A layer's cache that doubles its room, instead of being copied for every token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self._rooms: list[Tensor] | None = None
            return self.keys, self.values
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


def _new_cache(pairs: Sequence[tuple[Tensor, Tensor]] = ()) -> Any:
    cache: Any = DynamicCache()  # type: ignore[no-untyped-call]
    cache.layer_class_to_replicate = _GrowingLayer
    for number, (keys, values) in enumerate(pairs):
        cache.update(keys, values, number)
    return cache


def _pairs(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _pad(states: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, columns, 0)) if columns else states


def _without_tokens(request: SampleRequest, reason: str, error: str | None) -> Completion:
    return Completion(
        request_id=request.request_id, token_ids=np.zeros(0, np.int32), behavior_logprobs=np.zeros(0, np.float32),
        versions=(), finish_reason=reason, error=error,
    )  # fmt: skip


def _tensor(raw: RawTensor, parameter: Tensor) -> Tensor:
    data = np.frombuffer(raw.data, dtype=np.uint8)
    with np.errstate():
        flat = torch.frombuffer(data if data.flags.writeable else data.copy(), dtype=parameter.dtype)
    return flat.reshape(parameter.shape)
