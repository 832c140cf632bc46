"""Derives a run from another one: its settings, its model, and the record of its origin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing

from rftstream.config import loader
from rftstream.config.placement import chosen_settings
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts.control import RunManifest
from rftstream.errors import ConfigError
from rftstream.runs.folder import (
    OpenRun,
    RunFolder,
    lies_in_folder,
    names_on_log,
    open_transport,
    read_config,
    shown_path,
)
from rftstream.runs.manifest import changed_settings
from rftstream.runs.writes.load_demonstrations import check_demonstrations
from rftstream.service.control_view import read_manifest

OWN = ("run.name", "run.imported_from", "run.imported_versions", "explorer.count", "verifier.count")
"""Settings that a derived run always sets itself."""
OF_RECORDS = ("batches ", "verdicts ")
"""Beginnings of the lines in a manifest that say which records of the source are left out or others."""


def derive_config(source: OpenRun, folder: RunFolder, sets: Sequence[str]) -> RunConfig:
    """Return the source's config under the new name, changed by `sets`, without explorers. ConfigError if that is
    impossible."""
    if folder.path == source.folder.path:
        raise ConfigError(f"--into {shown_path(folder.path)}: is the run itself, expected a new folder")
    if not source.folder.exists():
        raise ConfigError(f"{source.folder.path}: no run folder on this host, expected one with config.toml")
    fixed = [
        f"run.name={json.dumps(folder.run_id)}",
        f"run.imported_from={json.dumps(str(source.folder.path))}",
        "explorer.count=0",
    ]
    config = loader.load([source.folder.config_file], sets=[*sets, *fixed], env={})
    if config.transport.partitions != source.config.transport.partitions:
        raise ConfigError(
            f"transport.partitions: got {config.transport.partitions}, expected {source.config.transport.partitions} "
            "as the run has: records keep their partition"
        )
    store = config.weights.store
    if "://" in store and not store.startswith("file://weights") and "{run}" not in store:
        raise ConfigError(
            f"weights.store: got {store!r}, which holds the weights of {source.run_id}; expected a place for each run, "
            "e.g. --set weights.store=URL/{run}"
        )
    return config


def derive_for_groups(source: OpenRun, folder: RunFolder, sets: Sequence[str], *, needs: str, made: str) -> RunConfig:
    """Return `derive_config` for a run whose groups come from the source. ConfigError also for a source without the
    data that the run `needs`, for stages, since the groups that are `made` are trained in order, and for an algorithm
    that does not fit the run's data."""
    if source.config.without_tasks:
        raise ConfigError(f"{source.run_id}: learned from demonstrations alone, expected a run with {needs}")
    config = derive_config(source, folder, sets)
    if config.stages:
        stages = Stages.of(source.config)
        steps = stages.batches_of_rollouts(0, stages.steps or 0)  # of what the groups were made for
        raise ConfigError(
            f"stages: {made} are trained on as they come, expected a run without stages; add --set stages=[] --set "
            f"run.steps={steps or 'NUMBER'} --set trainer.algorithm=NAME"
            + (" --set experts=unset" if config.experts is not None else "")
        )
    check_demonstrations(config)
    return config


def differences(source: OpenRun, config: RunConfig) -> tuple[str, ...]:
    """Return a line `key before -> after` for each setting that was changed on purpose. What either side leaves to the
    machine is not."""
    passed = {*OWN, *chosen_settings(source.config), *chosen_settings(config)}
    lines = changed_settings(source.config, config)
    return tuple(line for line in lines if line.partition(" ")[0] not in passed)


def changed_keys(source: OpenRun, config: RunConfig, sets: Sequence[str]) -> set[str]:
    """Return the settings that were changed on purpose, with those of `OWN` that `sets` names."""
    keys = {line.partition(" ")[0] for line in differences(source, config)}
    return keys | {one.partition("=")[0] for one in sets} & set(OWN)


def begun_config(source: OpenRun, folder: RunFolder, config: RunConfig, *, has_versions: bool) -> RunConfig | None:
    """Return the config that the folder's run was begun with, from its log or, before the log has it, from its folder;
    None if the run is new.

    `config` gives the place of the log, and `has_versions` says whether the run takes over versions of the source.
    ConfigError if the run differs from the one that the command would make from this source.
    """
    manifest = _begun_manifest(folder, config)
    begun = None if manifest is None else loader.from_toml(manifest.config)
    if begun is None and folder.exists():
        begun = read_config(folder)
    if begun is not None and (
        begun.run.imported_from != str(source.folder.path) or (begun.run.imported_versions is not None) != has_versions
    ):
        raise ConfigError(
            f"--into {shown_path(folder.path)}: is another run, expected a new folder or one that this command began"
        )
    return begun


def check_begun_with(
    begun: RunConfig | None, config: RunConfig, folder: RunFolder, matters: Callable[[str], bool] = bool
) -> None:
    """Raise ConfigError if a run was begun with other settings. `matters` picks among lines `key before -> after`."""
    lines = changed_settings(begun, config) if begun is not None else ()
    if differing := [line for line in lines if matters(line)]:
        raise ConfigError(
            f"--into {shown_path(folder.path)}: was begun with other settings: {'; '.join(differing)}; take the same "
            "ones to go on, or another folder"
        )


def check_records(folder: RunFolder, config: RunConfig, said: Sequence[str]) -> None:
    """Raise ConfigError if a run was begun with other records of the source. `said`: what its manifest is to say of
    them, in lines that begin as OF_RECORDS. They differ, too, where people or rewards have judged since."""
    manifest = _begun_manifest(folder, config)
    before = [] if manifest is None else [line for line in manifest.changed if line.startswith(OF_RECORDS)]
    if manifest is not None and before != list(said):
        raise ConfigError(
            f"--into {shown_path(folder.path)}: was begun with {'; '.join(before) or 'all records'}, and this command "
            f"has {'; '.join(said) or 'all of them'}; take another folder"
            + (f", or go on by `rftstream resume {shown_path(folder.path)}`" if folder.exists() else "")
        )


def _begun_manifest(folder: RunFolder, config: RunConfig) -> RunManifest | None:
    if not (folder.log.exists() if lies_in_folder(config) else folder.run_id in names_on_log(config)):
        return None
    with closing(open_transport(config, folder, create=False)) as transport:
        return read_manifest(transport)


def copy_model(source: RunFolder, target: RunFolder) -> None:
    """Copy the model folder of the source, once, since the files that it was made from may be gone. The caller holds
    the target's run folder."""
    if target.model.exists() or not source.model.is_dir():
        return
    partial = target.model.with_name(f"{target.model.name}.partial")  # the holder of the run folder is alone with it
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    shutil.copytree(source.model, partial)
    partial.rename(target.model)
