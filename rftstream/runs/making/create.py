"""Turns a folder into a run, and cleans up after a run that failed before it had begun.

The order makes a kill at any point harmless: lock, model, log, and config.toml last. A folder without config.toml is no
run yet, and workers wait for it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.runs.folder import WRITTEN_BY, RunFolder, create_log, naming, sharing_store, shown_path
from rftstream.runs.log_settings import check_log
from rftstream.runs.modules import write_modules
from rftstream.runs.writes.load_demonstrations import load_demonstrations
from rftstream.transport.base import Transport
from rftstream.version import __version__


def write_config(config: RunConfig, folder: RunFolder) -> None:
    """Write the run's config.toml, whole or not at all. Settings that the previous file does not have are written only
    if they are not at their default: the release that wrote it may not know them, and may have to continue the run."""
    like = None
    if folder.config_file.is_file():
        with naming(folder.config_file):
            like = folder.config_file.read_text(encoding="utf-8")
    partial = folder.config_file.with_suffix(f".{os.getpid()}.partial")
    with naming(folder.config_file):
        partial.write_text(f"{WRITTEN_BY}{__version__}\n{loader.to_toml(config, like)}", encoding="utf-8")
    partial.replace(folder.config_file)


def say_aside(text: str) -> None:
    """Print a line to stderr, since stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def begin(
    transport: Transport, config: RunConfig, folder: RunFolder, *, say: Callable[[str], None] = say_aside
) -> None:
    """Create the log of a new run, load the demonstrations that the run file names, and write config.toml, which makes
    the folder a run. ConfigError if the name or the store belongs to another run."""
    _check_unused(transport, config, folder)
    check_log(transport, config, folder.run_id, begun=False)
    create_log(transport, config)
    if config.experts is not None and config.experts.source is not None:
        load_demonstrations(transport, config, folder, config.experts, say=say)
    write_modules(config, folder)
    write_config(config, folder)


def _check_unused(transport: Transport, config: RunConfig, folder: RunFolder) -> None:
    """Raise ConfigError if the name on a shared log, or the store, is used by another run."""
    if "control" in transport.admin.topics() and any(transport.admin.end_offsets("control").values()):
        raise ConfigError(
            f"{folder.run_id}: the log has a run of this name already, but {shown_path(folder.path)} is new; take"
            " another name with --run-dir, or delete the topics of the old one"
        )
    if others := sharing_store(config, folder):
        raise ConfigError(
            f"weights.store: {config.weights.store!r} is the store of {others[0]} already, whose objects have the same "
            'names; put "{run}" into it, which becomes the name of the run, or take another place'
        )


def discard(folder: RunFolder, transport: Transport) -> None:
    """Remove everything but the logs of a run that failed before its first rollout, so that its name becomes free."""
    folder.config_file.unlink()
    folder.modules_file.unlink(missing_ok=True)
    if not folder.log.exists():
        transport.admin.delete_topics(list(transport.admin.topics()))
    for part in (folder.log, folder.model, folder.weights, folder.demonstrations):
        shutil.rmtree(part, ignore_errors=True)
