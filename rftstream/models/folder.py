"""Model folders: found, fetched or made, their digests, and the chat template in effect.

Imports neither torch nor transformers: every role calls `prepare_model`, and most have no use for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.errors import ConfigError
from rftstream.models.devices import check_device
from rftstream.models.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np

    from rftstream.config.sections import EvaluationSection, MakeModel, ModelSection, TasksetSection

FAKE = "fake"
"""`model.path = "fake"`: no model at all, for the fake policy and the fake backend."""

END = "<eos>"
SPECIAL_TOKENS: Mapping[int, tuple[str, ...]] = {1: ("<pad>", END, "<unk>"), 2: (END,)}
"""Layout of a made model -> its tokens beside the characters, by id. A policy samples whatever has a logit, so there is
none for padding, which is done with the end, and none for unknown characters, which are refused."""

MADE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
RECIPE = "rftstream.json"
"""In made folders: what they were made from."""
INITIAL = "initial.json"
"""In folders with another run's weights: which ones."""
LAYOUT = max(SPECIAL_TOKENS)
"""Of models that are made now; goes up when the same settings give other weights. Runs keep the one that they began
with."""
CONVERTED = {"SmolLM2-135M-Instruct": "smollm2"}
"""Names of folders -> what `rftstream convert` calls the model that belongs there."""
HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def prepare_model(
    section: ModelSection, folder: Path, seed: int, *, device: str = "cpu", threads: int = 1
) -> ModelSpec:
    """The run's model. `folder` is where a `[model.make]` one is made, once; later calls find it there."""
    spec = _prepare(section, folder, seed, device=device, threads=threads)
    if section.lora is None:
        return spec
    if spec.name == FAKE:
        raise ConfigError("model.lora: the fake model has no layers to adapt; give model.path or [model.make]")
    return dataclasses.replace(spec, name=f"{spec.name}+lora", lora=section.lora)


def _prepare(section: ModelSection, folder: Path, seed: int, *, device: str, threads: int) -> ModelSpec:
    spec = ModelSpec(
        name=FAKE,
        folder=folder,
        dtype=section.dtype,
        context=section.context,
        device=device,
        threads=threads,
        chat_template=section.chat_template,
        chat_template_kwargs=section.chat_template_kwargs,
    )
    if section.make is not None:
        return dataclasses.replace(spec, name=_made_model(section.make, folder, seed))
    if section.init_from is not None:
        origin = initial_of(folder)
        if origin is None:
            raise ConfigError(
                f"model.init_from: {folder}: the weights of {section.init_from} are not here yet, expected them to be "
                "fetched when the run is made; start it with `rftstream run` where that run is"
            )
        if origin["init_from"] != section.init_from:
            raise ConfigError(
                f"model.init_from: {folder} holds the weights of {origin['init_from']}, expected {section.init_from}; "
                "take back the change, or start a new run"
            )
        return dataclasses.replace(spec, name=str(origin["name"]))
    if section.path == FAKE:
        return spec
    assert section.path is not None  # config checks that there is one of path, make and init_from
    found = _find(section.path)
    if not (found / "config.json").is_file():
        raise ConfigError(f"model.path: {found}: has no config.json, expected a Hugging Face model folder")
    _check_weights(found)
    return dataclasses.replace(spec, name=section.path.rstrip("/").rpartition("/")[2], folder=found)


def model_here(section: ModelSection, folder: Path) -> ModelSpec | None:
    """The run's model for reading what it said, if it lies on this machine; nothing is made or fetched."""
    found: Path | None = folder
    if section.make is not None:
        found = folder if (folder / RECIPE).is_file() else None
    elif section.init_from is not None:
        found = folder if initial_of(folder) is not None else None
    elif section.path is not None and section.path != FAKE:
        found = Path(section.path) if Path(section.path).is_dir() else _find_cached(section.path)
    if found is None:
        return None
    return ModelSpec(
        name=FAKE if section.path == FAKE else found.name,
        folder=found,
        dtype=section.dtype,
        context=section.context,
        chat_template=section.chat_template,
        chat_template_kwargs=section.chat_template_kwargs,
    )


def _find_cached(name: str) -> Path | None:
    """What was fetched from the hub before."""
    try:
        import huggingface_hub

        return Path(huggingface_hub.snapshot_download(name, local_files_only=True, allow_patterns=HUB_PATTERNS))
    except Exception:  # not installed, not in the cache, or not a name: the hub's client raises errors of several kinds
        return None


def _check_weights(folder: Path) -> None:
    """ConfigError where there are weights, and all of them in files that may run code when they are opened. A folder
    without any serves for tokens alone."""
    kinds = {path.suffix: path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES}
    if kinds and ".safetensors" not in kinds:
        raise ConfigError(
            f"model.path: {folder}: has its weights in {sorted(kinds.values())[0]}, expected safetensors, which hold "
            "nothing but numbers; save the model anew: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(OTHER)"
        )


def check_loadable(spec: ModelSpec) -> None:
    """ConfigError unless a part that loads the model can: its weights are there and whole, and so is its device. Reads
    no more than the headers of the weights."""
    check_device(spec.device)
    check_complete(spec)


def check_complete(spec: ModelSpec) -> None:
    """ConfigError for a model folder without weights, or with a part of them."""
    if spec.name == FAKE:
        raise ConfigError(
            "model.path: 'fake' is no model, expected a Hugging Face model folder or [model.make]; or set "
            "explorer.policy and trainer.backend to 'fake'"
        )
    advice = "fetch the model again, or give another model.path"
    files = sorted(spec.folder.glob("*.safetensors"))
    for index in spec.folder.glob("*.safetensors.index.json"):
        wanted = {str(name) for name in read_json(index).get("weight_map", {}).values()}
        if absent := sorted(wanted - {file.name for file in files}):
            raise ConfigError(
                f"model.path: {spec.folder}: {len(absent)} of {len(wanted)} files of weights are absent ({absent[0]}); "
                f"{advice}"
            )
    if not files:
        raise ConfigError(f"model.path: {spec.folder}: has no weights, expected *.safetensors in it; {advice}")
    for file in files:
        if (size := file.stat().st_size) < (expected := _end_of_tensors(file)):
            raise ConfigError(f"{file}: found {size:,} bytes, expected {expected:,}: it was cut off; {advice}")


def tensor_headers(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors. ConfigError if it is none."""
    return _read_header(file)[0]


def _end_of_tensors(file: Path) -> int:
    header, start = _read_header(file)
    return start + max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """And where the tensors begin."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header: dict[str, Any] = json.loads(opened.read(length))
    except (struct.error, ValueError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{file}: not a safetensors file ({error}); fetch the model again") from None
    return header, 8 + int(length)


@contextlib.contextmanager
def loading(spec: ModelSpec) -> Iterator[None]:
    """Around what loads the model: what its folder or its device is to blame for is a ConfigError, since trying again
    would end the same. What the system refuses for now (memory, disk) goes on as it is."""
    check_loadable(spec)
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ConfigError(
            f"model.path: {spec.folder}: transformers cannot load it: {str(error) or type(error).__name__}"
        ) from error


def for_section(spec: ModelSpec, section: TasksetSection | EvaluationSection) -> ModelSpec:
    """The same model with the template that a taskset or an evaluation asks for; the spec itself if with none."""
    if section.chat_template is None and not section.chat_template_kwargs:
        return spec
    return dataclasses.replace(
        spec,
        chat_template=spec.chat_template if section.chat_template is None else section.chat_template,
        chat_template_kwargs={**spec.chat_template_kwargs, **section.chat_template_kwargs},
    )


def initial_of(folder: Path) -> dict[str, Any] | None:
    """Which run's weights a model folder holds; None for one that is not from `init_from`."""
    return read_json(folder / INITIAL) or None


def chat_template_text(spec: ModelSpec) -> str | None:
    """The template in effect: the spec's, or the model folder's own; None if there is none."""
    if spec.chat_template is not None:
        return spec.chat_template
    file = spec.folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(spec.folder / name).get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((one["template"] for one in template if one["name"] == "default"), None)
        if template is not None:
            return str(template)
    return None


def model_digests(spec: ModelSpec, *, weights: bool = True) -> dict[str, str]:
    """`sha256:<hex>` of the model (weights and config), its tokenizer and the template in effect; without `weights`,
    which take long to read, of the latter two."""
    if spec.name == FAKE:
        return dict.fromkeys(("model", "tokenizer", "chat_template"), _digest_bytes(FAKE.encode()))
    files = sorted(path for path in spec.folder.iterdir() if path.is_file())
    model = [path for path in files if path.suffix in WEIGHT_SUFFIXES or path.name == "config.json"]
    return {
        **({"model": _digest_files(model)} if weights else {}),
        "tokenizer": _digest_files(_tokenizer_files(spec.folder)),
        "chat_template": template_digest(spec),
    }


def _tokenizer_files(folder: Path) -> list[Path]:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.name in names]


def template_digest(spec: ModelSpec) -> str:
    """Of the template in effect and what it is given."""
    if spec.name == FAKE:
        return _digest_bytes(FAKE.encode())
    given = json.dumps(spec.chat_template_kwargs, sort_keys=True) if spec.chat_template_kwargs else ""
    return _digest_bytes(((chat_template_text(spec) or "") + given).encode())


def copy_companions(spec: ModelSpec, target: Path) -> None:
    """All of a model folder but its weights: config, tokenizer, template (the one in effect), generation config."""
    for path in sorted(spec.folder.iterdir()):
        weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in (RECIPE, INITIAL):
            shutil.copyfile(path, target / path.name)
    if spec.chat_template is not None or spec.chat_template_kwargs:
        text = _with_defaults(chat_template_text(spec) or "", spec.chat_template_kwargs)
        (target / "chat_template.jinja").write_text(text, encoding="utf-8")
    config = read_json(target / "config.json")
    config.pop("torch_dtype", None)
    config["dtype"] = spec.dtype
    _write_json(target / "config.json", config)


def _with_defaults(template: str, kwargs: Mapping[str, Any]) -> str:
    """The template with what it was given as its defaults: who serves the model would not know of them."""
    lines = (
        f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}{{%- endif %}}"
        for name, value in kwargs.items()
    )
    return "".join(lines) + template


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder; empty if the file isn't there."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, expected an object")
    return values


# ------------------------------------------------------------------------------------------------ found


def _find(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path).resolve()
    advice = "give a Hugging Face model folder, a name on the hub, or [model.make] for a tiny one"
    if (kind := CONVERTED.get(Path(path).name)) is not None:
        advice = f"make it by `rftstream convert {kind} {path}`, or {advice}"
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"model.path: {path}: no such folder; {advice}")
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"model.path: {path}: no such folder, and huggingface_hub is not installed to fetch it; {advice}"
        ) from None
    if (cached := _find_cached(path)) is not None:
        return cached
    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # the hub's client raises errors of several HTTP libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model.path: {path}: no such folder, and it could not be fetched from the hub ({reason}); {advice}"
        ) from None


# ------------------------------------------------------------------------------------------------ made


def _made_model(make: MakeModel, folder: Path, seed: int) -> str:
    """Makes the folder if it isn't there; the model's name, which depends on recipe and seed."""
    if make.width % make.heads or (make.width // make.heads) % 2:
        raise ConfigError(f"model.make.heads: got {make.heads}, expected a width ({make.width}) of heads x even number")
    if len(set(make.characters)) != len(make.characters) or not make.characters:
        raise ConfigError(f"model.make.characters: got {make.characters!r}, expected each character once")
    if not (folder / RECIPE).is_file():
        _make_atomically(folder, make, seed, LAYOUT)
    found = read_json(folder / RECIPE)
    recipe = _recipe(make, seed, found["layout"] if found.get("layout") in SPECIAL_TOKENS else LAYOUT)
    if found != recipe:
        raise ConfigError(
            f"model.make: {folder} holds a model made from another recipe: {_difference(found, recipe)}; "
            "take back the change, or start a new run"
        )
    return "made-" + hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


def make_as_recorded(section: ModelSection, folder: Path, seed: int, digests: Mapping[str, str]) -> None:
    """Make a `[model.make]` one that is not in `folder` yet in the layout of the run that has these digests."""
    if section.make is None or (folder / RECIPE).is_file():
        return
    for layout in SPECIAL_TOKENS:
        with tempfile.TemporaryDirectory(prefix="rftstream-") as scratch:
            _write_tokenizer(Path(scratch), section.make, layout)
            if _digest_files(_tokenizer_files(Path(scratch))) != digests.get("tokenizer"):
                continue
        _make_atomically(folder, section.make, seed, layout)
        return


def _recipe(make: MakeModel, seed: int, layout: int) -> dict[str, Any]:
    return {"make": dataclasses.asdict(make), "seed": seed, "layout": layout}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    then, now = ({**recipe.get("make", {}), **recipe, "make": None} for recipe in (before, after))
    return ", ".join(f"{key} {then.get(key)!r} -> {now.get(key)!r}" for key in now if then.get(key) != now.get(key))


def _make_atomically(folder: Path, make: MakeModel, seed: int, layout: int) -> None:
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_tokenizer(partial, make, layout)
    _write_config(partial, make, layout)
    _write_weights(partial, make, seed, layout)
    _write_json(partial / RECIPE, _recipe(make, seed, layout))
    try:
        partial.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(partial)
        if not (folder / RECIPE).is_file():
            raise ConfigError(f"model.make: {folder} is in the way: not made by rftstream; remove it") from None


def _write_tokenizer(folder: Path, make: MakeModel, layout: int) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    special = SPECIAL_TOKENS[layout]
    pad, unknown = special[0], special[-1] if layout == 1 else None
    vocabulary = {token: index for index, token in enumerate([*special, *make.characters])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, **({"unk_token": unknown} if unknown else {})))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "eos_token": END,
            **({"unk_token": unknown} if unknown else {}),
            "clean_up_tokenization_spaces": False,
            "model_max_length": make.context,
        },
    )
    (folder / "chat_template.jinja").write_text(MADE_TEMPLATE, encoding="utf-8")


def _write_config(folder: Path, make: MakeModel, layout: int) -> None:
    ids = {"pad_token_id": 0, "eos_token_id": SPECIAL_TOKENS[layout].index(END), "bos_token_id": None}
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_act": "silu",
            "vocab_size": len(SPECIAL_TOKENS[layout]) + len(make.characters),
            "hidden_size": make.width,
            "intermediate_size": 2 * make.width,
            "num_hidden_layers": make.layers,
            "num_attention_heads": make.heads,
            "num_key_value_heads": make.heads,
            "max_position_embeddings": make.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            **ids,
        },
    )
    _write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 1.0})


def _write_weights(folder: Path, make: MakeModel, seed: int, layout: int) -> None:
    from safetensors.numpy import save_file

    vocabulary = len(SPECIAL_TOKENS[layout]) + len(make.characters)
    save_file(dict(_made_weights(make, seed, vocabulary)), folder / "model.safetensors", metadata={"format": "pt"})


def _made_weights(make: MakeModel, seed: int, vocabulary: int) -> Iterator[tuple[str, np.ndarray]]:
    """Linear layers N(0, 1/fan_in), those that write to the residual stream smaller by sqrt(2 layers); embeddings
    (tied with the head) small, so that the first policy is nearly uniform."""
    import numpy as np

    generator = np.random.default_rng(seed)
    width, hidden = make.width, 2 * make.width

    def normal(rows: int, columns: int, std: float) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * std).astype(np.float32)

    residual = 1 / math.sqrt(2 * make.layers)
    yield "model.embed_tokens.weight", normal(vocabulary, width, 0.02)
    for layer in range(make.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", np.ones(width, np.float32)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{prefix}self_attn.{name}.weight", normal(width, width, width**-0.5)
        yield f"{prefix}self_attn.o_proj.weight", normal(width, width, residual * width**-0.5)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}mlp.{name}.weight", normal(hidden, width, width**-0.5)
        yield f"{prefix}mlp.down_proj.weight", normal(width, hidden, residual * hidden**-0.5)
    yield "model.norm.weight", np.ones(width, np.float32)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _digest_files(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            inner = hashlib.file_digest(file, "sha256")
        total.update(path.name.encode() + b"\0" + inner.digest())
    return f"sha256:{total.hexdigest()}"


def _digest_bytes(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
