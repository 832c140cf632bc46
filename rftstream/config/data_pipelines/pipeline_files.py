"""Pipelines in separate files: their `[[pipeline]]` and `[[tasksets.NAME.pipeline]]` replace those of a run's
config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rftstream.config import loader, toml_files
from rftstream.config.parts import registry
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError


def with_pipelines_of(config: RunConfig, file: Path) -> RunConfig:
    """Return the config with its operators replaced by those of a file, on both sides.

    The file is a run file, of which only the operators are used, or it has operators alone. ConfigError for other
    content, and for tasksets that the config does not have.
    """
    found = toml_files.read_toml(file)
    is_run_file = "run" in found
    if not is_run_file and (unknown := sorted(set(found) - {"pipeline", "tasksets"})):
        raise ConfigError(
            f"{file}: {unknown[0]}: found beside the operators, expected [[pipeline]] and [[tasksets.NAME.pipeline]] "
            "alone, or a whole run file; settings are changed by --set"
        )
    values = loader.to_dict(config)
    values["pipeline"] = found.get("pipeline", [])
    tables: Any = found.get("tasksets", {})
    for name, section in tables.items() if isinstance(tables, dict) else ():
        operators = section.get("pipeline", []) if isinstance(section, dict) else []
        if name not in values["tasksets"]:
            if is_run_file and not operators:
                continue
            raise ConfigError(f"{file}: tasksets.{name}: unknown; {registry.suggest(name, list(values['tasksets']))}")
        if not is_run_file and (more := sorted(set(section) - {"pipeline"})):
            raise ConfigError(f"{file}: tasksets.{name}.{more[0]}: found beside the operators, expected them alone")
    for name, section in values["tasksets"].items():
        theirs = tables.get(name, {}) if isinstance(tables, dict) else {}
        section["pipeline"] = theirs.get("pipeline", []) if isinstance(theirs, dict) else []
    try:
        return loader.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
