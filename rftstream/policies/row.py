"""The one row that is left of a batch, decoded on a CPU by [row.c](row.c) in the place of the model's modules.

A step of PyTorch over one row takes several times as long as a read of the weights: its products with one row are no
faster than with several, and thirty layers of modules cost as much again. Only plain decoders of Llama's kind in
bfloat16 are decoded so. All others, and rows that are not alone, go through the model itself.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rftstream.errors import PolicyError, WeightsError
from rftstream.weights import kernels

log = logging.getLogger(__name__)

SOURCES = (Path(__file__).with_name("row.c"),)
FLAGS = (*kernels.FLAGS, "-ffp-contract=fast", "-fno-math-errno")
MAX_THREADS = 2
"""With more threads PyTorch reads the weights faster than one thread does."""
LANES, ROWS = 16, 4
"""Of row.c: inputs of a product, and a head's width, come in so many; outputs in so many."""
CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Models whose layers are those of row.c where their settings are plain."""
NEEDED = {
    "input_layernorm.weight": 0,
    "self_attn.q_proj.weight": 1,
    "self_attn.k_proj.weight": 3,
    "self_attn.v_proj.weight": 5,
    "self_attn.o_proj.weight": 7,
    "post_attention_layernorm.weight": 8,
    "mlp.gate_proj.weight": 9,
    "mlp.up_proj.weight": 10,
    "mlp.down_proj.weight": 11,
}
"""Parameter of a layer -> its place among the pointers of row.c."""
BIASES = {"self_attn.q_proj.bias": 2, "self_attn.k_proj.bias": 4, "self_attn.v_proj.bias": 6}
KEYS, VALUES, NUM_POINTERS = 12, 13, 14


class RowDecoder:
    """A model's parameters as row.c reads them. `HfModel` makes it, and asks it for the logits of a row that is alone.

    It holds addresses: parameters must be changed in place."""

    def __init__(self, model: Any) -> None:
        """The model must be one that `suits`."""
        inner, config = model.model, model.config
        attention = inner.layers[0].self_attn
        self._rotary, self._num_layers = inner.rotary_emb, len(inner.layers)
        self._pointers = np.zeros((self._num_layers, NUM_POINTERS), dtype=np.uint64)
        self._parameters = list(model.parameters())  # their memory is read
        for layer, pointers in zip(inner.layers, self._pointers, strict=True):
            for name, parameter in layer.named_parameters():
                pointers[{**NEEDED, **BIASES}[name]] = parameter.data_ptr()
        self._embedding, self._norm, self._head = inner.embed_tokens.weight, inner.norm.weight, model.lm_head.weight
        self._sizes = np.asarray(
            [
                self._num_layers,
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                attention.head_dim,
                config.intermediate_size,
                len(self._head),
                0,
                0,
            ],
            dtype=np.int64,
        )
        self._constants = np.asarray([inner.norm.variance_epsilon, attention.scaling], dtype=np.float32)

    @staticmethod
    def of(model: Any, threads: int) -> RowDecoder | None:
        """Return the decoder of a model. None if the model does not suit, or there is nothing to compile it with."""
        if threads > MAX_THREADS or not suits(model):
            return None
        try:
            _library()
        except (WeightsError, OSError) as error:
            log.warning("policy hf: rows that are alone take longer than they need: %s", error)
            return None
        return RowDecoder(model)

    def logits(self, token_id: int, position: int, slot: int, column: int, cache: Any) -> Tensor:
        """Return the logits [1, V] behind a row's newest token, whose keys and values go into a column of its slot."""
        for pointers, layer in zip(self._pointers, cache.layers, strict=True):
            for place, room in zip((KEYS, VALUES), layer.rooms, strict=True):
                pointers[place] = room.data_ptr() + slot * room.stride(0) * room.element_size()
        self._sizes[-2:] = room.shape[2], column
        cosines, sines = self._rotary(self._norm, torch.tensor([[position]]))
        angles = torch.cat([cosines.reshape(-1), sines.reshape(-1)]).float()
        logits = self._head.new_empty((1, len(self._head)))
        failed = _library().rft_decode_row(
            self._sizes.ctypes.data,
            self._constants.ctypes.data,
            self._pointers.ctypes.data,
            self._embedding.data_ptr() + token_id * self._embedding.stride(0) * self._embedding.element_size(),
            self._norm.data_ptr(),
            self._head.data_ptr(),
            angles.data_ptr(),
            logits.data_ptr(),
        )
        if failed:
            raise PolicyError("policy hf: no memory for a row")
        return logits


def suits(model: Any) -> bool:
    """Return whether row.c computes what a model does."""
    if type(model).__name__ not in CLASSES or any(_is_odd(parameter) for parameter in model.parameters()):
        return False
    config, layers = model.config, model.model.layers
    names = set(NEEDED) | {name for name in BIASES if name in dict(layers[0].named_parameters())}
    return (
        config.hidden_act == "silu"
        and getattr(config, "sliding_window", None) is None
        and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
        and all({name for name, _ in layer.named_parameters()} == names for layer in layers)
        and layers[0].self_attn.head_dim % LANES == 0
        and all(
            part.in_features % LANES == 0 and part.out_features % ROWS == 0
            for part in model.model.modules()
            if isinstance(part, nn.Linear)
        )
        and config.hidden_size % LANES == 0
        and model.lm_head.bias is None
    )


def _is_odd(parameter: Tensor) -> bool:
    return parameter.dtype != torch.bfloat16 or parameter.device.type != "cpu" or not parameter.is_contiguous()


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(kernels.built(SOURCES, FLAGS)))
    library.rft_decode_row.argtypes = (ctypes.c_void_p,) * 8
    library.rft_decode_row.restype = ctypes.c_int
    return library


if __name__ == "__main__":
    kernels.build(kernels.beside_source(SOURCES, FLAGS), SOURCES, FLAGS)
    print(kernels.beside_source(SOURCES, FLAGS), file=sys.stderr)
