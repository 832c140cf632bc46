"""Model folders: how they are found, fetched or made, their digests, and their chat templates.

This module imports neither torch nor transformers: every role calls `prepare_model`, and most roles do not need
them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.config.parts.registry import near_file
from rftstream.errors import ConfigError
from rftstream.models.classifiers import RENDERING_FILE, as_classifier
from rftstream.models.devices import check_device
from rftstream.models.folders.files import digest_bytes, digest_files, read_json, tokenizer_files, write_json
from rftstream.models.folders.made import RECIPE, make_model
from rftstream.models.folders.rounded import round_folder
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_tokens import processor_digest

if TYPE_CHECKING:
    from rftstream.config.sections import EvaluationSection, ModelSection, TasksetSection

FAKE = "fake"
"""The value of `model.path` for no model at all, used with the fake policy and the fake backend."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""The file with the chat template, and the folder with further templates, as transformers writes them."""
DEFAULT_TEMPLATE, TOOLS_TEMPLATE = "default", "tool_use"
"""Names of templates: for prompts without tools, and for prompts with tools."""
INITIAL = "initial.json"
"""File in a folder with another run's weights. It says which weights these are."""
CONVERTED = {"SmolLM2-135M-Instruct": "smollm2"}
"""Names of folders -> what `rftstream convert` calls the model for that folder."""
HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def prepare_model(
    section: ModelSection, folder: Path, seed: int, *, device: str = "cpu", threads: int = 1, weights: bool = True
) -> ModelSpec:
    """Find, fetch or make the run's model.

    A `[model.make]` model is made once, in `folder`; later calls find it there. So is the rounded copy of a model that
    the trainer quantises, unless `weights` is False, for those who read only tokenizer and sizes."""
    spec = _prepare(section, folder, seed, device=device, threads=threads)
    if section.lora is None and section.quantize is not None:
        raise ConfigError(
            f"model.quantize: got {section.quantize!r} without [model.lora], expected adapters, since weights in four "
            "bits cannot be trained; add [model.lora], or leave quantize out"
        )
    if section.lora is None:
        return spec
    if spec.name == FAKE:
        raise ConfigError("model.lora: the fake model has no layers to adapt; give model.path or [model.make]")
    if section.quantize is not None:
        spec = dataclasses.replace(spec, name=f"{spec.name}+{section.quantize}", quantize=section.quantize)
        if weights:
            round_folder(spec, folder / section.quantize)
            spec = dataclasses.replace(spec, folder=folder / section.quantize)
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
        return dataclasses.replace(spec, name=make_model(section.make, folder, seed))
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
    """Return the run's model if it is on this machine, for reading its completions. Nothing is made or fetched."""
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
    """Return the folder of an earlier download from the hub, or None."""
    try:
        import huggingface_hub

        return Path(huggingface_hub.snapshot_download(name, local_files_only=True, allow_patterns=HUB_PATTERNS))
    except Exception:  # not installed, not in the cache, or not a name: the hub's client raises errors of several kinds
        return None


def _check_weights(folder: Path) -> None:
    """Raise ConfigError if all weights are in files that may run code when opened. A folder without weights passes,
    since it can still be used for its tokenizer."""
    kinds = {path.suffix: path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES}
    if kinds and ".safetensors" not in kinds:
        raise ConfigError(
            f"model.path: {folder}: has its weights in {sorted(kinds.values())[0]}, expected safetensors, which hold "
            "nothing but numbers; save the model anew: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(OTHER)"
        )


def check_loadable(spec: ModelSpec) -> None:
    """Raise ConfigError unless the model can be loaded: its weights are complete, and its device is on this machine.
    This reads only the headers of the weights."""
    check_device(spec.device)
    check_complete(spec)


def check_complete(spec: ModelSpec) -> None:
    """Raise ConfigError for a model folder without weights, or with only some of them."""
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
    """Return the header of a safetensors file: its tensors' names, dtypes and shapes. ConfigError if it is no such
    file."""
    return _read_header(file)[0]


def _end_of_tensors(file: Path) -> int:
    header, start = _read_header(file)
    return start + max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its tensors begin."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header: dict[str, Any] = json.loads(opened.read(length))
    except (struct.error, ValueError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{file}: not a safetensors file ({error}); fetch the model again") from None
    return header, 8 + int(length)


@contextlib.contextmanager
def loading(spec: ModelSpec) -> Iterator[None]:
    """Load a model inside this context. Errors that come from its folder or device become ConfigErrors, since a retry
    would fail in the same way. Temporary failures of the system (memory, disk) pass through."""
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
    """Return the model with the template that a taskset or an evaluation sets; the spec itself if it sets none."""
    if section.chat_template is None and not section.chat_template_kwargs:
        return spec
    return dataclasses.replace(
        spec,
        chat_template=spec.chat_template if section.chat_template is None else section.chat_template,
        chat_template_kwargs={**spec.chat_template_kwargs, **section.chat_template_kwargs},
    )


def initial_of(folder: Path) -> dict[str, Any] | None:
    """Return which run's weights a model folder holds; None if the folder was not made by `init_from`."""
    return read_json(folder / INITIAL) or None


def chat_templates(spec: ModelSpec) -> dict[str, str]:
    """Return the templates in use, by name: the spec's template, or all templates of the model folder. A template named
    `tool_use` is for prompts with tools. Separate template files take precedence over entries in
    tokenizer_config.json."""
    if spec.chat_template is not None:
        return {DEFAULT_TEMPLATE: spec.chat_template}
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json(spec.folder / name).get("chat_template")
        if isinstance(template, list):
            found |= {str(one["name"]): str(one["template"]) for one in template}
        elif isinstance(template, dict):
            found |= {str(one): str(text) for one, text in template.items()}
        elif template is not None:
            found[DEFAULT_TEMPLATE] = str(template)
    for file in sorted((spec.folder / MORE_TEMPLATES).glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if (file := spec.folder / TEMPLATE_FILE).is_file():
        found[DEFAULT_TEMPLATE] = file.read_text(encoding="utf-8")
    return found


def chat_template_text(spec: ModelSpec) -> str | None:
    """Return the template for prompts without tools; None if there is none."""
    return chat_templates(spec).get(DEFAULT_TEMPLATE)


def model_digests(spec: ModelSpec, *, weights: bool = True) -> dict[str, str]:
    """Return `sha256:<hex>` of the model (weights and config), its tokenizer, the template in use, and the image
    processor if the model is shown images. `weights=False` leaves out the first, which takes long to read."""
    if spec.name == FAKE:
        return dict.fromkeys(("model", "tokenizer", "chat_template"), digest_bytes(FAKE.encode()))
    files = sorted(path for path in spec.folder.iterdir() if path.is_file())
    model = [path for path in files if path.suffix in WEIGHT_SUFFIXES or path.name == "config.json"]
    processor = processor_digest(spec.folder)
    return {
        **({"model": digest_files(model)} if weights else {}),
        "tokenizer": digest_files(tokenizer_files(spec.folder)),
        "chat_template": template_digest(spec),
        **({"processor": processor} if processor is not None else {}),
    }


def template_digest(spec: ModelSpec) -> str:
    """Return the digest of the template in use and of the values that it gets."""
    if spec.name == FAKE:
        return digest_bytes(FAKE.encode())
    given = json.dumps(spec.chat_template_kwargs, sort_keys=True) if spec.chat_template_kwargs else ""
    return digest_bytes(((chat_template_text(spec) or "") + given).encode())


def copy_companions(spec: ModelSpec, target: Path) -> None:
    """Copy a model folder without its weights: config, tokenizer, the template in use, and generation config."""
    if spec.name == FAKE:
        (target / "config.json").write_text(json.dumps({"model_type": FAKE, "dtype": spec.dtype}) + "\n")
        return
    for path in sorted(spec.folder.iterdir()):
        weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in (RECIPE, INITIAL):
            shutil.copyfile(path, target / path.name)
    if spec.chat_template is None and (spec.folder / MORE_TEMPLATES).is_dir():
        shutil.copytree(spec.folder / MORE_TEMPLATES, target / MORE_TEMPLATES, dirs_exist_ok=True)
    for name, template in chat_templates(spec).items():
        if spec.chat_template is not None or spec.chat_template_kwargs:
            file = target / TEMPLATE_FILE if name == DEFAULT_TEMPLATE else target / MORE_TEMPLATES / f"{name}.jinja"
            file.parent.mkdir(exist_ok=True)
            file.write_text(_with_defaults(template, spec.chat_template_kwargs), encoding="utf-8")
    config = read_json(target / "config.json")
    config.pop("torch_dtype", None)
    config["dtype"] = spec.dtype
    if spec.as_classifier:
        config = as_classifier(config, where=f"model.path: {spec.folder}")
        write_json(target / RENDERING_FILE, {"rendering": "turn"})
    write_json(target / "config.json", config)


def _with_defaults(template: str, kwargs: Mapping[str, Any]) -> str:
    """Return the template with the run's values as its defaults, since a server of the model would not know these
    values."""
    lines = (
        f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}{{%- endif %}}"
        for name, value in kwargs.items()
    )
    return "".join(lines) + template


def _find(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path).resolve()
    advice = "give a Hugging Face model folder, a name on the hub, or [model.make] for a tiny one"
    if (kind := CONVERTED.get(Path(path).name)) is not None:
        advice = f"make it by `rftstream convert {kind} {path}`, or {advice}"
    elif near := near_file(Path(path)):
        advice = f"{near.removeprefix('; ')} Or {advice}"
    elif (run := Path(path).parent / "runs" / Path(path).name).is_dir():
        advice = f'{run} is a run, whose weights init_from = "{run}" takes; else {advice}'
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
