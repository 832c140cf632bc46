"""The run file: sections, defaults, ranges. The only reader of the environment.

Precedence: file (of several files, later ones override earlier ones) < environment `RFTSTREAM__TRAINER__LR` < `--set
trainer.lr=`. Secrets (keys such as `password`) are moved into the environment (secrets.py). A part's own settings are
in `[<kind>s.<name>]` (`[algorithms.grpo]`, `[policies.hf]`, `[rewards.math]`), are declared by its `Config`, and are
checked by `check_parts`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rftstream.config import secrets
from rftstream.config.data_pipelines.synthesis import check_synthesiser, growing_tasksets, grows
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec, Location, TasksetSpec
from rftstream.config.parts.sources import complete_sources
from rftstream.config.plain import plain_values
from rftstream.config.sampling_ranges import check_sampling
from rftstream.config.sections import EvaluationSection, RunConfig, TasksetSection
from rftstream.config.sizes import check_sizes
from rftstream.config.toml_files import read_toml
from rftstream.contracts.tasks import Sampling
from rftstream.errors import ConfigError

ORIGINS = {"path", "make", "init_from"}
"""Settings of [model] of which a run has exactly one."""

UNSET: Final = object()
"""The value that takes a setting away, so that its default holds."""
UNSET_WORD = "unset"
"""UNSET as --set and the environment take it, and as changed settings are shown."""


def load(
    files: str | Path | Sequence[str | Path], *, sets: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> RunConfig:
    """Return the resolved config of one or more run files. `sets` change settings, as --set does: ["trainer.lr=1e-5"].
    ConfigError says what is wrong and where."""
    files = [files] if isinstance(files, str | Path) else files
    merged: dict[str, Any] = {}
    sources: list[tuple[str, Mapping[str, Any]]] = []
    for file in files:
        sources.append((f"{file}:", read_toml(Path(file))))
        _replace_origin(merged, sources[-1:])
        _merge(merged, copy.deepcopy(sources[-1][1]))
    variables: dict[str, str] = {}
    environment = os.environ if env is None else env
    given = {name: name.lower().split("__")[1:] for name in sorted(environment) if name.startswith("RFTSTREAM__")}
    _replace_origin(
        merged, [(name, _nested(path, None)) for name, path in given.items() if environment[name] != UNSET_WORD]
    )
    for name, path in given.items():
        value = _parse_value(environment[name])
        _set(merged, path, value, where=name)
        sources.append((f"{name}:", _nested(path, value)))
        variables[".".join(path)] = name
    given_by_set = [one for one in sets if one.partition("=")[2] != UNSET_WORD]
    _replace_origin(merged, [(one, _nested(split_key(one.partition("=")[0]) or [""], None)) for one in given_by_set])
    for assignment in sets:
        key, equals, value = assignment.partition("=")
        path = split_key(key)
        if not equals or not path:
            raise ConfigError(f"--set {assignment}: expected section.key=value")
        _set(merged, path, _parse_value(value), where=f"--set {key}")
        variables.pop(".".join(path), None)
        sources.append(("--set", _nested(path, _parse_value(value))))
    merged.setdefault("base", str(Path(files[0]).resolve().parent) if files else os.getcwd())
    secrets.hide(merged, names=variables)
    try:
        for _, values in sources:
            registry.check_keys(values, RunConfig, "")  # also of what was taken away, and is in `merged` no more
        return from_dict(merged)
    except ConfigError as error:
        raise ConfigError(f"{_source_of(str(error), sources, files)} {error}") from None


def _replace_origin(target: dict[str, Any], later: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Remove the origin of the model that was given so far, if a later source gives another one."""
    sections = [values.get("model") for _, values in later]
    named = {key for section in sections if isinstance(section, Mapping) for key in section if key in ORIGINS}
    if named and isinstance(model := target.get("model"), dict):
        for key in ORIGINS - named:
            model.pop(key, None)


def _source_of(error: str, sources: Sequence[tuple[str, Mapping[str, Any]]], files: Sequence[str | Path]) -> str:
    """Return the source of the setting that the error names: for a value the last source that gave it, for a section
    the first. If no source gave it, return the files."""
    best, found = 0, ", ".join(map(str, files)) + ":"
    path = split_key(error.partition(": ")[0])
    for name, values in sources:
        depth, value = 0, values
        while depth < len(path) and isinstance(value, Mapping) and path[depth] in value:
            depth, value = depth + 1, value[path[depth]]
        if depth > best or (depth == best > 0 and not isinstance(value, Mapping)):
            best, found = depth, name
    return found


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    return {path[0]: _nested(path[1:], value) if len(path) > 1 else value}


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Return a config from plain values, with all checks done."""
    plain: dict[str, Any] = copy.deepcopy(dict(values))
    secrets.hide(plain)
    for section in ("run", "model", "experts" if "experts" in plain else "tasksets"):
        if section not in plain or (section == "model" and not plain[section]):
            raise ConfigError(
                f"[{section}]: {'nothing in it' if section in plain else 'missing'}; every run file needs [run], "
                "[model] and one [tasksets.NAME], or [experts] alone"
            )
    for tables, section_type in (("tasksets", TasksetSection), ("evaluations", EvaluationSection)):
        sections = complete_sources(plain.get(tables, {}), Path(str(plain.get("base", "."))))
        for name in sections if isinstance(sections, dict) else ():  # one by one, so that errors name them
            registry.convert(sections[name], section_type, where=f"{tables}.{name}")
    config: RunConfig = registry.convert(plain, RunConfig, where="")
    _check_kind_of_log(plain.get("transport", {}))
    _check_whole(config)
    return _absolute(config)


def to_dict(config: RunConfig, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config as plain values, without None and empty stages. This form is written beside the run and
    recorded in its manifest. With `like`, the values of a run file, default values are left out unless `like` has the
    setting."""
    values: dict[str, Any] = plain_values(config, like)
    if not config.stages:
        values.pop("stages", None)
    return values


def from_toml(text: str) -> RunConfig:
    """Return the config that `to_toml` wrote, as read from a log or from another run. Nothing is taken from the
    environment."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recorded config: not TOML: {error}") from None
    return from_dict(values)


def to_toml(config: RunConfig, like: str | None = None) -> str:
    """Return the config as the text of a run file, which `from_toml` can read. `like` is the text of a run file, used
    as in `to_dict`."""
    import tomli_w

    return tomli_w.dumps(to_dict(config, None if like is None else tomllib.loads(like)))


def replace(config: RunConfig, **settings: Any) -> RunConfig:
    """Return a copy with `section__key=value` changed, checked anew: replace(config, trainer__lr=1e-5)."""
    values = to_dict(config)
    for key, value in settings.items():
        _set(values, key.split("__"), value, where=key)
    return from_dict(values)


def sampling_for(config: RunConfig, differences: Mapping[str, Any], *, where: str) -> Sampling:
    """Return [sampling] with a taskset's or evaluation's own differences."""
    base = to_dict_flat(config.sampling)
    result: Sampling = registry.convert({**base, **differences}, Sampling, where=where)
    return result


def to_dict_flat(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a dict, one level deep."""
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}


def _check_kind_of_log(given: Mapping[str, Any]) -> None:
    """Refuse settings of brokers if no kind of log is given. The user most likely forgot the kind, and the log would be
    in the run folder. A run file that names the embedded log has switched away from Kafka on purpose."""
    for key in ("servers", "options"):
        if given.get(key) and "kind" not in given:
            raise ConfigError(
                f"transport.{key}: given without transport.kind, and the default, 'embedded', has no use for it; add "
                'kind = "kafka", or kind = "embedded" if the log is meant to be in the run folder'
            )


def _check_whole(config: RunConfig) -> None:
    if config.without_tasks and (config.experts is None or config.experts.source is None):
        raise ConfigError(
            'tasksets: none given; add one, e.g. [tasksets.train] source = "jsonl:data/train.jsonl", or name '
            "demonstrations by experts.source, for a run that learns from them alone"
        )
    origins = (config.model.path, config.model.make, config.model.init_from)
    if sum(origin is not None for origin in origins) != 1:
        raise ConfigError("model: expected exactly one of path, init_from and [model.make]")
    if "@" in config.weights.store.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            "weights.store: got a URL with keys in it, which would be written beside the run; expected none; "
            "give them in the environment, e.g. AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if 0 < (tokens := config.explorer.repetition_tokens) < 2 * config.explorer.repetition_period:
        raise ConfigError(
            f"explorer.repetition_tokens: got {tokens}, expected at least twice explorer.repetition_period = "
            f"{2 * config.explorer.repetition_period}, or 0 for never"
        )
    _check_versions(config)
    if config.experts is not None and "experts" in config.tasksets:
        raise ConfigError("tasksets.experts: the name of demonstrations beside [experts]; call the taskset otherwise")
    if config.tasksets and not any(section.weight for section in config.tasksets.values()):
        raise ConfigError("tasksets: every weight is 0; give at least one taskset a weight")
    _check_stages(config)
    if config.feeder.group_size == 1 and config.buffer.zero_variance == "replace":
        raise ConfigError("buffer.zero_variance: 'replace' would filter every group of size 1; use 'keep'")
    if not (config.steps or config.run.hours or config.run.stop_reward is not None) and not all(
        section.passes and not (section.weight and grows(section.source)) for section in config.tasksets.values()
    ):
        more = ", or passes for every taskset" if not growing_tasksets(config) else "; a taskset that grows has no end"
        raise ConfigError(f"run: nothing ends it; give steps, hours or stop_reward{more}")
    if config.feedback is not None and (wrong := config.feedback.problem(config.feeder.group_size)) is not None:
        raise ConfigError(wrong)
    check_sampling(config.sampling, where="sampling")
    for name, section in config.tasksets.items():
        _check_differences(config, section.sampling, where=f"tasksets.{name}.sampling")
    for name, evaluation in config.evaluations.items():
        _check_differences(config, evaluation.sampling, where=f"evaluations.{name}.sampling")
        if max(evaluation.k, default=1) > evaluation.n:
            raise ConfigError(f"evaluations.{name}.k: got {max(evaluation.k)}, expected at most n = {evaluation.n}")
    if config.synthesiser is not None:
        _check_differences(config, config.synthesiser.sampling, where="synthesiser.sampling")
    check_synthesiser(config)
    check_sizes(config)


def _check_versions(config: RunConfig) -> None:
    """Check the settings of published, kept and first versions."""
    trainer = config.trainer
    if trainer.publish_every > config.feeder.max_staleness + 1:
        raise ConfigError(
            f"trainer.publish_every: got {trainer.publish_every}, expected at most feeder.max_staleness + 1 = "
            f"{config.feeder.max_staleness + 1}; explorers would wait for a version that is never announced"
        )
    every, best = trainer.keep_every, trainer.keep_best
    if every is not None and every % trainer.checkpoint_every:
        raise ConfigError(
            f"trainer.keep_every: got {every}, expected a multiple of trainer.checkpoint_every = "
            f"{trainer.checkpoint_every}; there is no checkpoint of the versions between"
        )
    if best is not None and best not in config.evaluations:
        raise ConfigError(
            f"trainer.keep_best: got {best!r}, expected an evaluation; "
            + (registry.suggest(best, config.evaluations) if config.evaluations else "add [evaluations.NAME]")
        )
    if config.retention is not None and config.retention.checkpoints > trainer.keep_checkpoints:
        raise ConfigError(
            f"retention.checkpoints: got {config.retention.checkpoints}, expected at most trainer.keep_checkpoints = "
            f"{trainer.keep_checkpoints}; there are no more to begin with"
        )


def _check_stages(config: RunConfig) -> None:
    """Check the stages, without looking up any part."""
    if not config.stages:
        return
    if config.run.steps is not None:
        raise ConfigError(
            f"run.steps: got {config.run.steps:,}, expected none beside [[stages]], which say how long the run is "
            f"({config.steps:,} steps); leave it out"
        )
    if config.experts is not None and config.experts.passes is not None:
        raise ConfigError(
            f"experts.passes: got {config.experts.passes}, expected none beside [[stages]], which take each "
            "demonstration as often as their steps need; leave it out"
        )


def _check_differences(config: RunConfig, differences: Mapping[str, Any], *, where: str) -> None:
    """Check the differences. [sampling] by itself is valid, so an error of the combination is in the differences."""
    check_sampling(sampling_for(config, differences, where=where), where=where, given=differences)


PLAIN_FILE = "file"
"""Scheme of demonstrations in a file. The file's ending says how to read it."""


def _absolute(config: RunConfig) -> RunConfig:
    """Make relative file locations absolute, from the folder of the run file. Replace paths of templates by their text,
    so that all workers of the run have the same template."""
    base = Path(config.base)

    def source(text: str) -> str:
        scheme, colon, place = text.partition(":")
        kind = location_kind(scheme)
        if colon and kind == "path":
            return f"{scheme}:{base / Path(place).expanduser()}"
        is_folder = kind == "folder or name" and bool(place) and (base / place).is_dir()
        return f"{scheme}:{(base / place).resolve()}" if is_folder else text

    model = config.model
    if model.path is not None:
        beside = (base / Path(model.path).expanduser()).resolve()
        if beside.is_dir() or (model.path.startswith((".", "~")) and not Path(model.path).is_dir()):
            model = dataclasses.replace(model, path=str(beside))  # also a missing folder: errors then name this place
    model = dataclasses.replace(model, chat_template=_template(model.chat_template, base, "model"))

    def environment(named: str | dict[str, Any]) -> str | dict[str, Any]:
        return named if isinstance(named, str) else _absolute_settings(str(named.get("name")), named, base)

    def sections(kind: str) -> dict[str, Any]:
        return {
            name: dataclasses.replace(
                section,
                source=source(section.source),
                environment=environment(section.environment),
                chat_template=_template(section.chat_template, base, f"{kind}.{name}"),
            )
            for name, section in getattr(config, kind).items()
        }

    experts = config.experts
    if experts is not None:
        sources = [source(demonstrations_source(one, base)) for one in experts.sources]
        experts = dataclasses.replace(experts, source=sources[0] if len(sources) == 1 else tuple(sources) or None)
    return dataclasses.replace(
        config,
        model=model,
        tasksets=sections("tasksets"),
        evaluations=sections("evaluations"),
        experts=experts,
        environments={name: _absolute_settings(name, values, base) for name, values in config.environments.items()},
    )


def _absolute_settings(environment: str, values: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return the settings of an environment. The paths that the environment declares are made absolute."""
    spec = registry.built_in(EnvironmentSpec).get(environment)
    for setting in () if spec is None else spec.path_settings:
        values = _absolute_at(values, setting.split("."), base)
    return values


def _absolute_at(values: Any, keys: Sequence[str], base: Path) -> Any:
    if not keys:
        return str(base / Path(values).expanduser()) if isinstance(values, str) else values
    if not isinstance(values, dict):
        return values
    wanted = values.keys() if keys[0] == "*" else values.keys() & {keys[0]}
    return {key: _absolute_at(value, keys[1:], base) if key in wanted else value for key, value in values.items()}


def location_kind(scheme: str) -> Location:
    """Return the kind of location behind the colon of a source with this scheme."""
    spec = registry.built_in(TasksetSpec).get(scheme)
    return "path" if scheme == PLAIN_FILE else "name" if spec is None else spec.location


def demonstrations_source(text: str, base: Path) -> str:
    """Return KIND:LOCATION for a plain path. The kind follows from the file or folder there, else from the path's
    ending. `run:RUN` stays as it is."""
    scheme = text.partition(":")[0]
    spec = registry.built_in(TasksetSpec).get(scheme)
    if scheme in (PLAIN_FILE, "run") or (spec is not None and spec.has_rows):
        return text
    if (base / Path(text).expanduser()).is_dir():
        return f"hf:{text}"
    return f"{'parquet' if text.endswith('.parquet') else PLAIN_FILE}:{text}"


def _template(value: str | None, base: Path, section: str) -> str | None:
    """Return a template's text: `value` itself if it looks like a template, else the text of the file that it names."""
    if value is None or "{" in value or "\n" in value:
        return value
    where, path = f"{section}.chat_template", base / Path(value).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{where}: {path}: {error.strerror or error}; name a Jinja file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {path}: not UTF-8: {error}; save it as UTF-8") from None
    if "{" not in text:
        raise ConfigError(f"{where}: {path}: nothing of a template in it, expected Jinja with {{{{ messages }}}}")
    return text


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _set(target: dict[str, Any], path: Sequence[str], value: Any, *, where: str) -> None:
    part, *rest = path
    if value is UNSET and part not in target:
        return  # a section made for it would be a setting: [retention] alone deletes
    if not rest:
        target[part] = value
        if value is UNSET:
            del target[part]
        return
    inner = target.setdefault(part, {})
    if isinstance(inner, list) and len(rest) > 1:  # stages.0.steps
        number, *rest = rest
        if not (number.isdigit() and int(number) < len(inner)):
            raise ConfigError(f"{where}: got {part}.{number}, expected {part}.0 to {part}.{len(inner) - 1}")
        inner = inner[int(number)]
    if not isinstance(inner, dict):
        raise ConfigError(f"{where}: {part} is a value, not a section")
    _set(inner, rest, value, where=where)


def split_key(key: str) -> list[str]:
    """Return the parts of a key such as `tasksets."my set".weight`; quotes are honoured."""
    return [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|([^.]+)', key)]


def _parse_value(text: str) -> Any:
    """Return the value as TOML reads it. A value that is not TOML is taken as a string, so that quotes can be left
    out, except those of UNSET_WORD."""
    if text == UNSET_WORD:
        return UNSET
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
