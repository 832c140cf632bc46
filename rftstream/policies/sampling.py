"""From logits to tokens with exact logprobs, vectorised over a batch. Shapes: B rows, V vocabulary.

The order is vLLM's: penalties, tokens that a grammar forbids, stop tokens held back (min_tokens), temperature, min-p,
top-k, top-p. The recorded logprob is the one under the distribution that was sampled from, renormalised after all of
these. Greedy rows take the likeliest token after penalties; their logprobs are those of temperature 1 without
truncation.

Random numbers depend on (seed, position) alone, so that a token does not depend on the other rows of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rftstream.contracts.tasks import Sampling
from rftstream.core.allowed import encode_sets

BLOCK = 256
"""Number of tokens whose probabilities are summed together."""


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """The sampling settings of B rows: an array [B] for each setting, float64 except for the seeds."""

    seed: np.ndarray
    """Seeds, uint64 [B]."""
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    presence_penalty: np.ndarray
    frequency_penalty: np.ndarray
    repetition_penalty: np.ndarray
    min_tokens: np.ndarray

    @staticmethod
    def of(seeds: Sequence[int], settings: Sequence[Sampling]) -> SamplingTable:
        """Return the table of these seeds and settings, one row each."""
        columns = {
            item.name: np.asarray([getattr(setting, item.name) for setting in settings], dtype=np.float64)
            for item in dataclasses.fields(SamplingTable)
            if item.name != "seed"
        }
        return SamplingTable(seed=np.asarray(seeds, dtype=np.uint64), **columns)

    def take(self, rows_B: np.ndarray) -> SamplingTable:
        """Return the table of the given rows, in their order."""
        return SamplingTable(*(getattr(self, item.name)[rows_B] for item in dataclasses.fields(self)))

    def join(self, other: SamplingTable) -> SamplingTable:
        """Return this table with the rows of the other one after its own."""
        names = [item.name for item in dataclasses.fields(self)]
        return SamplingTable(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))

    @property
    def penalises(self) -> bool:
        """Whether any row has a penalty. Then `Sampler.draw` needs counts."""
        return bool(self.presence_penalty.any() or self.frequency_penalty.any() or (self.repetition_penalty != 1).any())


class Sampler:
    """Draws tokens for the rows of a batch. `DecodingBatch` makes a new one whenever its rows change, and calls
    `draw` in each step."""

    def __init__(
        self, table: SamplingTable, stop_token_ids: Sequence[int], device: torch.device, *, records_sets: bool = False
    ) -> None:
        """`records_sets`: whether `draw` returns the sets of tokens that could be drawn."""
        self._table, self._device, self._records_sets = table, device, records_sets
        self._stop_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64, device=device)
        self._greedy = bool((table.temperature == 0).any())
        self._truncates = bool((table.top_p < 1).any() or (table.top_k > 0).any())
        self._scale_B1 = self._column(np.where(table.temperature == 0, 1.0, table.temperature))
        self._scaled = bool((table.temperature != 1).any())

    def draw(
        self,
        logits_BV: Tensor,
        positions_B: np.ndarray,
        num_sampled_B: np.ndarray,
        prompt_seen_BV: Tensor | None = None,
        counts_BV: Tensor | None = None,
        forbidden_BV: Tensor | None = None,
    ) -> tuple[np.ndarray, np.ndarray, list[bytes] | None]:
        """Return the next token of each row, int64 [B], its logprob, float32 [B], and the sets of tokens that could be
        drawn, as `encode_sets` writes them; None if all could.

        `positions_B`: the absolute positions of the next tokens. `prompt_seen_BV` (bool) and `counts_BV` (float, counts
        of the sampled tokens) are needed only for penalties. `forbidden_BV` (bool): tokens that a grammar forbids; if
        it allows only stop tokens, these are not held back."""
        table = self._table
        given_BV = logits_BV = logits_BV.float()
        if counts_BV is not None and prompt_seen_BV is not None:
            logits_BV = self._penalise(logits_BV, prompt_seen_BV, counts_BV)
        if forbidden_BV is not None:
            logits_BV = logits_BV.masked_fill(forbidden_BV, -torch.inf)
        early_B = num_sampled_B < table.min_tokens
        if holds_back := bool(early_B.any() and len(self._stop_ids)):
            rows_B, ended_BV = torch.from_numpy(np.flatnonzero(early_B)).to(self._device), logits_BV
            logits_BV = logits_BV.clone()
            logits_BV[rows_B[:, None], self._stop_ids[None, :]] = -torch.inf
            if forbidden_BV is not None:
                logits_BV = torch.where((logits_BV == -torch.inf).all(dim=1, keepdim=True), ended_BV, logits_BV)
        if self._scaled:
            logits_BV = logits_BV / self._scale_B1
        truncates = self._truncates or bool(table.min_p.any())
        cut_BV = self._truncate(logits_BV) if truncates else logits_BV
        probs_BV = cut_BV.softmax(dim=-1)
        tokens_B1 = _invert(probs_BV, self._column(uniforms(table.seed, positions_B), torch.float64))
        if self._greedy:
            greedy_B1 = self._column(table.temperature == 0, torch.bool)
            tokens_B1 = torch.where(greedy_B1, logits_BV.argmax(dim=-1, keepdim=True), tokens_B1)
        logprobs_B = probs_BV.gather(1, tokens_B1).squeeze(1).log()
        sets = None
        if self._records_sets and (truncates or holds_back or forbidden_BV is not None):
            sets = encode_sets((cut_BV != -torch.inf) | (given_BV == -torch.inf))
        return tokens_B1.squeeze(1).cpu().numpy(), logprobs_B.cpu().numpy(), sets

    def _penalise(self, logits_BV: Tensor, prompt_seen_BV: Tensor, counts_BV: Tensor) -> Tensor:
        repetition_B1 = self._column(self._table.repetition_penalty)
        sampled_BV = counts_BV > 0
        weaker_BV = torch.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
        logits_BV = torch.where(prompt_seen_BV | sampled_BV, weaker_BV, logits_BV)
        logits_BV = logits_BV - self._column(self._table.frequency_penalty) * counts_BV
        return logits_BV - self._column(self._table.presence_penalty) * sampled_BV.float()

    def _truncate(self, logits_BV: Tensor) -> Tensor:
        """Return the logits with -inf for tokens that min-p, top-k and top-p remove. Greedy rows stay unchanged."""
        table, whole_B = self._table, self._table.temperature == 0
        if table.min_p.any():
            floor_B1 = self._column(np.where(whole_B, 0.0, table.min_p)).log()
            floor_B1 = logits_BV.max(dim=-1, keepdim=True).values + floor_B1
            logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -torch.inf)
        if not self._truncates:
            return logits_BV
        vocabulary = logits_BV.shape[1]
        top_k_B = np.where(whole_B | (table.top_k == 0), vocabulary, np.minimum(table.top_k, vocabulary))
        top_p_B = np.where(whole_B, 1.0, table.top_p)
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        ranks_1V = torch.arange(vocabulary, device=self._device)[None, :]
        sorted_BV = sorted_BV.masked_fill(ranks_1V >= self._column(top_k_B), -torch.inf)
        probs_BV = sorted_BV.softmax(dim=-1)
        before_BV = probs_BV.cumsum(dim=-1) - probs_BV  # of all likelier tokens: the first one is always kept
        out_BV = (before_BV >= self._column(top_p_B)) & (self._column(top_p_B) < 1)
        return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV.masked_fill(out_BV, -torch.inf))

    def _column(self, values_B: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values_B)).to(self._device, dtype)[:, None]


def _invert(probs_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return the first token at which the cumulative probability exceeds the uniform number, int64 [B, 1].

    Probabilities are accumulated in float64: first over blocks, then inside the selected block, since a sum is cheaper
    than a scan."""
    vocabulary = probs_BV.shape[1]
    padded_BV = torch.nn.functional.pad(probs_BV, (0, -vocabulary % BLOCK)) if vocabulary % BLOCK else probs_BV
    blocks_BKW = padded_BV.reshape(len(padded_BV), -1, BLOCK)
    sums_BK = blocks_BKW.sum(dim=-1).double()
    cdf_BK = sums_BK.cumsum(dim=-1)
    target_B1 = uniforms_B1 * cdf_BK[:, -1:]
    block_B1 = torch.searchsorted(cdf_BK, target_B1, right=True).clamp(max=cdf_BK.shape[1] - 1)  # NaN sorts last
    rest_B1 = target_B1 - (cdf_BK.gather(1, block_B1) - sums_BK.gather(1, block_B1))
    inside_BW = blocks_BKW[torch.arange(len(probs_BV), device=probs_BV.device), block_B1[:, 0]].double().cumsum(dim=-1)
    # the block's sum was rounded differently: stay below its last step, which is a token with a probability
    rest_B1 = torch.minimum(rest_B1, inside_BW[:, -1:] * (1 - 1e-9))
    return (block_B1 * BLOCK + torch.searchsorted(inside_BW, rest_B1, right=True)).clamp(max=vocabulary - 1)


def uniforms(seeds_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Return a number in (0, 1) for each (seed, position), float64 [B], by splitmix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        mixed_B = seeds_B + (positions_B.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed_B = (mixed_B ^ (mixed_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed_B = (mixed_B ^ (mixed_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed_B = mixed_B ^ (mixed_B >> np.uint64(31))
    result_B: np.ndarray = ((mixed_B >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32
    return result_B
