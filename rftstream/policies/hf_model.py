"""The Hugging Face model that `hf` samples from: loaded once, its parameters exchanged in place.

Shapes: U prompts, L their tokens, B rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, logging

from rftstream.errors import PolicyError
from rftstream.models.folder import loading
from rftstream.models.seeing import ImageFeatures, SeeingModel, model_class
from rftstream.models.spec import ModelSpec
from rftstream.policies import attention
from rftstream.policies.prompts import Block, Features, TokenIds
from rftstream.policies.turns import KeptTurn
from rftstream.weights.snapshot import DTYPES, RawTensor


class HfModel:
    """A causal language model on its device. `HfPolicy` makes it, gives it versions, and asks it for logits."""

    def __init__(self, spec: ModelSpec) -> None:
        torch.set_num_threads(spec.threads)
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with loading(spec):
            self._model = model_class(spec.folder).from_pretrained(
                spec.folder,
                dtype=getattr(torch, spec.dtype),
                attn_implementation=attention.register(),
                use_safetensors=True,
            )
        self._model.to(spec.device)
        self._model.eval()
        self.device = torch.device(spec.device)
        self.vocabulary_size = int(self._model.config.get_text_config().vocab_size)
        self.seeing = SeeingModel.of(self._model, spec.folder)
        """The same model as one that is shown images; None if it is not."""
        self.parameters = dict(self._model.named_parameters())
        self.expected = {
            name: (DTYPES[str(parameter.dtype).removeprefix("torch.")], tuple(parameter.shape))
            for name, parameter in self.parameters.items()
        }
        """Name -> dtype and shape of the tensors that `load` takes."""

    def load(self, tensors: Mapping[str, RawTensor]) -> None:
        """Overwrite these parameters; the others stay as they are."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameter = self.parameters[name]
                if parameter.numel():
                    parameter.copy_(_tensor(tensor, parameter))

    def compute(self, prompts: tuple[TokenIds, ...], features: Features) -> Block:
        """Return keys, values and next logits of these prompts, which are padded on the left. `features`: those of the
        images in them."""
        longest = max(len(prompt) for prompt in prompts)
        starts_U1 = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=self.device)
        columns_1L = torch.arange(longest, device=self.device)[None]
        cache: Any = DynamicCache()
        read, shifts_U = self._read(prompts, [0] * len(prompts), features)
        logits_UV = self.forward({**read, "attention_mask": columns_1L >= starts_U1, "past_key_values": cache})
        states = [(layer.keys, layer.values) for layer in cache.layers]
        return Block(prompts=prompts, states=states, logits_UV=logits_UV, shifts_U=shifts_U)

    def extends(self, prompt: TokenIds, turn: KeptTurn) -> bool:
        """Return whether `extend` may go on from the turn: not where a new image's tokens see each other."""
        ahead = self.seeing is not None and self.seeing.looks_ahead
        return not (ahead and any(token < 0 for token in prompt[len(turn.token_ids) :]))

    def _read(
        self, prompts: Sequence[TokenIds], begins: Sequence[int], features: Features
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        """Return what the model reads of each prompt, from token `begins` on and padded on the left: tokens and
        positions; or embeddings, where images stand among them. Return also `Block.shifts_U`."""
        width = max(len(prompt) - begin for prompt, begin in zip(prompts, begins, strict=True))
        token_ids_UW = np.zeros((len(prompts), width), dtype=np.int64)
        positions_UW = np.zeros((len(prompts), width), dtype=np.int64)
        for row, (prompt, begin) in enumerate(zip(prompts, begins, strict=True)):
            start = width - (len(prompt) - begin)
            token_ids_UW[row, start:] = prompt[begin:]
            positions_UW[row, start:] = np.arange(begin, len(prompt))
        shifts_U = np.zeros(len(prompts), dtype=np.int64)
        if not features or not any(token < 0 for prompt in prompts for token in prompt):
            read = {"input_ids": torch.from_numpy(token_ids_UW), "position_ids": torch.from_numpy(positions_UW)}
            return {name: one.to(self.device) for name, one in read.items()}, shifts_U
        assert self.seeing is not None, "others are given no images"
        shown = [images_in(prompt, features) for prompt in prompts]
        positions = self._image_positions(prompts, begins, shown, positions_UW, shifts_U)
        read = {"position_ids": torch.from_numpy(positions).to(self.device)}
        is_image_UW = torch.from_numpy(token_ids_UW < 0).to(self.device)
        tokens_UW = torch.from_numpy(np.maximum(token_ids_UW, 0)).to(self.device)
        new = [one for row, begin in zip(shown, begins, strict=True) for place, one in row if place >= begin]
        if not new:
            return {**read, "input_ids": tokens_UW}, shifts_U
        places_N = torch.from_numpy(np.flatnonzero(token_ids_UW < 0)).to(self.device)
        embeddings = self.seeing.embed(tokens_UW, places_N, torch.cat([one.features_KD for one in new]))
        return {**read, "inputs_embeds": embeddings, **self.seeing.attention(is_image_UW)}, shifts_U

    def _image_positions(
        self,
        prompts: Sequence[TokenIds],
        begins: Sequence[int],
        shown: Sequence[Sequence[tuple[int, ImageFeatures]]],
        positions_UW: np.ndarray,
        shifts_U: np.ndarray,
    ) -> np.ndarray:
        """Return positions [3, U, W] if the model has its own for images, and fill in `shifts_U`; else those of text,
        as they are."""
        assert self.seeing is not None
        placeholder, width = self.seeing.tokens.token_id, positions_UW.shape[1]
        positions_3UW = np.repeat(positions_UW[None], 3, axis=0)
        has_own = False
        for row, (prompt, begin) in enumerate(zip(prompts, begins, strict=True)):
            ids = np.asarray(prompt)
            own_3T = self.seeing.positions(np.where(ids < 0, placeholder, ids), [image for _, image in shown[row]])
            if own_3T is not None:
                positions_3UW[:, row, width - (len(prompt) - begin) :] = own_3T[:, begin:]
                shifts_U[row] = int(own_3T.max()) + 1 - len(prompt)
                has_own = True
        return positions_3UW if has_own else positions_UW

    def extend(self, prompts: Sequence[TokenIds], turns: Sequence[KeptTurn], features: Features) -> Block:
        """Return the same as `compute` for prompts that each begin with a turn. Only what is new is computed.

        Turns and what is new are each padded on the left. Afterwards each turn is moved up to what is new."""
        begins = [len(turn.token_ids) for turn in turns]
        before_U = torch.tensor(begins)
        new_U = torch.tensor([len(prompt) for prompt in prompts]) - before_U
        before, width = int(before_U.max()), int(new_U.max())
        read, shifts_U = self._read(prompts, begins, features)
        columns_1L = torch.arange(before + width)[None]
        is_turn_UL = (columns_1L >= before - before_U[:, None]) & (columns_1L < before)
        is_new_UL = columns_1L >= before + width - new_U[:, None]
        cache: Any = DynamicCache()
        for number in range(len(turns[0].states)):
            cache.update(*(_padded([turn.states[number][part] for turn in turns], before) for part in (0, 1)), number)
        logits_UV = self.forward(
            {
                **read,
                "attention_mask": (is_turn_UL | is_new_UL).to(self.device),
                "past_key_values": cache,
            }
        )
        # columns of what is new stay, those of the turn move by the padding between
        sources_UL = torch.where(is_new_UL, columns_1L, (columns_1L - (width - new_U)[:, None]).clamp(min=0))
        sources_U1L1 = sources_UL[:, None, :, None].to(self.device)
        states = [
            (_gathered(layer.keys, sources_U1L1), _gathered(layer.values, sources_U1L1)) for layer in cache.layers
        ]
        return Block(prompts=tuple(prompts), states=states, logits_UV=logits_UV, shifts_U=shifts_U)

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the logits of the next token, [B, V]; the cache grows by the given tokens."""
        try:
            output = self._model(**inputs, use_cache=True, logits_to_keep=1)
        except RuntimeError as error:  # out of memory, for one
            shape = tuple(inputs["position_ids"].shape)
            raise PolicyError(f"policy hf: the model failed at {shape} tokens: {error}") from error
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV if self.seeing is None else self.seeing.mask(logits_BV)

    def close(self) -> None:
        """Drop the model, so that its memory is given back."""
        self._model, self.seeing, self.parameters = None, None, {}


def images_in(prompt: TokenIds, features: Features) -> list[tuple[int, ImageFeatures]]:
    """Return the images of a prompt in order, each with the place of its first placeholder."""
    places = [place for place, token in enumerate(prompt) if token < 0]
    found, number = [], 0
    while number < len(places):
        image = features[prompt[places[number]]]
        found.append((places[number], image))
        number += len(image.features_KD)
    return found


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """Return rows [H, L, D] of several lengths as one tensor [U, H, width, D], padded on the left with zeros."""
    heads, _, size = rows[0].shape
    padded_UHLD = rows[0].new_zeros((len(rows), heads, width, size))
    for number, row in enumerate(rows):
        padded_UHLD[number, :, width - row.shape[1] :] = row
    return padded_UHLD


def _gathered(states_UHLD: Tensor, sources_U1L1: Tensor) -> Tensor:
    _, heads, _, size = states_UHLD.shape
    return states_UHLD.gather(2, sources_U1L1.expand(-1, heads, -1, size))


def _tensor(raw: RawTensor, parameter: Tensor) -> Tensor:
    data = np.frombuffer(memoryview(raw.data), dtype=np.uint8)
    flat = torch.frombuffer(data if data.flags.writeable else data.copy(), dtype=parameter.dtype)
    return flat.reshape(parameter.shape)
