"""The manifest, which defines a run: digests of its data, written first and compared by every process that continues
the run."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from rftstream.config.loader import from_toml, to_dict, to_toml
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import RunManifest
from rftstream.contracts.role_names import RoleName
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.open import open_taskset
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import for_section, model_digests, template_digest
from rftstream.models.spec import ModelSpec
from rftstream.roles import role_spec
from rftstream.runs.making.scoring_settings import is_of_a_reward, is_of_an_environment
from rftstream.version import __version__

_WARNED = ("trainer.lr",)
"""Settings that may change on resume, but change what is learned."""
OTHER_DATA = "same settings, other data"
"""End of a difference that no setting explains."""

_OF_A_TASKSET = re.compile(r"tasksets\..+\.pipeline\.\d+\.")


def make_manifest(
    config: RunConfig, run_id: str, digests: Mapping[str, str], now: float, changed: Sequence[str] = ()
) -> RunManifest:
    """Return the run's first record, which defines the run. `changed` lists settings that differ from the run that it
    was made from."""
    return RunManifest(
        run=run_id,
        created_at=now,
        config=to_toml(config),
        digests=dict(digests),
        partitions=config.transport.partitions,
        shares=config.trainer.shares,
        seed=config.run.seed,
        rftstream_version=__version__,
        changed=tuple(changed),
    )


def check_same_run(
    manifest: RunManifest, config: RunConfig, digests: Mapping[str, str], *, other_operators: bool = False
) -> None:
    """Check that a run continues with the same model, template, tasksets, layout and operators. ConfigError, with the
    differences, if not. `other_operators`: operators and stages may differ, since another run decides again."""
    then, now = _then_and_now(manifest, config)
    differences = _of_the_layout(manifest, config, then)
    if other_operators:
        differences = [line for line in differences if not line.startswith("stages ")]
    operators = _of_operators(then, now)
    for name in sorted(set(digests) | set(manifest.digests) - {"config"}):
        if digests.get(name) != manifest.digests.get(name):
            differences.append(_explained(name, then, now))
    if differences:
        raise ConfigError(
            f"{manifest.run}: a run keeps its model, template, tasksets, partitions, shares and seed, but found "
            f"{'; '.join(differences)}; take back the change, {_otherwise(differences)}"
        )
    if operators and not other_operators:
        raise ConfigError(
            f"{manifest.run}: a run keeps its operators, since each of their decisions can be computed again from its "
            f"log, but found {'; '.join(operators)}; take back the change, or start a new run, from this one's weights "
            "with model.init_from"
        )


def check_worker(manifest: RunManifest, config: RunConfig, digests: Mapping[str, str]) -> None:
    """Check that a worker has the same run file as its run. ConfigError, with the differences, if not. `digests` are
    those of the data that its role uses."""
    then, now = _then_and_now(manifest, config)
    differences = _of_the_layout(manifest, config, then)
    tasksets = sorted(name.removeprefix("taskset.") for name in manifest.digests if name.startswith("taskset."))
    if sorted(config.tasksets) != tasksets:
        differences.append(f"tasksets {tasksets} -> {sorted(config.tasksets)}")
    for name, digest in sorted(digests.items()):
        if manifest.digests.get(name, digest) != digest:
            differences.append(_explained(name, then, now))
    if differences:
        raise ConfigError(
            f"{manifest.run}: this worker was given other settings than the run was started with: "
            f"{'; '.join(differences)}; start it with the run's own file"
        )


def digests_for(role: str, config: RunConfig, model: Callable[[], ModelSpec]) -> dict[str, str]:
    """Return the digests of the data that a role uses. Only the trainer uses the weights' digest; other roles follow
    announced weights."""
    wanted = role_spec(role).digests
    if not wanted:
        return {}
    spec = model()
    digests = {**model_digests(spec, weights="weights" in wanted)}
    for name, section in config.tasksets.items():
        if "templates" in wanted and (own := for_section(spec, section)) is not spec:
            digests[f"chat_template.{name}"] = template_digest(own)
    return digests


def _then_and_now(manifest: RunManifest, config: RunConfig) -> tuple[Mapping[str, Any], dict[str, Any]]:
    return _settings_in(manifest.config), _flat(to_dict(config))


@lru_cache(maxsize=4)
def _settings_in(text: str) -> Mapping[str, Any]:
    """Return the settings of a manifest. Settings that were added since are at their defaults, so that they do not
    count as different. A manifest that this release cannot read as a config (none, or one of a later release) is
    returned unchanged."""
    with contextlib.suppress(ConfigError):
        return MappingProxyType(_flat(to_dict(from_toml(text))))
    return MappingProxyType(_flat(tomllib.loads(text)))


def _of_the_layout(manifest: RunManifest, config: RunConfig, then: Mapping[str, Any]) -> list[str]:
    fixed: dict[str, tuple[Any, Any]] = {
        "transport.partitions": (manifest.partitions, config.transport.partitions),
        "trainer.shares": (manifest.shares, config.trainer.shares),
        "run.seed": (manifest.seed, config.run.seed),
        "model.dtype": (then.get("model.dtype", config.model.dtype), config.model.dtype),
        "stages": (_in_stages(then) if then else bool(config.stages), bool(config.stages)),
    }
    if config.experts is not None:  # the second half of a pass cannot have another order
        for name in ("held_out", "shuffle"):
            now = getattr(config.experts, name)
            fixed[f"experts.{name}"] = then.get(f"experts.{name}", now), now
    now = _flat(to_dict(config))
    for key in sorted({key for key in (*then, *now) if key.startswith("model.lora.")}):
        fixed[key] = (then.get(key), now.get(key))
    return [f"{key} {before!r} -> {after!r}" for key, (before, after) in fixed.items() if before != after]


def declares_operators(manifest: RunManifest) -> bool:
    """Return whether the run file that a manifest holds has operators."""
    return any(key.startswith("pipeline.") or _OF_A_TASKSET.match(key) for key in _settings_in(manifest.config))


def _of_operators(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences in operators and, if there are operators, in everything else that their decisions depend
    on."""
    keys = [key for key in sorted({*then, *now}) if key.startswith("pipeline.") or _OF_A_TASKSET.match(key)]
    if then and keys:
        keys += ["buffer.zero_variance", "buffer.min_siblings"]
    return [_difference(key, then, now) for key in keys if then and then.get(key) != now.get(key)]


def _in_stages(settings: Mapping[str, Any]) -> bool:
    """Return whether the run has stages. With stages, batches are made in another way, and passes have other
    positions."""
    return any(key.startswith("stages.") for key in settings)


def changed_settings(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the settings that differ, as lines for people: `key before -> after`."""
    return _differences(_flat(to_dict(before)), _flat(to_dict(after)), "")


@lru_cache(maxsize=64)
def changed_in_text(before: str, after: str) -> tuple[str, ...]:
    """Return `changed_settings` of two configs as TOML, as the log has them."""
    return () if before == after else tuple(_differences(_settings_in(before), _settings_in(after), ""))


def changes_of_resume(before: RunConfig, after: RunConfig) -> list[str]:
    """Return `changed_settings`, with a warning at settings that change what the model learns, and at those that change
    nothing, since every stage has its own."""
    lines = []
    for line in changed_settings(before, after):
        section, _, key = line.partition(" ")[0].partition(".")
        is_own = [getattr(stage, key, None) is not None for stage in after.stages]
        if section == RoleName.trainer and is_own and all(is_own):
            line += f" (changes nothing: every stage has its own {key}; set stages.0.{key}, stages.1.{key}, ...)"
        elif line.startswith(_WARNED):
            line += " (what is learned changes)"
        elif is_of_a_reward(line) or is_of_an_environment(line, after):
            line += " (rewards and evaluations of before do not compare with those from here on)"
        lines.append(line)
    return lines


def data_digests(config: RunConfig, model: ModelSpec, tasksets: Mapping[str, Taskset] | None = None) -> dict[str, str]:
    """Return digests of the model, its tokenizer and template, and of each taskset, with the taskset's own template if
    it has one. `tasksets` are those that are already open."""
    digests = model_digests(model)
    for name, section in config.tasksets.items():
        taskset = (tasksets or {}).get(name) or open_taskset(name, section, config)
        digests[f"taskset.{name}"] = taskset.digest
        if (own := for_section(model, section)) is not model:
            digests[f"chat_template.{name}"] = template_digest(own)
    return digests


def _otherwise(differences: Sequence[str]) -> str:
    if not all(line.endswith(OTHER_DATA) for line in differences):
        return "or start a new run"
    return (
        "or have what it sampled scored by the answers of now (`rftstream rescore RUN --new-answers --into NEWRUN`), "
        "or start a new run, from this one's weights with model.init_from"
    )


def _explained(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Explain a difference by the settings that differ, else by the data."""
    kind, _, taskset = name.partition(".")
    section = f"tasksets.{taskset}." if taskset else "model."
    settings = _differences(then, now, f"{section}{kind if kind == 'chat_template' else ''}")
    source = f"{section}source"
    if len(settings) == 1 and settings[0].startswith(f"{source} ") and source in then and source in now:
        return f"{name}: other data in {now[source]!r} than in {then[source]!r}"  # where it lies differs by host
    return f"another {name}: " + ", ".join(settings) if settings else f"{name}: {OTHER_DATA}"


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> list[str]:
    keys = [key for key in sorted({*then, *now}) if key.startswith(prefix) and then.get(key) != now.get(key)]
    return [_difference(key, then, now) for key in keys]


def _difference(key: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the difference between two values. For texts of several lines, it is the first line that differs."""
    before, after = then.get(key, ""), now.get(key, "")
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        lines = zip_longest(before.splitlines(keepends=True), after.splitlines(keepends=True), fillvalue="")
        number, pair = next((n, pair) for n, pair in enumerate(lines, start=1) if pair[0] != pair[1])
        bare = [line.rstrip("\r\n") for line in pair]
        shown = pair if bare[0] == bare[1] else bare  # only their ends differ
        return f"{key} line {number}: {shorten(shown[0])} -> {shorten(shown[1])}"
    return f"{key} {_value(then, key)} -> {_value(now, key)}"


def shorten(text: str) -> str:
    """Return the text quoted and cut to 80 characters."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def _value(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "unset"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            value = {str(number): one for number, one in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
