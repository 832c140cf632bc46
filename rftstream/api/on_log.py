"""Opens a run of a shared log by its id alone, on a host that has neither its folder nor its run file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.runs.folder import OpenRun, RunFolder, names_on_log, open_transport
from rftstream.service.control_view import read_manifest

_ANY = {"run": {"name": "any", "steps": 1}, "model": {"path": "fake"}, "tasksets": {"any": {"source": "arithmetic"}}}
"""Settings with which a log can be asked for its runs: nothing but the transport is used of them."""


def open_on_log(run_id: str, servers: str, options: Mapping[str, Any]) -> OpenRun:
    """Open a run by its id and the servers of its log. Its settings are those that the run recorded. ConfigError if the
    log has no such run."""
    asking = loader.from_dict({**_ANY, "transport": {"kind": "kafka", "servers": servers, "options": dict(options)}})
    known = names_on_log(asking)
    if run_id not in known:
        raise ConfigError(f"{run_id}: no such run at {servers}; {registry.suggest(run_id, sorted(known))}")
    with closing(open_transport(asking, RunFolder(Path(run_id)))) as transport:
        manifest = read_manifest(transport)
    if manifest is None:
        raise ConfigError(f"{run_id}: the run at {servers} has not begun, so it has no settings yet; start its workers")
    config = _with_servers(loader.from_toml(manifest.config), servers, options)
    folder = RunFolder(Path(config.base) / config.run.folder / run_id)
    return OpenRun(folder, config, open_transport(config, folder))


def _with_servers(config: RunConfig, servers: str, options: Mapping[str, Any]) -> RunConfig:
    """Return the settings with these servers, since the log may have other addresses from here."""
    own = {"transport__options": dict(options)} if options else {}
    return loader.replace(config, transport__servers=servers, **own)
