"""The Hugging Face model that `hf` samples from: loaded once, its parameters replaced in place.

Shapes: U prompts, L their tokens, B rows of the batch, N their new tokens, P places, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from rftstream.errors import PolicyError
from rftstream.models.offload import held_tensors, tensors_of
from rftstream.models.vision.seeing import ImageFeatures, SeeingModel
from rftstream.policies.hf.packed import PackedRows
from rftstream.policies.hf.prompts import Block, Features, TokenIds, shift_behind
from rftstream.policies.hf.row import MAX_BATCH, RowDecoder
from rftstream.policies.hf.turns import KeptTurn
from rftstream.weights.checkpoint_names import CheckpointNames
from rftstream.weights.snapshot import RawTensor
from rftstream.weights.tensors import as_tensor


class HfModel:
    """A causal language model on its device. `open_model` makes it; `HfPolicy` loads versions into it, and asks it for
    logits.

    With `keeps_states`, keys and values are kept in a `SlotCache`. Otherwise nothing is kept, and all tokens of a row
    are computed again for each new one."""

    def __init__(
        self,
        model: Any,
        *,
        keeps_states: bool,
        names: CheckpointNames | None = None,
        seeing: SeeingModel | None = None,
        row: RowDecoder | None = None,
    ) -> None:
        """`names`: those of versions; None if none is loaded. `seeing`: the model with its vision tower, or None.
        `row`: decodes batches of few rows, or None."""
        self._model, self.keeps_states, self._row = model, keeps_states, row
        self.device: torch.device = model.device
        self.vocabulary_size = int(model.config.get_text_config().vocab_size)
        self.seeing = seeing
        """The same model with its vision tower; None if it is not shown images."""
        self._names, self.parameters = names, held_tensors(model)
        self.expected = {} if names is None else names.layout(str(model.dtype).removeprefix("torch."))
        """Name -> dtype and shape of the tensors of a version."""
        self._takes_places = "logits_to_keep" in inspect.signature(model.forward).parameters

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors on the device."""
        return tensors_of(self._model)

    def load(self, tensors: Mapping[str, RawTensor]) -> None:
        """Overwrite these weights; the others stay unchanged."""
        assert self._names is not None, "versions are loaded"
        for name, tensor in tensors.items():
            self._names.place(name).write(self.parameters, as_tensor(tensor))

    def compute(self, prompts: tuple[TokenIds, ...], features: Features) -> Block:
        """Return keys, values and next logits of these prompts, which are padded on the left. `features`: those of the
        images in them."""
        if not self.keeps_states:
            assert not features, "models with images keep states"
            return Block(prompts, [], self._compute_whole(prompts), np.zeros(len(prompts), dtype=np.int64))
        longest = max(len(prompt) for prompt in prompts)
        starts_U1 = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=self.device)
        token_ids_UL = np.zeros((len(prompts), longest), dtype=np.int64)
        positions_3UL = np.zeros((3, len(prompts), longest), dtype=np.int64)
        shifts_U = np.zeros(len(prompts), dtype=np.int64)
        has_own = False
        for row, prompt in enumerate(prompts):
            place = slice(longest - len(prompt), longest)
            token_ids_UL[row, place] = prompt
            positions_3UL[:, row, place] = np.arange(len(prompt))
            if (own_3L := self.positions(prompt, features)) is not None:
                positions_3UL[:, row, place], shifts_U[row], has_own = own_3L, shift_behind(own_3L), True
        columns_1L = torch.arange(longest, device=self.device)[None]
        cache: Any = DynamicCache()
        inputs = {
            **self._read(token_ids_UL, features),
            "position_ids": torch.from_numpy(positions_3UL if has_own else positions_3UL[0]).to(self.device),
            "attention_mask": columns_1L >= starts_U1,
            "past_key_values": cache,
        }
        logits_UV = self.forward(inputs, columns_1L[0, -1:])[:, 0]
        states = [(layer.keys, layer.values) for layer in cache.layers]
        return Block(prompts=prompts, states=states, logits_UV=logits_UV, shifts_U=shifts_U)

    def _compute_whole(self, prompts: tuple[TokenIds, ...]) -> Tensor:
        """Return the logits [U, V] after the prompts. Prompts of one length are computed together, without padding and
        without a cache."""
        found_UV: dict[int, Tensor] = {}
        more = {"logits_to_keep": 1} if self._takes_places else {}
        for length in sorted({len(prompt) for prompt in prompts}):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            token_ids_RL = torch.tensor([prompts[row] for row in rows], device=self.device)
            try:
                logits_RPV = self._model(input_ids=token_ids_RL, use_cache=False, **more).logits
            except RuntimeError as error:
                shape = tuple(token_ids_RL.shape)
                raise PolicyError(f"policy hf: the model failed at {shape} tokens: {error}") from error
            found_UV |= zip(rows, logits_RPV[:, -1], strict=True)
        return torch.stack([found_UV[row] for row in range(len(prompts))])

    def extends(self, prompt: TokenIds, turn: KeptTurn) -> bool:
        """Return whether a prompt that begins with a turn may continue from it. If it has a new image whose tokens
        attend to each other, it must be computed whole, since packed tokens attend only to earlier ones."""
        ahead = self.seeing is not None and self.seeing.looks_ahead
        return not (ahead and any(token < 0 for token in prompt[len(turn.token_ids) :]))

    def positions(self, prompt: TokenIds, features: Features) -> np.ndarray | None:
        """Return the model's own positions of a prompt's tokens, int64 [3, L]; None if they are the tokens' indices."""
        if self.seeing is None:
            return None
        ids = np.asarray(prompt)
        images = _images_in(prompt, features)
        return self.seeing.positions(np.where(ids < 0, self.seeing.tokens.token_id, ids), images)

    def _read(self, token_ids: np.ndarray, features: Features) -> dict[str, Tensor]:
        """Return the model's inputs: tokens, or their embeddings if there are images among them."""
        flat = token_ids.reshape(-1)
        places = np.flatnonzero(flat < 0)
        if not len(places):
            return {"input_ids": torch.from_numpy(token_ids).to(self.device)}
        assert self.seeing is not None, "others are given no images"
        features_ND = torch.cat([image.features_KD for image in _images_in(flat.tolist(), features)])
        read = torch.from_numpy(np.maximum(token_ids, 0)).to(self.device)
        embeddings = self.seeing.embed(read, torch.from_numpy(places).to(self.device), features_ND)
        is_image = torch.from_numpy(token_ids < 0).to(self.device)
        return {"inputs_embeds": embeddings, **self.seeing.attention(is_image)}

    def compute_packed(
        self, token_ids_N: np.ndarray, positions: np.ndarray, rows: PackedRows, cache: Any, features: Features
    ) -> Tensor:
        """Return the logits [B, V] after the new tokens of rows whose other tokens are in the cache. `positions`: [N]
        or [3, N]. `features`: those of the images among the new tokens; each image is there completely."""
        if self._row is not None and len(token_ids_N) == len(rows.order_B) <= MAX_BATCH:
            return self._row.logits(token_ids_N, positions, rows, cache)
        inputs = {
            **self._read(token_ids_N[None], features),
            "position_ids": torch.from_numpy(positions).to(self.device)[..., None, :],
            "attention_mask": rows,
            "past_key_values": cache,
        }
        return self.forward(inputs, rows.last_B)[0]

    def forward(self, inputs: Mapping[str, Any], places: Tensor) -> Tensor:
        """Return the logits [U, P, V] after the tokens at P places; the cache grows by the given tokens."""
        try:
            output = self._model(**inputs, use_cache=True, logits_to_keep=places)
        except RuntimeError as error:  # for example out of memory
            shape = tuple(inputs["position_ids"].shape)
            raise PolicyError(f"policy hf: the model failed at {shape} tokens: {error}") from error
        logits_UPV: Tensor = output.logits
        return logits_UPV if self.seeing is None else self.seeing.mask(logits_UPV)

    def close(self) -> None:
        """Drop the model, so that its memory is freed."""
        self._model, self.seeing, self._row, self.parameters = None, None, None, {}


def _images_in(token_ids: Sequence[int], features: Features) -> list[ImageFeatures]:
    """Return the images among tokens, in order."""
    numbers = [token for token in token_ids if token < 0]
    found, first = [], 0
    while first < len(numbers):
        found.append(features[numbers[first]])
        first += len(found[-1].features_KD)
    return found
