"""The vision part of a made model: a small CLIP tower and a projector in front of the made Llama, put together as
transformers' LLaVA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.models.folders.files import write_json
from rftstream.models.vision.images import IMAGE_MARK

if TYPE_CHECKING:
    import numpy as np

    from rftstream.config.sections import MakeModel

IMAGE_SIZE, PATCH_SIZE = 32, 8
"""Pixels on each side of an image as the model sees it, and of a patch."""
NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2
"""Number of patches of an image. Each patch is one token."""
SPECIAL_TOKENS = (IMAGE_MARK,)
"""Tokens beside those of a made model that reads only text."""
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + IMAGE_MARK + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def config_around(text: Mapping[str, Any], make: MakeModel, *, image_token: int) -> dict[str, Any]:
    """Return the config of the whole model. `text` is the config of the made Llama."""
    outer = ("dtype", "eos_token_id", "pad_token_id", "bos_token_id", "tie_word_embeddings")
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        **{name: text[name] for name in outer},
        "image_token_index": image_token,
        "image_seq_length": NUM_PATCHES,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "text_config": dict(text),
        "vision_config": {
            "model_type": "clip_vision_model",
            "attention_dropout": 0.0,
            "hidden_act": "quick_gelu",
            "hidden_size": make.width,
            "image_size": IMAGE_SIZE,
            "intermediate_size": 2 * make.width,
            "layer_norm_eps": 1e-5,
            "num_attention_heads": make.heads,
            "num_channels": 3,
            "num_hidden_layers": 1,
            "patch_size": PATCH_SIZE,
            "projection_dim": make.width,
        },
    }


def write_processor(folder: Path) -> None:
    """Write the image processor's files, and what transformers' LlavaProcessor needs beside the tokenizer."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": size,
            "resample": 2,
            "do_center_crop": False,
            "crop_size": size,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    write_json(
        folder / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE_MARK,
            "num_additional_image_tokens": 1,
            "patch_size": PATCH_SIZE,
            "vision_feature_select_strategy": "default",
        },
    )


def weights_around(text: Mapping[str, np.ndarray], make: MakeModel, seed: int) -> dict[str, np.ndarray]:
    """Return the weights of the whole model. `text`: the weights of the made Llama. Linear layers are N(0, 1/fan_in);
    layers that write to the residual stream are smaller by sqrt(2). The features of an image are about as large as the
    embeddings of text."""
    import numpy as np

    generator = np.random.default_rng([seed, 1])
    width, hidden = make.width, 2 * make.width

    def normal(*shape: int, std: float) -> np.ndarray:
        return (generator.standard_normal(shape) * std).astype(np.float32)

    zeros, ones = np.zeros(width, np.float32), np.ones(width, np.float32)
    tower, pixels = "model.vision_tower.", 3 * PATCH_SIZE * PATCH_SIZE
    weights = {f"model.language_{name}": value for name, value in text.items()}
    weights |= {
        f"{tower}embeddings.class_embedding": normal(width, std=0.02),
        f"{tower}embeddings.patch_embedding.weight": normal(width, 3, PATCH_SIZE, PATCH_SIZE, std=pixels**-0.5),
        f"{tower}embeddings.position_embedding.weight": normal(NUM_PATCHES + 1, width, std=0.5),
    }
    for name in ("pre_layrnorm", "post_layernorm", "encoder.layers.0.layer_norm1", "encoder.layers.0.layer_norm2"):
        weights |= {f"{tower}{name}.weight": ones.copy(), f"{tower}{name}.bias": zeros.copy()}
    layer = f"{tower}encoder.layers.0."
    for name, rows, columns, std in (
        ("self_attn.q_proj", width, width, width**-0.5),
        ("self_attn.k_proj", width, width, width**-0.5),
        ("self_attn.v_proj", width, width, width**-0.5),
        ("self_attn.out_proj", width, width, (2 * width) ** -0.5),
        ("mlp.fc1", hidden, width, width**-0.5),
        ("mlp.fc2", width, hidden, (2 * hidden) ** -0.5),
    ):
        weights |= {
            f"{layer}{name}.weight": normal(rows, columns, std=std),
            f"{layer}{name}.bias": np.zeros(rows, np.float32),
        }
    for name, std in (("linear_1", width**-0.5), ("linear_2", 0.1 * math.sqrt(1 / width))):
        projector = f"model.multi_modal_projector.{name}"
        weights |= {f"{projector}.weight": normal(width, width, std=std), f"{projector}.bias": zeros.copy()}
    return weights
