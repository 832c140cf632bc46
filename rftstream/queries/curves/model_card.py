"""The model card of a trained model: README.md beside its weights, in the form of the Hugging Face hub.

It names the base model, the training data with environments and rewards, the versions at which a reward changed, the
algorithm, and the results of evaluations. It is shared together with the folder, so it contains no local path and no
key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftstream.algorithms.reward_changes import RewardChange, changes_to_text
from rftstream.config import secrets
from rftstream.config.loader import location_kind
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec
from rftstream.config.parts.reward_uses import reward_formula, reward_uses
from rftstream.config.sections import EvaluationSection, RunConfig, TasksetSection, name_of_part
from rftstream.contracts.control import RunManifest
from rftstream.contracts.versions import EvalResult
from rftstream.models.folders.files import read_json
from rftstream.models.spec import ModelSpec
from rftstream.queries.curves.history import read_glance
from rftstream.queries.formatting import number
from rftstream.service.control_view import read_manifest
from rftstream.service.role import Log
from rftstream.version import __version__

FILE = "README.md"
KEPT = ("license", "license_name", "license_link", "language")
"""Keys of the base model's card that also hold for models trained from it."""
SHOWN = ("mean", "pass@", "best@", "worst@")
"""Prefixes of the metrics that are shown in the card."""

LOADED = {
    "text-generation": "AutoModelForCausalLM",
    "image-text-to-text": "AutoModelForImageTextToText",
    "text-classification": "AutoModelForSequenceClassification",
}
"""Task of a model, named as on the hub -> the class that loads it."""


def write_model_card(log: Log, config: RunConfig, spec: ModelSpec, folder: Path, version: int) -> None:
    """Write the card of a version into its model folder, whole or not at all."""
    text = card_text(log, config, spec, version)
    partial = folder / f".{FILE}.{os.getpid()}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(folder / FILE)


ASKED = """chat = {chat}
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens={max_tokens}{stop})[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""
"""Lines of the card that generate a text."""


def card_text(log: Log, config: RunConfig, spec: ModelSpec, version: int) -> str:
    """Return the text of the card of a version, from the log's current state."""
    manifest = read_manifest(log.transport)
    glance = read_glance(log)
    results = _last_of_each(glance.evaluations, version)
    changes = [change for change in glance.reward_changes if change.version <= version]
    run = manifest.run if manifest is not None else config.run.name
    task = _task(spec)
    paragraphs = [
        f"# {run}",
        f"Version {version:,} of the run `{run}`, trained with rftstream {__version__}.",
        _table(("", ""), list(_facts(config, spec, manifest))),
        *_trained_on(config, manifest, changes),
        *_evaluated(config, results),
        "## How to use it",
        f"```python\nfrom transformers import {LOADED[task]}, AutoTokenizer\n\n"
        f'model = {LOADED[task]}.from_pretrained("PATH-OR-NAME")\n'
        'tokenizer = AutoTokenizer.from_pretrained("PATH-OR-NAME")\n'
        f"{_asked(config) if task == 'text-generation' else ''}```",
    ]
    header = _header(config, spec, run, task, results)
    return secrets.hidden(f"---\n{header}---\n\n" + "\n\n".join(paragraphs) + "\n")


def _asked(config: RunConfig) -> str:
    """Return how a text is generated, from prompts such as the run's."""
    system = config.shared_system
    chat = [] if system is None else [{"role": "system", "content": system}]
    stop = list(config.sampling.stop)
    return ASKED.format(
        chat=json.dumps([*chat, {"role": "user", "content": "PROMPT"}], ensure_ascii=False),
        max_tokens=config.sampling.max_tokens,
        stop=f", stop_strings={json.dumps(stop, ensure_ascii=False)}, tokenizer=tokenizer" if stop else "",
    )


# --------------------------------------------------------------------------------------------------------- header


def _header(config: RunConfig, spec: ModelSpec, run: str, task: str, results: Sequence[EvalResult]) -> str:
    """Return the metadata. Each value is JSON, which YAML reads."""
    algorithms = dict.fromkeys(_algorithms(config))
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": task,
        **_of_base_card(spec.folder / FILE),
        **({"base_model": config.model.path} if _is_on_hub(config.model.path) else {}),
        "tags": ["rftstream", "reinforcement-learning", *algorithms],
    }
    if results:
        values["model-index"] = [{"name": run, "results": [_index_entry(config, task, result) for result in results]}]
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def _index_entry(config: RunConfig, task: str, result: EvalResult) -> dict[str, Any]:
    section = config.evaluations.get(result.evaluation)
    return {
        "task": {"type": task},
        "dataset": {"name": result.evaluation, "type": _source(section) if section else result.evaluation},
        "metrics": [{"type": name, "value": round(value, 6), "name": name} for name, value in _shown(result).items()],
    }


def _of_base_card(card: Path) -> dict[str, Any]:
    """Return the metadata of the base model's card that also holds for this model."""
    import yaml  # type: ignore[import-untyped]  # it has no types

    try:
        text = card.read_text(encoding="utf-8")
        found = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        values = yaml.safe_load(found[1]) if found else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return {key: values[key] for key in KEPT if key in values} if isinstance(values, dict) else {}


def _is_on_hub(path: str | None) -> bool:
    return path is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not Path(path).is_dir()


def _task(spec: ModelSpec) -> str:
    if spec.as_classifier:
        return "text-classification"
    return "image-text-to-text" if "vision_config" in read_json(spec.folder / "config.json") else "text-generation"


# ----------------------------------------------------------------------------------------------------------- text


def _facts(config: RunConfig, spec: ModelSpec, manifest: RunManifest | None) -> Iterator[tuple[str, str]]:
    yield "trained from", _base(config)
    yield "algorithm", ", ".join(f"`{name}`" for name in dict.fromkeys(_algorithms(config)))
    if config.model.lora is not None:
        yield "adapters", f"rank {config.model.lora.rank}, merged into the model"
    yield "weights", spec.dtype
    yield "seed", str(config.run.seed)
    if manifest is not None:
        for name in ("model", "tokenizer", "chat_template", "config"):
            if digest := manifest.digests.get(name):
                yield f"digest of the {name.replace('_', ' ')}{' it began with' * (name == 'model')}", f"`{digest}`"


def _base(config: RunConfig) -> str:
    model = config.model
    if model.make is not None:
        return f"random weights: {model.make.layers} layers of width {model.make.width}, made on the spot"
    if model.init_from is not None:
        return f"`{Path(model.init_from).name}`, a version of another run"
    assert model.path is not None, "one of the three is given"
    return f"`{model.path if _is_on_hub(model.path) else Path(model.path).name}`"


def _algorithms(config: RunConfig) -> list[str]:
    """Return the algorithms of the run in order. The trainer's is included only if a stage or a taskset uses it."""
    named = config.algorithms_named()
    if config.stages:
        usual = [
            name_of_part(stage.algorithm or config.trainer.algorithm, f"stages.{number}")
            for number, stage in enumerate(config.stages)
        ]
    else:
        usual = [config.trainer.algorithm]
    return usual + [name_of_part(one, where) for where, one in named.items() if where.startswith("tasksets.")]


def _trained_on(config: RunConfig, manifest: RunManifest | None, changes: Sequence[RewardChange]) -> Iterator[str]:
    digests: Mapping[str, str] = manifest.digests if manifest is not None else {}
    played = {name: _environment(section, name) for name, section in config.tasksets.items()}
    has_turns = not all(
        registry.find_spec(EnvironmentSpec, environment).has_one_turn for environment in played.values()
    )
    rows = [
        (
            f"`{name}`",
            f"`{_source(section)}`",
            *([f"`{played[name]}`"] if has_turns else []),
            _reward(section, name),
            f"`{digests.get(f'taskset.{name}', '-')}`",
        )
        for name, section in config.tasksets.items()
    ]
    yield "## What it was trained on"
    if rows:
        yield _table(("taskset", "source", *(["environment"] if has_turns else []), "reward", "digest"), rows)
    if changes:
        lines = "\n".join(f"- {line}" for line in changes_to_text(changes))
        yield f"The reward changed, so some versions were trained on another one than the newest:\n\n{lines}"
    if config.experts is not None and config.experts.sources:
        places = ", ".join(f"`{_without_folders(source)}`" for source in config.experts.sources)
        yield f"Demonstrations: {places}."


def _environment(section: TasksetSection, name: str) -> str:
    return name_of_part(section.environment, f"tasksets.{name}.environment")


def _reward(section: TasksetSection, name: str) -> str:
    return f"`{reward_formula(reward_uses(section.reward, f'tasksets.{name}.reward'))}`"


def _source(section: TasksetSection | EvaluationSection) -> str:
    return _without_folders(section.source)


def _without_folders(source: str) -> str:
    """Return a source without local folders."""
    scheme, colon, place = source.partition(":")
    is_path = colon and (location_kind(scheme) == "path" or Path(place).is_absolute())
    return f"{scheme}:{Path(place).name}" if is_path else source


def _evaluated(config: RunConfig, results: Sequence[EvalResult]) -> Iterator[str]:
    if not results:
        return
    yield "## What was measured"
    names = list(dict.fromkeys(name for result in results for name in _shown(result)))
    unscored = ["unscored"] if any(result.num_unscored for result in results) else []
    rows = []
    for result in results:
        section = config.evaluations.get(result.evaluation)
        values = _shown(result)
        rows.append(
            (
                f"`{result.evaluation}`",
                f"`{_source(section)}`" if section else "-",
                f"{result.name.version:,}",
                f"{result.num_tasks:,} x {result.num_samples:,}",
                *(f"{result.num_unscored:,}" for _ in unscored),
                *(number(values.get(name)) for name in names),
            )
        )
    yield _table(("evaluation", "source", "version", "tasks x samples", *unscored, *names), rows)


def _shown(result: EvalResult) -> dict[str, float]:
    names = sorted(result.metrics, key=lambda name: (len(name), name))
    return {name: result.metrics[name] for first in SHOWN for name in names if name.startswith(first)}


def _last_of_each(results: Sequence[EvalResult], version: int) -> list[EvalResult]:
    """Return the newest result of each evaluation up to the version."""
    newest = {result.evaluation: result for result in results if result.name.version <= version}
    return [newest[name] for name in sorted(newest)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
