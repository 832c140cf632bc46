"""Decodes the last few rows of a batch on a CPU with [row.c](row.c) instead of the model's modules.

For one row a PyTorch step takes several times as long as reading the weights: its products with one row are no faster
than with several, and thirty layers of modules cost as much again. row.c decodes only plain decoders of Llama's kind in
bfloat16. Other models, prompts, and larger batches use the model itself.

Shapes: B rows, N their newest tokens, in the order of the pass, V vocabulary, D width of a head.
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
from rftstream.policies.hf.packed import PackedRows
from rftstream.weights.deltas import kernels

log = logging.getLogger(__name__)

SOURCES = (Path(__file__).with_name("row.c"),)
FLAGS = (*kernels.FLAGS, "-ffp-contract=fast", "-fno-math-errno")
MAX_THREADS = 2
"""Largest number of threads for which row.c is used: with more, PyTorch reads the weights faster than row.c's one
thread."""
MAX_BATCH = 4
"""Largest number of rows that row.c decodes at once."""
LANES, ROWS = 16, 4
"""Granularity of row.c: the inputs of a product and a head's width are multiples of LANES, the outputs multiples of
ROWS."""
CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Models whose layers row.c can compute, if their settings are plain."""
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
"""Parameter of a layer -> its index among the pointers of row.c."""
BIASES = {"self_attn.q_proj.bias": 2, "self_attn.k_proj.bias": 4, "self_attn.v_proj.bias": 6}
KEYS, VALUES, NUM_POINTERS = 12, 13, 14


class RowDecoder:
    """A model's parameters as row.c reads them. `HfModel` makes it, and asks it for the logits of a few rows.

    It holds memory addresses, so parameters must be changed in place."""

    def __init__(self, model: Any) -> None:
        """`model`: must satisfy `suits`."""
        inner, config = model.model, model.config
        attention = inner.layers[0].self_attn
        self._rotary, self._num_layers = inner.rotary_emb, len(inner.layers)
        self._pointers = np.zeros((self._num_layers, NUM_POINTERS), dtype=np.uint64)
        self._parameters = list(model.parameters())  # row.c reads their memory
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
            ],
            dtype=np.int64,
        )
        self._constants = np.asarray([inner.norm.variance_epsilon, attention.scaling], dtype=np.float32)

    @staticmethod
    def of(model: Any, threads: int) -> RowDecoder | None:
        """Return the decoder of a model; None if the model does not suit, or there is no compiler."""
        if threads > MAX_THREADS or not suits(model):
            return None
        try:
            _library()
        except (WeightsError, OSError) as error:
            log.warning("policy hf: rows that are alone take longer than they need: %s", error)
            return None
        return RowDecoder(model)

    def logits(self, token_ids_N: np.ndarray, positions_N: np.ndarray, rows: PackedRows, cache: Any) -> Tensor:
        """Return the logits [B, V] after the newest tokens of up to MAX_BATCH rows, one token each."""
        for pointers, layer in zip(self._pointers, cache.layers, strict=True):
            pointers[KEYS], pointers[VALUES] = (room.data_ptr() for room in layer.rooms)
        self._sizes[-1] = cache.layers[0].rooms[0].shape[2]
        places = [np.ascontiguousarray(one, dtype=np.int64) for one in (token_ids_N, rows.slots_N, rows.positions_N)]
        cosines_ND, sines_ND = (one[0] for one in self._rotary(self._norm, torch.from_numpy(positions_N)[None]))
        angles_N2D = torch.stack([cosines_ND, sines_ND], dim=1).float()
        logits_NV: Tensor = self._head.new_empty((len(token_ids_N), len(self._head)))
        failed = _library().rft_decode_rows(
            len(token_ids_N),
            self._sizes.ctypes.data,
            self._constants.ctypes.data,
            self._pointers.ctypes.data,
            self._embedding.data_ptr(),
            self._norm.data_ptr(),
            self._head.data_ptr(),
            *(place.ctypes.data for place in places),
            angles_N2D.data_ptr(),
            logits_NV.data_ptr(),
        )
        if failed:
            raise PolicyError("policy hf: no memory for a row")
        return logits_NV[rows.last_B] if len(logits_NV) > 1 else logits_NV


def suits(model: Any) -> bool:
    """Return whether row.c can compute a model."""
    if type(model).__name__ not in CLASSES or any(_is_odd(parameter) for parameter in model.parameters()):
        return False
    config, layers = model.config, model.model.layers
    names = set(NEEDED) | {name for name in BIASES if name in dict(layers[0].named_parameters())}
    plain: bool = (
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
    return plain


def _is_odd(parameter: Tensor) -> bool:
    return parameter.dtype != torch.bfloat16 or parameter.device.type != "cpu" or not parameter.is_contiguous()


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(kernels.built(SOURCES, FLAGS)))
    library.rft_decode_rows.argtypes = (ctypes.c_int, *(ctypes.c_void_p,) * 11)
    library.rft_decode_rows.restype = ctypes.c_int
    return library


if __name__ == "__main__":
    kernels.build(kernels.beside_source(SOURCES, FLAGS), SOURCES, FLAGS)
    print(kernels.beside_source(SOURCES, FLAGS), file=sys.stderr)
