"""The rows that `hf` decodes together: their sampled tokens and their progress. A finished row leaves at once.

Each row has a slot of the cache. A row joins with a computed prompt, or continues from a kept turn. In the second case,
the new part of its prompt is computed in the same pass as the next token of the other rows.

Shapes: B rows, N joining rows or tokens of a pass, L tokens of a prompt, T sampled tokens of a row, V vocabulary."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftstream.contracts.beside import Columns, uniform
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.token_values import EXPERTS
from rftstream.contracts.versions import VersionName
from rftstream.core.allowed import column_of
from rftstream.models.rendering import Renderer
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.hf.cache import SlotCache
from rftstream.policies.hf.family_cache import LayerStates
from rftstream.policies.hf.packed import PackedRows
from rftstream.policies.hf.prompts import Block, TokenIds, shift_behind
from rftstream.policies.hf.turns import KeptTurn
from rftstream.policies.row_forms import RowForms
from rftstream.policies.sampling import Sampler, SamplingTable

ARRAYS = (
    "_slots_B",
    "_limits_B",
    "_lengths_B",
    "_shifts_B",
    "_alive_B",
    "_broken_B",
    "_before_B",
    "_num_sampled_B",
    "_tokens_BT",
    "_logprobs_BT",
    "_versions_BT",
)
"""Names of the arrays with an entry for each row."""


class DecodingBatch:
    """Requests that are decoded together, one row each. `HfPolicy` makes it.

    A request uses `join` with a computed prompt, or `go_on` from a turn. A decoding step consists of `leave`,
    `next_tokens` for the model, and `sample`. `completion` and `turn` are called for a finished row, before the next
    `leave`."""

    def __init__(
        self,
        renderer: Renderer,
        stop_ids: np.ndarray,
        device: torch.device,
        cache: SlotCache,
        *,
        forms: RowForms,
        records_sets: bool = False,
    ) -> None:
        """`forms`: those that the policy has begun. `records_sets`: whether completions have the sets of tokens that
        could be sampled."""
        self._renderer, self._stop_ids, self._device = renderer, stop_ids, device
        self._records_sets = records_sets
        self._requests: list[SampleRequest] = []
        self._sets: list[list[bytes]] = []
        """The sets that each row's first tokens were sampled from; those after them were sampled from all ids."""
        self.experts = BatchExperts()
        self._forms = forms
        self._slots_B = np.zeros(0, dtype=np.int64)
        """Slot of each row in the cache; -1 for a finished row whose slot now belongs to its turn."""
        self._limits_B = np.zeros(0, dtype=np.int64)
        self._lengths_B = np.zeros(0, dtype=np.int64)
        """Number of tokens of each row in the cache."""
        self._shifts_B = np.zeros(0, dtype=np.int64)
        """Difference between the positions of tokens after the last image and their indices in the row."""
        self._alive_B = np.zeros(0, dtype=bool)
        self._broken_B = np.zeros(0, dtype=bool)
        """Rows whose slots may contain NaN or infinity."""
        self._before_B = np.zeros(0, dtype=np.int64)
        """Number of tokens of each row that were sampled elsewhere and came with the request."""
        self._num_sampled_B = np.zeros(0, dtype=np.int64)
        self._tokens_BT = np.zeros((0, 16), dtype=np.int32)
        self._logprobs_BT = np.zeros((0, 16), dtype=np.float32)
        self._versions_BT = np.zeros((0, 16), dtype=np.int32)
        self._table = SamplingTable.of([], [])
        self._seen: tuple[Tensor, Tensor] | None = None
        self._cache = cache
        self._own_3L: dict[int, np.ndarray] = {}
        """Row that continues with new images -> the model's own positions of its prompt, until the new part is
        computed."""
        self.logits_BV: Any = None
        """Logits of the next token of each row. The policy sets them after each pass."""

    @property
    def num_rows(self) -> int:
        """Number of rows, finished ones included."""
        return len(self._requests)

    @property
    def requests(self) -> Sequence[SampleRequest]:
        """The requests of the rows, finished ones included."""
        return tuple(self._requests)

    @property
    def num_alive(self) -> int:
        """Number of rows that have not finished."""
        return int(self._alive_B.sum())

    # ------------------------------------------------------------------------------------------ who is in it

    def join(self, requests: Sequence[SampleRequest], block: Block, which: Sequence[int]) -> None:
        """Add requests as new rows. Their prompts have the indices `which` in the block. There must be free slots."""
        lengths = [len(request.token_ids) for request in requests]
        self.experts.join([block.experts[number] if block.experts else None for number in which])
        self._add(requests, self._cache.put(block.states, which, lengths), lengths, block.shifts_U[list(which)])
        logits_NV = block.logits_UV[torch.tensor(which, device=self._device)]
        self.logits_BV = logits_NV if self.logits_BV is None else torch.cat([self.logits_BV, logits_NV])

    def go_on(self, request: SampleRequest, turn: KeptTurn, own_3L: np.ndarray | None = None) -> None:
        """Add a request whose prompt begins with a turn, as a new row. It takes the turn's slot. The new part of the
        prompt is computed with the next tokens. `own_3L`: positions of the prompt if it has new images and the model
        has its own positions for them."""
        assert turn.slot is not None, "TurnStore.take gives it one"
        length = len(turn.token_ids)
        shift = turn.shift
        if own_3L is not None:
            self._own_3L[self.num_rows], shift = own_3L, shift_behind(own_3L)
        self.experts.join([None])
        self._add([request], [turn.slot], [length], np.asarray([shift]))
        turn.slot = None

    def _add(
        self, requests: Sequence[SampleRequest], slots: Sequence[int], lengths: Sequence[int], shifts_N: np.ndarray
    ) -> None:
        num = len(requests)
        context = self._renderer.context or np.iinfo(np.int64).max
        known_N = np.asarray([len(request.token_ids) for request in requests])
        joining = {
            "_slots_B": np.asarray(slots),
            "_limits_B": np.minimum([request.max_tokens for request in requests], context - known_N),
            "_lengths_B": np.asarray(lengths),
            "_shifts_B": shifts_N,
            "_alive_B": np.ones(num, dtype=bool),
            "_before_B": np.asarray([request.num_sampled for request in requests], dtype=np.int64),
        }
        for name in ARRAYS:
            array = getattr(self, name)
            empty = np.zeros((num, *array.shape[1:]), dtype=array.dtype)
            setattr(self, name, np.concatenate([array, joining.get(name, empty)]))
        self._requests += requests
        self._sets += [[] for _ in requests]
        self._table = self._table.join(
            SamplingTable.of([request.seed for request in requests], [request.sampling for request in requests])
        )
        self._seen = None
        self._bind()

    def leave(self) -> None:
        """Remove the finished rows, and free their slots."""
        if self.num_alive == self.num_rows:
            return
        for is_clean in (True, False):
            gone_B = ~self._alive_B & (self._slots_B >= 0) & (self._broken_B != is_clean)
            self._cache.free(self._slots_B[gone_B].tolist(), clean=is_clean)
        stay_B = np.flatnonzero(self._alive_B)
        for name in ARRAYS:
            setattr(self, name, getattr(self, name)[stay_B])
        self._requests = [self._requests[row] for row in stay_B]
        self._sets = [self._sets[row] for row in stay_B]
        self.experts.keep(stay_B.tolist())
        self._table = self._table.take(stay_B)
        stay = torch.from_numpy(stay_B).to(self._device)
        self.logits_BV = self.logits_BV[stay] if len(stay_B) else None
        if self._seen is not None:
            self._seen = (self._seen[0][stay], self._seen[1][stay])
        self._bind()

    def contexts(self) -> list[TokenIds]:
        """Return, for each row, the tokens in the cache: all but the newest."""
        return [self._known(row)[: self._lengths_B[row]] for row in range(self.num_rows)]

    def renew(self, states: Iterable[LayerStates]) -> None:
        """Replace the cache with newly computed keys and values of `contexts`: row after row, in any number of
        parts."""
        first = 0
        for part in states:
            rows = slice(first, first + len(part[0][0]))
            slots, lengths = self._slots_B[rows].tolist(), self._lengths_B[rows].tolist()
            self._cache.replace(part, range(len(slots)), lengths, slots)
            first = rows.stop

    def forget(self, request_id: str) -> None:
        """Mark a request's row as finished, so that it leaves without a completion. Unknown ids are ignored."""
        for row, request in enumerate(self._requests):
            if request.request_id == request_id:
                self._alive_B[row] = False
                self._broken_B[row] = True  # nobody has checked its last result

    def _bind(self) -> None:
        """Rebuild the values that depend on the set of rows."""
        self._sampler = Sampler(self._table, self._stop_ids.tolist(), self._device, records_sets=self._records_sets)
        self._forms.bind(self._requests)
        self._with_stops = [row for row, request in enumerate(self._requests) if request.sampling.stop]

    # ------------------------------------------------------------------------------------------ one token of each

    def next_tokens(self) -> tuple[np.ndarray, np.ndarray, PackedRows]:
        """Return the tokens that are not in the cache yet, int64 [N], with their positions, int64 [N] or [3, N], and
        places: the last token of each row, or the new part of its prompt."""
        counts_B = np.asarray([len(request.token_ids) for request in self._requests])
        counts_B += self._num_sampled_B - self._lengths_B
        rows = PackedRows(self._slots_B, self._lengths_B, counts_B, self._device)
        newest_B = self._tokens_BT[np.arange(self.num_rows), self._num_sampled_B - 1].tolist()
        positions_N = rows.positions_N + np.repeat(self._shifts_B[rows.order_B], counts_B[rows.order_B])
        if self._own_3L:
            positions_N = np.repeat(positions_N[None], 3, axis=0)
        token_ids: list[int] = []
        for row in rows.order_B.tolist():
            if (own_3L := self._own_3L.pop(row, None)) is not None:
                new = slice(len(token_ids), len(token_ids) + counts_B[row])
                positions_N[:, new] = own_3L[:, -counts_B[row] :]
            if self._num_sampled_B[row]:
                token_ids.append(newest_B[row])
            else:
                token_ids += self._requests[row].token_ids[-counts_B[row] :]
        self._lengths_B += counts_B
        return np.asarray(token_ids, dtype=np.int64), positions_N, rows

    def _known(self, row: int) -> TokenIds:
        """Return a row's prompt and its sampled tokens."""
        return (*self._requests[row].token_ids, *self._tokens_BT[row, : self._num_sampled_B[row]].tolist())

    def sample(self, version: int) -> list[tuple[int, str]]:
        """Sample a token for each unfinished row. Return the rows that finish with it, each with the reason.

        `version` is the token's index in the list of versions that `completion` gets."""
        seen_BV, counts_BV = self._penalty_counts() if self._table.penalises else (None, None)
        tokens_B, logprobs_B, sets = self._sampler.draw(
            self.logits_BV,
            self._lengths_B,
            self._before_B + self._num_sampled_B,
            seen_BV,
            counts_BV,
            self._forms.forbidden(),
        )
        if counts_BV is not None:
            rows_B = torch.arange(self.num_rows, device=self._device)
            counts_BV[rows_B, torch.from_numpy(tokens_B).to(self._device)] += 1
        broken_B = self._alive_B & ~np.isfinite(logprobs_B)
        broken_B[self._forms.accept(tokens_B)] = True
        self._broken_B |= broken_B
        alive_B = np.flatnonzero(self._alive_B & ~broken_B)
        places_B = self._num_sampled_B[alive_B]
        if places_B.max(initial=0) >= self._tokens_BT.shape[1]:
            for name in ("_tokens_BT", "_logprobs_BT", "_versions_BT"):
                array = getattr(self, name)
                setattr(self, name, np.pad(array, ((0, 0), (0, array.shape[1]))))
        self._tokens_BT[alive_B, places_B] = tokens_B[alive_B]
        self._logprobs_BT[alive_B, places_B] = logprobs_B[alive_B]
        self._versions_BT[alive_B, places_B] = version
        if sets is not None:
            for row, place in zip(alive_B.tolist(), places_B.tolist(), strict=True):
                self._sets[row] += [b""] * (place - len(self._sets[row]))
                self._sets[row].append(sets[row])
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
        """Return the tokens sampled for a request so far; None if it is unknown or finished."""
        for row, request in enumerate(self._requests):
            if request.request_id == request_id and self._alive_B[row]:
                return self.completion(row, "unfinished", names)
        return None

    def completion(self, row: int, reason: str, names: Sequence[VersionName]) -> Completion:
        """Return a row's completion. `names` are the versions whose indices `sample` got."""
        count = int(self._num_sampled_B[row])
        held = self._sets[row]
        sets = column_of(held + [b""] * (count - len(held))) if held else {}
        return Completion(
            request_id=self._requests[row].request_id,
            token_ids=self._tokens_BT[row, :count].copy(),
            behavior_logprobs=self._logprobs_BT[row, :count].copy(),
            versions=_spans_of(self._versions_BT[row, :count], names),
            finish_reason=reason,
            beside={**self.experts.of(row), **sets},
            error=self._forms.error(row) or "the model's logits are not finite" if reason == "error" else None,
        )

    def turn(self, row: int) -> KeptTurn | None:
        """Return the turn of a finished row if its rollout may continue; the turn then owns the row's slot. None if the
        weights changed meanwhile: keys and values of old weights end with their request."""
        request, count = self._requests[row], int(self._num_sampled_B[row])
        versions_T = self._versions_BT[row, :count]
        if not request.may_go_on or not count or versions_T[0] != versions_T[-1]:
            return None
        slot, self._slots_B[row] = int(self._slots_B[row]), -1
        return KeptTurn(self._known(row)[:-1], slot, shift=int(self._shifts_B[row]))

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
        """Return which tokens are in the prompt, and how often each token was sampled. Both are kept while the rows
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


def _spans_of(versions_T: np.ndarray, names: Sequence[VersionName]) -> tuple[VersionSpan, ...]:
    """Return the spans of tokens, given the index in `names` of each token's version. The indices never fall."""
    count = len(versions_T)
    if not count:
        return ()
    first = int(versions_T[0])
    if first == versions_T[-1]:
        return (_span(0, count, names[first].trainer_epoch, names[first].version),)
    edges = [0, *(np.flatnonzero(np.diff(versions_T)) + 1).tolist(), count]
    return tuple(
        _span(start, end - start, name.trainer_epoch, name.version)
        for start, end in itertools.pairwise(edges)
        for name in [names[int(versions_T[start])]]
    )


@functools.lru_cache(maxsize=1024)
def _span(start: int, count: int, trainer_epoch: int, version: int) -> VersionSpan:
    """Return a span, the same object for equal ones: most completions of a step have the same few."""
    return VersionSpan(start=start, count=count, trainer_epoch=trainer_epoch, version=version)


class BatchExperts:
    """The experts that the tokens of each row took, pass by pass; empty if they are not recorded. `DecodingBatch` makes
    it. Arrays that it returned stay as they were."""

    def __init__(self) -> None:
        self._held_BTK: list[np.ndarray | None] = []
        """Experts of each row [T, K], with places for more tokens; None before the first."""
        self._counts_B: list[int] = []

    def join(self, prompts: Sequence[np.ndarray | None]) -> None:
        """Add rows. `prompts`: the experts of their prompts; None if none were recorded."""
        self._held_BTK += prompts
        self._counts_B += [0 if prompt is None else len(prompt) for prompt in prompts]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._held_BTK = [self._held_BTK[row] for row in rows]
        self._counts_B = [self._counts_B[row] for row in rows]

    def took(self, experts_NK: np.ndarray, rows: PackedRows) -> None:
        """Add the experts of the tokens of a pass."""
        first = 0
        for row, end in zip(rows.order_B.tolist(), rows.ends_B.tolist(), strict=True):
            count, held_TK = self._counts_B[row], self._held_BTK[row]
            whole = count + end - first
            if held_TK is None or whole > len(held_TK):
                longer_TK = np.empty((2 * whole, experts_NK.shape[1]), experts_NK.dtype)
                if held_TK is not None:
                    longer_TK[:count] = held_TK[:count]
                self._held_BTK[row] = held_TK = longer_TK
            held_TK[count:whole] = experts_NK[first:end]
            self._counts_B[row], first = whole, end

    def of(self, row: int) -> Columns:
        """Return the experts of a row as values beside its newest tokens, to which their passes led."""
        held_TK, count = self._held_BTK[row], self._counts_B[row]
        return {} if held_TK is None or not count else {EXPERTS: uniform(held_TK[:count])}


def batch_tensors(batch: DecodingBatch) -> Iterator[Tensor]:
    """Yield a batch's tensors on the device, apart from the cache."""
    if batch.logits_BV is not None:
        yield batch.logits_BV
    yield from batch._seen or ()
