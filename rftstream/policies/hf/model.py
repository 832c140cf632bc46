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
from rftstream.models.routers import Routing
from rftstream.models.vision.seeing import ImageFeatures, SeeingModel
from rftstream.policies.hf.cache import SlotCache
from rftstream.policies.hf.family_cache import NAMES, FamilyCache, Fixed, LayerStates, empty_cache, name_of_cache
from rftstream.policies.hf.packed import PackedRows
from rftstream.policies.hf.prompts import Block, Features, TokenIds, shift_behind
from rftstream.policies.hf.row import MAX_BATCH, RowDecoder
from rftstream.weights.checkpoint_names import CheckpointNames
from rftstream.weights.snapshot import RawTensor
from rftstream.weights.tensors import as_tensor


class HfModel:
    """A causal language model on its device. `open_model` makes it; `HfPolicy` loads versions into it, and asks it for
    logits.

    With `keeps_states`, keys and values are kept in a `SlotCache`. Otherwise nothing is kept, and all tokens of a row
    are computed again for each new one. A model that keeps states beside them is computed by plain batches of rows with
    equally many new tokens, without padding, since packed rows would share a state."""

    def __init__(
        self,
        model: Any,
        *,
        keeps_states: bool,
        packs: bool = True,
        continues: bool = True,
        names: CheckpointNames | None = None,
        seeing: SeeingModel | None = None,
        row: RowDecoder | None = None,
        routing: Routing | None = None,
    ) -> None:
        """`packs`: whether passes are over packed rows, not over plain batches. `continues`: whether a pass may be over
        several tokens of a row that has a state. `names`: those of versions; None if none is loaded. `seeing`: the
        model with its vision tower, or None. `row`: decodes batches of few rows, or None. `routing`: of the model, if
        the experts that tokens take are recorded."""
        self._model, self.keeps_states, self._row = model, keeps_states, row
        self._routing = routing
        self.experts_NK: np.ndarray | None = None
        """Experts that the tokens of the last pass took; None if they are not recorded."""
        self.device: torch.device = model.device
        self.vocabulary_size = int(model.config.get_text_config().vocab_size)
        self.seeing = seeing
        """The same model with its vision tower; None if it is not shown images."""
        self._names, self.parameters = names, held_tensors(model)
        self.expected = {} if names is None else names.layout(str(model.dtype).removeprefix("torch."))
        """Name -> dtype and shape of the tensors of a version."""
        self._packs, self.continues = packs, continues
        self.is_divisible = keeps_states and packs
        """Whether a row may continue from any part of what was computed."""
        """Whether rows go on from kept turns."""
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._cache_name = name_of_cache(model)
        self.family: FamilyCache | None = None
        """The model's own cache for all passes over slots, from the first pass over prompts on; None with packed
        rows."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors on the device."""
        return tensors_of(self._model)

    def load(self, tensors: Mapping[str, RawTensor]) -> None:
        """Overwrite these weights; the others stay unchanged."""
        assert self._names is not None, "versions are loaded"
        for name, tensor in tensors.items():
            self._names.place(name).write(self.parameters, as_tensor(tensor))

    def compute(self, prompts: tuple[TokenIds, ...], features: Features) -> Block:
        """Return keys, values, states and next logits of these prompts. They are padded on the left; with states,
        those of one length are computed together instead. `features`: those of the images in them."""
        if not self.keeps_states:
            assert not features, "models with images keep states"
            return self._compute_whole(prompts)
        if self._packs:
            return self._compute_together(prompts, features)
        groups = _of_one_length(prompts)
        blocks = [self._compute_together(tuple(prompts[row] for row in rows), features) for rows in groups]
        return blocks[0] if len(blocks) == 1 else _joined(prompts, blocks, np.argsort(np.concatenate(groups)))

    def _compute_together(self, prompts: tuple[TokenIds, ...], features: Features) -> Block:
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
        inputs: dict[str, Any] = {
            **self._read(token_ids_UL, features),
            "position_ids": torch.from_numpy(positions_3UL if has_own else positions_3UL[0]).to(self.device),
        }
        states: LayerStates
        if self._packs:
            cache: Any = DynamicCache()
            inputs |= {"attention_mask": columns_1L >= starts_U1, "past_key_values": cache}
            logits_UV = self.forward(inputs, columns_1L[0, -1:])[:, 0]
            states = [(layer.keys, layer.values) for layer in cache.layers]
        else:
            logits_UV, used = self._plain_pass(inputs, empty_cache(self._model))
            family = FamilyCache(self._model, used)
            states = family.take()
            self.family = self.family or family
        experts = self._experts_of(prompts, longest)
        return Block(prompts=prompts, states=states, logits_UV=logits_UV, shifts_U=shifts_U, experts=experts)

    def _experts_of(self, prompts: Sequence[TokenIds], longest: int) -> list[np.ndarray]:
        """Return the experts of each prompt in the last pass, in which they were padded on the left; empty if they are
        not recorded."""
        if self.experts_NK is None:
            return []
        padded_ULK = self.experts_NK.reshape(len(prompts), longest, -1)
        return [row_LK[longest - len(prompt) :] for row_LK, prompt in zip(padded_ULK, prompts, strict=True)]

    def _compute_whole(self, prompts: tuple[TokenIds, ...]) -> Block:
        """Return the logits after the prompts, without states. Prompts of one length are computed together, without
        padding and without a cache."""
        found_UV: dict[int, Tensor] = {}
        experts: dict[int, np.ndarray] = {}
        more = {"logits_to_keep": 1} if "logits_to_keep" in self._takes else {}
        for rows in _of_one_length(prompts):
            token_ids_RL = torch.tensor([prompts[row] for row in rows], device=self.device)
            try:
                logits_RPV = self._recorded(input_ids=token_ids_RL, use_cache=False, **more).logits
            except RuntimeError as error:
                shape = tuple(token_ids_RL.shape)
                raise PolicyError(f"policy hf: the model failed at {shape} tokens: {error}") from error
            found_UV |= zip(rows, logits_RPV[:, -1], strict=True)
            group = [prompts[row] for row in rows]
            experts |= zip(rows, self._experts_of(group, len(group[0])), strict=False)
        return Block(
            prompts=prompts,
            states=[],
            logits_UV=torch.stack([found_UV[row] for row in range(len(prompts))]),
            shifts_U=np.zeros(len(prompts), dtype=np.int64),
            experts=[experts[row] for row in sorted(experts)],
        )

    def extends(self, prompt: TokenIds, length: int) -> bool:
        """Return whether a prompt may continue from this number of its tokens. If it has a new image whose tokens
        attend to each other, it must be computed whole, since packed tokens attend only to earlier ones."""
        ahead = self.seeing is not None and self.seeing.looks_ahead
        return not (ahead and any(token < 0 for token in prompt[length:]))

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

    def compute_new(
        self, token_ids_N: np.ndarray, positions: np.ndarray, rows: PackedRows, cache: SlotCache, features: Features
    ) -> Tensor:
        """Return the logits [B, V] after the new tokens of rows whose other tokens are in the cache. `positions`: [N]
        or [3, N]. `features`: those of the images among the new tokens; each image is there completely."""
        if not self._packs:
            return self._compute_by_count(token_ids_N, positions, rows, cache, features)
        cache.write(rows.slots_N, rows.positions_N)
        if self._row is not None and len(token_ids_N) == len(rows.order_B) <= MAX_BATCH:
            return self._row.logits(token_ids_N, positions, rows, cache.for_model)
        inputs = {
            **self._read(token_ids_N[None], features),
            "position_ids": torch.from_numpy(positions).to(self.device)[..., None, :],
            "attention_mask": rows,
            "past_key_values": cache.for_model,
        }
        return self.forward(inputs, rows.last_B)[0]

    def _compute_by_count(
        self, token_ids_N: np.ndarray, positions: np.ndarray, rows: PackedRows, cache: SlotCache, features: Features
    ) -> Tensor:
        """Do what `compute_new` does, in a plain batch for each number of new tokens."""
        assert self.family is not None, "rows have computed prompts"
        found: list[Tensor] = []
        order: list[np.ndarray] = []
        experts: list[tuple[np.ndarray, np.ndarray]] = []
        for which_B, places_N, group in rows.alike():
            shape = (len(which_B), -1)
            group_positions = positions[..., places_N].reshape(*positions.shape[:-1], *shape)
            cache.write(group.slots_N, group.positions_N)
            cache.lend(group.slots_N.reshape(shape)[:, 0])
            inputs = {
                **self._read(token_ids_N[places_N].reshape(shape), features),
                "position_ids": torch.from_numpy(group_positions).to(self.device),
                **({"attention_mask": group} if self.family.has_attention else {}),
            }
            found.append(self._plain_pass(inputs, cache.for_model)[0])
            cache.take_back()
            order.append(which_B)
            if self.experts_NK is not None:
                experts.append((places_N, self.experts_NK))
        if experts:
            places, parts = zip(*experts, strict=True)
            self.experts_NK = np.concatenate(parts)[np.argsort(np.concatenate(places))]
        inverse_B = torch.from_numpy(np.argsort(np.concatenate(order))).to(self.device)
        return torch.cat(found)[inverse_B]

    def _plain_pass(self, inputs: dict[str, Any], cache: Any) -> tuple[Tensor, Any]:
        """Return the logits [U, V] after rows of one length, and their cache. `cache`: None if the model makes it."""
        inputs = {name: value for name, value in inputs.items() if name in self._takes}
        if cache is not None and self._cache_name is not None:
            inputs[self._cache_name] = cache
        output = self._call(inputs, 1)
        if cache is None:
            cache = next(found for name in NAMES if (found := getattr(output, name, None)) is not None)
        logits_UV = output.logits[:, -1]
        return logits_UV if self.seeing is None else self.seeing.mask(logits_UV), cache

    def forward(self, inputs: Mapping[str, Any], places: Tensor) -> Tensor:
        """Return the logits [U, P, V] after the tokens at P places; the cache grows by the given tokens."""
        logits_UPV: Tensor = self._call(inputs, places).logits
        return logits_UPV if self.seeing is None else self.seeing.mask(logits_UPV)

    def _call(self, inputs: Mapping[str, Any], places: Tensor | int) -> Any:
        """Return the model's output for inputs and a cache."""
        try:
            return self._recorded(**inputs, use_cache=True, logits_to_keep=places)
        except RuntimeError as error:  # for example out of memory
            shape = tuple(next(iter(inputs.values())).shape[:2])
            raise PolicyError(f"policy hf: the model failed at {shape} tokens: {error}") from error

    def _recorded(self, **inputs: Any) -> Any:
        """Call the model, and keep the experts that the tokens take if they are recorded."""
        if self._routing is None:
            return self._model(**inputs)
        with self._routing.recorded() as experts:
            output = self._model(**inputs)
        self.experts_NK = experts().cpu().numpy().astype(self._routing.dtype)
        return output

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


def _of_one_length(prompts: Sequence[TokenIds]) -> list[list[int]]:
    """Return the indices of prompts, those of each length together."""
    found: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        found.setdefault(len(prompt), []).append(row)
    return list(found.values())


def _joined(prompts: tuple[TokenIds, ...], blocks: Sequence[Block], order_U: np.ndarray) -> Block:
    """Return the prompts of several blocks as one, padded on the left. `order_U`: the place of each prompt among all
    rows of the blocks."""
    longest = max(map(len, prompts))
    order = torch.from_numpy(order_U).to(blocks[0].logits_UV.device)

    def join(tensors: Sequence[Tensor], *, is_fixed: bool) -> Tensor:
        pad = torch.nn.functional.pad
        return torch.cat([one if is_fixed else pad(one, (0, 0, longest - one.shape[2], 0)) for one in tensors])[order]

    states: list[tuple[Tensor, ...]] = []
    for layer in zip(*(block.states for block in blocks), strict=True):
        kind = Fixed if (is_fixed := isinstance(layer[0], Fixed)) else tuple
        states.append(kind(join(tensors, is_fixed=is_fixed) for tensors in zip(*layer, strict=True)))
    logits_UV = torch.cat([block.logits_UV for block in blocks])[order]
    experts = [row_LK for block in blocks for row_LK in block.experts]
    return Block(
        prompts=prompts,
        states=states,
        logits_UV=logits_UV,
        shifts_U=np.concatenate([block.shifts_U for block in blocks])[order_U],
        experts=[experts[place] for place in order_U] if experts else (),
    )
