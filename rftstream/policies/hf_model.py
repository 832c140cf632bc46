"""The Hugging Face model that `hf` samples from: loaded once, its parameters exchanged in place.

Shapes: U prompts, L their tokens, B rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, logging

from rftstream.errors import PolicyError
from rftstream.models.folder import loading
from rftstream.models.spec import ModelSpec
from rftstream.policies import attention
from rftstream.policies.prompts import Block, TokenIds
from rftstream.weights.snapshot import DTYPES, RawTensor


class HfModel:
    """A causal language model on its device. `HfPolicy` makes it, gives it versions, and asks it for logits."""

    def __init__(self, spec: ModelSpec) -> None:
        torch.set_num_threads(spec.threads)
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        loader: Any = AutoModelForCausalLM
        with loading(spec):
            self._model = loader.from_pretrained(
                spec.folder,
                dtype=getattr(torch, spec.dtype),
                attn_implementation=attention.register(),
                use_safetensors=True,
            )
        self._model.to(spec.device)
        self._model.eval()
        self.device = torch.device(spec.device)
        self.vocabulary_size = int(self._model.config.vocab_size)
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

    def compute(self, prompts: tuple[TokenIds, ...]) -> Block:
        """Return keys, values and next logits of these prompts, which are padded on the left."""
        longest = max(len(prompt) for prompt in prompts)
        starts_U1 = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=self.device)
        token_ids_UL = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            token_ids_UL[row, longest - len(prompt) :] = prompt
        columns_1L = torch.arange(longest, device=self.device)[None]
        cache: Any = DynamicCache()
        logits_UV = self.forward(
            {
                "input_ids": torch.from_numpy(token_ids_UL).to(self.device),
                "position_ids": (columns_1L - starts_U1).clamp(min=0),
                "attention_mask": columns_1L >= starts_U1,
                "past_key_values": cache,
            }
        )
        states = [(layer.keys, layer.values) for layer in cache.layers]
        return Block(prompts=prompts, states=states, logits_UV=logits_UV)

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the logits of the next token, [B, V]; the cache grows by the given tokens."""
        try:
            output = self._model(**inputs, use_cache=True, logits_to_keep=1)
        except RuntimeError as error:  # out of memory, for one
            shape = tuple(inputs["input_ids"].shape)
            raise PolicyError(f"policy hf: the model failed at {shape} tokens: {error}") from error
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Drop the model, so that its memory is given back."""
        self._model, self.parameters = None, {}


def _tensor(raw: RawTensor, parameter: Tensor) -> Tensor:
    data = np.frombuffer(memoryview(raw.data), dtype=np.uint8)
    flat = torch.frombuffer(data if data.flags.writeable else data.copy(), dtype=parameter.dtype)
    return flat.reshape(parameter.shape)
