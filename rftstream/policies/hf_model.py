"""The Hugging Face model that `hf` samples from: loaded once, its parameters exchanged in place.

Shapes: U prompts, L their tokens, B rows of the batch, N their new tokens, P places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, logging

from rftstream.errors import PolicyError
from rftstream.models.folder import loading
from rftstream.models.seeing import SeeingModel, model_class
from rftstream.models.spec import ModelSpec
from rftstream.policies import attention, linear
from rftstream.policies.packed import PackedRows
from rftstream.policies.prompts import Block, Features, TokenIds
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
        if self.device.type == "cpu" and linear.lacks(self._model.dtype):
            linear.widen(self._model)
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
        token_ids_UL = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            token_ids_UL[row, longest - len(prompt) :] = prompt
        columns_1L = torch.arange(longest, device=self.device)[None]
        cache: Any = DynamicCache()
        inputs = {
            **self._read(token_ids_UL, features),
            "position_ids": (columns_1L - starts_U1).clamp(min=0),
            "attention_mask": columns_1L >= starts_U1,
            "past_key_values": cache,
        }
        logits_UV = self.forward(inputs, columns_1L[0, -1:])[:, 0]
        states = [(layer.keys, layer.values) for layer in cache.layers]
        return Block(prompts=prompts, states=states, logits_UV=logits_UV)

    def _read(self, token_ids: np.ndarray, features: Features) -> dict[str, Tensor]:
        """Return what the model reads: tokens, or their embeddings where images stand among them."""
        places = np.flatnonzero(token_ids < 0)
        if not len(places):
            return {"input_ids": torch.from_numpy(token_ids).to(self.device)}
        assert self.seeing is not None, "others are given no images"
        tokens = self.seeing.tokens
        numbers = token_ids.reshape(-1)[places[:: tokens.per_image]]
        read = torch.from_numpy(np.where(token_ids < 0, tokens.token_id, token_ids)).to(self.device)
        features_IKD = torch.stack([features[int(number)] for number in numbers])
        return {"inputs_embeds": self.seeing.embed(read, torch.from_numpy(places).to(self.device), features_IKD)}

    def compute_packed(self, token_ids_N: np.ndarray, rows: PackedRows, cache: Any, features: Features) -> Tensor:
        """Return the logits [B, V] behind the new tokens of rows whose other tokens are in the cache."""
        inputs = {
            **self._read(token_ids_N[None], features),
            "position_ids": torch.from_numpy(rows.positions_N).to(self.device)[None],
            "attention_mask": rows,
            "past_key_values": cache,
        }
        return self.forward(inputs, rows.last_B)[0]

    def forward(self, inputs: Mapping[str, Any], places: Tensor) -> Tensor:
        """Return the logits [U, P, V] behind the tokens at P places; the cache grows by the given tokens."""
        try:
            output = self._model(**inputs, use_cache=True, logits_to_keep=places)
        except RuntimeError as error:  # out of memory, for one
            shape = tuple(inputs["position_ids"].shape)
            raise PolicyError(f"policy hf: the model failed at {shape} tokens: {error}") from error
        logits_UPV: Tensor = output.logits
        return logits_UPV if self.seeing is None else self.seeing.mask(logits_UPV)

    def close(self) -> None:
        """Drop the model, so that its memory is given back."""
        self._model, self.seeing, self.parameters = None, None, {}


def _tensor(raw: RawTensor, parameter: Tensor) -> Tensor:
    data = np.frombuffer(memoryview(raw.data), dtype=np.uint8)
    flat = torch.frombuffer(data if data.flags.writeable else data.copy(), dtype=parameter.dtype)
    return flat.reshape(parameter.shape)
