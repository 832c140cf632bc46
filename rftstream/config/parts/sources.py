"""What the source of a taskset brings: an environment and a reward, for sections that name none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import TasksetSpec


def complete_sources(sections: Any, base: Path) -> Any:
    """Add the environment and the reward that a source brings to the sections that name none. Return the sections."""
    for section in sections.values() if isinstance(sections, dict) else ():
        scheme, _, location = str(section.get("source") if isinstance(section, dict) else "").partition(":")
        spec = registry.built_in(TasksetSpec).get(scheme)
        if spec is None:
            continue
        if spec.location == "path":
            location = str(base / Path(location).expanduser())
        options = section.get("options", {})
        python = base / "venvs" / spec.venv / "bin" / "python"
        if spec.venv and isinstance(options, dict) and "python" not in options and python.exists():
            section["options"] = options = {**options, "python": str(python.absolute())}
        if spec.environment and isinstance(options, dict):
            section.setdefault("environment", spec.environment_of(location, options))
        if spec.reward:
            section.setdefault("reward", spec.reward)
    return sections
