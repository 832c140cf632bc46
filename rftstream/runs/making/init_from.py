"""`model.init_from = "RUN@version"`: starts a run with the weights of another run."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError, WeightsError
from rftstream.models.folders.folder import INITIAL, copy_companions, initial_of
from rftstream.runs.folder import open_run
from rftstream.runs.published import model_of, read_published, whole_model
from rftstream.weights.snapshot import write_snapshot


def fetch_initial(config: RunConfig, folder: Path) -> None:
    """Make the model folder of a run with `init_from`, once. Do nothing without `init_from`. The caller holds the run
    folder.

    The folder gets the version's published weights, and the tokenizer, template and config of the other run's model.
    ConfigError if there is no such run or version, or its weights are gone.
    """
    wanted = config.model.init_from
    if wanted is None or initial_of(folder) is not None:
        return
    path, version = _parsed(wanted, Path(config.base))
    opened = open_run(path)
    with closing(opened.transport):
        spec, published = model_of(opened), read_published(opened)
        chosen = [] if version is None else [version]
        (announced,) = published.choose(chosen, where=f"model.init_from: {path}: version")
        try:
            tensors = whole_model(spec, published.follower.fetch(announced))
        except WeightsError as error:
            raise ConfigError(f"model.init_from: {wanted}: {error}") from None
    partial = folder.with_name(f"{folder.name}.partial")  # the holder of the run folder is alone with it
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir(parents=True)
    copy_companions(spec, partial)
    (partial / INITIAL).unlink(missing_ok=True)  # the model that the other run was begun from
    with (partial / "model.safetensors").open("wb") as file:
        write_snapshot(file, tensors, {"format": "pt"})
    name = f"{spec.name}@{announced.name.version}"
    origin = {
        "init_from": wanted,
        "name": name,
        "run": opened.run_id,
        "trainer_epoch": announced.name.trainer_epoch,
        "version": announced.name.version,
        "weights_digest": announced.weights_digest,
    }
    (partial / INITIAL).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def is_unfetched(config: RunConfig, folder: Path) -> bool:
    """Return whether a model folder lacks what `init_from` names: `fetch_initial` failed, and said why."""
    return config.model.init_from is not None and initial_of(folder) is None


def _parsed(wanted: str, base: Path) -> tuple[Path, int | None]:
    """Return the run folder or file, relative to the run file or to the current folder, and the version."""
    run, at, version = wanted.rpartition("@")
    if not at:
        run, version = wanted, ""
    elif not version.isdecimal():
        raise ConfigError(f"model.init_from: got {wanted!r}, expected RUN or RUN@version, e.g. runs/first@200")
    path = base / run if (base / run).exists() else Path(run)
    if not path.exists():
        raise ConfigError(f"model.init_from: {run}: no such run, expected a run folder or a run file")
    return path, int(version) if version else None
